"""Reading the elements of a checkpoint straight into tensors, shared out among any number of readers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import torch

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import Stored, TensorEntry, stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.format.safetensors import HeaderEntry, header_length
from edl_hvd.checkpoint.format.shards import DTYPES, bytes_of
from edl_hvd.checkpoint.reading.files import read_again_if_damaged, refuse_if_removed
from edl_hvd.checkpoint.reading.verification import damaged_chunks, raise_damaged, verified_header
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError
from edl_hvd.storage import Storage

_SPAN_BYTES = 16 * 1024 * 1024
# A tensor larger than this is shared out, and read by several threads; large beside a request.

AT_ONCE = 8
# Spans under way: with two connections each that is what one large transfer has, and 16 MB are where a checksum takes
# less time than they take to come.

_DIRECT_BYTES = 4 * 1024 * 1024
# What is smaller is read together with its neighbours, by way of a buffer of ``_RUN_BYTES``: a request costs
# milliseconds.
_RUN_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """Whole chunks of a piece, which one reader reads and verifies.

    Attributes:
        file: Name of the shard.
        name: Name of the piece there.
        first_byte: Place of its first byte among the piece's; a multiple of the file's ``chunk_bytes``.
        size_bytes: Number of its bytes; 0 for a piece without elements.
    """

    file: str
    name: str
    first_byte: int
    size_bytes: int


def spans_of(manifest: Manifest, names: Collection[str] | None = None) -> list[Span]:
    """All elements of a checkpoint, or of some of its tensors, each in one span; in the same order for every reader."""
    spans = []
    for file, pieces in stored_by_file(_chosen(manifest, names)).items():
        chunk_bytes = manifest.files[file].chunk_bytes
        span_bytes = max(1, _SPAN_BYTES // chunk_bytes) * chunk_bytes
        for name, stored in pieces.items():
            size_bytes = _bytes_of_piece(stored)
            for start in range(0, max(size_bytes, 1), span_bytes):
                spans.append(Span(file, name, start, min(span_bytes, size_bytes - start)))
    return spans


def divide(spans: Sequence[Span], readers: int) -> list[list[Span]]:
    """To each reader neighbouring spans of about as many bytes; every span to one.

    >>> [len(share) for share in divide([Span("f", str(n), 0, 10) for n in range(7)], 3)]
    [2, 3, 2]
    """
    total_bytes = sum(span.size_bytes for span in spans)
    shares: list[list[Span]] = [[] for _ in range(readers)]
    before_bytes = 0
    for span in spans:
        middle = before_bytes + span.size_bytes / 2
        shares[min(readers - 1, int(middle * readers / total_bytes) if total_bytes else 0)].append(span)
        before_bytes += span.size_bytes
    return shares


def empty_tensors(manifest: Manifest, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Memory for all tensors, or for some of them."""
    chosen = _chosen(manifest, names)
    return {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in chosen.items()}


def place_of(span: Span, stored: Stored, tensor: torch.Tensor) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """Where in the memory of its tensor the elements of a span are."""
    start = stored.piece.first_row * stored.row_bytes + span.first_byte
    return bytes_of(tensor)[start : start + span.size_bytes]


