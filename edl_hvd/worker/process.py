"""This process's place in the job: its launcher, its rendezvous, its present world. One per process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
from dataclasses import replace

import torch

from edl_hvd.compat.lazy_dynamo import import_dynamo_lazily
from edl_hvd.data.randomness import seed_unseeded
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.gpus import VISIBLE_DEVICES, count_gpus, hides_gpus
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.platforms import Addresses
from edl_hvd.notices.watch import NoticeWatch, open_watch
from edl_hvd.settings import Launch, Settings, platform_addresses, process_environment
from edl_hvd.time_slice import ask_for_short_time_slices
from edl_hvd.worker.engine.collectives import Collectives, WorldCollectives
from edl_hvd.worker.joining.rendezvous import Rendezvous, RendezvousInfo
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.uncaught import shorten_tracebacks
from edl_hvd.world import World

logger = logging.getLogger(__name__)


class Process:
    """The place of this process in the job, which :func:`init` sets up.

    Attributes:
        launch: Variables of the launcher.
        rendezvous: Way in which it joins worlds.
        notices: Watch for preemption notices of this host; ``None`` where there is none.
        last: The present world, or between two worlds the one before; ``None`` before the first.
        is_complete: An elastic function has returned, so that the job is complete for its launcher.
    """

    def __init__(self, launch: Launch, rendezvous: Rendezvous) -> None:
        self.launch = launch
        self.rendezvous = rendezvous
        self.notices: NoticeWatch | None = None
        self.last: World | None = None
        self.is_complete = False
        self._joined: RendezvousInfo | None = None
        self._collectives: WorldCollectives | None = None

    @property
    def joined(self) -> RendezvousInfo | None:
        """The present world and its collectives; ``None`` between worlds."""
        return self._joined

    @joined.setter
    def joined(self, joined: RendezvousInfo | None) -> None:
        self._joined = self._collectives = None
        if joined is not None:
            self.last = joined.world
            self._collectives = WorldCollectives(joined.collectives)
            self._joined = replace(joined, collectives=self._collectives)

    @property
    def world(self) -> World | None:
        """The present world; ``None`` between worlds."""
        return self.joined.world if self.joined else None

    @property
    def collectives(self) -> Collectives:
        """The collectives of the present world.

        Raises:
            UsageError: There is no world.
        """
        return self.require_joined("a collective").collectives

    def require_joined(self, call: str) -> RendezvousInfo:
        """The present world and its collectives, for a call that needs them.

        Args:
            call: What was called, for the message.

        Raises:
            UsageError: There is no world.
        """
        if self._joined is None:
            raise UsageError(
                f"{call} was called outside a world; collectives work inside the function decorated with "
                "@edl_hvd.elastic, because the world is joined when that function is entered"
            )
        return self._joined

    def refuse_broken_world(self) -> None:
        """See :func:`refuse_broken_world`."""
        if self._collectives is not None:
            self._collectives.refuse_broken()


_process: Process | None = None


def init(rendezvous: Rendezvous | None = None) -> None:
    """Prepare this process for elastic training. Every rank calls it once, at the start of the script.

    The launcher decides how worlds are joined. Under ``edlrun`` this call connects to the driver, under ``horovodrun``
    to its rendezvous server, under ``mpirun`` or ``srun`` to MPI. Without a launcher, as in ``python train.py``, the
    world is this process alone. With a GPU, :func:`device` becomes the current CUDA device. A worker whose slot is
    beyond the number of GPUs shares one, and is told to NCCL as a host of its own (``NCCL_HOSTID``).

    Under ``edlrun`` it seeds torch, ``random`` and NumPy alike on all workers, unless the script has done so before.
    What the script draws then, such as the parts of ``random_split``, is the same on all of them.

    No world is joined yet: that happens when the elastic function is entered. So a worker that builds its model for a
    minute does not delay the others. Not collective; blocks for the connection to the launcher only. A second call does
    nothing, until :func:`shutdown`.

    Args:
        rendezvous: An object with the methods of ``edl_hvd.worker.joining.rendezvous.Rendezvous``, for tests and for
            launchers of your own. Left out, the environment that the launcher has set decides.

    Raises:
        PlatformError: A launcher started this process, but Horovod or mpi4py cannot be imported here.
        RendezvousError: The driver of ``edlrun`` cannot be reached.
        SettingsError: The environment holds an invalid setting.
        UsageError: The script has started Horovod by itself.
    """
    global _process
    if _process is not None:
        return
    shorten_tracebacks()
    ask_for_short_time_slices()
    launch = Launch.from_environment()
    if launch.driver is not None:
        _print_stacks_on_sigquit()
    settings = Settings.from_environment()
    import_dynamo_lazily()
    if launch.driver is not None and launch.driver.seed:
        seed_unseeded(launch.driver.seed)
    _process = Process(launch, rendezvous or _rendezvous_for(launch))
    if launch.local_rank == 0:  # one worker of each host
        _process.notices = _watch_for_notices(settings, _process.rendezvous)
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        if launch.local_rank >= torch.cuda.device_count() and VISIBLE_DEVICES not in process_environment():
            # NCCL refuses two members on one GPU of a host; of two hosts, as it takes them for, it does not.
            os.environ.setdefault("NCCL_HOSTID", f"{launch.host}:{launch.local_rank}")
    _leave_imports_to_themselves()


def _leave_imports_to_themselves() -> None:
    """Exempt the objects that exist now, most of them of imported modules, from garbage collection.

    They live as long as the process. Each full collection would go through all of them, for 0.1 s, and a process that
    ends makes several, which delays the end of its host. Objects that the script makes from now on are collected.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def _watch_for_notices(settings: Settings, rendezvous: Rendezvous) -> NoticeWatch | None:
    """Ask the platform in a thread whether this host will be gone; ``None`` where there is no platform to ask."""

    def on_notice(notice: Notice) -> None:
        rendezvous.on_preemption_notice(
            settings.termination_grace_s if notice.deadline_s is None else max(0.0, notice.deadline_s)
        )
        logger.warning("notice for this host: %s", notice.words)

    return open_watch(settings.notices, on_notice, Addresses(**platform_addresses()))


