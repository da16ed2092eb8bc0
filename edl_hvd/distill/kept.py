"""Answers that are kept on a storage, for later epochs, restarts and jobs; original here.

An answer is kept for a sample of a view, which is the epoch, or the epoch modulo the number of views, with a check of
its input. So another cut of the batches, another order or another world finds it, and a changed data set does not.
Only answers of steps that were committed are written, each file once, by the worker that has got them::

    <url>/<kind>/about.json                the teacher, and what it answers, for people
    <url>/<kind>/000003/<random>.answers   a JSON line, three tables, and the answers' bytes

The tables have 8 bytes for each sample: its index, the check of its input, and the check of its answer. A file that is
damaged, or whose row is, counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import xxhash

from edl_hvd.distill.place import Place
from edl_hvd.errors import ObjectExistsError, StorageError, UsageError
from edl_hvd.frames import Array, ArrayType
from edl_hvd.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_VERSION = 1
_HEADER_BYTES = 1 << 16
_TABLES = ("index", "input", "answer")
_FILE_BYTES = 4 << 20
# Answers that are written together, at least, unless a pass ends: a request to an object store costs as much.
_MOST_PENDING_BYTES = 64 << 20
# Of steps that are not committed; older ones are not kept.
_MOST_WAITING = 16
# Files of that size that wait for the storage: as much memory again.
_MOST_FILES = 100_000
_END_S = 60.0
# Longest wait for a storage, of a step and at the end of a loader.
_AGAIN_S, _AGAIN_EVERY_S = 2.0, 0.1
# Another worker may be about to write what it has got at the end of the epoch before.


@dataclass(frozen=True)
class AnswerKind:
    """What answers of one folder have in common.

    Attributes:
        fingerprint: Fingerprint of the teacher, not empty.
        outputs: What it sends back of its model's result.
        probe: Digest of its answer to a fixed input in the shape of a micro-batch; empty unless they are exact.
    """

    fingerprint: str
    outputs: str
    probe: str = ""

    @property
    def folder(self) -> str:
        """The name of the folder."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return digest[:32]


@dataclass(frozen=True)
class SampleKeys:
    """What answers to the samples of a micro-batch are found by.

    Attributes:
        view: Number of the view.
        indices: Indices of the samples.
        checks: Checks of their inputs.
    """

    view: int
    indices: tuple[int, ...]
    checks: tuple[int, ...]


@dataclass(frozen=True)
class KeptPart:
    """What a micro-batch, or a part of it, has to do with kept answers.

    Attributes:
        kind: Kind of the answers.
        keys: Keys of its samples.
        arrays: Answer that is kept; ``None`` if it is not.
    """

    kind: AnswerKind
    keys: SampleKeys
    arrays: tuple[Array, ...] | None


def check_rows(arrays: Sequence[Array]) -> tuple[int, ...]:
    """A check of each row of arrays whose first dimension is the batch, 64 bits with a sign (xxHash 3)."""
    samples = arrays[0].type.shape[0]
    types = " ".join(map(str, _row_types(arrays)))
    begin = xxhash.xxh3_64_intdigest(types.encode())
    checks = [begin] * samples
    for one in arrays:
        content, size_bytes = memoryview(one.content).cast("B"), one.type.size_bytes // max(1, samples)
        for row in range(samples):
            checks[row] = xxhash.xxh3_64_intdigest(content[row * size_bytes : (row + 1) * size_bytes], checks[row])
    return tuple(check - (1 << 64) if check >> 63 else check for check in checks)


# --- files ---


def encode_file(keys: Sequence[SampleKeys], answers: Sequence[tuple[Array, ...]]) -> list[bytes | memoryview]:
    """The contents of a file with the answers to some micro-batches of one view, of one type."""
    rows = _row_types(answers[0])
    index = numpy.array([one for key in keys for one in key.indices], dtype="<i8")
    inputs = numpy.array([one for key in keys for one in key.checks], dtype="<i8")
    own = numpy.array([one for answer in answers for one in check_rows(answer)], dtype="<i8")
    tables = b"".join(table.tobytes() for table in (index, inputs, own))
    header = {
        "version": _VERSION, "view": keys[0].view, "samples": len(index),
        "answer": [[one.name, one.dtype, list(one.shape)] for one in rows],
        "tables": xxhash.xxh3_128_hexdigest(tables),
    }  # fmt: skip
    bodies = [memoryview(answer[number].content) for number in range(len(rows)) for answer in answers]
    return [json.dumps(header).encode() + b"\n", tables, *bodies]


