"""Google Compute Engine: preemption and host maintenance, from the metadata server.

Source: Compute Engine documentation, "Preemptible VM instances", "Handle GPU host maintenance events".
"""

from __future__ import annotations

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.notices.asking import ask, refused
from edl_hvd.notices.notice import Notice

ADDRESS = "http://metadata.google.internal"
_INSTANCE = "/computeMetadata/v1/instance/"
EVERY_S = 2.0
# A fifteenth of the shortest notice; the metadata server is a process of the same host.
PREEMPTION_S = 30.0 - EVERY_S
# The machine has 30 seconds, of which some pass until it is asked again.
MAINTENANCE_S = 60.0 - EVERY_S
# Machines with GPUs are told an hour before, others a minute; which this is, nobody says.


class Google:
    """See ``Provider``.

    Args:
        address: Of the metadata server ("http://" and ``GCE_METADATA_HOST``).
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
        answer = ask(self._address, path, {"Metadata-Flavor": "Google"}, self._clock)
        # Whoever is not Google does not say so: a proxy, say.
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise refused(self._address, path, answer)
        return answer.text.strip()


def read_state(preempted: str, maintenance: str) -> Notice | None:
    """The notice in the values of "preempted" and "maintenance-event". A machine that only moves is none.

    >>> read_state("FALSE", "MIGRATE_ON_HOST_MAINTENANCE")

    Raises:
        PlatformError: They are not understood.
    """
    if preempted not in ("TRUE", "FALSE"):
        raise PlatformError(f"Google says {preempted[:200]!r} where it says TRUE or FALSE")
    if preempted == "TRUE":
        return Notice("preemption", PREEMPTION_S, "Google is preempting this machine")
    if maintenance == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("host maintenance", MAINTENANCE_S, "Google will stop this machine to maintain its host")
    return None
