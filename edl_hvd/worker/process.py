"""This process's place in the job: its launcher, its rendezvous, its present world. One per process."""

from __future__ import annotations

import faulthandler
import signal

import torch

from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.late_compiler import import_compiler_late
from edl_hvd.notices.watch import NoticeWatch
from edl_hvd.settings import Launch, Settings, platform_addresses
from edl_hvd.worker.engine import calls
from edl_hvd.worker.engine.calls import Operation
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.joining.notices import watch_for_notices
from edl_hvd.worker.joining.rendezvous import Joined, Rendezvous
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.position import position
from edl_hvd.world import World

_OUTSIDE = (
    "{} was called outside a world; collectives work inside the function decorated with @edl_hvd.elastic, because the "
    "world is joined when that function is entered"
)


class Process:
    """What :func:`init` sets up.

    Attributes:
        launch: How this process was started.
        rendezvous: How it joins worlds.
        notices: Who asks whether this host is about to go, or ``None``.
        last: The present world, or between two worlds the one before; ``None`` before the first.
    """

    def __init__(self, launch: Launch, rendezvous: Rendezvous) -> None:
        self.launch = launch
        self.rendezvous = rendezvous
        self.notices: NoticeWatch | None = None
        self.last: World | None = None
        self._joined: Joined | None = None

    @property
    def joined(self) -> Joined | None:
        """The present world and its collectives; ``None`` between worlds."""
        return self._joined

    @joined.setter
    def joined(self, joined: Joined | None) -> None:
        self._joined = joined
        if joined is not None:
            self.last = joined.world

    @property
    def world(self) -> World | None:
        return self.joined.world if self.joined else None

    @property
    def collectives(self) -> Collectives:
        if self.joined is None:
            raise UsageError(_OUTSIDE.format("a collective"))
        return self.joined.collectives


_process: Process | None = None


