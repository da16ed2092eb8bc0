"""The driver brings a donor and a standby together, and tells the standby when its donor is dead."""

import asyncio
from typing import Any

import pytest
from test_job_grace import Deaf, Idle

from edl_hvd.driver.control import ProcessEnding, Unreachable
from edl_hvd.driver.job import Job
from edl_hvd.driver.membership.events import Formed, HostsFound, Ready
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import Network
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import TO_WORKER, DonorLost, Hello, ReceiveState, ServingState, ShutDown, decode, encode

DONOR, OTHER, STANDBY = "a:0", "a:1", "b:0"


def told(*said: tuple[str, int, Any]) -> list[object]:
    """What a standby is told of its transfer when workers say this: name, incarnation, message."""

    async def talk() -> list[object]:
        job = Job(Rules(2, 1, 3), Idle(), Network(lambda host: "127.0.0.1"), Deaf())
        await job.start()
        job.handle(HostsFound((HostSlots("a", 2),)))
        for event in (Ready(OTHER, 1), Ready(DONOR, 1), Formed(OTHER, 1, 1), Formed(DONOR, 1, 1)):
            job.handle(event)
        job.handle(HostsFound((HostSlots("a", 2), HostSlots("b", 1))))
        reader, writer = await asyncio.open_connection("127.0.0.1", job._port)
        writer.write(encode(Hello(job._control.token, STANDBY, 1)))
        while not job._control.connections([STANDBY]):
            await asyncio.sleep(0.001)
        job.handle(Ready(STANDBY, 1))
        [donor] = job._donors.values()
        for worker, incarnation, message in said:
            job._on_message({DONOR: donor, OTHER: ({DONOR, OTHER} - {donor}).pop()}[worker], incarnation, message)
        job._control.send(STANDBY, ShutDown(save=False, left_s=None))
        heard = []
        while not isinstance(message := decode(await reader.readline(), TO_WORKER), ShutDown):
            heard.append(message)
        writer.close()
        for task in list(job._tasks):
            task.cancel()
        job._control.close()
        return [message for message in heard if isinstance(message, ReceiveState | DonorLost)]

    return asyncio.run(talk())


SERVING = (DONOR, 1, ServingState(1, STANDBY, "127.0.0.1", 7))
RECEIVE = ReceiveState(1, "127.0.0.1", 7)


@pytest.mark.parametrize("end", [ProcessEnding(), Unreachable()])
def test_a_standby_is_told_when_its_donor_dies(end):
    assert told(SERVING, (DONOR, 1, end)) == [RECEIVE, DonorLost()]


@pytest.mark.parametrize(
    "said",
    [(OTHER, 1, ProcessEnding()), (DONOR, 7, ProcessEnding())],
    ids=["another member", "another process of its slot"],
)
def test_it_goes_on_receiving_when_another_one_dies(said):
    assert told(SERVING, said) == [RECEIVE]


def test_a_member_that_is_not_its_donor_any_more_is_not_received_from():
    assert told((OTHER, 1, ServingState(1, STANDBY, "127.0.0.1", 8)), SERVING) == [RECEIVE]