def read_spans(
    storage: Storage,
    manifest: Manifest,
    spans: Sequence[Span],
    tensors: Mapping[str, torch.Tensor],
    at_once: int = AT_ONCE,
) -> None:
    """Fill in the elements of some spans, verified, several at once.

    Beside the tensors each takes what the storage takes for 16 MiB, and so much itself if tensors are small.

    Raises:
        CheckpointDamagedError: Something is not as the manifest says.
        ObjectMissingError: The whole checkpoint was removed meanwhile.
        StorageError: The storage does not answer.
    """
    by_file: dict[str, list[Span]] = {}
    for span in spans:
        by_file.setdefault(span.file, []).append(span)
    stored = stored_by_file(manifest.tensors)
    with ThreadPoolExecutor(at_once, thread_name_prefix="edl-hvd-restore") as pool:
        try:
            for file, wanted in by_file.items():
                _FileReader(storage, manifest, file, stored[file], tensors).read(wanted, pool)
        except ObjectMissingError as error:
            refuse_if_removed(storage, manifest.step)
            raise CheckpointDamagedError(f"a file of step {manifest.step} is missing: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)  # after an error nobody wants the others


class _FileReader:
    def __init__(
        self, storage: Storage, manifest: Manifest, file: str, expected: Mapping[str, Stored],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self._storage = storage
        self._key = object_keys.folder(manifest.step) + file
        self._entry = manifest.files[file]
        self._expected = expected
        self._tensors = tensors

    def read(self, spans: Sequence[Span], pool: ThreadPoolExecutor) -> None:
        try:
            read_again_if_damaged(self._key, lambda: self._read(spans, pool))
        except ValueError as error:
            raise CheckpointDamagedError(f"{self._key} in {self._storage.url} is damaged: {error}") from error

    def _read(self, spans: Sequence[Span], pool: ThreadPoolExecutor) -> None:
        head = self._read_head(self._entry.header_bytes)
        # One that is longer than listed is not the one that was written; then all of it, to say what it is.
        whole = min(header_length(head), self._entry.size_bytes)
        header = verified_header(head if whole <= len(head) else self._read_head(whole), self._entry, self._expected)
        runs = list(_runs(spans, header))
        # A thread takes an address space of its own; a file that is read at once needs none.
        read = (pool.map if len(runs) > 1 else map)(lambda run: self._read_run(run, header), runs)
        raise_damaged([place for damaged in read for place in damaged])

    def _read_head(self, size_bytes: int) -> bytearray:
        head = bytearray(size_bytes)
        self._fetch(0, memoryview(head))
        return head

    def _read_run(self, run: Sequence[Span], header: Mapping[str, HeaderEntry]) -> list[str]:
        """Read neighbours at once; the places in them that are damaged."""
        start = header[run[0].name].start + run[0].first_byte
        if len(run) == 1:
            self._fetch(start, self._target(run[0]).data)
        else:
            last = run[-1]
            buffer = numpy.empty(header[last.name].start + last.first_byte + last.size_bytes - start, dtype=numpy.uint8)
            self._fetch(start, buffer.data)
            for span in run:
                begin = header[span.name].start + span.first_byte - start
                numpy.copyto(self._target(span), buffer[begin : begin + span.size_bytes])
        damaged = []
        for span in run:
            stored, target, place = self._expected[span.name], self._target(span).data, header[span.name].start
            damaged += damaged_chunks(target, stored, span.first_byte, self._entry.chunk_bytes, place)
        return damaged

    def _target(self, span: Span) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
        stored = self._expected[span.name]
        return place_of(span, stored, self._tensors[stored.tensor])

    def _fetch(self, start: int, buffer: memoryview) -> None:
        if buffer.nbytes and (found := self._storage.read_into(self._key, start, buffer)) < buffer.nbytes:
            raise CheckpointDamagedError(
                f"{self._key} in {self._storage.url} has {start + found} bytes instead of {self._entry.size_bytes}"
            )


def _runs(spans: Sequence[Span], header: Mapping[str, HeaderEntry]) -> Iterator[list[Span]]:
    """Spans to be read at once: neighbours in the file, but large ones by themselves."""
    run: list[Span] = []
    run_bytes = end = 0
    for span in sorted(spans, key=lambda span: header[span.name].start + span.first_byte):
        start = header[span.name].start + span.first_byte
        alone = span.size_bytes >= _DIRECT_BYTES
        if run and (alone or start != end or run_bytes + span.size_bytes > _RUN_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(span)
        run_bytes, end = run_bytes + span.size_bytes, start + span.size_bytes
        if alone:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run


def _chosen(manifest: Manifest, names: Collection[str] | None) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in manifest.tensors.items() if names is None or name in names}


def _bytes_of_piece(stored: Stored) -> int:
    return stored.piece.rows * stored.row_bytes
