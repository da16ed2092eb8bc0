"""A world of one process, for ``python train.py``."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

from edl_hvd.settings import Settings
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL, GracefulExit, RendezvousInfo, StateTransfer
from edl_hvd.world import SOLO

logger = logging.getLogger(__name__)

_KILLED_BY = 128  # what a shell adds to the number of the signal


class SoloRendezvous:
    """See :class:`~edl_hvd.worker.joining.rendezvous.Rendezvous`. The world stays; SIGTERM ends it at the next commit.

    Whoever sends SIGTERM (a scheduler, Kubernetes, a spot host that goes) sends SIGKILL some time later. Until then the
    last commit is written to a checkpoint. A second SIGTERM ends the process at once.
    """

    elastic = False

    def __init__(self) -> None:
        self._end: tuple[str, int, float] | None = None  # why this process is to end, its exit code, when it is killed

    def join(self, known_step: int, held_step: int, transfer: StateTransfer | None = None) -> RendezvousInfo:
        if self._end is not None:
            reason, code, killed_at_s = self._end
            raise GracefulExit(reason, code=code, save=True, remaining_s=killed_at_s - time.monotonic())
        # A handler of the script's own stays; signals reach the main thread only.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        return RendezvousInfo(SOLO, SoloCollectives(), known_step)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        killed_at_s = time.monotonic() + Settings.from_environment().termination_grace_s
        self._end = "SIGTERM came", _KILLED_BY + signal.SIGTERM, killed_at_s
        self._restore_handler()
        logger.warning("SIGTERM: saving and leaving at the next commit; another one ends this process at once")

    def _restore_handler(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def change_pending(self) -> bool:
        return self._end is not None

    def leave(self, broken: bool) -> None:
        self._restore_handler()

    def on_preemption_notice(self, remaining_s: float) -> None:
        self._end = self._end or ("the host is about to go", EX_TEMPFAIL, time.monotonic() + remaining_s)

    def ended(self, step: int, error: BaseException | None) -> None:
        self._restore_handler()
