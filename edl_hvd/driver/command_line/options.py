"""What a user asked of one job: the words of ``edlrun``'s command line, read, completed and checked.

``read_options`` takes the flags as text, each under the name by which messages call it, and finds every problem
before it gives up, those included that only a look at the machine shows: a missing file, an unknown host.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.expression import Leaf
from edl_hvd.discovery.source import Source
from edl_hvd.discovery.sources.combined import read_source, sources_in, start_now
from edl_hvd.discovery.sources.hostfile import FixedHosts, HostsFile, parse_host_list, read_hostfile
from edl_hvd.discovery.sources.schedule import Schedule
from edl_hvd.discovery.sources.script import Script
from edl_hvd.discovery.sources.trace import TraceReplay
from edl_hvd.driver.command_line.flags import FlagReader
from edl_hvd.driver.command_line.resume import HOST_FLAGS, complete
from edl_hvd.driver.command_line.tuning import read_tunings
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import is_local
from edl_hvd.driver.workers.agents import AgentHosts
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.open_inference import is_inference_source, read_models
from edl_hvd.preflight.verdict import BOUND
from edl_hvd.proof import read_token
from edl_hvd.status_server import read_address

UNBOUNDED = 1_000_000
# Workers; more than any job will have, and still a number to calculate with.
FIXED_EVERY_S = 60.0
# Nothing will change; the question costs nothing either.
LOCAL_EVERY_S = 0.2
# Reading a small file takes 0.1 ms; a host that comes or goes is acted on at once.
SCRIPT_EVERY_S = 1.0
# Horovod's own pace, for which such scripts are written.

_SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?\[\]{}#~\n]|^\s*\w+=|^\s*(\.|!|command|eval|exec|export|set|if|for|while)\s")
# A command line that holds one of these means what the shell makes of it; its first word is no program, or not all.
_LOOK_UPS = 32
# Names asked for at a time; a name server that does not answer takes some seconds for each.
_SSH_S = 5.0
# ``ssh -G`` reads a file or two.
_REFUSED = {
    "--mpi": "workers of edlrun talk through Gloo and NCCL; leave it out, or start the job with mpirun",
    "--mpi-args": "edlrun runs no mpirun; leave it out, or start the job with mpirun",
    "--binding-args": "edlrun runs no mpirun; leave it out, or bind in the command, e.g. with numactl",
    "--jsrun": "edlrun starts workers by itself, through ssh; leave it out, or start the job with jsrun",
    "--check-build": "run 'edl-hvd doctor' instead",
}


@dataclass(frozen=True)
class Options:
    """One job, ready to run.

    Attributes:
        command: What each worker runs.
        source: Where the hosts come from.
        poll_every_s: How often to ask it; see ``HostWatch``.
        is_damped: Leave out its hosts that come and go again and again.
        preflight: Largest ratio of a new host's time to that of the others; ``None``: it is not measured.
        rules: How many workers, and the bounds that were asked for.
        worker_variables: To be added to the workers' environment.
        network_interfaces: A worker may use any of them; empty: it finds one.
        ssh_port: On all hosts; ``None`` leaves it to ssh.
        ssh_identity_file: Private key; ``None`` leaves it to ssh.
        start_timeout_s: Longest wait for a host to let a worker be started.
        output_filename: Folder for the workers' output, or ``None``.
        prefix_output_with_timestamp: Each line of the workers' output gets the time.
        verbose: Tell more.
        record: File for the history of the membership, or ``None``.
        metrics_port: Where to serve metrics, as ``PORT`` or ``ADDRESS:PORT``, or ``None``.
        status_port: The same for the job's report.
        job_dir: Folder for what ``resume`` and other programs need to know of the job, or ``None``.
        resume: Go on where the job of ``job_dir`` stopped.
        given: The flags as they were given, for a later run that goes on.
    """

    command: tuple[str, ...]
    source: Source
    poll_every_s: float
    rules: Rules
    worker_variables: Mapping[str, str] = field(default_factory=dict)
    network_interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    start_timeout_s: float = 30.0
    # Horovod's own default; to connect takes less than a second, to a host under load several.
    output_filename: str | None = None
    prefix_output_with_timestamp: bool = False
    verbose: bool = False
    record: str | None = None
    metrics_port: str | None = None
    status_port: str | None = None
    job_dir: str | None = None
    resume: bool = False
    is_damped: bool = False
    preflight: float | None = None
    given: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class _Hosts:
    """Where hosts come from. ``fixed``: all of them, when they are known; ``named_by``: the flag and its value."""

    source: Source
    every_s: float
    fixed: tuple[HostSlots, ...] = ()
    named_by: str = ""
    is_damped: bool = False


def read_options(
    command: Sequence[str],
    given: Mapping[str, str],
    environ: Mapping[str, str],
    found: Sequence[str] = (),
    clock: Clock = SYSTEM_CLOCK,
) -> Options:
    """The job that a command line asks for. Blocks while names are looked up; starts nothing.

    Args:
        command: The user's program and its arguments.
        given: The flags that were given, by their long names (the number of workers as ``-np``). A switch is
            "1" or "0", the ends of a range are separated by a space, network interfaces by commas.
        environ: Where programs, and the variables that stand in for flags, are looked up.
        found: Problems found before, to be reported with the others.

    Raises:
        UsageError: One line per problem, each naming the flag, its value and the remedy.
    """
    flags = FlagReader(given, environ)
    for problem in found:
        flags.add_error(problem)
    try:
        command = complete(flags, command)
    except UsageError as error:
        raise UsageError("\n".join([*flags.problems, str(error)])) from error
    _check_refused(flags)
    hosts = _read_hosts(flags, clock)
    interfaces = tuple(name for name in flags.given.get("--network-interfaces", "").split(",") if name)
    _check_here(flags, hosts, command, interfaces)
    options = Options(
        command=tuple(command),
        source=hosts.source,
        poll_every_s=hosts.every_s,
        rules=_read_rules(flags, hosts),
        worker_variables=_read_worker_variables(flags),
        network_interfaces=tuple(dict.fromkeys(interfaces)),
        ssh_port=flags.count("--ssh-port", least=1, most=65535),
        ssh_identity_file=flags.readable_file("--ssh-identity-file", "a private key"),
        start_timeout_s=flags.seconds("--start-timeout", Options.start_timeout_s, 1, "HOROVOD_START_TIMEOUT"),
        output_filename=flags.writable_folder("--output-filename"),
        prefix_output_with_timestamp=flags.is_on("--prefix-output-with-timestamp"),
        verbose=flags.is_on("--verbose"),
        record=flags.writable_file("--record"),
        metrics_port=_read_port(flags, "--metrics-port"),
        status_port=_read_port(flags, "--status-port"),
        job_dir=flags.writable_folder("--job-dir"),
        resume=flags.is_on("--resume"),
        is_damped=hosts.is_damped,
        preflight=_read_preflight(flags),
        given=dict(flags.given),
    )
    if flags.problems:
        raise UsageError("\n".join(flags.problems))
    return options


def _check_refused(flags: FlagReader) -> None:
    """Look for flags of ``horovodrun`` that mean nothing here."""
    for flag, remedy in _REFUSED.items():
        if flag in flags.given:
            flags.add_error(f"{flag} is not for edlrun: {remedy}")


def _read_worker_variables(flags: FlagReader) -> Mapping[str, str]:
    """The variables that are added to the environment of the workers."""
    return {
        **read_tunings(flags),
        **({"EDL_HVD_TAKE_OVER": "1"} if flags.is_on("--take-over") else {}),
        **_read_teachers(flags),
    }


def _read_port(flags: FlagReader, flag: str) -> str | None:
    text = flags.given.get(flag)
    if text is not None:
        try:
            read_address(text)
        except UsageError as error:
            flags.add_error(f"{flag}: {error}")
    return text


def _read_teachers(flags: FlagReader) -> Mapping[str, str]:
    """The variable by which workers find teachers."""
    text = flags.given.get("--teachers")
    if text is None:
        return {}
    try:
        if is_inference_source(text):
            read_models(text)
        else:
            read_source(text, start_now).source.close()
    except UsageError as error:
        flags.add_error(f"--teachers {text!r}: {error}")
    return {"EDL_HVD_TEACHERS": text}


def _read_rules(flags: FlagReader, hosts: _Hosts) -> Rules:
    """The numbers of workers, and the bounds; with whatever values where there is a problem."""
    if "-np" not in flags.given:
        flags.add_error("-np is missing; expected the number of workers, e.g. -np 4")
    num_proc = flags.count("-np", least=1)
    min_np, max_np = flags.count("--min-np", least=1), flags.count("--max-np", least=1)
    spares = flags.count("--spares") or 0
    if min_np and max_np and min_np > max_np:
        flags.add_error(f"--min-np {min_np} is more than --max-np {max_np}; lower the one or raise the other")
    if num_proc and min_np and num_proc < min_np:
        flags.add_error(f"-np {num_proc} is less than --min-np {min_np}; raise the one or lower the other")
    if num_proc and max_np and num_proc > max_np:
        flags.add_error(f"-np {num_proc} is more than --max-np {max_np}; lower the one or raise the other")
    slots = sum(host.slots for host in hosts.fixed)
    if num_proc and hosts.fixed and num_proc + spares > slots:
        asked = f"-np {num_proc}" + f" with --spares {spares}" * bool(spares)
        flags.add_error(
            f"{asked} needs {num_proc + spares} slots, {hosts.named_by} has {slots}; ask for less or add slots"
        )
    # As horovodrun has it: hosts that are listed, and no --min-np, make a job of exactly -np workers.
    least = num_proc if min_np is None else min_np
    most = num_proc if hosts.fixed and min_np is None else UNBOUNDED
    return Rules(
        num_proc=num_proc or 1,
        min_np=least or 1,
        max_np=max_np or most or 1,
        spares=spares,
        last_call_timeout_s=flags.seconds("--last-call-timeout", Rules.last_call_timeout_s, 0),
        drain_lead_s=flags.seconds("--drain-lead", Rules.drain_lead_s, 0),
        elastic_timeout_s=flags.seconds("--elastic-timeout", Rules.elastic_timeout_s, 1, "HOROVOD_ELASTIC_TIMEOUT"),
        host_failures=flags.count("--host-failures", least=1) or Rules.host_failures,
        failure_window_s=flags.seconds("--failure-window", Rules.failure_window_s, 1),
        cooldown_s=_read_cooldown(flags),
        reset_limit=flags.count("--reset-limit"),
        hosts_are_fixed=bool(hosts.fixed),
    )


def _read_preflight(flags: FlagReader) -> float | None:
    bound = flags.number("--preflight-bound")
    if bound is not None and bound <= 1:
        flags.add_error(
            f"--preflight-bound {bound:g} would keep the slower half of the hosts out; expected more than 1, e.g. 2"
        )
    if bound is None and not flags.is_on("--preflight"):
        return None
    return BOUND if bound is None else bound


def _read_cooldown(flags: FlagReader) -> float:
    """The lower end of horovodrun's range; it doubles the pause each time up to the upper end, here it stays."""
    text = flags.given.get("--blacklist-cooldown-range")
    if text is None:
        return Rules.cooldown_s
    try:
        least, most = (int(word) for word in text.split())
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        flags.add_error(
            f"--blacklist-cooldown-range {text} cannot be used; expected seconds, MIN MAX from 1, e.g. 60 300"
        )
    return float(least)


