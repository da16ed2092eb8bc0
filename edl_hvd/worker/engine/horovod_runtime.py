"""Horovod in this process: started for one world after the other, left again whatever state it is in."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable

import horovod.torch as hvd

from edl_hvd.errors import RendezvousError, UsageError
from edl_hvd.key_value_store import StoreAddress
from edl_hvd.network_interface import address_of
from edl_hvd.worker.engine import mended
from edl_hvd.worker.engine.children import close_on_fork, open_sockets
from edl_hvd.worker.engine.horovod_collectives import HorovodCollectives, WorldFailure
from edl_hvd.worker.engine.stall_inspector import StallInspector
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_LEAVE_S = 5.0  # far more than leaving takes on a busy machine
_GLOO_TIMEOUT_FRACTION = 0.9  # a start that takes longer is ended, before Gloo does it


class HorovodRuntime:
    """Horovod in this process, which is started and stopped once for each world.

    Args:
        elastic: Whether a world may be left for another; else the job ends when one breaks.
        collective_timeout_s: Seconds that the members may wait for each other; ``None`` where a driver sees to it.

    Attributes:
        generation: Generation of the last world started; 0 before the first.
        current: Generation of the world that forms or lives; 0 for none.

    Raises:
        PlatformError: The installed Horovod is not mended.
    """

    def __init__(self, elastic: bool, collective_timeout_s: float | None = None) -> None:
        mended.require()
        self.generation = 0
        self._elastic = elastic
        self._collective_timeout_s = collective_timeout_s
        self._lock = threading.Lock()
        self.current = 0
        self._left = 0  # generation of the world that is being left
        self._failures: dict[int, WorldFailure] = {}

    def start(self, world: World, store: StoreAddress) -> HorovodCollectives | None:
        """Start Horovod as a member of ``world``; blocks until all members have.

        Args:
            world: World to start, with this worker's place in it.
            store: Address of the key-value store of this generation.

        Returns:
            Its collectives; ``None`` if a member or the store is gone, and with it the world.

        Raises:
            PlatformError: The network interface that is to be used has no address.
            RendezvousError: The world did not form, and there will be no other.
        """
        self._prepare(world, store)
        before = open_sockets()
        with self._lock:
            self._failures = {number: lost for number, lost in self._failures.items() if number >= world.generation}
            self.current = world.generation
            mended.abort(on=world.generation in self._failures)  # else what was given up is over
        formed = self._init(world.generation)
        with self._lock:
            failure = self._failures.get(world.generation)
            formed = formed and failure is None
            if formed:
                self.generation = world.generation
        if not formed:
            self.stop(broken=True)
            reason = failure.reason if failure is not None else "a member or the key-value store"
            logger.warning("generation %d did not form: %s is gone", world.generation, reason)
            if self._elastic:
                return None
            raise RendezvousError(
                f"Horovod cannot start: {reason} is gone; the output of the other workers may say more"
            )
        close_on_fork(open_sockets() - before)
        timeout_s = self._collective_timeout_s
        inspector = None if timeout_s is None else StallInspector(world, store, timeout_s)
        logger.info("generation %d: rank %d of %d", world.generation, world.rank, world.size)
        return HorovodCollectives(lambda: self._failures.get(world.generation), inspector)

    def _prepare(self, world: World, store: StoreAddress) -> None:
        """Set the place in the world, which Horovod's C++ reads from the environment at init."""
        if os.environ.get("HOROVOD_GLOO_IFACE"):
            address_of(os.environ["HOROVOD_GLOO_IFACE"])
        key = hmac.digest(store.token.encode(), f"generation {world.generation}".encode(), hashlib.sha256)
        # HOROVOD_ELASTIC stays set: NCCL aborts only then.
        os.environ.update(
            HOROVOD_RANK=str(world.rank),
            HOROVOD_SIZE=str(world.size),
            HOROVOD_LOCAL_RANK=str(world.local_rank),
            HOROVOD_LOCAL_SIZE=str(world.local_size),
            HOROVOD_CROSS_RANK=str(world.cross_rank),
            HOROVOD_CROSS_SIZE=str(world.cross_size),
            HOROVOD_GLOO_RENDEZVOUS_ADDR=store.address,
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(store.port),
            HOROVOD_GLOO_RENDEZVOUS_TOKEN=store.token,
            HOROVOD_WORLD_KEY=key.hex(),
        )

    def _init(self, generation: int) -> bool:
        """Start Horovod; false if the world did not form."""
        bound_s = _GLOO_TIMEOUT_FRACTION * float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
        bound = _after(bound_s, self.end_world, generation, f"a member that was waited for for {bound_s:.0f} s")
        try:
            hvd.init()
        except ValueError:  # what hvd.init() makes of an error
            return False
        finally:
            bound.cancel()
        return True

    def end_world(self, generation: int, worker: str, grace_s: float = 0.0) -> None:
        """End what waits in a world that has lost a member. Any thread, any time; does not block.

        Args:
            generation: Generation of the world, also of one that this worker is yet to hear of.
            worker: Name of the member that is gone, for people.
            grace_s: Seconds that a collective may still wait. A world that forms ends at once.
        """
        with self._lock:
            known = self._failures.get(generation)
            if known is None or grace_s < known.grace_s:
                self._failures[generation] = WorldFailure(worker, time.monotonic(), grace_s)
            is_ended = generation == self.current and (generation != self.generation or grace_s == 0)
            if is_ended or generation == self._left:
                mended.abort(on=True)

    @property
    def has_lost_member(self) -> bool:
        """Whether a member of the present world is gone. Any thread."""
        with self._lock:
            return self.current in self._failures

    def stop(self, broken: bool) -> None:
        """Shut Horovod down. Blocks for some seconds at most.

        Args:
            broken: Whether the world is broken; else its members shut down together.
        """
        with self._lock:
            self.current, self._left = 0, self.current
            failure = self._failures.get(self._left)
            if broken or (failure is not None and failure.grace_s == 0):
                mended.abort(on=True)
        bound = _after(_LEAVE_S, mended.abort, True)
        try:
            hvd.shutdown()
        finally:
            bound.cancel()
            with self._lock:
                self._left = 0


def _after(seconds: float, act: Callable[..., object], *arguments: object) -> threading.Timer:
    timer = threading.Timer(seconds, act, arguments)
    timer.daemon = True
    timer.start()
    return timer


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
