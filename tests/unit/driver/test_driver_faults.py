"""What goes wrong within the driver ends the job with one sentence, in whatever task of the event loop it happens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_job_grace import Deaf
from waiting import LONG_S

from edl_hvd.driver import job as job_module
from edl_hvd.driver.job import Job
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import Network
from edl_hvd.driver.reporter import Reporter
from edl_hvd.driver.status import Status
from edl_hvd.driver.workers.process import Exit, WorkerProcess
from edl_hvd.errors import EdlHvdError, InternalError, PlatformError
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import Hello, Ready, encode

REPORT = (
    r"; this is a fault of edl_hvd: please report it with the lines above; a new run goes on at the newest checkpoint"
)


class Process(WorkerProcess):
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self.pid = 1
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._running = True

    def _signal(self, number: signal.Signals) -> None:
        self.ended.set()

    async def wait(self) -> Exit:
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        return Exit(None, 15)


class Starter:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.processes: list[Process] = []

    async def start(self, worker: str, variables: object) -> Process:
        if self.error is not None:
            raise self.error
        self.processes.append(Process())
        return self.processes[-1]


class Driver:
    """A job of one worker under test."""

    def __init__(self) -> None:
        self.starter = Starter()
        self.job = Job(Rules(1, 1, 1), self.starter, Network(lambda host: "127.0.0.1"), Deaf())
        self.connections: list[asyncio.StreamWriter] = []

    async def say_ready(self) -> None:
        """Say it as a worker does."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.job._port)
        writer.write(encode(Hello(self.job._control.token, "a:0", 1)) + encode(Ready(-1)))
        self.connections.append(writer)


def error_of(prepare: Callable[[Driver], None], then: Callable[[Driver], Any]) -> EdlHvdError:
    """How a job ends in which something goes wrong; what the event loop would say of it by itself is an error."""

    async def test() -> EdlHvdError:
        unseen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        driver = Driver()
        await driver.job.start()
        driver.job.handle(events.HostsFound((HostSlots("a", 1),)))
        prepare(driver)
        running = asyncio.create_task(driver.job.run())
        while not driver.starter.processes and driver.starter.error is None:
            await asyncio.sleep(0)
        if (coroutine := then(driver)) is not None:
            await coroutine
        with pytest.raises(EdlHvdError) as raised:
            await asyncio.wait_for(running, LONG_S)
        assert all(process.ended.is_set() for process in driver.starter.processes)
        for connection in driver.connections:
            connection.close()
            with suppress(OSError):
                await connection.wait_closed()
        assert not unseen
        return raised.value

    return asyncio.run(test())


@pytest.mark.parametrize(
    "error", [PlatformError("no port is free; end another program"), OSError(24, "Too many files")]
)
def test_no_store_for_a_world_ends_the_job(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(job_module, "KeyValueStore", refuse)
    found = error_of(lambda driver: None, Driver.say_ready)
    if isinstance(error, PlatformError):
        assert found is error
    else:
        assert str(found).startswith("the driver failed at the event Ready: OSError: [Errno 24] Too many files; ")
        assert found.__cause__ is error


def test_a_fault_of_the_state_machine_ends_the_job_and_its_traceback_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_at_ready(driver: Driver) -> None:
        transition = driver.job._recorder.transition

        def broken(membership: Any, event: Any, now_s: float) -> Any:
            if isinstance(event, events.Ready):
                raise KeyError("a:0")
            return transition(membership, event, now_s)

        monkeypatch.setattr(driver.job._recorder, "transition", broken)

    found = error_of(break_at_ready, Driver.say_ready)
    assert isinstance(found, InternalError)
    assert str(found) == "the driver failed at the event Ready: KeyError: 'a:0'" + REPORT
    [record] = [record for record in caplog.records if record.name == "edl_hvd.driver.job"]
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_a_fault_while_a_message_is_taken_in_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard(worker: str, incarnation: int) -> None:
        raise ValueError("no such worker")

    found = error_of(lambda driver: monkeypatch.setattr(driver.job._health, "heard", heard), Driver.say_ready)
    assert str(found).startswith("the driver failed at the message Connected of a:0: ValueError: no such worker; ")


def test_a_fault_while_a_process_is_started_ends_the_job() -> None:
    def break_start(driver: Driver) -> None:
        driver.starter.error = ValueError("embedded null byte")

    found = error_of(break_start, lambda driver: None)
    assert str(found).startswith("the driver failed at the process of a:0: ValueError: embedded null byte; ")


def test_a_fault_while_a_process_is_waited_for_ends_the_job() -> None:
    def fail(driver: Driver) -> None:
        [process] = driver.starter.processes
        process.error = ValueError("x")
        process.ended.set()

    assert "the driver failed at the process of a:0: ValueError: x; " in str(error_of(lambda driver: None, fail))


def test_a_status_that_cannot_be_made_is_said_and_the_job_goes_on(tmp_path: Path) -> None:
    def write(status: Status) -> None:
        raise TypeError("no JSON")

    reporter = Reporter(Deaf(), write, Status(0.0, "starting"))
    asyncio.run(reporter.close(events.End(0, "")))
    assert reporter._problem == "TypeError: no JSON"