def _read_hosts(flags: FlagReader, clock: Clock) -> _Hosts:
    """Where the hosts come from; no source at all where there is a problem."""
    named = [flag for flag in HOST_FLAGS if flag in flags.given]
    if "--token-file" in flags.given and "--agents-port" not in flags.given:
        flags.add_error("--token-file is for agents; add --agents-port PORT, or leave it out")
    slots = flags.count("--slots-per-host", least=1)
    if len(named) > 1:
        every = " and ".join(f"{flag} {flags.given[flag]!r}" for flag in named)
        flags.add_error(f"{every} {'both' if len(named) == 2 else 'all'} say where the hosts are; keep one of them")
    all_here = FlagReader(flags.given, {}).count("-np", least=1) or 1  # what is wrong with it is told elsewhere
    hosts = _fix((HostSlots("localhost", all_here),), "the default, localhost,")  # as under horovodrun
    for flag in named:
        text = flags.given[flag]
        try:
            if flag == "--hosts":
                hosts = _fix(parse_host_list(text, slots or 1), f"--hosts {textwrap.shorten(text, 60)}")
            elif flag == "--hostfile":
                hosts = _fix(read_hostfile(text, slots or 1), f"--hostfile {text}")
            elif flag == "--agents-port":
                hosts = _read_agents(flags)
            elif flag == "--discover":
                hosts = _read_discover(text, slots, clock)
            else:
                hosts = _Hosts(_read_script(text, slots, flags.environ), SCRIPT_EVERY_S)
        except (UsageError, DiscoveryError) as error:
            for problem in str(error).split("\n"):
                flags.add_error(f"{flag} {text!r}: {problem}")
            hosts = _Hosts(FixedHosts(()), FIXED_EVERY_S)
    return hosts


