"""A fault while a host's process is started is what is known of the host, at once."""

from __future__ import annotations

import asyncio

from edl_hvd.driver.network import Network
from edl_hvd.driver.preflight.preflight import Preflight
from edl_hvd.hosts import HostSlots


class Broken:
    async def start(self, worker: str, variables: object) -> None:
        raise ValueError("embedded null byte")


def test_a_host_whose_process_cannot_be_started_for_any_reason_is_not_waited_for() -> None:
    preflight = Preflight(Broken(), Network(lambda host: "127.0.0.1"), 2.0)  # type: ignore[arg-type]
    [result] = asyncio.run(preflight.look([HostSlots("a", 1)], ()))
    assert result.findings.problem == "ValueError: embedded null byte"
