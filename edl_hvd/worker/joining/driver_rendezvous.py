"""Joining worlds under ``edlrun``: the driver says who is a member, Horovod starts.

A worker is told everything over one connection: its worlds, that a member has died, that the world is to change at
the next commit, that it is to go. When the connection ends the driver is gone: the workers agree at their next commit
to stop, or find that their world is broken; one of them writes a checkpoint, and all end with exit code 75, "run me
again". Nobody is left then who ends a worker that hangs on its way there, so each sees to it that it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType

from edl_hvd import protocol
from edl_hvd.errors import CheckpointFailedError, OwnedError, UsageError
from edl_hvd.key_value_store import StoreAddress
from edl_hvd.network_interface import interface_of
from edl_hvd.settings import Driver
from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime, refuse_own_horovod
from edl_hvd.worker.joining.driver_connection import DriverConnection, DriverLost, Urgent
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL, GracefulExit, RendezvousInfo, Replica, StateTransfer
from edl_hvd.worker.progress import progress
from edl_hvd.world import World

_LOOPBACK = "lo"
# Who waits for longer without a driver is cut off from the others, or one of them is stuck. It loses at most what came
# after its last commit.
_ORPHAN_GRACE_S = 3.0
# The others wait for what is still on its way to a standby; sending the whole state again takes longer than this.
_LAST_STEPS_S = 10.0
_LONGEST_ERROR = 2000  # characters; the whole traceback is in the worker's output


class DriverRendezvous:
    """See :class:`edl_hvd.worker.joining.rendezvous.Rendezvous`. For processes started by ``edlrun``.

    Args:
        driver: Address of the driver, and name of this worker.
        grace_s: Seconds within which a worker whose driver is gone has come to its end, or to its last checkpoint.
        end_within: Function that ends this process that number of seconds from now, whatever it does then.
    """

    elastic = True

    def __init__(
        self, driver: Driver, grace_s: float = 30.0, end_within: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._name, self._token = driver.worker, driver.token
        self._horovod = HorovodRuntime(elastic=True)
        self._transfer: StateTransfer | None = None
        self._started: Mapping[str, int] = {}  # how often each collective of the world was
        self._grace_s = grace_s
        self._end_within = end_within
        self._driver = DriverConnection(driver, lambda: progress.beat(self._horovod.generation), self._on_urgent)
        self._has_raised = False
        self._is_done = False
        self._excepthook, sys.excepthook = sys.excepthook, self._on_uncaught
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        refuse_own_horovod()

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell the driver that the script is wrong outside of its training function, so that it is not tried again."""
        if isinstance(error, UsageError) and not self._has_raised:
            self._send_raised(-1, error)
        self._excepthook(kind, error, trace)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Whoever sends it wants this host back: leave at the next commit, and lose nothing.
        self._driver.request_drain()

    def _on_urgent(self, news: Urgent) -> None:
        match news:
            case protocol.PeerLost(generation, worker):
                self._horovod.end_world(generation, worker)
            case protocol.ServeState(generation, standby, address):
                port, own = 0, address or self._driver.local_address
                if self._transfer is not None and generation == self._horovod.generation:
                    port = self._transfer.serve(own, self._token)
                self._driver.send(protocol.ServingState(generation, standby, own, port))
            case protocol.Explain(generation, collectives) if generation == self._horovod.generation:
                stands = progress.where()
                started = tuple(self._started.get(name, 0) for name in collectives)
                self._driver.send(
                    protocol.Waits(generation, progress.waits, progress.collective, started, stands.place, stands.stack)
                )
            case DriverLost():
                # Nobody tells of members that leave any more. The workers agree at their next commit to stop.
                self._horovod.end_world(self._horovod.current, "the driver", _ORPHAN_GRACE_S)
                self._end_within(self._grace_s)

    def change_pending(self) -> bool:
        return self._driver.lost or self._driver.change == self._horovod.generation > 0

    def has_lost_member(self) -> bool:
        return self._horovod.has_lost_member

    def join(self, known_step: int, held_step: int, transfer: StateTransfer | None = None) -> RendezvousInfo:
        self._transfer = transfer
        refuse_own_horovod()
        while True:
            self._driver.send(protocol.Ready(held_step))
            joined = self._enter(self._next_world(transfer))
            if joined is not None:
                return joined
            if transfer is not None:  # the world that did not form may have left it a state
                held_step = transfer.held_step()

    def _next_world(self, transfer: StateTransfer | None) -> protocol.WorldAssigned:
        """Wait for the world to enter; meanwhile take the state over from one that trains, if the driver says so."""
        replica: Replica | None = None
        world: protocol.WorldAssigned | None = None
        catches_up = 0  # generation of the world whose state it takes over, until the driver is told that it has it
        while True:
            news = self._driver.next(_LAST_STEPS_S if world else None)
            if replica is not None and isinstance(news, protocol.ReceiveState | protocol.ShutDown | DriverLost | None):
                replica.abandon()
            match news:
                case DriverLost():
                    raise GracefulExit(
                        "the driver is gone", code=EX_TEMPFAIL, save=True, job_goes_on=self._driver.takes_calls
                    )
                case protocol.ShutDown(save, remaining_s):
                    raise GracefulExit(f"the driver asked {self._name} to exit", save=save, remaining_s=remaining_s)
                case protocol.WorldAssigned(generation) if generation > self._horovod.generation:
                    world = news
                case protocol.ReceiveState(generation, address, port):
                    catches_up, give = generation, self._driver.enqueue
                    replica = transfer.receive(address, port, self._token, give) if transfer and port else None
                case protocol.DonorLost() if replica is not None:
                    replica.end_input()
                case _ if replica is not None and news is replica:
                    replica.apply_next()
            if catches_up and (replica is None or replica.caught_up or replica.closed):
                self._driver.send(protocol.CaughtUp(catches_up))
                catches_up = 0
            if replica is not None and replica.closed:
                replica = None
            if world is not None and replica is None:
                return world

    def _enter(self, told: protocol.WorldAssigned) -> RendezvousInfo | None:
        world = World.of(told.generation, told.members, told.members.index(self._name))
        if self._driver.lost:
            return None
        interface = told.interface or interface_of(told.address or self._driver.local_address)
        os.environ["HOROVOD_GLOO_IFACE"] = interface
        if interface != _LOOPBACK:
            # As horovodrun does. NCCL looks once: on loopback it had better choose itself, other hosts may join.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        collectives = self._horovod.start(world, StoreAddress(told.store_address, told.store_port, self._token))
        if collectives is None:
            return None
        self._started = collectives.started
        self._driver.send(protocol.Formed(world.generation))
        return RendezvousInfo(world, collectives, told.known_step)

    def leave(self, broken: bool) -> None:
        self._horovod.stop(broken)

    def on_preemption_notice(self, remaining_s: float) -> None:
        self._driver.send(protocol.PreemptionNotice(remaining_s))

    def ended(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self._is_done = True
            self._driver.send(protocol.Done())
        else:
            self._send_raised(step, error)

    def _send_raised(self, step: int, error: BaseException) -> None:
        self._has_raised = True
        hopeless = isinstance(error, UsageError) and progress.steps == 0
        # Another try would find the same owner, or disturb it; or do what the script does not want. Once the training
        # is complete there is none.
        ends_job = self._is_done or isinstance(error, (OwnedError, CheckpointFailedError))
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        self._driver.send(protocol.Raised(step, text, hopeless, ends_job))
