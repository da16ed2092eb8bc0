"""Cache of the last good answer on disk: many polls read it, one refresher writes it.

The files of an entry, in a folder that only its user can enter:

    KEY.answer   the record (``record.py``), replaced atomically
    KEY.lock     held by the refresher, which asks the source; holds its process id
    KEY.polled   touched by every poll, so that the refresher knows that there are polls

A poll never asks the source itself. It forks a refresher, which takes the lock, asks, and writes the record; the poll
reads the record until its time is over. So a source that hangs blocks the refresher alone, which an alarm ends. A
process that dies at any moment leaves the old record or the new one.

With a refresh time the refresher continues as long as there are polls: boto3 is loaded once per job, not once per
request. Serving an old answer meanwhile is stale-while-revalidate of RFC 5861.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import site
import sys
from collections.abc import Mapping, Sequence

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.polling.poll import sign_of
from edl_hvd.discovery.polling.record import Record
from edl_hvd.discovery.registry import PolledSource, make_source, read_variables
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import format_hosts

ANSWER_S = 0.8
# Seconds. Horovod polls every second and holds its driver's lock meanwhile; Python's start takes a part of it.
ASK_S = 60
# Seconds. Three tries of a slow cloud fit in; a refresher that hangs longer is replaced.
IDLE_S = 30
# Seconds. A job polls about once per second; half a minute without a poll means that it has ended.
GAP_S = 60
# Seconds. After a minute without a request the next poll is the first of a new job, and may wait longer.
SETTLED_S = 2.0
# The coarsest clock of a file system in use, that of FAT.
LOOK_S = 0.002
# Seconds. A local file answers within a few of these; each pause is twice the one before,
LONGEST_LOOK_S = 0.032
# up to this: a tenth of the CPU time of a poll that waits for a whole second.


def poll(key: str, source: str, given: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the answer of a discovery script; return its exit code: 0, 1 (no answer), 2 (wrong arguments)."""
    try:
        polled = make_source(source, given, read_variables(source, environ))
    except UsageError as error:
        return _complain(source, f"{error}; see from_{source} --help", 2)
    try:
        answer, warning = find_answer(polled, CacheEntry(key), SYSTEM_CLOCK)
    except DiscoveryError as error:
        return _complain(source, str(error), 1)
    if warning:
        _complain(source, warning, 0)
    sys.stdout.write(answer)
    return 0


def _complain(source: str, message: str, code: int) -> int:
    sys.stderr.write(f"from_{source}: {' '.join(message.split())}\n")
    return code


def find_answer(polled: PolledSource, entry: CacheEntry, clock: Clock) -> tuple[str, str]:
    """Find the answer to print, and a warning about it (empty for none).

    Returns within ``ANSWER_S``; for the first poll of a job within the ``first_s`` of the source.

    Raises:
        DiscoveryError: There is no answer that is new enough.
    """
    started_s = clock.monotonic_s()
    since_s = started_s - polled.refresh_s
    entry.touch()
    record = entry.read()
    refreshing, look_s = False, LOOK_S
    while not record.is_fresh(since_s) and not record.has_failed(since_s):
        # Once: a refresher that dies at once is not started again.
        refreshing = refreshing or entry.start_refresher(polled, since_s, clock)
        now_s = clock.monotonic_s()
        # Not the answer of an earlier job, whose hosts may have ended: the first poll has time for a new one.
        is_of_this_job = started_s - record.asked_s < _gap_s(polled) and record.answered_s >= record.began_s
        may_serve_at_once = polled.refresh_s > 0 and is_of_this_job and record.is_servable(now_s, polled.stale_s)
        if may_serve_at_once or now_s >= max(started_s + ANSWER_S, record.began_s + polled.first_s):
            break
        clock.sleep(look_s)
        look_s = min(2 * look_s, LONGEST_LOOK_S)
        record = entry.read()
    return _judge(record, polled, started_s, clock.monotonic_s())


def _judge(record: Record, polled: PolledSource, started_s: float, now_s: float) -> tuple[str, str]:
    if record.is_fresh(started_s - polled.refresh_s):
        return record.answer, record.remark
    failed = record.failed_s > record.answered_s and record.failed_s >= record.asked_s
    waited_s = now_s - started_s
    late = f"the source did not answer within {waited_s:.1f} s" if waited_s >= ANSWER_S else "a newer one is on its way"
    reason = record.failure if failed else late
    age_s = now_s - record.answered_s + record.age_s
    if record.is_servable(now_s, polled.stale_s):
        is_doubtful = record.failed_s > record.answered_s or age_s > 3 * polled.refresh_s
        warning = f"giving the answer of {age_s:.0f} s ago, good for {polled.stale_s:g} s: {reason}"
        return record.answer, warning * is_doubtful
    if record.answer and polled.stale_s:
        reason += f"; the last good answer is {age_s:.0f} s old, more than --stale {polled.stale_s:g} allows"
    raise DiscoveryError(reason)