def _read_agents(flags: FlagReader) -> _Hosts:
    """Hosts that call by their agents.

    Raises:
        UsageError: There is no token that they could prove, or none that may serve as one.
    """
    port = flags.count("--agents-port", least=0, most=65535)
    path = flags.readable_file("--token-file", "a file with a token")
    if path is None and "--token-file" not in flags.given:
        raise UsageError("agents have to prove a token; add --token-file FILE, the same as on the hosts")
    return _Hosts(AgentHosts(port or 0, read_token(path) if path and os.path.isfile(path) else ""), LOCAL_EVERY_S)


def _fix(hosts: tuple[HostSlots, ...], named_by: str) -> _Hosts:
    return _Hosts(FixedHosts(hosts), FIXED_EVERY_S, hosts, named_by)


def _read_discover(text: str, slots: int | None, clock: Clock) -> _Hosts:
    """Read a source or a combination of sources, see ``discovery/expression.py``.

    Raises:
        UsageError: It is not understood.
        DiscoveryError: A file that it names does not read now.
    """

    def imply(leaf: Leaf) -> list[str]:
        return [*([f"--slots={slots}"] if slots else []), *start_now(leaf, clock)]

    question = read_source(text, imply, clock=clock)
    for source in sources_in(question.source):
        if isinstance(source, HostsFile):
            source.answer()
        if isinstance(source, Schedule | TraceReplay):
            replace(source, start_s=0.0).answer()
    every_s = question.refresh_s or (SCRIPT_EVERY_S if question.needs_packages else LOCAL_EVERY_S)
    return _Hosts(question.source, every_s, is_damped=question.is_damped)


