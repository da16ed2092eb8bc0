"""Azure: scheduled events, from the instance metadata. They are not acknowledged: Azure would then begin earlier.

Source: Azure documentation, "Azure Metadata Service: Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import HttpAnswer
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.request import refusal, request

ADDRESS = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_KINDS = {
    "Preempt": "spot eviction",
    "Terminate": "scheduled termination",
    "Reboot": "scheduled reboot",
    "Redeploy": "scheduled redeployment",
}
# "Freeze" pauses the machine for seconds, which a job survives.


class AzureNotices:
    """Provider of Azure, for one thread at a time.

    Args:
        address: URL of the metadata service.
    """

    name = "azure"
    every_s = 2.0
    # Seconds: a fifteenth of the notice of an eviction.

    def __init__(self, address: str = ADDRESS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address = address.rstrip("/")
        self._clock = clock
        self._machine = ""

    def ask(self) -> Notice | None:
        self._machine = self._machine or self._get(_NAME).text.strip()
        events = self._get(_EVENTS)
        return read_events(events.text, self._machine, events.now_s(self._clock))

    def _get(self, path: str) -> HttpAnswer:
        # The first request after the start of a machine may take two minutes; it fails here and is repeated.
        answer = request(self._address, path, {"Metadata": "true"}, self._clock)
        if answer.status != 200:
            raise refusal(self._address, path, answer)
        return answer


def read_events(text: str, machine: str, now_s: float) -> Notice | None:
    """Find the earliest event that ends the machine, if there is one.

    Raises:
        PlatformError: The answer is not understood.
    """
    try:
        events = [
            event
            for event in json.loads(text)["Events"]
            if event["EventType"] in _KINDS and machine in event["Resources"]
        ]
        notices = [_read_event(event, now_s) for event in events]
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError(f"the scheduled events of Azure are not understood: {text[:200]!r}") from error
    return min(notices, key=lambda notice: notice.deadline_s or 0.0, default=None)


def _read_event(event: dict[str, Any], now_s: float) -> Notice:
    kind = _KINDS[event["EventType"]]
    time = event.get("NotBefore") or ""  # empty when it has begun
    left_s = max(0.0, parsedate_to_datetime(time).timestamp() - now_s) if time else 0.0
    words = f"Azure has announced a {kind} of this machine, {f'not before {time}' if time else 'which has begun'}"
    return Notice(kind, left_s, words, str(event["EventId"]))
