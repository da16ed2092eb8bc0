"""What jobs say of their work: asked at their launchers, beside the operator's turns, which never wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import UsageError
from edl_hvd.http_client import BodyTooLongError, Bounds, exchange
from edl_hvd.job_report import PATH, JobReport, read_report
from edl_hvd.kubernetes.pods import STATUS_PORT

EVERY_S, FIRST_EVERY_S, FIRST_S = 10.0, 2.0, 60.0
# More often in the first minute of a launcher, until the job has measured its curve.
_BOUNDS = Bounds(socket_s=1.0, whole_s=2.0, body_bytes=1 << 16)
_AT_ONCE = 8


def ask_launcher(address: str, port: int = STATUS_PORT) -> JobReport | None:
    """What the job of a launcher says; ``None``: nothing that can be used, as before it has begun. Blocks for 2 s.

    Args:
        address: IP address of the launcher's pod.
        port: Its port.
    """
    host = f"[{address}]" if ":" in address else address
    with suppress(OSError, HTTPException, BodyTooLongError, UsageError):
        answer = exchange(urlsplit(f"http://{host}:{port}{PATH}"), {}, _BOUNDS, SYSTEM_CLOCK)
        if answer.status == 200:
            return read_report(answer.text)
    return None


class Reports:
    """The last report of each job. One thread calls :meth:`of`; others ask.

    Args:
        ask: Asks at the address of a launcher.
        clock: For the times between two questions.
    """

    def __init__(self, ask: Callable[[str], JobReport | None] = ask_launcher, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ask, self._clock = ask, clock
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="edl_hvd reports")
        self._since_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._asking: set[str] = set()
        self._found: dict[str, JobReport] = {}

    def of(self, launchers: Mapping[str, str]) -> dict[str, JobReport]:
        """What each job has said last. Asks those whose time it is, and does not wait for the answers.

        Args:
            launchers: Addresses of the launchers that run, by the UID of the job.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            for job in self._since_s.keys() - launchers.keys():
                for known in (self._since_s, self._asked_s, self._found):
                    known.pop(job, None)
            for job in launchers:
                self._since_s.setdefault(job, now_s)
            due = [
                job for job in launchers
                if job not in self._asking and now_s - self._asked_s.get(job, float("-inf")) >= self._pause_s(job)
            ]  # fmt: skip
            self._asking.update(due)
            self._asked_s.update(dict.fromkeys(due, now_s))
            found = dict(self._found)
        for job in due:
            self._threads.submit(self._ask_one, job, launchers[job])
        return found

    def close(self) -> None:
        """Ask nobody any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pause_s(self, job: str) -> float:
        known, since_s = self._found.get(job), self._since_s.get(job, float("inf"))
        is_new = self._clock.monotonic_s() - since_s < FIRST_S
        return FIRST_EVERY_S if is_new and not (known is not None and known.sizes) else EVERY_S

    def _ask_one(self, job: str, address: str) -> None:
        report = None
        try:
            report = self._ask(address)
        finally:
            with self._lock:
                self._asking.discard(job)
                if report is not None and job in self._asked_s:
                    self._found[job] = report
