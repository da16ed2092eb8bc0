"""Horovod in this process: started for one world after the other, left again whatever state it is in."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from http.client import HTTPException
from typing import Any, NoReturn

import horovod.torch as hvd
import torch

from edl_hvd import key_value_store
from edl_hvd.errors import RendezvousError, UsageError
from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.settings import PastLife
from edl_hvd.worker.engine import mended
from edl_hvd.worker.engine.abort_guard import AbortGuard
from edl_hvd.worker.engine.children import keep_from_children
from edl_hvd.worker.engine.departures import Departures
from edl_hvd.worker.engine.horovod_collectives import HorovodCollectives
from edl_hvd.worker.engine.interface import bind_to
from edl_hvd.worker.engine.native_call import NativeCall
from edl_hvd.worker.engine.rebirth import be_reborn
from edl_hvd.worker.engine.sockets import break_sockets, open_sockets
from edl_hvd.worker.engine.standstill import Standstills
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_LEAVE_S = 5.0  # far more than leaving takes on a busy machine, far less than the Gloo timeout
_BREAK_AGAIN_S = 0.05
_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT_S = 10.0


class Engine:
    """See the module.

    Args:
        name: This worker, as ``host:slot``.
        environment: The whole environment at the process's start, for a rebirth.
        elastic: A world may be left for another; else the job ends when one breaks.
        collective_timeout_s: How long the members may wait for each other; ``None`` where a driver sees to it.

    Attributes:
        generation: Of the last world started.
        rank: In the last world started; -1 before the first.
        known_step: The furthest step heard of.
        keep: Puts the state of this worker in a safe place, see ``Rendezvous.join``.
    """

    def __init__(
        self, name: str, environment: dict[str, str], elastic: bool, collective_timeout_s: float | None = None
    ) -> None:
        mended.require()
        self.generation = 0
        self.rank = -1
        self.known_step = -1
        self.keep: Callable[[], dict[str, Any]] = dict
        self._name = name
        self._environment = environment
        self._elastic = elastic
        self._collective_timeout_s = collective_timeout_s
        self._collectives: HorovodCollectives | None = None
        self._guard: AbortGuard | None = None
        self._sockets: frozenset[tuple[int, str]] = frozenset()

    def start(self, world: World, store: tuple[str, int], departures: Departures) -> HorovodCollectives | None:
        """Start Horovod as a member of ``world``; blocks until all members have.

        Args:
            world: The world, with this worker's place in it.
            store: Address and port of the key-value store of this generation.
            departures: Tells who has left it already.

        Returns:
            Its collectives; ``None`` if the store is gone, and with it the world.
        """
        if not self._prepare(world, store):
            return None
        before = open_sockets()
        guard = AbortGuard(departures)
        try:
            formed = self._init(world.generation, before, departures, guard)
            if not formed:
                hvd.shutdown()
                guard.end()
                logger.warning("generation %d did not form: %s", world.generation, departures.reason or "a member left")
                if self._elastic:
                    return None
                raise RendezvousError(
                    f"Horovod cannot start: {departures.reason or 'a member'} is missing; the output of the other "
                    "workers may say more"
                )
        except BaseException:
            guard.end()
            raise
        if self._elastic:
            guard.started()
            self._guard = guard
        else:
            guard.end()
        self._sockets = open_sockets() - before
        keep_from_children(self._sockets)
        self.generation, self.rank = world.generation, world.rank
        timeout_s = self._collective_timeout_s
        standstills = None if timeout_s is None else Standstills(world, store, timeout_s)
        self._collectives = HorovodCollectives(departures, self.break_connections, standstills)
        logger.info("generation %d: rank %d of %d", world.generation, world.rank, world.size)
        return self._collectives

    def _init(
        self, generation: int, before: frozenset[tuple[int, str]], departures: Departures, guard: AbortGuard
    ) -> bool:
        """Let Horovod start; false if the world cannot form."""
        gloo_s = float(self._environment.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        start = NativeCall(hvd.init)
        try:
            if start.returns_within(0.9 * gloo_s, lambda: departures.reason or guard.held.is_set()):
                return True
            with mended.abort():
                deadline_s = time.monotonic() + _LEAVE_S
                while not guard.held.is_set() and time.monotonic() < deadline_s:
                    break_sockets(open_sockets() - before)
                    if start.returns_within(_BREAK_AGAIN_S, guard.held.is_set):
                        return False  # it has formed all the same, and somebody is gone
        except ValueError:  # what hvd.init() makes of an error
            return False
        self._be_reborn(generation, f"{departures.reason or 'a member'} is missing at its start")

    def times_started(self, names: Iterable[str]) -> list[int]:
        """How often each of these collectives was started in the present world. Any thread."""
        started = self._collectives.started if self._collectives is not None else {}
        return [started.get(name, 0) for name in names]

    def break_connections(self) -> None:
        """Make every collective of this world fail, here and at the neighbours. Any thread."""
        break_sockets(self._sockets)

    def stop(self, broken: bool) -> None:
        """Shut Horovod down; does not return if that needs a new process image."""
        if broken:
            self.break_connections()
        if self._guard is not None:
            self._shut_down_or_be_reborn(broken, self._guard)
            self._guard.end()
            self._guard = None
        else:
            hvd.shutdown()  # the job ends; at the worst after the Gloo timeout
        self._sockets = frozenset()

    def _shut_down_or_be_reborn(self, broken: bool, guard: AbortGuard) -> None:
        if broken:
            guard.broke()
        shutdown = NativeCall(hvd.shutdown)
        left = shutdown.returns_within(_LEAVE_S, guard.held.is_set)
        if not left and not broken:
            self.break_connections()
            left = shutdown.returns_within(_LEAVE_S, guard.held.is_set)
        if guard.held.is_set():
            self._be_reborn(self.generation, "its connections ended in the middle of a message")
        if left and self._collectives is not None and self._collectives.abandoned:
            left = self._forget_leftovers()
        if not left:
            self._be_reborn(self.generation, "it has not ended a collective")

    def _forget_leftovers(self) -> bool:
        """Horovod keeps a tensor that it was given too late, and would refuse its name from then on.

        In a world of this process alone it gets rid of it, because there nobody is waited for.
        """
        store = KeyValueStore(_LOOPBACK)
        try:
            if not self._prepare(World.of(self.generation, (self._name,), rank=0), (store.address, store.port)):
                return False
            return NativeCall(_pass_through_a_world_of_one).returns_within(_LEAVE_S)
        finally:
            store.close()

    def _prepare(self, world: World, store: tuple[str, int]) -> bool:
        """Hand the place in the world to Horovod. False if the store is gone already."""
        # Horovod's C++ reads these at init. After a shutdown in elastic mode it also asks the store for its
        # rank; the answer is put there beforehand. HOROVOD_ELASTIC stays set: NCCL aborts only then.
        numbers = (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank, world.cross_size)
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        address, port = store
        os.environ.update({f"HOROVOD_{name}": str(number) for name, number in zip(names, numbers, strict=True)})
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
        interface = os.environ.get("HOROVOD_GLOO_IFACE")
        if interface:
            bind_to(interface)
        key = f"/rank_and_size/{self._name.rpartition(':')[0]}:{world.local_rank}"
        try:
            key_value_store.put(address, port, key, ",".join(map(str, numbers)).encode(), _STORE_TIMEOUT_S)
        except (OSError, HTTPException):
            return False
        return True

    def _be_reborn(self, generation: int, reason: str) -> NoReturn:
        if not self._elastic:
            raise RendezvousError(f"Horovod cannot start: {reason}; the output of the other workers may say more")
        try:
            be_reborn(self._environment, PastLife(generation, self.known_step, self.keep(), self.rank), reason)
        except BaseException:
            # An ordinary end would wait for Horovod's thread, which is stuck.
            logger.exception("this process cannot be run anew, so it ends")
            os._exit(os.EX_SOFTWARE)


def refuse_own_horovod() -> None:
    """Called while this process is in no world.

    Raises:
        UsageError: The script has started Horovod itself.
    """
    if hvd.is_initialized():
        raise UsageError(
            "this script has started Horovod by itself, with horovod's own hvd.init(), before its world was there; "
            "remove that call and the import of horovod, and write `import edl_hvd as hvd`: edl_hvd starts Horovod "
            "when the function decorated with @edl_hvd.elastic is entered (docs/from_static_horovod.md)"
        )


def _pass_through_a_world_of_one() -> None:
    hvd.init()
    # Requests are answered in the order in which they came: after this one no older one is left.
    hvd.allreduce(torch.zeros(1), name="edl_hvd.leftovers")
    hvd.shutdown()
