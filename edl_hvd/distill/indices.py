"""Indices instead of inputs: the teacher reads the samples itself, with the student's augmentation; original here.

What a sample of an ``ElasticBatchSampler`` is follows from the data set, the index, seed, epoch and position, which are
48 bytes. So where the students' network is the limit, and teachers have the data set as well, these travel alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from edl_hvd.data.order import IndexOrder
from edl_hvd.data.sampler import BatchIndices
from edl_hvd.distill.kept import check_rows
from edl_hvd.distill.outputs import named, to_arrays
from edl_hvd.errors import UsageError
from edl_hvd.frames import Array

_INDEX, _PLACE, _CHECK = "edl_hvd_index", "edl_hvd_place", "edl_hvd_check"
_LARGEST = 1 << 63


class Indices:
    """What ``send=`` of a :class:`~edl_hvd.distill.DistillLoader` may be instead of a function.

    Every rank makes one; it does nothing by itself.

    Args:
        check: Function of a batch that returns what the teacher's model sees of it, as ``send=`` would. With it a check
            of each input travels, too (xxHash, 64 bits), and a teacher whose data set gives other bits says so. It is
            needed for ``keep=``.
    """

    def __init__(self, check: Callable[[Any], Any] | None = None) -> None:
        self.check = check

    def arrays_of(self, batch: Any, indices: Any) -> tuple[Array, ...]:
        """The arrays that are sent for a batch. Called by the loader; not collective.

        Args:
            batch: Batch as the loader inside yields it.
            indices: Indices of its samples, with their place.

        Returns:
            Three arrays with a row for each sample: index, place, and check of the input.

        Raises:
            UsageError: They do not come from an ``ElasticBatchSampler``.
        """
        if not isinstance(indices, BatchIndices) or not -_LARGEST <= indices.seed < _LARGEST:
            raise UsageError(
                f"send=Indices(…) was given the indices of a {type(indices).__name__}, from which a teacher cannot "
                "read the same samples; expected a loader whose batch_sampler is an ElasticBatchSampler with a seed "
                "below 2**63"
            )
        place = [indices.seed, indices.epoch, indices.position, int(indices.repeats)]
        tensors = {
            _INDEX: torch.tensor(list(indices), dtype=torch.int64),
            _PLACE: torch.tensor([place] * len(indices), dtype=torch.int64),
            _CHECK: torch.tensor(self._checks(batch, len(indices)), dtype=torch.int64),
        }
        return to_arrays(tensors)

    def _checks(self, batch: Any, samples: int) -> Sequence[int]:
        if self.check is None:
            return [0] * samples
        return check_rows(to_arrays(named(self.check(batch))))

    def keyed(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """The arrays that kept answers are found by. Called by the loader; not collective.

        Args:
            arrays: Result of :meth:`arrays_of`.

        Returns:
            The checks of the inputs.

        Raises:
            UsageError: There is no check of the inputs.
        """
        if self.check is None:
            raise UsageError(
                "keep= finds answers by a check of each input, and send=Indices() sends none; give Indices(check=…) "
                "the function of a batch that send= would be"
            )
        return tuple(one for one in arrays if one.type.name == _CHECK)


class OnIndices(torch.nn.Module):
    """A teacher that reads its inputs itself; what the function for ``edl-hvd teach`` returns.

    The students' loaders have ``send=Indices()``, and the same data set::

        def build():
            return distill.OnIndices(make_teacher(), edl_hvd.SeededDataset(images), send=lambda batch: batch[0])

    It reads in the thread that computes, one sample after the other.

    Args:
        model: Module that answers.
        dataset: Data set, as the students' ``DataLoader`` has it.
        send: Function of a batch that returns what the model sees of it.
        collate_fn: Function that makes a batch of samples; left out, torch's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dataset: Any,
        *,
        send: Callable[[Any], Any],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        super().__init__()
        self.model = model
        self._dataset, self._send, self._collate = dataset, send, collate_fn

    def forward(self, sent: Any) -> Any:
        """The answers to samples. Called by the package; not collective.

        Args:
            sent: Tensors that :meth:`Indices.arrays_of` has made, of one or several micro-batches.

        Returns:
            The model's answer, with a row for each sample.

        Raises:
            UsageError: A sample has other bits than the student's, or is not in the data set.
        """
        if not isinstance(sent, dict) or set(sent) != {_INDEX, _PLACE, _CHECK}:
            raise UsageError("this teacher reads its inputs itself; give the students' DistillLoader send=Indices()")
        device = sent[_INDEX].device
        parts = [self._read(*rows) for rows in _split(sent[_INDEX].cpu(), sent[_PLACE].cpu(), sent[_CHECK].cpu())]
        whole = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
        return self.model(next(iter(whole.values())) if len(whole) == 1 else whole)

    def _read(self, index: torch.Tensor, place: Sequence[int], checks: Sequence[int]) -> dict[str, torch.Tensor]:
        seed, epoch, position, repeats = place
        order = IndexOrder(1)
        order.repeats = bool(repeats)
        indices = BatchIndices(index.tolist(), seed, epoch, position, order)
        if not all(0 <= one < len(self._dataset) for one in indices):
            raise UsageError(
                f"sample {max(indices)} was asked for, and the teacher's data set has {len(self._dataset)}; give both "
                "sides the same data set"
            )
        get_all = getattr(self._dataset, "__getitems__", None)
        samples = get_all(indices) if get_all is not None else [self._dataset[one] for one in indices]
        inputs = named(self._send(self._collate(samples)))
        if any(checks):
            for one, own, theirs in zip(indices, check_rows(to_arrays(inputs)), checks, strict=True):
                if own != theirs:
                    raise UsageError(
                        f"sample {one} of epoch {epoch} has other bits in the teacher's data set than in the "
                        "student's; give both sides the same files, transforms and versions, or leave check= out"
                    )
        return inputs


def _split(
    index: torch.Tensor, place: torch.Tensor, check: torch.Tensor
) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
    """The micro-batches that are computed together."""
    begin = 0
    for end in range(1, len(index) + 1):
        if end == len(index) or not torch.equal(place[end], place[begin]):
            yield index[begin:end], place[begin].tolist(), check[begin:end].tolist()
            begin = end
