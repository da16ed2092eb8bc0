"""What workers print, kept in files: ``<folder>/<worker>/stdout`` and ``stderr``."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO


class OutputFiles:
    """Appends, so that a worker that comes back in its slot does not erase what the one before has said.

    Args:
        folder: Where, or ``None`` to keep nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def write(self, worker: str, stream: str, line: bytes) -> None:
        """Keep one line."""
        if self._folder is None:
            return
        file = self._files.get((worker, stream))
        if file is None:
            folder = self._folder / f"worker.{worker.replace(':', '.')}"
            folder.mkdir(parents=True, exist_ok=True)
            file = self._files[worker, stream] = open(folder / stream, "ab", buffering=0)  # noqa: SIM115  # stays open
        file.write(line)

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