def _print_stacks_on_sigquit() -> None:
    """Have SIGQUIT print the stack of each thread. The driver sends it before it ends a worker that makes no progress.

    The handler is native: it needs neither the main thread nor Python's lock, which the worker may be waiting for.
    """
    # A process that a shell starts in the background ignores the signal. Any other handler is the script's own.
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        faulthandler.register(signal.SIGQUIT, file=2)


def end_within(seconds: float) -> None:
    """End this process after a number of seconds, and print the stacks of its threads; the newest call counts.

    The timer is native: once it is set it needs neither the main thread nor Python's lock. A worker in which something
    holds that lock from before the driver's end cannot set it; the next ``edlrun --resume`` ends that worker.

    Args:
        seconds: Seconds from now, greater than 0.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _rendezvous_for(launch: Launch) -> Rendezvous:
    """The way in which this launcher's workers join worlds; connects to the launcher.

    Raises:
        PlatformError: A package that it needs cannot be imported.
    """
    launcher = "edlrun" if launch.driver else "horovodrun" if launch.address is not None else "mpirun"
    try:
        if launch.driver is not None:
            from edl_hvd.worker.joining.driver_rendezvous import DriverRendezvous

            return DriverRendezvous(launch.driver, Settings.from_environment().termination_grace_s, end_within)
        if launch.address is not None:
            from edl_hvd.worker.joining.horovod_rendezvous import HorovodRendezvous

            return HorovodRendezvous(launch, Settings.from_environment())
        if launch.mpi:
            # Its import starts MPI, which waits for the other ranks with Python's lock.
            end_within(Settings.from_environment().elastic_timeout_s)
            try:
                from edl_hvd.worker.joining.mpi_rendezvous import MpiRendezvous
            finally:
                faulthandler.cancel_dump_traceback_later()
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
    """Whether :func:`init` was called, and :func:`shutdown` was not called since. Any rank; not collective."""
    return _process is not None


def shutdown() -> None:
    """Leave the present world, if there is one, and forget what :func:`init` set up. Any rank; not collective.

    A script need not call it: a process that exits leaves by itself. Outside a world it does not block. In a world it
    stops Horovod, within some 5 s, and the world ends for its other members, too. A second call does nothing.
    """
    global _process
    if _process is not None and _process.notices is not None:
        _process.notices.stop()
    if _process is not None and _process.joined is not None:
        _process.rendezvous.leave(broken=False)
    _process = None


def rank() -> int:
    """The number of this worker in the world, different on every worker. Any rank; not collective.

    It may change with every change of the world, so ask for it again where it is needed. Inside the elastic function it
    is the rank in the present world, and between two worlds the rank in the last one.

    Before the first world it is the launcher's assignment, which may change when the world is joined. Workers that
    start a job are assigned 0, 1, 2, …. Under ``edlrun`` a worker that starts later, as a newcomer or in the place of
    one that died, is assigned the number that it will probably have, and never 0 while another worker lives. So what
    ``if rank() == 0`` guards before training is done on one worker when the job starts, and not again for newcomers.

    Returns:
        An integer in [0, size()).

    Raises:
        UsageError: :func:`init` was not called.
    """
    process = current()
    if process.last is not None:
        return process.last.rank
    return process.launch.rank


def size() -> int:
    """The number of workers in the present world; between two worlds, in the last one. Any rank; not collective.

    It changes with the world, so ask for it again where it is needed. Before the first world it is the launcher's
    assignment, which may change when the world is joined: the number of workers that the job starts with. For a worker
    that ``edlrun`` starts later it is the number of workers of the job, this one included.

    Returns:
        An integer of at least 1.

    Raises:
        UsageError: :func:`init` was not called.
    """
    process = current()
    return process.last.size if process.last is not None else max(process.launch.size, rank() + 1)


def local_rank() -> int:
    """The number of this worker's slot on its host. Any rank; not collective.

    It does not change during the life of the process.

    Returns:
        An integer of at least 0. It may exceed ``local_size() - 1`` when workers of lower numbers are gone.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return current().launch.local_rank


