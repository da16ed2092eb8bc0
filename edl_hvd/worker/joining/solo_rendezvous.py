"""A world of one process, for ``python train.py``."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

from edl_hvd.settings import Settings
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.rendezvous import EX_TEMPFAIL, GracefulExit, Handover, RendezvousInfo
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
        self._asked_s: float | None = None  # when SIGTERM came
        self._going_s: float | None = None  # when this host will be gone
        self._before: Any = None  # its handler until the world was joined

    def join(self, known_step: int, held_step: int, handover: Handover | None = None) -> RendezvousInfo:
        if self._asked_s is not None:
            left_s = Settings.from_environment().termination_grace_s - (time.monotonic() - self._asked_s)
            code = _KILLED_BY + signal.SIGTERM
            raise GracefulExit("SIGTERM came", code=code, save=True, left_s=left_s)
        if self._going_s is not None:
            left_s = self._going_s - time.monotonic()
            raise GracefulExit("the host is about to go", code=EX_TEMPFAIL, save=True, left_s=left_s)
        # A handler of the script's own stays; signals reach the main thread only.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return RendezvousInfo(SOLO, SoloCollectives(), known_step)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._asked_s = time.monotonic()
        self._restore_handler()
        logger.warning("SIGTERM: saving and leaving at the next commit; another one ends this process at once")

    def _restore_handler(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def change_pending(self) -> bool:
        return self._asked_s is not None or self._going_s is not None

    def leave(self, broken: bool) -> None:
        self._restore_handler()

    def host_going(self, left_s: float) -> None:
        self._going_s = time.monotonic() + left_s

    def ended(self, step: int, error: BaseException | None) -> None:
        self._restore_handler()
