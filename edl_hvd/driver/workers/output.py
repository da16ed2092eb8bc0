"""What a child writes: line by line, no longer than the child lives; and kept in files, if the user wants it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from edl_hvd.background_writes import BackgroundWrites

_LONGEST_LINE_BYTES = 64 * 1024
# A progress bar without newlines, or binary junk, must not fill the driver's memory.
_READ_BYTES = 64 * 1024
_PIPE_BYTES = 1024 * 1024
# The most that Linux gives a user without privileges. One has at least 64 KiB.


class Lines:
    """Cuts bytes into lines."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, newline included; one of more than 64 KiB comes in pieces.

        >>> lines = Lines()
        >>> lines.feed(b"a"), lines.feed(b"b\\nc\\nd"), lines.rest()
        ([], [b'ab\\n', b'c\\n'], b'd')
        """
        *whole, begun = (self._begun + data).split(b"\n")
        *pieces, self._begun = _pieces(begun) or [b""]
        return [*(piece for line in whole for piece in _pieces(line + b"\n")), *pieces]

    def rest(self) -> bytes:
        """What has been begun and not ended by a newline."""
        rest, self._begun = self._begun, b""
        return rest


class Output:
    """Standard output and error of one child. Belongs to the running event loop.

    asyncio's own pipes would do, but there a child has not ended before they have, and whoever inherits one can hold
    that back.

    Args:
        take: Gets ``"stdout"`` or ``"stderr"`` and each line, in the event loop; a last one without newline at the
            end. Must not raise.
    """

    def __init__(self, take: Callable[[str, bytes], None]) -> None:
        self._pipes = (_Pipe(partial(take, "stdout")), _Pipe(partial(take, "stderr")))

    async def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None,
        talk: bool,
        hold: bool,
        keep: Sequence[int] = (),
    ) -> asyncio.subprocess.Process:
        """Start the child in a session of its own and read what it writes from now on.

        Args:
            words: Its command.
            environment: All of it.
            folder: Where it runs; ``None`` for here.
            talk: Its standard input is written to, instead of being empty.
            hold: It gets the read ends as well. Without a reader, writing fails or kills (SIGPIPE), and when the
                driver is killed the reader is gone; so it can write on, until the pipe is full.
            keep: Descriptors that it inherits.

        Raises:
            OSError, ValueError: It could not be started.
        """
        if hold:
            for pipe in self._pipes:
                pipe.widen()
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=environment,
                cwd=folder,
                stdin=asyncio.subprocess.PIPE if talk else asyncio.subprocess.DEVNULL,
                stdout=self._pipes[0].write_end,
                stderr=self._pipes[1].write_end,
                pass_fds=[*keep, *(pipe.read_end for pipe in self._pipes if hold)],
                start_new_session=True,
            )
        except BaseException:
            for pipe in self._pipes:
                pipe.discard()
            raise
        for pipe in self._pipes:
            pipe.listen()
        return process

    async def finish(self, patience_s: float) -> None:
        """Take the rest of what was written, and stop reading; to be called when the child has ended.

        Args:
            patience_s: How long somebody else who holds the pipes open is waited for.
        """
        ends = [asyncio.ensure_future(pipe.ended.wait()) for pipe in self._pipes]
        await asyncio.wait(ends, timeout=patience_s)
        for end in ends:
            end.cancel()
        for pipe in self._pipes:
            pipe.close()


class OutputFiles:
    """What workers print, in ``<folder>/<worker>/stdout`` and ``stderr``; written in a thread.

    It appends, so that a worker that comes back in its slot does not erase what the one before has said. Files that
    cannot be written any more, for instance on a full disk, end the keeping of all output and not the job.

    Args:
        folder: Where, or ``None`` to keep nothing.
        problem: Told once why nothing more is kept, and how much was left out while the disk took nothing.
    """

    def __init__(self, folder: str | None, problem: Callable[[str], None]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._problem = problem
        self._writes = BackgroundWrites[tuple[str, str]](self._write)
        self._left_out_lines = 0
        # Of the thread:
        self._files: dict[tuple[str, str], BinaryIO] = {}
        self._failure: OSError | None = None

    def write(self, worker: str, stream: str, line: bytes) -> None:
        """Keep one line. Returns at once."""
        if self._folder is None:
            return
        self._tell()
        if self._writes.has_room:
            self._writes.put((worker, stream), line)
        else:
            self._left_out_lines += 1

    def _tell(self) -> None:
        """Say what has gone wrong in the thread."""
        if self._failure is not None:
            kept, self._folder = self._folder, None
            self._problem(
                f"what workers print is not kept in {kept} any more: {self._failure.strerror}; the job goes on, and a "
                "run with another --output-filename keeps it again"
            )
        elif self._left_out_lines and self._writes.has_room:
            lines, self._left_out_lines = self._left_out_lines, 0
            self._problem(f"{lines} lines of workers are not in {self._folder}, which took nothing for some time")

    def _write(self, place: tuple[str, str], data: bytes) -> None:
        if self._failure is not None:
            return
        try:
            file = self._file(*place)
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            self._failure = error
            self._close()

    def _file(self, worker: str, stream: str) -> BinaryIO:
        file = self._files.get((worker, stream))
        if file is None:
            assert self._folder is not None
            folder = self._folder / f"worker.{worker.replace(':', '.')}"
            folder.mkdir(parents=True, exist_ok=True)
            file = self._files[worker, stream] = open(folder / stream, "ab", buffering=0)  # noqa: SIM115  # stays open
        return file

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writes.drain()
        if self._folder is not None:
            self._tell()
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of a network disk that is full: the job has its own result
                file.close()
        self._files.clear()


class _Pipe:
    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._lines = Lines()
        self.ended = asyncio.Event()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def widen(self) -> None:
        """Let the child run ahead; refused, and no matter, when the user has many wide pipes already."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def listen(self) -> None:
        """The child has its copy of the write end."""
        os.close(self.write_end)
        asyncio.get_running_loop().add_reader(self.read_end, self._read)

    def discard(self) -> None:
        """There is no child."""
        os.close(self.write_end)
        os.close(self.read_end)

    def close(self) -> None:
        """Take what is there, which is no more than fits the pipe, whoever may still write."""
        for _ in range(_PIPE_BYTES // _READ_BYTES):
            if self.ended.is_set() or not self._read():
                break
        self._end()

    def _read(self) -> bool:
        """Whether something was there."""
        try:
            data = os.read(self.read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        for line in self._lines.feed(data):
            self._take(line)
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self.ended.is_set():
            return
        asyncio.get_running_loop().remove_reader(self.read_end)
        os.close(self.read_end)
        self.ended.set()
        rest = self._lines.rest()
        if rest:
            self._take(rest)


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + _LONGEST_LINE_BYTES] for start in range(0, len(line), _LONGEST_LINE_BYTES)]
