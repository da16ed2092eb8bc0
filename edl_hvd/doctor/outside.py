"""What a job talks to: its storage, its discovery script and its source of hosts."""

from __future__ import annotations

import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping

from edl_hvd.discovery.inspection import Inspector
from edl_hvd.discovery.source import Permission
from edl_hvd.discovery.sources.combined import read_source, start_now
from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult
from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.hosts import parse_host
from edl_hvd.storage.opening import open_storage

_STORAGE = "Storage"
_DISCOVERY = "Discovery"
_SLOW_S = 1.0
# Horovod asks every second, and until the script answers it can react to nothing else.
_GIVE_UP_S = 60.0
# A script that hangs is reported, not waited for.


def _storage_remedy(error: EdlHvdError) -> str:
    """What helps against this failure of a storage; it is told by the cause, which is the library's own error."""
    if isinstance(error, UsageError):
        return "correct --checkpoint, or set what is missing"
    cause = error.__cause__
    kind = type(cause).__name__
    code = str(getattr(cause, "response", {}).get("Error", {}).get("Code", ""))
    if "no credentials were found" in str(error):
        return "give this host credentials; the message names their variables"
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        return "give this host credentials: those two variables, a profile in AWS_PROFILE, or an instance role"
    if kind == "NoRegionError":
        return "set AWS_DEFAULT_REGION on this host"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
        return "correct or renew the credentials of this host; 'aws sts get-caller-identity' says whose they are"
    if code == "NoSuchBucket":
        return "create the bucket, or correct --checkpoint"
    if kind.endswith(("ConnectionError", "TimeoutError", "ConnectionClosedError")):
        return "look at the network of this host, at AWS_ENDPOINT_URL and at the region"
    return "grant this host read, write and delete there"


def check_storage(url: str) -> CheckResult:
    """Write, read and delete one small object at ``url``, as a checkpoint would."""
    probe = f"doctor-{uuid.uuid4().hex}"
    content = b"written by edl-hvd doctor\n"
    start_s = time.monotonic()
    try:
        storage = open_storage(url)
        try:
            storage.write_new(probe, content)
            read = storage.read(probe)
            storage.delete(probe)
        finally:
            storage.close()
    except EdlHvdError as error:
        return CheckResult(_STORAGE, "checkpoints", MISSING, str(error), _storage_remedy(error))
    if read != content:
        return CheckResult(
            _STORAGE, "checkpoints", MISSING, f"{url} gave back other bytes than were written", "report it"
        )
    seconds = time.monotonic() - start_s
    return CheckResult(
        _STORAGE, "checkpoints", OK, f"{storage.url}: wrote, read and deleted an object in {seconds:.2f} s"
    )


def check_discovery(script: str, environ: Mapping[str, str]) -> CheckResult:
    """Run ``script`` once the way Horovod does, through the shell, and hold the answer against the contract."""
    start_s = time.monotonic()
    try:
        answer = subprocess.run(
            script, shell=True, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_GIVE_UP_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _bad(f"no answer within {_GIVE_UP_S:.0f} s", "make it answer from what it knew last, within a second")
    return judge_discovery(answer.returncode, answer.stdout, answer.stderr, time.monotonic() - start_s)


def judge_discovery(returncode: int, stdout: str, stderr: str, seconds: float) -> CheckResult:
    """Hold one answer of a discovery script against the contract.

    Args:
        seconds: How long it took.
    """
    if returncode != 0:
        reason = (stderr.strip().splitlines() or ["no message"])[-1]
        return _bad(f"exit code {returncode}: {reason}", "run it by hand; Horovod ends a starting job on this")
    lines = stdout.splitlines()
    if not any(line.strip() for line in lines):
        return _bad("exit code 0 and no host", "exit non-zero when unsure: Horovod takes this for 'all hosts are gone'")
    hosts = []
    for line in lines:
        try:
            hosts.append(parse_host(line))
        except UsageError as error:
            return _bad(str(error), "print one host:slots line per host and nothing else (log to stderr)")
    names = [entry.host for entry in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return _bad(f"{', '.join(twice)} is listed more than once", "print each host once")
    slots = sum(entry.slots for entry in hosts)
    summary = (
        f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, {slots} slot{'s' if slots > 1 else ''}, {seconds:.2f} s"
    )
    if seconds > _SLOW_S:
        return CheckResult(_DISCOVERY, "script", ADVICE, summary, "answer within a second; the launcher waits for it")
    if hosts != sorted(hosts):
        return CheckResult(
            _DISCOVERY, "script", ADVICE, f"{summary}, unsorted", "sort the lines: ranks follow the order"
        )
    return CheckResult(_DISCOVERY, "script", OK, summary)


def _bad(found: str, fix: str) -> CheckResult:
    return CheckResult(_DISCOVERY, "script", MISSING, found, fix)


def check_source(text: str) -> Iterator[CheckResult]:
    """What the source of ``edlrun --discover TEXT`` is permitted, one by one, then its hosts."""
    try:
        polled = read_source(text, start_now)
    except EdlHvdError as error:
        yield CheckResult(_DISCOVERY, "source", MISSING, str(error), "correct --discover")
        return
    try:
        for permission in polled.source.permissions():
            yield judge_permission(permission)
        start_s = time.monotonic()
        try:
            listing = Inspector(polled).inspect()
        except EdlHvdError as error:
            yield CheckResult(
                _DISCOVERY, "source", MISSING, str(error), "a job would wait for its hosts until this works"
            )
            return
        seconds = time.monotonic() - start_s
        summary = f"{_count(len(listing.hosts), 'host')}, {_count(listing.slots, 'slot')}, {seconds:.2f} s"
        left_out = f", {len(listing.left_out)} left out" * bool(listing.left_out)
        if listing.hosts:
            yield CheckResult(_DISCOVERY, "source", OK, summary + left_out)
        else:
            fix = f"'edl-hvd discover {shlex.quote(text)}' says why hosts are left out"
            yield CheckResult(_DISCOVERY, "source", ADVICE, f"it answers, with no hosts{left_out}", fix)
    finally:
        polled.source.close()


def judge_permission(permission: Permission) -> CheckResult:
    found = f"{permission.name}: {permission.words}"
    if permission.granted:
        return CheckResult(_DISCOVERY, "permission", OK, found)
    if permission.granted is None:
        return CheckResult(_DISCOVERY, "permission", ADVICE, found, "whether it is granted could not be found out")
    return CheckResult(
        _DISCOVERY, "permission", MISSING, found, "grant it; docs/discovery.md has what each source needs"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
