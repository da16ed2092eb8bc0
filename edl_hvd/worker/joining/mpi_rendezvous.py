"""Joining the one world of an MPI job: ``mpirun -np 4 python train.py``, or ``srun``.

MPI only tells the ranks of each other; the world itself is Horovod's over Gloo, as under ``horovodrun``.
It is fixed: no elasticity, but checkpoints and resumption as everywhere.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time

from mpi4py import MPI

from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.network_interface import address_of, interface_of
from edl_hvd.settings import Settings
from edl_hvd.worker.engine.horovod_runtime import HorovodRuntime, refuse_own_horovod
from edl_hvd.worker.joining.rendezvous import Rendezvous, RendezvousInfo, StateTransfer
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class MpiRendezvous(Rendezvous):
    """See :class:`edl_hvd.worker.joining.rendezvous.Rendezvous`. A fixed world ends with its first host.

    Args:
        interface: Network interface for Gloo, or ``None`` for the one that the host's name resolves to.
    """

    elastic = False

    def __init__(self, interface: str | None) -> None:
        refuse_own_horovod()
        settings = Settings.from_environment()
        self._timeout_s = settings.elastic_timeout_s
        self._horovod = HorovodRuntime(elastic=False, collective_timeout_s=settings.collective_timeout_s)
        self._interface = interface
        self._store: KeyValueStore | None = None

    def join(self, known_step: int, held_step: int, transfer: StateTransfer | None = None) -> RendezvousInfo:
        refuse_own_horovod()
        communicator = MPI.COMM_WORLD
        self._await_all(communicator)
        rank = communicator.Get_rank()
        hosts: list[str] = communicator.allgather(socket.gethostname())
        if self._interface:
            address, interface = address_of(self._interface), self._interface
        else:
            address = "127.0.0.1" if len(set(hosts)) == 1 else socket.gethostbyname(hosts[rank])
            interface = interface_of(address)
        if rank == 0:
            self._store = KeyValueStore(address, token=secrets.token_hex(16))
        store = communicator.bcast(self._store.place if self._store else None)
        members = [f"{host}:{hosts[:place].count(host)}" for place, host in enumerate(hosts)]
        world = World.of(1, members, rank)
        os.environ.update(
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_HOSTNAME=hosts[rank],
            HOROVOD_GLOO_IFACE=interface,
        )
        collectives = self._horovod.start(world, store)
        assert collectives is not None, "a world that is not elastic forms or fails"
        return RendezvousInfo(world, collectives, known_step)

    def _await_all(self, communicator: MPI.Intracomm) -> None:
        """Wait for the other ranks, asleep: MPI's own wait keeps a processor busy, and has no end."""
        deadline_s = time.monotonic() + self._timeout_s
        barrier = communicator.Ibarrier()
        while not barrier.Test():
            if time.monotonic() > deadline_s:
                logger.error(
                    "rank %d met no complete world of %d within %.0f s; check that every rank enters the "
                    "@edl_hvd.elastic function, and the output of the ranks that did not; the job ends",
                    communicator.Get_rank(), communicator.Get_size(), self._timeout_s,
                )  # fmt: skip
                # Not an exception: a process that exits waits in MPI_Finalize for the same ranks.
                sys.stderr.flush()
                communicator.Abort(1)
            time.sleep(_POLL_S)

    def leave(self, broken: bool) -> None:
        self._horovod.stop(broken)
        if self._store is not None:
            self._store.close()
            self._store = None