@dataclass(frozen=True)
class _AnswerFile:
    """A file that was found.

    Attributes:
        key: Key of it.
        rows: Types of one sample's answer.
        samples: Number of samples.
        begin_bytes: Where the answers begin.
        tables: Index, check of the input and check of the answer, of each sample.
    """

    key: str
    rows: tuple[ArrayType, ...]
    samples: int
    begin_bytes: int
    tables: tuple[Any, Any, Any]

    @classmethod
    def read(cls, storage: Storage, key: str, size_bytes: int, view: int) -> _AnswerFile:
        """Read the first part of a file.

        Raises:
            ValueError: It is damaged.
            StorageError: The storage does not answer.
        """
        head = bytearray(min(_HEADER_BYTES, size_bytes))
        count = storage.read_into(key, 0, head)
        line, newline, rest = bytes(head[:count]).partition(b"\n")
        header = json.loads(line) if newline else None
        if not isinstance(header, dict) or header.get("version") != _VERSION or header.get("view") != view:
            raise ValueError("it does not begin with a header of this version")
        samples = header["samples"]
        try:
            rows = tuple(ArrayType(name, dtype, tuple(shape)) for name, dtype, shape in header["answer"])
        except (TypeError, UsageError) as error:
            raise ValueError(str(error)) from error
        tables_bytes, begin_bytes = 24 * samples, len(line) + 1
        expected = begin_bytes + tables_bytes + samples * sum(one.size_bytes for one in rows)
        if type(samples) is not int or samples < 1 or size_bytes != expected:
            raise ValueError(f"it has {size_bytes} bytes; expected {expected}")
        content = bytearray(tables_bytes)
        known = min(len(rest), tables_bytes)
        content[:known] = rest[:known]
        if known < tables_bytes:
            storage.read_into(key, begin_bytes + known, memoryview(content)[known:])
        if xxhash.xxh3_128_hexdigest(content) != header["tables"]:
            raise ValueError("its tables do not verify")
        tables = numpy.frombuffer(content, dtype="<i8").reshape(3, samples)
        return cls(key, rows, samples, begin_bytes + tables_bytes, (tables[0], tables[1], tables[2]))

    def read_rows(self, storage: Storage, rows: Sequence[int]) -> list[bytearray]:
        """The bytes of some rows, ascending, of each array; neighbours are read at once."""
        found = []
        begin_bytes = self.begin_bytes
        for one in self.rows:
            body = bytearray(one.size_bytes * len(rows))
            first = 0
            for number in range(1, len(rows) + 1):
                if number == len(rows) or rows[number] != rows[number - 1] + 1:
                    part = memoryview(body)[first * one.size_bytes : number * one.size_bytes]
                    if len(part):
                        storage.read_into(self.key, begin_bytes + rows[first] * one.size_bytes, part)
                    first = number
            found.append(body)
            begin_bytes += self.samples * one.size_bytes
        return found


class _View:
    """What is kept of one view; one thread.

    Attributes:
        view: Number of it.
        has_gaps: Whether answers that another worker should have written have been waited for, and were not there.
    """

    def __init__(self, storage: Storage, folder: str, view: int) -> None:
        self._storage, self._prefix, self.view = storage, f"{folder}/{view:06d}/", view
        self.has_gaps = False
        self._files: list[_AnswerFile] = []
        self._seen: set[str] = set()
        self._index = self._input = self._file = self._row = numpy.empty(0, dtype=numpy.int64)

    def list_new(self) -> None:
        """Look for files that were written since the last time."""
        new = [one for one in self._storage.list(self._prefix) if one.key not in self._seen]
        for one in new[: max(0, _MOST_FILES - len(self._files))]:
            self._seen.add(one.key)
            try:
                self._files.append(_AnswerFile.read(self._storage, one.key, one.size_bytes, self.view))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                logger.warning("the kept answers in %s of %s are left out: %s", one.key, self._storage.url, error)
        if new:
            self._merge()

    def _merge(self) -> None:
        files = self._files
        index, check, _ = (numpy.concatenate([one.tables[number] for one in files]) if files else self._index
                           for number in range(3))  # fmt: skip
        sizes = [one.samples for one in files]
        number = numpy.repeat(numpy.arange(len(files)), sizes)
        row = numpy.concatenate([numpy.arange(size) for size in sizes]) if files else self._row
        order = numpy.lexsort((check, index))
        self._index, self._input, self._file, self._row = index[order], check[order], number[order], row[order]

    def find(self, keys: SampleKeys) -> list[tuple[int, int]] | None:
        """File and row of each sample; ``None`` unless all are there."""
        found = []
        begins = numpy.searchsorted(self._index, keys.indices)
        for index, check, begin in zip(keys.indices, keys.checks, begins.tolist(), strict=True):
            while begin < len(self._index) and self._index[begin] == index and self._input[begin] != check:
                begin += 1
            if begin == len(self._index) or self._index[begin] != index:
                return None
            found.append((int(self._file[begin]), int(self._row[begin])))
        return found

    def read(self, found: list[tuple[int, int]]) -> tuple[Array, ...] | None:
        """The answers; ``None`` if they are damaged, or of several types."""
        types = self._files[found[0][0]].rows
        whole = [bytearray(one.size_bytes * len(found)) for one in types]
        for number in sorted({file for file, _ in found}):
            file = self._files[number]
            if file.rows != types:
                return None
            rows = sorted({row for other, row in found if other == number})
            bodies = file.read_rows(self._storage, rows)
            places = {row: at for at, row in enumerate(rows)}
            for to, (other, row) in enumerate(found):
                if other == number:
                    for one, body, target in zip(types, bodies, whole, strict=True):
                        size_bytes, at = one.size_bytes, places[row]
                        target[to * size_bytes : (to + 1) * size_bytes] = body[at * size_bytes : (at + 1) * size_bytes]
        arrays = tuple(
            Array(ArrayType(one.name, one.dtype, (len(found), *one.shape)), body)
            for one, body in zip(types, whole, strict=True)
        )
        expected = tuple(int(self._files[number].tables[2][row]) for number, row in found)
        return arrays if check_rows(arrays) == expected else None


