"""An operator that is told to end does so at once, and not when its next turn is due."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from test_operator_metrics import MemoryServer
from waiting import soon

from edl_hvd.kubernetes import operator as operator_module
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.leadership import Leadership
from edl_hvd.kubernetes.operator import Operator


class Quiet(Operator):
    """An operator without news; it is told to end before its turn forgets what was new, or as it begins to wait."""

    def __init__(self, end_in_turn: bool) -> None:
        api = cast(ApiServer, MemoryServer())
        super().__init__(api, Leadership(api, "edl-hvd", "me"), lambda text: None)
        self.end_in_turn = end_in_turn
        self._news = News(self)
        self._news.set()

    def act(self) -> bool:
        """A turn that sees nothing."""
        self._looked_s = self._clock.monotonic_s()
        if self.end_in_turn:
            self.end()
        self._news.clear()
        return True


class News(threading.Event):
    def __init__(self, operator: Quiet) -> None:
        super().__init__()
        self.operator = operator

    def wait(self, timeout: float | None = None) -> bool:
        if not self.operator.end_in_turn and not self.is_set():
            self.operator.end()
        return super().wait(timeout)


@pytest.mark.parametrize("end_in_turn", [True, False], ids=["in a turn", "between two turns"])
def test_an_operator_that_is_told_to_end_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, end_in_turn: bool) -> None:
    for name in ("QUIET_S", "RENEW_EVERY_S"):
        monkeypatch.setattr(operator_module, name, 1e6)
    thread = threading.Thread(target=Quiet(end_in_turn).run, daemon=True)
    thread.start()
    soon(thread)