class CacheEntry:
    """Files of one entry of the cache.

    Raises:
        DiscoveryError: The folder is not private, or cannot be written.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._boot = _boot_id()
        folder = os.path.dirname(key)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            status = os.lstat(folder)
        except OSError as error:
            raise self._unusable(error) from error
        if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
            raise DiscoveryError(
                f"{folder} is not a folder of this user alone (mode 0700); remove it or set EDL_HVD_DISCOVERY_CACHE"
            )

    def _unusable(self, error: OSError) -> DiscoveryError:
        return DiscoveryError(
            f"cannot keep answers in {os.path.dirname(self._key)}: {error.strerror}; "
            "set EDL_HVD_DISCOVERY_CACHE to a folder on a local disk"
        )

    def touch(self) -> None:
        try:
            os.close(os.open(f"{self._key}.polled", os.O_WRONLY | os.O_CREAT, 0o600))
            os.utime(f"{self._key}.polled")
        except OSError as error:
            raise self._unusable(error) from error

    def touched(self) -> int:
        """A number that changes with each poll."""
        return os.stat(f"{self._key}.polled").st_mtime_ns

    def read(self) -> Record:
        try:
            with open(f"{self._key}.answer", encoding="utf-8") as file:
                return Record.from_text(file.read(), self._boot)
        except FileNotFoundError:
            return Record()
        except OSError as error:
            raise self._unusable(error) from error

    def write(self, record: Record, refresh_s: float) -> None:
        """Replace the record; only the holder of the lock may call this."""
        draft = f"{self._key}.draft"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(record.to_text(refresh_s, self._boot))
        os.replace(draft, f"{self._key}.answer")

    def start_refresher(self, polled: PolledSource, since_s: float, clock: Clock) -> bool:
        """Fork the refresher, unless there is one or the answer has just come; return whether it was forked."""
        try:
            lock = os.open(f"{self._key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = self.read()
            if record.is_fresh(since_s) or record.has_failed(since_s):
                return False
            if os.fork() == 0:
                _run_refresher(self, polled, lock, clock)
            return True
        except BlockingIOError:
            return False  # there is a refresher
        finally:
            os.close(lock)  # the refresher's copy keeps the lock


def _run_refresher(entry: CacheEntry, polled: PolledSource, lock: int, clock: Clock) -> None:
    """Run in the forked process: ask until there are no more polls, then exit. Never returns."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)  # an open standard output would keep Horovod waiting for more hosts
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        if polled.needs_packages and sys.flags.no_site:
            site.main()  # which -S has left out
        refresh(polled, entry, clock)
        code = 0
    finally:
        os._exit(code)


def refresh(polled: PolledSource, entry: CacheEntry, clock: Clock) -> None:
    """Ask, write the record and wait, until there was no poll for a while."""
    touched, wanted_s = entry.touched(), clock.monotonic_s()
    while True:
        clock.sleep(max(0.0, entry.read().asked_s + polled.refresh_s - clock.monotonic_s()))
        signal.alarm(ASK_S)
        ask(polled, entry, clock)
        signal.alarm(0)
        if entry.touched() != touched:
            touched, wanted_s = entry.touched(), clock.monotonic_s()
        if polled.refresh_s == 0 or clock.monotonic_s() - wanted_s > max(IDLE_S, 2 * polled.refresh_s):
            return


def ask(polled: PolledSource, entry: CacheEntry, clock: Clock) -> None:
    """Ask the source once and write the record."""
    record = entry.read().asked(clock.monotonic_s(), _gap_s(polled))
    entry.write(
        record, polled.refresh_s
    )  # before the request: a refresher that is killed is not followed by another at once
    signs = _signs(polled.source.files, clock.wall_s())  # before it is read: what changes meanwhile shows later
    try:
        record = _answer(polled, record, signs)
    except (DiscoveryError, UsageError) as error:
        record = record.failed(str(error))
    except Exception as error:  # this process has no standard error; the next poll prints the record
        record = record.failed(f"internal error, please report: {type(error).__name__}: {error}")
    entry.write(record, polled.refresh_s)


def _gap_s(polled: PolledSource) -> float:
    """Seconds without a request after which the next poll is the first of a new job."""
    return max(GAP_S, 3 * polled.refresh_s)


def _signs(paths: Sequence[str], now_s: float) -> str:
    """The signs of files for ``poll.py``; empty where a later change need not show in them.

    A file that is written twice within a tick of its system's clock, and read in between, has the same sign.
    """
    signs = []
    for path in paths:
        with contextlib.suppress(OSError):
            if now_s - os.stat(path).st_ctime < SETTLED_S:
                return ""
        signs += [sign_of(path), path]
    return "" if any(separator in path for path in paths for separator in "\t\n") else "\t".join(signs)


def _answer(polled: PolledSource, record: Record, signs: str) -> Record:
    """The record after a request at ``record.asked_s``."""
    if not polled.is_damped and not polled.source.parts:
        found = polled.source.answer()
        unchanged = f"{record.asked_s + found.holds_s!r}\t{signs}" if signs else ""
        return (
            record.answered(format_hosts(found.hosts), unchanged=unchanged) if found.hosts else record.answered_empty()
        )
    from edl_hvd.discovery.polling.stateful import answer  # a poll of a file does not need it

    return answer(polled, record)


def _boot_id() -> str:
    """The name of this boot of the machine: the monotonic clock starts from zero with each."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"  # not Linux; the fast path of poll.py is then never taken