def _read_script(text: str, slots: int | None, environ: Mapping[str, str]) -> Script:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the shell will not understand it ({error}); correct the quotes") from error
    if not words:
        raise UsageError("it is empty; expected a command that prints host:slots lines")
    problem = "" if _SHELL_SYNTAX.search(text) else _find_program(words[0], environ)
    if problem:
        raise UsageError(f"{problem}; expected a program that prints host:slots lines")
    return Script(text, slots)


def _find_program(word: str, environ: Mapping[str, str]) -> str:
    """Why the shell would not find this program (empty: it would)."""
    if "/" not in word:
        if shutil.which(word, path=environ.get("PATH", os.defpath)):
            return ""
        here = f", but there is a file of that name here: write ./{word}" if os.path.isfile(word) else ""
        return f"there is no program {word!r} on PATH{here}"
    if not os.path.exists(word):
        return f"there is no file {word!r}"
    if os.path.isdir(word):
        return f"{word!r} is a folder"
    return "" if os.access(word, os.X_OK) else f"{word!r} is not executable; run 'chmod +x {shlex.quote(word)}'"


def _check_here(flags: FlagReader, hosts: _Hosts, command: Sequence[str], interfaces: Sequence[str]) -> None:
    """Look up the hosts that are known; where one of them is this machine, look for what its workers will need.

    Of hosts that are still to be discovered nothing can be said, nor of the programs on others.
    """
    if not command:
        flags.add_error("no command is given; put the program behind the flags, e.g. edlrun -np 4 python train.py")
    names = [host.host for host in hosts.fixed]
    if not names:
        return
    ssh = shutil.which("ssh", path=flags.environ.get("PATH", os.defpath))
    with ThreadPoolExecutor(min(len(names), _LOOK_UPS)) as pool:
        for problem in pool.map(lambda name: _look_up(name, ssh), names):
            if problem:
                flags.add_error(f"{hosts.named_by}: {problem}")
        here = any(pool.map(is_local, names))
    if not here:
        return
    own = [name for _, name in socket.if_nameindex()]
    if interfaces and not set(interfaces) & set(own):
        flags.add_error(
            f"--network-interfaces {','.join(interfaces)}: this machine has none of them; it has {', '.join(own)}"
        )
    problem = find_command(command, flags.environ)
    if problem:
        flags.add_error(problem)


def find_command(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why this machine cannot run a command, as one sentence; empty if it can, or if there is none."""
    problem = (_find_program(command[0], environ) or _find_python_file(command)) if command else ""
    words = textwrap.shorten(shlex.join(command), 60)
    return f"command {words}: {problem}; expected a program that this machine can run" if problem else ""


def _find_python_file(command: Sequence[str]) -> str:
    """Why Python would not find its script (empty: it would, or it is no Python)."""
    is_script = is_python(command[0]) and len(command) > 1
    if not is_script or command[1].startswith("-") or os.path.exists(command[1]):
        return ""
    return f"there is no file {command[1]!r}"


def is_python(program: str) -> bool:
    """Whether a program is Python, by its name."""
    return re.fullmatch(r"python[0-9.]*", os.path.basename(program)) is not None


def _look_up(host: str, ssh: str | None) -> str:
    """Why nobody here knows a host of this name (empty: it is known)."""
    try:
        socket.getaddrinfo(host, None)
        return ""
    except (OSError, UnicodeError) as error:  # the latter for a label that is too long
        reason = error.strerror if isinstance(error, OSError) else str(error)
    if ssh and _is_ssh_alias(host, ssh):
        return ""
    return f"unknown host {host!r} ({reason}); correct the name, or make it known in DNS, /etc/hosts or ~/.ssh/config"


def _is_ssh_alias(host: str, ssh: str) -> bool:
    """Whether the user's ssh has another name for this host, or a way to it that does not start with its address."""
    try:
        answer = subprocess.run(
            [ssh, "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SSH_S, check=False
        ).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    settings = dict(entry.partition(" ")[::2] for entry in answer.splitlines())
    if any(settings.get(way, "none") != "none" for way in ("proxyjump", "proxycommand")):
        return True
    try:
        return settings.get("hostname", host) != host and bool(socket.getaddrinfo(settings["hostname"], None))
    except (OSError, UnicodeError):
        return False
