"""Streams of shards: each sample once per epoch whatever the worlds, from real tar files and real loader processes."""

from __future__ import annotations

import gc
import os
import pickle
import random
import tarfile
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import CountedReads, add, number_of, write_shards
from torch.utils.data import DataLoader, IterableDataset

import edl_hvd
import edl_hvd.data.shard_order
import edl_hvd.tar_samples
from edl_hvd.data.shard_order import ShardOrder
from edl_hvd.errors import StateError, UsageError

COUNTS = [7, 0, 12, 3, 9, 1, 20, 5, 8, 6, 11, 4]
SAMPLES = sum(COUNTS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), COUNTS)


def make(paths, read=edl_hvd.TarSamples, transform=number_of, **options):
    shards = edl_hvd.ElasticShards(paths, COUNTS, read=read, transform=transform)
    return shards, shards.sampler(**{"global_batch": 8, "micro_batch": 4, "interleave": 2, **options})


# -- the order --

counts = st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any)


@given(counts=counts, micro_batch=st.integers(1, 9), lanes=st.integers(1, 12), shuffle=st.booleans(), data=st.data())
def test_each_sample_comes_once_and_any_stretch_is_that_of_the_whole(counts, micro_batch, lanes, shuffle, data):
    order = ShardOrder(counts, micro_batch, lanes, shuffle)
    whole = order.samples(3, 1, 0, order.positions)
    assert sorted(whole) == list(range(sum(counts)))
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(first + 1, len(whole)))
    assert order.samples(3, 1, first, last) == whole[first:last]


@given(counts=counts, micro_batch=st.integers(1, 9), lanes=st.integers(1, 12))
def test_a_lane_goes_from_front_to_back_through_one_shard_after_the_other(counts, micro_batch, lanes):
    order = ShardOrder(counts, micro_batch, lanes)
    whole = order.samples(3, 1, 0, order.positions)
    chunks = [whole[i : i + micro_batch] for i in range(0, len(whole) // micro_batch * micro_batch, micro_batch)]
    shard_of = numpy.repeat(numpy.arange(len(counts)), counts)
    visits = Counter()
    for lane in range(lanes):
        row = [index for chunk in chunks[lane::lanes] for index in chunk]
        shards = shard_of[row]
        for shard in set(shards.tolist()):
            mine = numpy.flatnonzero(shards == shard)
            assert numpy.all(numpy.diff(mine) == 1), "a lane comes back to a shard"
            assert numpy.all(numpy.diff(numpy.array(row)[mine]) == 1), "a lane leaves out samples of a shard"
            visits[shard] += 1
    # Shards are only cut where one lane ends and the next begins.
    assert sum(visits.values()) <= sum(count > 0 for count in counts) + lanes - 1


def test_shards_are_shuffled_anew_in_each_epoch_and_not_when_told_not_to():
    def first_ones(shuffle, epoch):
        return ShardOrder([10] * 100, 10, 1, shuffle).samples(0, epoch, 0, 1000)[::10]

    assert len({tuple(first_ones(True, epoch)) for epoch in range(3)}) == 3
    assert first_ones(False, 0) == first_ones(False, 1) == list(range(0, 1000, 10))


# -- loaders --


def run_epoch(shards, samplers, loaders, worlds, epoch=0):
    """Deal an epoch to one world after the other, as ``state.batches`` does; returns what was counted, step by step.

    Each world makes N steps and breaks in the middle of one: every rank has then taken some micro-batches more,
    and its loader has prefetched.
    """
    counted = []
    position = {"epoch": epoch, "offset": 0}
    for size, steps in [*worlds, (1, None)]:
        world = samplers[:size]
        for rank, sampler in enumerate(world):
            sampler.load_state_dict({**sampler.state_dict(), **position})
            sampler.set_world(rank, size)
        of_world = [list(sampler.steps()) for sampler in world]
        streams = [iter(loader) for loader in loaders[:size]]
        for number in range(len(of_world[0]) if steps is None else min(steps, len(of_world[0]))):
            counted.append([next(stream).tolist() for mine, stream in zip(of_world, streams, strict=True)
                            for _ in mine[number].share])  # fmt: skip
            for sampler, mine in zip(world, of_world, strict=True):
                sampler.advance(mine[number])
            position = {name: world[0].state_dict()[name] for name in ("epoch", "offset")}
        for mine, stream in zip(of_world, streams, strict=True):  # not counted
            if steps is not None and steps < len(mine):
                for _ in mine[steps].share[:1]:
                    next(stream)
    return counted


def loaders_for(paths, ranks, processes, **options):
    made = [make(paths, **options) for _ in range(ranks)]
    more = {"persistent_workers": True, "prefetch_factor": 4} if processes else {}
    loaders = [DataLoader(shards, batch_sampler=batches, num_workers=processes, **more) for shards, batches in made]
    return made[0][0], [batches for _, batches in made], loaders


@pytest.mark.parametrize("processes", [0, 2])
def test_each_sample_is_counted_once_through_worlds_that_break_with_loaders_that_live_on(paths, processes):
    """Prefetched samples of a broken world never count: the next one takes them again, from another process."""
    shards, samplers, loaders = loaders_for(paths, 3, processes)
    alone = loaders_for(paths, 1, 0)
    for epoch in range(3):
        counted = run_epoch(shards, samplers, loaders, [(2, 2), (3, 3), (1, 1), (2, 0)], epoch)
        numbers = [number for step in counted for batch in step for number in batch]
        assert sorted(numbers) == list(range(SAMPLES))
        assert counted == run_epoch(*alone, [], epoch), "the steps of a run that never broke"


@settings(max_examples=25)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=6),
    sizes=st.sampled_from([(8, 4), (6, 2), (10, None), (1, 1), (40, 5)]),
    interleave=st.integers(1, 3),
)
def test_each_sample_is_counted_once_whatever_worlds_and_batches(paths, worlds, sizes, interleave):
    options = {"global_batch": sizes[0], "micro_batch": sizes[1], "interleave": interleave}
    counted = run_epoch(*loaders_for(paths, 4, 0, **options), worlds)
    assert sorted(number for step in counted for batch in step for number in batch) == list(range(SAMPLES))


