"""A data set whose random numbers follow the sample, not the process that loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from edl_hvd.data.randomness import seed_loading
from edl_hvd.data.sampler import BatchIndices
from edl_hvd.errors import UsageError

# Keep the numbers of a sample, of a batch put together, and of a training step apart.
_SAMPLE, _COLLATE = 1, 2


class SeededDataset(Dataset[Any]):
    """Data set whose random numbers (augmentation) depend on seed, epoch and sample index only; original here.

    It wraps a map-style data set for a ``DataLoader`` whose ``batch_sampler`` is an
    :class:`~edl_hvd.ElasticBatchSampler`. Every rank makes one::

        loader = DataLoader(edl_hvd.SeededDataset(dataset), batch_sampler=batches, num_workers=8)

    Before each ``dataset[index]``, the generators of torch (the CPU's), ``random`` and NumPy (``numpy.random.…``) are
    seeded from the sampler's seed, the epoch and the index; where a sample is drawn more than once in an epoch, from
    its position, too. Before the ``collate_fn`` they are seeded from the micro-batch's place in the epoch, for MixUp
    and the like. So neither rank, nor world, nor loader process changes the samples. No ``set_epoch`` is needed: seed
    and epoch travel with the indices, also to processes that live on or have prefetched. It costs some 20 µs per
    sample.

    Generators that a data set makes itself (``numpy.random.default_rng()``) are not reached; seed them in
    ``__getitem__`` from ``torch.randint``. In the main process (``num_workers=0``) the generators stay as the last
    micro-batch has left them; ``state.batches`` seeds them anyway.

    Args:
        dataset: Data set with ``__len__`` and ``__getitem__``. A ``__getitems__`` of its own is not used, because the
            samples of a micro-batch would share one state of the generators.
        views: Number of epochs after which the random numbers of a sample come again, at least 1: epoch ``e`` has those
            of epoch ``e`` modulo ``views``. Then a teacher's answers can be used again, see
            :class:`~edl_hvd.distill.DistillLoader`. Left out, each epoch has its own. Those of the ``collate_fn``
            depend on what is in the batch, and do not come again where the order is another one.

    Raises:
        UsageError: Raised when samples are taken: the indices come from another sampler, or one sample is asked for by
            itself, so that seed and epoch are unknown.
    """

    def __init__(self, dataset: Any, views: int | None = None) -> None:
        if views is not None and (type(views) is not int or views < 1):
            raise UsageError(f"views={views!r}; expected a number of epochs of at least 1, or None")
        self.dataset, self.views = dataset, views

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        raise UsageError(_REFUSED.format(f"the index {index!r}"))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of a micro-batch; called by the ``DataLoader``, in its processes."""
        if not isinstance(indices, BatchIndices):
            raise UsageError(_REFUSED.format(f"a {type(indices).__name__} of {len(indices)} indices"))
        return seeded(indices, self.dataset.__getitem__, views=self.views)


def seeded(
    indices: BatchIndices, get: Callable[[int], Any], reach: Callable[[int], object] = lambda index: None,
    views: int | None = None,
) -> list[Any]:  # fmt: skip
    """``get`` of each index, with the generators seeded for it; at the end they are seeded for the ``collate_fn``.

    Args:
        reach: Called first with each index, for what has to be done before it and may draw random numbers, too.
        views: Number of epochs after which the numbers come again; ``None``: never.
    """
    seed, epoch = indices.seed, indices.epoch % views if views else indices.epoch
    samples = []
    for position, index in enumerate(indices, indices.position):
        reach(index)
        seed_loading(seed, epoch, index, _SAMPLE, *([position] if indices.repeats else []))
        samples.append(get(index))
    seed_loading(seed, epoch, indices.position, _COLLATE)
    return samples


_REFUSED = (
    "SeededDataset was given {}, which says nothing of seed and epoch; expected what an ElasticBatchSampler yields: "
    "DataLoader(SeededDataset(dataset), batch_sampler=batches). Without a sampler, use the data set inside (.dataset)"
)