def local_size() -> int:
    """The number of workers of the present world on this host. Any rank; not collective.

    It changes with the world, as :func:`size` does. Before the first world it is the launcher's assignment.

    Returns:
        An integer of at least 1.

    Raises:
        UsageError: :func:`init` was not called.
    """
    process = current()
    return process.last.local_size if process.last is not None else process.launch.local_size


def device() -> torch.device:
    """The device for this worker's model and batches. Any rank; not collective.

    Returns:
        The GPU with the number ``local_rank() % torch.cuda.device_count()``. Without one it is Apple's ``mps`` where
        there is no launcher, since Horovod can sum nothing that lies there; else the CPU.

    Raises:
        UsageError: :func:`init` was not called, and there is a GPU to choose; or ``CUDA_VISIBLE_DEVICES`` names GPUs
            that this host does not have, as one that is listed with more slots than GPUs.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    environ = process_environment()
    if VISIBLE_DEVICES in environ and not hides_gpus(environ) and torch.version.cuda and (there := count_gpus()):
        raise UsageError(
            f"{VISIBLE_DEVICES} is {environ[VISIBLE_DEVICES]!r}, and torch sees no such GPU, though this host has "
            f"{there}; list the host with as many slots as it has GPUs, or with devices= and their numbers; "
            f"{VISIBLE_DEVICES}= trains without"
        )
    if torch.backends.mps.is_available() and isinstance(current().rendezvous, SoloRendezvous):
        return torch.device("mps")
    return torch.device("cpu")


def refuse_broken_world() -> None:
    """Refuse to go on in a world that has lost a member, though the script has caught the error. Not collective.

    Raises:
        WorldBrokenError: A collective of the present world has failed.
    """
    if _process is not None:
        _process.refuse_broken_world()