# --- writing ---


@dataclass(frozen=True)
class _Pending:
    """The answer to a micro-batch that was consumed.

    Attributes:
        kind: Kind of it.
        keys: Keys of it.
        place: Place of the micro-batch.
        is_watched: Whether it is to be kept only when its step is committed.
        arrays: Answer itself.
    """

    kind: AnswerKind
    keys: SampleKeys
    place: Place
    is_watched: bool
    arrays: tuple[Array, ...]

    @property
    def size_bytes(self) -> int:
        return sum(one.type.size_bytes for one in self.arrays) + 24 * self.place.samples


class _Writing:
    """A thread that writes files, in the order in which they are given.

    A slow storage is waited for, so that nothing is left out; one that does nothing for a minute is not, until it goes
    on.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Sequence[bytes | memoryview]]] = deque()
        self._is_writing = self._is_closing = self._is_stuck = False
        self._problems: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="edl_hvd kept answers", daemon=True)
        self._thread.start()

    def put(self, key: str, content: Sequence[bytes | memoryview]) -> None:
        """Have an object written; blocks while many wait, for a minute at most. What finds no room then is left out."""
        with self._changed:
            patience_s = 0.0 if self._is_stuck else _END_S
            if not self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING, patience_s):
                self._is_stuck = True
                self._warn("stuck", f"{self._storage.url} has written nothing for {_END_S:.0f} s")
                return
            self._waiting.append((key, content))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written; blocks for a minute at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, _END_S)

    def close(self) -> None:
        """Write what is left, and end; blocks for a minute at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_stuck = self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                key, content = self._waiting.popleft()
                self._is_writing = True
            try:
                self._storage.write_new(key, content)
            except ObjectExistsError:
                pass
            except StorageError as error:  # the training needs no kept answer
                self._warn("failed", str(error))

    def _warn(self, kind: str, problem: str) -> None:
        """Once for each kind."""
        if kind not in self._problems:
            self._problems.add(kind)
            logger.warning("answers of teachers are not kept: %s", problem)


