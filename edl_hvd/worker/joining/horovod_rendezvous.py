"""Joining worlds under stock ``horovodrun``: its server assigns ranks, the members meet at a barrier, Horovod starts.

What differs from Horovod's own elastic mode: a worker asks for its rank before ``hvd.init()``, so one that was removed
ends regularly, not in an abort of C++; members stay connected, so a death is known whatever Horovod is doing; and a
change of hosts is heard of from the start of the process on, until an assignment covers it.
"""

from __future__ import annotations

import atexit
import json
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from http.client import HTTPException

from horovod.runner.elastic.worker import WorkerNotificationManager

from edl_hvd import key_value_store
from edl_hvd.errors import RendezvousError
from edl_hvd.key_value_store import KeyValueStore, StoreAddress
from edl_hvd.settings import Launch, Settings
from edl_hvd.worker.engine.children import close_on_fork, open_sockets
from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime, refuse_own_horovod
from edl_hvd.worker.joining.barrier import Barrier, JoinRequest
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL, GracefulExit, Rendezvous, RendezvousInfo, StateTransfer
from edl_hvd.world import World

_STORE_KEY = "/edl_hvd/meeting"
_POLL_S = 0.02


class HorovodRendezvous(Rendezvous):
    """See :class:`edl_hvd.worker.joining.rendezvous.Rendezvous`. For processes started by ``horovodrun``.

    Args:
        launch: Variables that the launcher has put into the environment.
        settings: Timeouts.
    """

    def __init__(self, launch: Launch, settings: Settings) -> None:
        refuse_own_horovod()
        self.elastic = launch.elastic
        self._settings = settings
        self._name = f"{launch.host}:{launch.local_rank}"
        self._horovod = HorovodRuntime(launch.elastic, settings.collective_timeout_s)
        self._launcher = StoreAddress(launch.address or "", launch.port)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._launcher.address, launch.port or 9))
            # By this address of this host the launcher, and so the other workers, can reach it.
            self._address: str = probe.getsockname()[0]
        self._assigned: tuple[int, int] | None = launch.rank, launch.size
        self._known_step = -1  # the furthest that this worker has heard of
        self._last_generation = 0  # also of a world that did not form
        self._store: KeyValueStore | None = None
        self._barrier: Barrier | None = None
        self._change_announced = False
        self._gone_at_s: float | None = None  # when this host will be gone
        if self.elastic:
            # From the very start: a change announced while this process still builds its model is not lost.
            notices = WorkerNotificationManager()
            notices.register_listener(self)
            notices.init(launch.address, launch.port, launch.interface, launch.host, launch.local_rank)
        atexit.register(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        # The others may still be busy with the last collective, so that this end must not look like a death.
        if self._barrier is not None:
            self._barrier.leave(regular=True)
        self._close_store(broken=False)

    def on_hosts_updated(self, timestamp: float, update: object) -> None:
        """Note that hosts have come or gone; called by Horovod, in a thread of its own."""
        self._change_announced = True

    def change_pending(self) -> bool:
        return self._change_announced or self._gone_at_s is not None

    def join(self, known_step: int, held_step: int, transfer: StateTransfer | None = None) -> RendezvousInfo:
        if self._gone_at_s is not None:
            # An error to the launcher, which then leaves the host alone.
            remaining_s = self._gone_at_s - time.monotonic()
            raise GracefulExit("the host is about to go", code=EX_TEMPFAIL, save=True, remaining_s=remaining_s)
        refuse_own_horovod()
        deadline_s = time.monotonic() + self._settings.elastic_timeout_s
        self._known_step = max(self._known_step, known_step)
        before = open_sockets()
        while True:
            (rank, size), self._assigned = self._assigned or self._ask_launcher(), None
            barrier = self._join_barrier(rank, size)
            joined = self._start_horovod(rank, barrier) if barrier is not None else None
            if joined is not None:
                close_on_fork(open_sockets() - before)
                return joined
            if not self.elastic or time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"worker {self._name} met no complete world of {size} within "
                    f"{self._settings.elastic_timeout_s:.0f} s; check that every worker enters the "
                    "@edl_hvd.elastic function, and the output of the workers that did not"
                )

    def leave(self, broken: bool) -> None:
        if self._barrier is not None:
            self._barrier.leave(regular=not broken)
            self._barrier = None
        self._horovod.stop(broken)
        self._close_store(broken)

    def _close_store(self, broken: bool) -> None:
        if self._store is not None:
            self._store.close(broken)
            self._store = None

    def on_preemption_notice(self, remaining_s: float) -> None:
        if self.elastic:  # else all end with it
            self._gone_at_s = time.monotonic() + remaining_s

    # --- asking the launcher ---

    def _ask_launcher(self) -> tuple[int, int]:
        """Report ready and block until the launcher has the next world; the rank in it, and its size.

        A worker may ask once per world.
        """
        self._change_announced = False  # a change announced before this question is part of the answer
        # The launcher itself gives up after the elastic timeout; wait a little longer for its answer.
        timeout_s = self._settings.elastic_timeout_s + 60
        answer = self._request(key_value_store.get, f"/rank_and_size/{self._name}", timeout_s)
        rank, *others = [int(number) for number in (answer or b"-1").decode().split(",")]
        if rank < 0:
            raise GracefulExit(f"the launcher removed {self._name} from the job")
        return rank, others[0]  # the others follow from the names of the members

    def _request(self, ask: Callable[..., bytes | None], path: str, *arguments: object) -> bytes | None:
        try:
            return ask(self._launcher, path, *arguments)
        except (OSError, HTTPException) as error:
            raise RendezvousError(
                f"the launcher at {self._launcher.address}:{self._launcher.port} does not answer a request for {path}: "
                f"{error}; it has probably ended, see its output"
            ) from error

    # --- meeting the others ---

    def _join_barrier(self, rank: int, size: int) -> Barrier | None:
        """Wait for the others; ``None`` if one of them did not come, or left."""
        # The stock elastic launcher does not tell that a starting worker died; asking it again does. A
        # static launcher ends everybody in that case, so there it is enough to wait.
        barrier_timeout_s = self._settings.join_timeout_s if self.elastic else self._settings.elastic_timeout_s
        if rank == 0:
            self._store = KeyValueStore(self._address, token=secrets.token_hex(16))
            self._publish(asdict(self._store.place))
            store: StoreAddress | None = self._store.place
        else:
            store = self._find_store(barrier_timeout_s)
            barrier_timeout_s += 10  # rank 0 gives up first, and so tells that it is gone when it does not
        own = JoinRequest(rank, self._name, self._last_generation, self._known_step)
        if store is not None:
            with suppress(OSError, HTTPException, ValueError):
                return Barrier(store, size, own, barrier_timeout_s)
        if self._store is not None:
            self._publish({"closed": True})
            self._close_store(broken=True)
        return None

    def _publish(self, notice: dict[str, object]) -> None:
        value = json.dumps({**notice, "step": self._known_step}).encode()
        self._request(key_value_store.put, _STORE_KEY, value, 10)

    def _find_store(self, barrier_timeout_s: float) -> StoreAddress | None:
        """The address of the store that rank 0 of the next world serves; ``None`` if it is not there in time."""
        deadline_s = time.monotonic() + barrier_timeout_s
        while time.monotonic() < deadline_s:
            answer = self._request(key_value_store.get, _STORE_KEY, 10)
            notice = json.loads(answer) if answer else {}
            self._known_step = max(self._known_step, notice.get("step", -1))
            if "port" in notice:
                return StoreAddress(notice["address"], notice["port"], notice["token"])
            if "closed" in notice:
                break
            time.sleep(_POLL_S)
        return None

    # --- starting Horovod ---

    def _start_horovod(self, rank: int, barrier: Barrier) -> RendezvousInfo | None:
        requests = barrier.requests
        self._last_generation = max(member.generation for member in requests) + 1
        world = World.of(self._last_generation, [member.name for member in requests], rank)
        barrier.watch(lambda worker: self._horovod.end_world(world.generation, worker))
        self._known_step = max(member.known_step for member in requests)
        collectives = self._horovod.start(world, barrier.store)
        if collectives is None:
            barrier.leave(regular=False)
            self._close_store(broken=True)
            return None
        self._barrier = barrier
        return RendezvousInfo(world, collectives, self._known_step)
