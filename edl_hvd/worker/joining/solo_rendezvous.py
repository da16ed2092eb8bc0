"""A world of one process, for ``python train.py``."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.protocol import SAME_SIGTERM_S
from edl_hvd.settings import Settings
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL, GracefulExit, RendezvousInfo, StateTransfer
from edl_hvd.world import SOLO

logger = logging.getLogger(__name__)

_KILLED_BY = 128  # what a shell adds to the number of the signal


class SoloRendezvous:
    """See :class:`~edl_hvd.worker.joining.rendezvous.Rendezvous`. The world stays; SIGTERM ends it at the next commit.

    Whoever sends SIGTERM (a scheduler, Kubernetes, a spot host that goes) sends SIGKILL some time later. Until then the
    last commit is written to a checkpoint. A second SIGTERM, a second or more after it, ends the process at once.

    Args:
        clock: For the time between two signals.
    """

    elastic = False

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._terminated_s: float | None = None  # when SIGTERM came first
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
        now_s = self._clock.monotonic_s()
        if self._terminated_s is not None:
            if now_s - self._terminated_s >= SAME_SIGTERM_S:
                self._restore_handler()
                os.kill(os.getpid(), signal.SIGTERM)
            return
        self._terminated_s = now_s
        killed_at_s = time.monotonic() + Settings.from_environment().termination_grace_s
        self._end = "SIGTERM came", _KILLED_BY + signal.SIGTERM, killed_at_s
        logger.warning("SIGTERM: saving and leaving at the next commit; another one ends this process at once")

    def _restore_handler(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def change_pending(self) -> bool:
        return self._end is not None

    def has_lost_member(self) -> bool:
        return False

    def leave(self, broken: bool) -> None:
        if self._terminated_s is None:  # else the second SIGTERM of one request may be on its way
            self._restore_handler()

    def on_preemption_notice(self, remaining_s: float) -> None:
        self._end = self._end or ("the host is about to go", EX_TEMPFAIL, time.monotonic() + remaining_s)

    def ended(self, step: int, error: BaseException | None) -> None:
        self._restore_handler()
