"""Whether this worker is to leave its world, for whoever waits there for something that may not come for a long time.

The worker tells how to find out while an elastic function runs, and the distillation asks; neither knows the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WorldChange:
    """Set by the thread of the script, and asked by any."""

    def __init__(self) -> None:
        self._ask: Callable[[], bool] | None = None

    @contextmanager
    def found_by(self, ask: Callable[[], bool]) -> Iterator[None]:
        """Ask this function during a block."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def is_pending(self) -> bool:
        """Whether the world is to end; false outside an elastic function, and in threads of the script's own."""
        return self._ask is not None and threading.current_thread() is threading.main_thread() and self._ask()


world_change = WorldChange()
"""That of this process."""
