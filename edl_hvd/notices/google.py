"""Google Compute Engine: preemption and host maintenance, from the metadata server.

Source: Compute Engine documentation, "Preemptible VM instances", "Handle GPU host maintenance events".
"""

from __future__ import annotations

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.request import refusal, request

ADDRESS = "http://metadata.google.internal"
_INSTANCE = "/computeMetadata/v1/instance/"
EVERY_S = 2.0
# Seconds: a fifteenth of the shortest notice. The metadata server is a process of the same host.
PREEMPTION_S = 30.0 - EVERY_S
# The machine has 30 seconds, of which at most ``EVERY_S`` have passed.
MAINTENANCE_S = 60.0 - EVERY_S
# Machines with GPUs get the notice an hour before, others a minute; the server does not say which.


class GoogleNotices:
    """Provider of Google Compute Engine.

    Args:
        address: URL of the metadata server ("http://" and ``GCE_METADATA_HOST``).
    """

    name = "google"
    every_s = EVERY_S

    def __init__(self, address: str = ADDRESS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address = address.rstrip("/")
        self._clock = clock

    def ask(self) -> Notice | None:
        return read_state(self._get("preempted"), self._get("maintenance-event"))

    def _get(self, name: str) -> str:
        path = f"{_INSTANCE}{name}"
        answer = request(self._address, path, {"Metadata-Flavor": "Google"}, self._clock)
        # A server that is not Google's lacks this header, for example a proxy.
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise refusal(self._address, path, answer)
        return answer.text.strip()


def read_state(preempted: str, maintenance: str) -> Notice | None:
    """Read the notice in "preempted" and "maintenance-event"; there is none for a live migration.

    >>> read_state("FALSE", "MIGRATE_ON_HOST_MAINTENANCE")

    Raises:
        PlatformError: An entry is not understood.
    """
    if preempted not in ("TRUE", "FALSE"):
        raise PlatformError(f"Google says {preempted[:200]!r} where it says TRUE or FALSE")
    if preempted == "TRUE":
        return Notice("preemption", PREEMPTION_S, "Google is preempting this machine")
    if maintenance == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("host maintenance", MAINTENANCE_S, "Google will stop this machine to maintain its host")
    return None