class Mine(IterableDataset):
    """A stream as a user writes one: it opens a shard, decodes and augments."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with tarfile.open(self.path) as tar:
            for member in tar:
                if member.name.endswith(".number"):
                    number = int(tar.extractfile(member).read())
                    yield number, torch.rand(1, dtype=torch.float64), random.random(), numpy.random.rand()


@pytest.mark.parametrize(("size", "processes"), [(1, 2), (3, 0), (3, 2)])
def test_an_iterable_dataset_of_the_users_draws_the_same_for_each_world(paths, size, processes):
    def drawn(size, processes):
        _, samplers, loaders = loaders_for(paths, size, processes, read=Mine, transform=None)
        found = {}
        for rank, (sampler, loader) in enumerate(zip(samplers, loaders, strict=True)):
            sampler.set_world(rank, size)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for batch in loader:
                    for number, *values in zip(*batch, strict=True):
                        found[epoch, int(number)] = [float(value) for value in values]
        return found

    alone = drawn(1, 0)
    assert len(alone) == 2 * SAMPLES
    assert len({tuple(values) for values in alone.values()}) == 2 * SAMPLES
    assert drawn(size, processes) == alone


def test_a_loader_whose_processes_are_spawned(paths):
    shards, batches = make(paths)
    expected = [batch.tolist() for batch in DataLoader(shards, batch_sampler=batches)]
    loader = DataLoader(shards, batch_sampler=batches, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in loader] == expected


def test_processes_forked_after_reading_do_not_move_the_files_of_their_parent(tmp_path):
    """They inherit open files, whose position they share."""

    def unbuffered(path):
        file = os.open(path, os.O_RDONLY)
        try:
            while record := os.read(file, 8):
                yield int.from_bytes(record, "little")
        finally:
            os.close(file)

    paths = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(b"".join((10 * number + i).to_bytes(8, "little") for i in range(10)))
    shards = edl_hvd.ElasticShards(paths, [10] * 3, read=unbuffered)
    batches = shards.sampler(global_batch=4, micro_batch=2, interleave=1)
    expected = [batch.tolist() for batch in DataLoader(shards, batch_sampler=batches)]
    stream = iter(DataLoader(shards, batch_sampler=batches))
    begun = [next(stream).tolist() for _ in range(4)]
    batches.offset = 8  # where the parent is now
    assert [batch.tolist() for batch in DataLoader(shards, batch_sampler=batches, num_workers=1)] == expected[4:]
    assert begun + [batch.tolist() for batch in stream] == expected


# -- what is read --


def test_in_a_world_that_stays_each_shard_is_read_once(tmp_path):
    """2 workers with 2 loader processes each; equal shards, so that no lane begins inside of one."""
    counts = [6] * 32
    paths = write_shards(tmp_path, counts)
    reads = CountedReads(tmp_path / "log")
    for rank in range(2):
        shards = edl_hvd.ElasticShards(paths, counts, read=reads, transform=number_of)
        batches = shards.sampler(global_batch=12, micro_batch=3, interleave=2)
        assert batches.order.lanes == 8
        batches.set_world(rank, 2)
        assert len(list(DataLoader(shards, batch_sampler=batches, num_workers=2))) == 32
    assert reads.counted() == (32, sum(counts))


def test_after_a_resize_only_shards_that_were_begun_are_opened_again(tmp_path):
    counts = [6] * 32
    paths = write_shards(tmp_path, counts)
    reads = CountedReads(tmp_path / "log")

    def epoch(size, state=None, steps=None):
        for rank in range(size):
            shards = edl_hvd.ElasticShards(paths, counts, read=reads, transform=number_of)
            batches = shards.sampler(global_batch=12, micro_batch=3, interleave=2)
            batches.load_state_dict(state or batches.state_dict())
            batches.set_world(rank, size)
            mine = list(batches.steps())[:steps]
            stream = iter(DataLoader(shards, batch_sampler=batches))
            for step in mine:
                for _ in step.share:
                    next(stream)
                batches.advance(step)
        return batches.state_dict()

    state = epoch(2, steps=7)
    opened, read = reads.counted()
    assert read == 7 * 12
    epoch(3, state)
    opened_in_all, read_in_all = reads.counted()
    # 7 steps are 28 micro-batches, 3 or 4 from each of 8 lanes: half of the lanes are inside a shard, after 3 of 6.
    assert (opened, opened_in_all) == (16, 16 + 16 + 4)
    assert read_in_all == sum(counts) + 4 * 3


def test_two_lanes_that_meet_in_a_shard_do_not_open_it_again_and_again(tmp_path):
    counts = [60]
    reads = CountedReads(tmp_path / "log")
    shards = edl_hvd.ElasticShards(write_shards(tmp_path, counts), counts, read=reads, transform=number_of)
    order = ShardOrder(counts, micro_batch=3, lanes=4)
    batches = edl_hvd.ElasticBatchSampler(60, global_batch=12, micro_batch=3, order=order)
    seen = [number for batch in DataLoader(shards, batch_sampler=batches) for number in batch.tolist()]
    assert sorted(seen) == list(range(60))
    opened, read = reads.counted()
    assert opened <= 2 * 4
    assert read <= 4 * 60


def test_no_more_shards_stay_open_than_allowed(tmp_path):
    counts = [4] * 20
    paths = write_shards(tmp_path, counts)
    opened = []

    class Noted(edl_hvd.TarSamples):
        def __init__(self, path):
            super().__init__(path)
            opened.append(self)

        def close(self):
            super().close()
            if self in opened:
                opened.remove(self)

    shards = edl_hvd.ElasticShards(paths, counts, read=Noted, transform=number_of, open_shards=3)
    batches = shards.sampler(global_batch=10, micro_batch=1, interleave=1)
    seen = []
    for (number,) in DataLoader(shards, batch_sampler=batches):
        seen.append(int(number))
        assert len(opened) <= 3
    assert sorted(seen) == list(range(80))
    assert opened == []


# -- counts, and what does not fit --


def test_samples_are_counted_once_and_again_when_a_file_changes(tmp_path):
    paths = write_shards(tmp_path, COUNTS)
    cache = tmp_path / "counts.json"
    opened = []

    def read(path):
        opened.append(path)
        return edl_hvd.TarSamples(path)

    assert edl_hvd.count_samples(paths, read, cache) == COUNTS
    assert edl_hvd.count_samples(paths[::-1], read, cache) == COUNTS[::-1]
    assert opened == paths
    with tarfile.open(paths[2], "w") as tar:
        add(tar, "one.number", b"1")
    assert edl_hvd.count_samples(paths, read, cache)[:4] == [7, 0, 1, 3]
    assert opened == [*paths, paths[2]]


def test_counting_that_is_interrupted_keeps_what_it_has(tmp_path):
    paths = write_shards(tmp_path, [2, 3, 4])

    def read(path):
        if path == paths[2]:
            raise KeyboardInterrupt
        return iter(edl_hvd.TarSamples(path))

    with pytest.raises(KeyboardInterrupt):
        edl_hvd.count_samples(paths, read, tmp_path / "counts.json")
    assert edl_hvd.count_samples(paths[:2], None, tmp_path / "counts.json") == [2, 3]


def test_samples_of_streams_without_files_are_counted_too():
    assert edl_hvd.count_samples([3, 0, 5], range) == [3, 0, 5]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "shards": {"a": 3}}', "\x00"])
def test_a_file_of_counts_that_is_something_else_is_refused(tmp_path, content):
    (tmp_path / "counts.json").write_text(content)
    with pytest.raises(UsageError, match=r"counts\.json' cannot be used .* Delete it"):
        edl_hvd.count_samples([], range, tmp_path / "counts.json")


@pytest.mark.parametrize(("skips", "processes"), [(True, 0), (False, 0), (False, 1)])
@pytest.mark.parametrize(("real", "said"), [(8, "has 8 samples, and its count says 9"), (10, "has more than 9")])
def test_a_shard_with_another_number_of_samples_is_named(tmp_path, skips, real, said, processes):
    paths = write_shards(tmp_path, [9, real, 9])
    reads = CountedReads(tmp_path / "log", skips)
    shards = edl_hvd.ElasticShards(paths, [9] * 3, read=reads, transform=number_of)
    batches = shards.sampler(global_batch=3)
    with pytest.raises(UsageError, match=rf"the shard '.*0001.tar' {said}"):
        list(DataLoader(shards, batch_sampler=batches, num_workers=processes))
    gc.collect()  # the loader, which the traceback has kept; else it may go in a process forked for another one


def test_a_sampler_without_the_order_of_the_shards_is_refused(paths):
    shards, _ = make(paths)
    for batches in (edl_hvd.ElasticBatchSampler(len(shards), global_batch=8), [[0, 1]]):
        with pytest.raises(UsageError, match=r"batch_sampler=shards\.sampler"):
            next(iter(DataLoader(shards, batch_sampler=batches)))


def test_a_position_is_refused_when_a_count_has_changed(paths):
    _, batches = make(paths)
    batches.advance(next(batches.steps()))
    moved = [COUNTS[0] + 1, COUNTS[1], COUNTS[2] - 1, *COUNTS[3:]]
    other = edl_hvd.ElasticShards(paths, moved, read=edl_hvd.TarSamples).sampler(
        global_batch=8, micro_batch=4, interleave=2
    )
    with pytest.raises(StateError, match="belongs to the order 'shards-1 4 2 shuffled"):
        other.load_state_dict(batches.state_dict())


@pytest.mark.parametrize(
    ("make_shards", "said"),
    [
        (lambda: edl_hvd.ElasticShards(["a"], [1, 2], read=range), "there are 1 shards and counts of shape"),
        (lambda: edl_hvd.ElasticShards(["a", "b"], [1, -2], read=range), r"counts\[1\] is -2"),
        (lambda: edl_hvd.ElasticShards(["a"], [0], read=range), "there are no samples in 1 shards"),
        (lambda: edl_hvd.ElasticShards([], [], read=range), "counts cannot be used|no samples in 0"),
        (lambda: edl_hvd.ElasticShards(["a"], [0.5], read=range), "counts cannot be used"),
        (lambda: edl_hvd.ElasticShards(["a"], [1], read=range, open_shards=0), "open_shards=0"),
        (lambda: edl_hvd.ElasticShards(["a"], [1], read=range).sampler(), "batch size is not clear"),
        (lambda: edl_hvd.ElasticShards(["a"], [1], read=range).sampler(global_batch=1, interleave=0), "interleave=0"),
    ],
)
def test_shards_that_make_no_sense_are_refused(make_shards, said):
    with pytest.raises(UsageError, match=said):
        make_shards()


def test_shards_travel_to_another_process_without_what_is_open(paths):
    shards, batches = make(paths)
    next(iter(DataLoader(shards, batch_sampler=batches)))
    again = pickle.loads(pickle.dumps(shards))
    assert [again[index] for index in (3, 4, 0)] == [3, 4, 0]