def init(rendezvous: Rendezvous | None = None) -> None:
    """Prepare this process for elastic training. Call it first, on every worker.

    Under ``horovodrun`` it connects to the launcher, under ``mpirun`` to MPI; without a launcher the
    world is this process alone.
    No world is joined yet: that happens when the elastic function is entered, so that a worker
    that builds its model for a minute keeps nobody waiting in Horovod.

    Args:
        rendezvous: How to join worlds, instead of what the environment suggests.

    Raises:
        PlatformError: A launcher started this process, but Horovod or mpi4py is not installed here.
        SettingsError: The environment holds an invalid setting.
    """
    global _process
    if _process is not None:
        return
    launch = Launch.from_environment()
    if launch.driver is not None:
        _show_stack_when_asked()
    settings = Settings.from_environment()
    import_compiler_late()
    _process = Process(launch, rendezvous or _rendezvous_for(launch))
    if launch.local_rank == 0:  # one worker of each host
        _process.notices = watch_for_notices(
            settings.notices, platform_addresses(), settings.grace_s, _process.rendezvous
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(device())


def _show_stack_when_asked() -> None:
    """Let SIGQUIT print where each thread stands. The driver sends it before it ends a worker that does not move.

    The handler is native: it needs neither the main thread nor Python's lock, which may be what the worker hangs in.
    """
    # Whatever a shell starts in the background ignores it; any other handler is the script's, which has a use for it.
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        faulthandler.register(signal.SIGQUIT, file=2)


def _rendezvous_for(launch: Launch) -> Rendezvous:
    launcher = "edlrun" if launch.driver else "horovodrun" if launch.address is not None else "mpirun"
    try:
        if launch.driver is not None:
            from edl_hvd.worker.joining.driver_rendezvous import DriverRendezvous

            return DriverRendezvous(launch)
        if launch.address is not None:
            from edl_hvd.worker.joining.horovod_rendezvous import HorovodRendezvous

            return HorovodRendezvous(launch, Settings.from_environment())
        if launch.mpi:
            from edl_hvd.worker.joining.mpi_rendezvous import MpiRendezvous

            return MpiRendezvous(launch.interface)
    except ImportError as error:
        raise PlatformError(
            f"this worker was started by {launcher}, but a package it needs cannot be imported here: {error}; run "
            "`edl-hvd build-horovod` on this host for Horovod, `pip install 'edl-hvd[mpi]'` for mpi4py"
        ) from error
    return SoloRendezvous()


def current() -> Process:
    """The process set up by :func:`init`.

    Raises:
        UsageError: :func:`init` was not called.
    """
    if _process is None:
        raise UsageError("edl_hvd is not initialised; call edl_hvd.init() at the start of the script")
    return _process


def is_initialized() -> bool:
    """Whether :func:`init` was called, as in Horovod."""
    return _process is not None


def shutdown() -> None:
    """Leave the present world, if any, and forget everything :func:`init` set up."""
    global _process
    if _process is not None and _process.notices is not None:
        _process.notices.stop()
    if _process is not None and _process.joined is not None:
        _process.rendezvous.leave(broken=False)
    _process = None


def rank() -> int:
    """This worker's rank: in [0, size()), and another one on every worker.

    Inside the elastic function it is the rank in the present world, between two worlds that in the last one. Before the
    first world it is the launcher's assignment, which may change when the world is joined. Workers that start a job
    are assigned 0, 1, 2, …; under ``edlrun`` a worker that starts later, as a newcomer or in the place of one that
    died, is assigned the number that it will probably have, and never 0 while another worker lives. So what
    ``if rank() == 0`` guards before training is done on one worker when the job starts, and not again for newcomers.
    """
    process = current()
    if process.last is not None:
        return process.last.rank
    return process.launch.rank


def size() -> int:
    """Workers in the present world; between two worlds, in the last one.

    Before the first world it is the launcher's assignment, which may change when the world is joined: the number of
    workers that the job starts with, for one that ``edlrun`` starts later that of the job with it.
    """
    process = current()
    return process.last.size if process.last is not None else max(process.launch.size, rank() + 1)


def local_rank() -> int:
    """This worker's number on its host; does not change during the life of the process."""
    return current().launch.local_rank


def local_size() -> int:
    """Workers on this host: members of the world, as :func:`size`; before the first one as the launcher assigned."""
    process = current()
    return process.last.local_size if process.last is not None else process.launch.local_size


def device() -> torch.device:
    """The device for this worker: the GPU numbered like its local rank, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def _collectives_for(name: str) -> tuple[Collectives, int, int]:
    """Collectives, rank and size of the present world, for the public collective ``name``. All of them ask here.

    Raises:
        UsageError: There is no world, or a micro-batch is being computed, of which workers may have different numbers.
    """
    process = current()
    position.refuse_inside(f"edl_hvd.{name}()")
    if process.joined is None:
        raise UsageError(_OUTSIDE.format(name))
    world = process.joined.world
    return process.joined.collectives, world.rank, world.size


def allreduce(tensor: torch.Tensor, op: Operation | None = None) -> torch.Tensor:
    """Combine a tensor over the present world. Collective: every rank calls it; blocks.

    No gradient flows through the result.

    Args:
        tensor: Any shape, equal on all ranks; any numeric type, or bool for "max" and "min"; left as it is.
        op: "sum", "mean" (or "average"), "max" or "min". It has no default, because Horovod's is the average.

    Returns:
        A new tensor of the same shape, type and device. Types of less than 32 bits are computed in 32.

    Raises:
        WorldBrokenError: A member is gone; inside the elastic function the loop recovers from it.
        UsageError: ``op`` is left out or not one of these, or does not fit the tensor's type (a mean of whole
            numbers), the ranks passed different shapes or called different collectives, or there is no world.
    """
    collectives, _, of = _collectives_for("allreduce")
    return calls.allreduce(collectives, of, tensor, op)


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, one after the other. Collective: every rank calls it; blocks.

    No gradient flows through the result.

    Args:
        tensor: Any numeric type or bool, equal on all ranks. Its first dimension may differ between ranks, and be 0;
            the others are equal. One without dimensions counts as one of a single element. Left as it is.

    Returns:
        A new tensor on the same device, in rank order along dimension 0.

    Raises:
        WorldBrokenError: A member is gone; inside the elastic function the loop recovers from it.
        UsageError: The ranks passed tensors that do not fit together or called different collectives, or there is no
            world.
    """
    collectives, own, of = _collectives_for("allgather")
    return calls.allgather(collectives, own, of, tensor)


def broadcast(tensor: torch.Tensor, root_rank: int = 0) -> torch.Tensor:
    """The tensor of one rank, on every rank. Collective: every rank calls it; blocks.

    Args:
        tensor: Any numeric type or bool; of one type and shape on all ranks. Left as it is.
        root_rank: Whose tensor it is, in [0, size), equal on all ranks.

    Returns:
        A new tensor of the same shape, type and device. No gradient flows through it.

    Raises:
        WorldBrokenError: A member is gone; inside the elastic function the loop recovers from it.
        UsageError: There is no such rank, the ranks passed tensors of different sizes or called different collectives,
            or there is no world.
    """
    collectives, own, of = _collectives_for("broadcast")
    return calls.broadcast(collectives, own, of, tensor, root_rank)


def barrier() -> None:
    """Wait until every rank of the present world has called it. Collective; blocks.

    Raises:
        WorldBrokenError: A member is gone; inside the elastic function the loop recovers from it.
        UsageError: The ranks called different collectives, or there is no world.
    """
    collectives, own, of = _collectives_for("barrier")
    calls.barrier(collectives, own, of)
