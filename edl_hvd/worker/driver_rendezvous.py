"""Joining worlds under ``edlrun``: the driver says who is a member, Horovod starts.

A worker is told everything over one connection: its worlds, that a member has died, that the world is to change at
the next commit, that it is to go. When the connection ends the driver is gone: the workers agree at their next commit
to stop, rank 0 writes a checkpoint, and all end with exit code 75, "run me again".
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil

from edl_hvd.errors import PlatformError
from edl_hvd.settings import Launch
from edl_hvd.worker.departures import Departures
from edl_hvd.worker.driver_line import DriverLine
from edl_hvd.worker.engine import Engine
from edl_hvd.worker.progress import progress
from edl_hvd.worker.rendezvous import Dismissed, Joined
from edl_hvd.world import World

ORPHANED = 75  # EX_TEMPFAIL
_LONGEST_ERROR = 2000  # characters; the whole traceback is in the worker's output


class DriverRendezvous:
    """See :class:`edl_hvd.worker.rendezvous.Rendezvous`. For processes started by ``edlrun``.

    Args:
        launch: What the driver put into the environment.
        environment: The whole environment at start, for a rebirth.
    """

    elastic = True

    def __init__(self, launch: Launch, environment: dict[str, str]) -> None:
        assert launch.driver is not None
        self._name = launch.driver.worker
        self._engine = Engine(self._name, environment, elastic=True)
        if launch.past is not None:
            self._engine.generation, self._engine.known_step = launch.past.generation, launch.past.known_step
        self._departures = Departures()
        self._forming = 0
        self._was_rank_0 = False
        self._line = DriverLine(launch.driver, lambda: progress.beat(self._engine.generation))
        self._line.on_gone(self._on_gone)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Whoever sends it wants this host back: leave at the next commit, and lose nothing.
        self._line.wants_to_go = True

    def _on_gone(self, generation: int, worker: str) -> None:
        if generation in (self._engine.generation, self._forming):
            self._departures.note(worker, regular=False)
            if generation == self._engine.generation:
                self._engine.break_connections()

    def change_pending(self) -> bool:
        return self._line.lost or self._line.change == self._engine.generation > 0

    def join(self, known_step: int, held_step: int, keep: Callable[[], dict[str, Any]]) -> Joined:
        engine = self._engine
        engine.known_step, engine.keep = max(engine.known_step, known_step), keep
        while True:
            self._line.say("ready", step=held_step)
            joined = self._enter(self._next_world())
            if joined is not None:
                return joined

    def _next_world(self) -> dict[str, Any]:
        while True:
            news = self._line.next()
            if news is None:
                raise Dismissed("the driver is gone", code=ORPHANED, save=self._was_rank_0)
            if news["what"] == "dismiss":
                raise Dismissed(f"the driver sends {self._name} home", save=news["save"])
            if news["what"] == "world" and news["generation"] > self._engine.generation:
                return news

    def _enter(self, news: dict[str, Any]) -> Joined | None:
        engine = self._engine
        world = World.of(news["generation"], news["members"], news["members"].index(self._name))
        engine.known_step = max(engine.known_step, news["known_step"])
        self._departures, self._forming = Departures(), world.generation
        os.environ["HOROVOD_GLOO_IFACE"] = news["interface"] or _interface_of(self._line.local_address)
        address, port = news["store"]
        collectives = engine.start(world, (address, port), self._departures)
        if collectives is None:
            return None
        self._was_rank_0 = world.rank == 0
        self._line.say("formed", generation=world.generation)
        return Joined(world, collectives, engine.known_step)

    def leave(self, broken: bool) -> None:
        self._engine.stop(broken)

    def ended(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self._line.say("done")
        else:
            self._line.say("raised", step=step, error=f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])


def _interface_of(address: str) -> str:
    """The network interface that has this address of ours."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise PlatformError(f"no network interface of this host has the address {address}; set --network-interfaces")