class KeptAnswers:
    """Answers on a storage: found by a reading thread, and noted by that of the script.

    Args:
        url: Folder or URL.
        views: Number of epochs after which inputs come again; ``None``: they do not.
        sampler: Batch sampler. One that is part of a ``State`` tells which steps were committed; of another one,
            every answer that was consumed is kept.

    Raises:
        UsageError: The URL, or the number of views, is none.
    """

    def __init__(self, url: str, views: int | None, sampler: Any) -> None:
        if views is not None and (type(views) is not int or views < 1):
            raise UsageError(f"views={views!r}; expected a number of epochs of at least 1, or None")
        self._storage = open_storage(url)
        self._views, self._sampler = views, sampler
        self._lock = threading.Lock()
        self._view: dict[str, _View] = {}
        self._has_failed = False
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._told: set[str] = set()
        self._writing: _Writing | None = None

    def keys_of(self, place: Place, indices: tuple[Any, ...], arrays: Sequence[Array]) -> SampleKeys:
        """The keys of a micro-batch.

        Raises:
            UsageError: Its indices are no integers.
        """
        if not all(isinstance(index, int) for index in indices):
            raise UsageError(
                f"answers are kept by the indices of samples, and the batch sampler yields {indices[0]!r}; expected "
                "integers, as an ElasticBatchSampler yields them, or a DistillLoader without keep="
            )
        view = place.epoch % self._views if self._views else place.epoch
        return SampleKeys(view, tuple(map(int, indices)), check_rows(arrays))

    def find(self, kind: AnswerKind, place: Place, keys: SampleKeys) -> tuple[Array, ...] | None:
        """The answer to a micro-batch; ``None`` if it is not kept. Blocks for the storage."""
        try:
            with self._lock:
                return self._find(kind, keys, self._views is not None and place.epoch >= self._views)
        except StorageError as error:  # teachers are there as well
            if not self._has_failed:
                logger.warning("kept answers cannot be read, and teachers are asked instead: %s", error)
            self._has_failed = True
            return None

    def _find(self, kind: AnswerKind, keys: SampleKeys, is_expected: bool) -> tuple[Array, ...] | None:
        view = self._view.get(kind.folder)
        if view is None or view.view != keys.view:
            view = self._view[kind.folder] = _View(self._storage, kind.folder, keys.view)
            view.list_new()
        found, until_s = view.find(keys), time.monotonic() + _AGAIN_S
        while found is None and is_expected and not view.has_gaps:
            view.has_gaps = time.monotonic() > until_s
            time.sleep(_AGAIN_EVERY_S)
            view.list_new()
            found = view.find(keys)
        return view.read(found) if found else None

    def note(self, part: KeptPart, place: Place, arrays: tuple[Array, ...]) -> None:
        """The answer to a part of the micro-batch at a place was consumed, and is not kept yet."""
        is_watched = bool(getattr(self._sampler, "is_watched", False))
        self._pending.append(_Pending(part.kind, part.keys, place, is_watched, arrays))
        self._pending_bytes += self._pending[-1].size_bytes
        while self._pending_bytes > _MOST_PENDING_BYTES:
            self._pending_bytes -= self._pending.pop(0).size_bytes

    def settle(self, is_over: bool = False) -> None:
        """Write what was committed.

        Args:
            is_over: Whether the pass is over: what is not committed then will be asked for again, and little is
                written, too.
        """
        if not is_over and self._pending_bytes < _FILE_BYTES:
            return
        committed: tuple[int, int] = getattr(self._sampler, "committed", (0, 0))
        done = [one for one in self._pending if not one.is_watched or _end(one.place) <= committed]
        left = [] if is_over else [one for one in self._pending if one.is_watched and _end(one.place) > committed]
        if not is_over and sum(one.size_bytes for one in done) < _FILE_BYTES:
            return
        self._pending, self._pending_bytes = left, sum(one.size_bytes for one in left)
        while done:
            first = done[0]
            same = [one for one in done if _alike(one, first)]
            done = [one for one in done if not _alike(one, first)]
            self._write(same)

    def _write(self, entries: list[_Pending]) -> None:
        if self._writing is None:
            self._writing = _Writing(self._storage)
        kind, view = entries[0].kind, entries[0].keys.view
        if kind.folder not in self._told:
            self._told.add(kind.folder)
            about = {"version": _VERSION, **asdict(kind)}
            self._writing.put(f"{kind.folder}/about.json", [json.dumps(about, indent=2).encode() + b"\n"])
        content = encode_file([one.keys for one in entries], [one.arrays for one in entries])
        self._writing.put(f"{kind.folder}/{view:06d}/{secrets.token_hex(8)}.answers", content)

    def begin_pass(self) -> None:
        """Write what the last pass has left, and look for what is there by now. Blocks for the storage."""
        self.settle(is_over=True)
        if self._writing is not None:
            self._writing.flush()
        with self._lock:
            self._view.clear()

    def close(self) -> None:
        """Write what is left, and end the thread. Blocks for the storage, not longer than a minute."""
        self.settle(is_over=True)
        if self._writing is not None:
            self._writing.close()
            self._writing = None
        with self._lock:
            self._view.clear()


def _end(place: Place) -> tuple[int, int]:
    return place.epoch, place.position + place.samples


def _alike(one: _Pending, other: _Pending) -> bool:
    return (one.kind, one.keys.view, _row_types(one.arrays)) == (other.kind, other.keys.view, _row_types(other.arrays))


def _row_types(arrays: Sequence[Array]) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(one.type.name, one.type.dtype, one.type.shape[1:]) for one in arrays)
