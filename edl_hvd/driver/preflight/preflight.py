"""One look at some new hosts: a process on each, which measures it and meets those of others.

A process is started as a worker would be, calls back over a connection (``control.py``) and says what it has
measured. Then the hosts meet in pairs, each newcomer with other newcomers and with hosts that are in the job already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from edl_hvd.driver.control import Connected, Control, ProcessEnding, Unreachable
from edl_hvd.driver.network import Network, RendezvousEndpoint
from edl_hvd.driver.workers.process import ProcessStarter, WorkerProcess
from edl_hvd.errors import EdlHvdError
from edl_hvd.hosts import HostSlots
from edl_hvd.preflight.measured import HostFindings, Measured
from edl_hvd.preflight.messages import FROM_PROBE, FromProbe, Listening, Measure, Meet, Met
from edl_hvd.preflight.verdict import judge, pairs
from edl_hvd.settings import Driver

REFERENCE_HOSTS = 2
# Hosts of the job that newcomers meet: one may be about to go, or busy.
_FIRST_S, _LATE_S = 120.0, 60.0
# Until the first answer, and for the others after it: Python and torch from a cold network disk take a minute; the
# measurements take a second.
_MEET_S = 45.0
# Three waits of ten seconds within the process, and what they are late.
_END_S = 2.0
# A process that waits ends by itself when nobody is connected any more; one that hangs is killed, as fast as ssh can.
_KILL_S = 5.0

_News: TypeAlias = FromProbe | Connected
_Expected = TypeVar("_Expected", bound=_News)


@dataclass(frozen=True)
class PreflightResult:
    """What came of it.

    Attributes:
        findings: What is known of the host.
        fault: Why it is to get no workers; empty: it may.
        answered: It has measured itself. If not, it may be that it is not up yet.
    """

    findings: HostFindings
    fault: str = ""

    @property
    def answered(self) -> bool:
        return self.findings.measured is not None


class Preflight:
    """How hosts are looked at.

    Args:
        starter: Starts ``python -m edl_hvd.preflight`` on a host.
        network: How it reaches this machine.
        bound: Largest ratio of a host's time to that of the others.
    """

    def __init__(self, starter: ProcessStarter, network: Network, bound: float) -> None:
        self._starter = starter
        self._network = network
        self._bound = bound

    async def look(self, new: Sequence[HostSlots], known: Sequence[HostFindings]) -> list[PreflightResult]:
        """Look at these hosts. Leaves no process behind, also when it is cancelled.

        Args:
            new: The hosts.
            known: What was found of those that are in the job, the most trusted ones first.
        """
        probes = _Probes(self._starter, self._network)
        try:
            reference_hosts = [findings.host for findings in known[:REFERENCE_HOSTS]]
            await probes.open()
            found = await probes.measure(new, reference_hosts)
            fair = [findings for findings in found if not self._judge(findings, [*found, *known])]
            met = await probes.meet([*reference_hosts, *(findings.host for findings in fair)])
        finally:
            await probes.close()
        found = [_with_best(findings, met) if findings in fair else findings for findings in found]
        faults = {findings.host: self._judge(findings, [*found, *known]) for findings in found}
        # Who met nobody could be anybody: the one that is listed first stays, alone.
        if not known and fair and all(faults[findings.host] for findings in fair):
            faults[fair[0].host] = ""
        return [PreflightResult(findings, faults[findings.host]) for findings in found]

    def _judge(self, findings: HostFindings, all_of_them: Iterable[HostFindings]) -> str:
        return judge(findings, [other for other in all_of_them if other.host != findings.host], self._bound)


def _with_best(findings: HostFindings, met: Mapping[str, Sequence[tuple[float, str]]]) -> HostFindings:
    times = [seconds for seconds, problem in met.get(findings.host, ()) if not problem]
    if times:
        return replace(findings, exchange_s=min(times))
    problems = [problem for _, problem in met.get(findings.host, ())]
    return replace(findings, problem=problems[0] if problems else "")


class _Probes:
    """The processes of one look, and the connections to them."""

    def __init__(self, starter: ProcessStarter, network: Network) -> None:
        self._starter = starter
        self._network = network
        self._news: dict[str, asyncio.Queue[_News | str]] = {}
        self._control = Control(self._is_expected, self._on_message, FROM_PROBE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: dict[str, WorkerProcess] = {}
        self._pair = 0
        self._port = 0

    async def open(self) -> None:
        self._port = await self._control.start()

    async def close(self) -> None:
        self._control.close()
        if not self._tasks:
            return
        await asyncio.wait(self._tasks, timeout=_END_S)
        for process in self._processes.values():
            process.kill()
        await asyncio.wait(self._tasks, timeout=_KILL_S)
        for task in self._tasks:
            task.cancel()

    async def measure(self, hosts: Sequence[HostSlots], reference_hosts: Sequence[str]) -> list[HostFindings]:
        """What each host says of itself. Reference hosts have work to do: they are started, and not asked."""
        for name in (*reference_hosts, *(entry.host for entry in hosts)):
            self._news[_worker(name)] = asyncio.Queue()
            self._tasks.add(asyncio.get_running_loop().create_task(self._run_process(_worker(name))))
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(self._measure(entry)) for entry in hosts]
        greeted = [loop.create_task(self._next(name, Connected, _FIRST_S)) for name in reference_hosts]
        try:
            await asyncio.wait(asked, timeout=_FIRST_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([*asked, *greeted], timeout=_LATE_S)
            return [
                task.result() if task.done() else HostFindings(entry.host, entry.slots, problem="it does not answer")
                for entry, task in zip(hosts, asked, strict=True)
            ]
        finally:
            for task in (*asked, *greeted):
                task.cancel()

    async def _measure(self, entry: HostSlots) -> HostFindings:
        answer: _News | str = await self._next(entry.host, Connected, None)
        if not isinstance(answer, str):
            self._control.send(_worker(entry.host), Measure())
            answer = await self._next(entry.host, Measured, None)
        if isinstance(answer, Measured):
            return HostFindings(entry.host, entry.slots, answer)
        return HostFindings(entry.host, entry.slots, problem=str(answer))

    async def meet(self, hosts: Sequence[str]) -> Mapping[str, Sequence[tuple[float, str]]]:
        """Seconds, or what went wrong, of each meeting, by host."""
        met: dict[str, list[tuple[float, str]]] = {host: [] for host in hosts}
        for turn in pairs(hosts):
            results = await asyncio.gather(*(self._meet(*pair) for pair in turn))
            for pair, result in zip(turn, results, strict=True):
                connected = self._control.connections([_worker(host) for host in pair])
                gone = [host for host in pair if _worker(host) not in connected]
                for host in gone or pair:  # that a partner is gone is not the other one's fault
                    met[host].append(result)
        return met

    async def _meet(self, host: str, guest: str) -> tuple[float, str]:
        connections = self._control.connections((_worker(host), _worker(guest)))
        for name in (host, guest):
            if _worker(name) not in connections:
                return 0.0, f"{name} is gone"
        self._pair += 1
        pair, endpoint = self._pair, RendezvousEndpoint.of(connections)
        here, there = connections[_worker(host)], connections[_worker(guest)]
        own = endpoint.address_for(here) or here.peer
        self._say(host, pair, own, None, None)
        answer = await self._next(host, Listening, _MEET_S, pair)
        if isinstance(answer, str):
            return 0.0, f"no allreduce of {host} and {guest}: {answer}"
        self._say(guest, pair, endpoint.address_for(there), own, answer.port)
        results = await asyncio.gather(*(self._next(name, Met, _MEET_S, pair) for name in (host, guest)))
        slowest_s = 0.0
        for result in results:
            if isinstance(result, str) or result.problem:
                return 0.0, f"{host} and {guest}: {result if isinstance(result, str) else result.problem}"
            slowest_s = max(slowest_s, result.duration_s)
        return slowest_s, ""

    def _say(self, host: str, pair: int, own: str | None, other: str | None, port: int | None) -> None:
        self._control.send(_worker(host), Meet(pair, own, other, port, self._network.interface))

    async def _next(self, host: str, kind: type[_Expected], timeout_s: float | None, pair: int = 0) -> _Expected | str:
        """The host's next message of this kind, and of this pair; or why there is none."""
        news = self._news[_worker(host)]
        ends_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = None if ends_s is None else ends_s - asyncio.get_running_loop().time()
            try:
                said = await asyncio.wait_for(news.get(), left_s)
            except asyncio.TimeoutError:
                return f"{host} has not answered for {timeout_s:.0f} s"
            if isinstance(said, str):
                news.put_nowait(said)  # for whoever asks next, too
                return said
            if isinstance(said, kind) and getattr(said, "pair", 0) == pair:
                return said
            if isinstance(said, Met) and said.pair == pair:
                return said.problem  # before it could listen

    async def _run_process(self, worker: str) -> None:
        """One process, from its start to its end; how it ended is the last that is heard of it."""
        try:
            address = await asyncio.to_thread(self._network.toward, _host(worker))
            driver = Driver(address, self._port, self._control.token, worker, 1)
            process = self._processes[worker] = await self._starter.start(worker, driver.as_environment())
            ended = await process.wait()
            del self._processes[worker]
            last = [line for line in process.last_lines if line.strip()][-1:]
            self._news[worker].put_nowait("; ".join([ended.text, *last]))
        except (OSError, EdlHvdError) as error:
            self._news[worker].put_nowait(str(error))
        except Exception as error:  # whatever it is: the host would be waited for for two minutes
            self._news[worker].put_nowait(f"{type(error).__name__}: {error}")

    def _is_expected(self, worker: str, incarnation: int) -> bool:
        return worker in self._news and incarnation == 1

    def _on_message(self, worker: str, incarnation: int, said: _News | Unreachable | ProcessEnding) -> None:
        if isinstance(said, Unreachable | ProcessEnding):
            self._news[worker].put_nowait("it does not answer any more")
        else:
            self._news[worker].put_nowait(said)


def _worker(host: str) -> str:
    return f"{host}:preflight"


def _host(worker: str) -> str:
    return worker.rpartition(":")[0]
