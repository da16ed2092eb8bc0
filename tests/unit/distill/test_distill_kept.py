"""Answers that are kept: found by sample and input, whatever the cut; never another's, a damaged one's, or unsaved."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Images, Sums, fleet, sums
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.kept import AnswerKind, KeptAnswers, KeptPart, check_rows
from edl_hvd.distill.outputs import to_arrays, to_tensors
from edl_hvd.distill.place import Place
from edl_hvd.errors import UsageError
from edl_hvd.storage.file import FileStorage

KIND = AnswerKind("a-fingerprint", "logits")


class Watched:
    """A sampler that is part of a ``State``."""

    def __init__(self) -> None:
        self.is_watched, self.committed = True, (0, 0)


def inputs_of(indices: tuple[int, ...], salt: int = 0) -> Any:
    return to_arrays({"x": torch.tensor([[index, salt] for index in indices])})


def answer_of(indices: tuple[int, ...]) -> Any:
    return to_arrays(
        {"logits": torch.tensor([[index * 0.5, -index] for index in indices]), "other": torch.tensor(indices)}
    )


def keep(kept: KeptAnswers, indices: tuple[int, ...], position: int, epoch: int = 0) -> None:
    place = Place(7, epoch, position, len(indices), "order")
    keys = kept.keys_of(place, indices, inputs_of(indices))
    kept.note(KeptPart(KIND, keys, None), place, answer_of(indices))


def find(kept: KeptAnswers, indices: tuple[int, ...], epoch: int = 0, salt: int = 0, kind: AnswerKind = KIND) -> Any:
    place = Place(9, epoch, 0, len(indices), "another")
    return kept.find(kind, place, kept.keys_of(place, indices, inputs_of(indices, salt)))


def equals(found: Any, indices: tuple[int, ...]) -> bool:
    wanted, got = to_tensors(answer_of(indices)), to_tensors(found)
    return set(wanted) == set(got) and all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_answers_are_found_by_sample_in_any_cut_and_order(tmp_path):
    chance = random.Random(1)
    order = chance.sample(range(1000), 200)
    first = KeptAnswers(str(tmp_path), None, None)
    for position in range(0, 200, 8):
        keep(first, tuple(order[position : position + 8]), position)
    first.close()
    second = KeptAnswers(str(tmp_path), None, None)
    for count in (1, 5, 32, 200):
        indices = tuple(chance.sample(order, count))
        assert equals(find(second, indices), indices)
    assert find(second, (order[0], next(one for one in range(1000) if one not in order))) is None


def test_another_input_view_or_teacher_finds_nothing(tmp_path):
    first = KeptAnswers(str(tmp_path), 2, None)
    keep(first, (1, 2, 3), 0, epoch=1)
    first.close()
    second = KeptAnswers(str(tmp_path), 2, None)
    assert equals(find(second, (3, 1), epoch=1), (3, 1))
    assert equals(find(second, (3, 1), epoch=5), (3, 1)), "the view comes again after two epochs"
    assert find(second, (3, 1), epoch=2) is None
    assert find(second, (3, 1), epoch=1, salt=1) is None, "the data set has changed"
    assert find(second, (3, 1), epoch=1, kind=AnswerKind("another", "logits")) is None
    assert find(second, (3, 1), epoch=1, kind=AnswerKind("a-fingerprint", "top_k=2")) is None


def test_only_what_was_committed_is_written(tmp_path):
    sampler = Watched()
    kept = KeptAnswers(str(tmp_path), None, sampler)
    for position in range(0, 40, 4):
        keep(kept, tuple(range(position, position + 4)), position)
    sampler.committed = (0, 24)
    kept.begin_pass()  # a new world goes on from position 24
    for position in range(0, 40, 4):
        indices = tuple(range(position, position + 4))
        assert (find(kept, indices) is not None) == (position < 24), position
    keep(kept, (24, 25, 26, 27), 24)
    sampler.committed = (1, 0)
    kept.begin_pass()
    assert find(kept, (24, 25, 26, 27)) is not None
    assert find(kept, (28, 29)) is None, "it was rolled back, and is another worker's now"
    kept.close()


def test_answers_are_written_while_the_pass_goes_on_and_take_a_bounded_memory(tmp_path):
    sampler = Watched()
    kept = KeptAnswers(str(tmp_path), None, sampler)
    large = to_arrays({"logits": torch.zeros(4, 1 << 18)})  # 4 MB
    for number in range(40):
        place = Place(0, 0, 4 * number, 4)
        indices = tuple(range(4 * number, 4 * number + 4))
        kept.note(KeptPart(KIND, kept.keys_of(place, indices, inputs_of(indices)), None), place, large)
        kept.settle()
        assert kept._pending_bytes <= 64 << 20
    assert not list(tmp_path.rglob("*.answers"))
    sampler.committed = (0, 160)
    kept.settle()
    kept.close()
    files = list(tmp_path.rglob("*.answers"))
    assert sum(path.stat().st_size for path in files) > 40 << 20
    assert find(kept, (156, 157)) is not None
    assert find(kept, (0, 1)) is None, "older than the bound, so not kept"


def test_a_damaged_file_or_row_counts_as_not_there(tmp_path, caplog):
    kept = KeptAnswers(str(tmp_path), None, None)
    keep(kept, tuple(range(8)), 0)
    kept.close()
    (path,) = tmp_path.rglob("*.answers")
    whole = path.read_bytes()
    chance = random.Random(5)
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            broken = bytearray(whole)
            if chance.random() < 0.3:
                broken = broken[: chance.randrange(len(broken))]
            else:
                broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            path.write_bytes(broken)
            found = find(KeptAnswers(str(tmp_path), None, None), tuple(range(8)))
            assert found is None or equals(found, tuple(range(8))), "an answer that was never given"
    assert "are left out" in caplog.text
    path.write_bytes(whole)
    assert find(KeptAnswers(str(tmp_path), None, None), tuple(range(8))) is not None


def test_a_storage_that_fails_costs_no_training(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        loader = make_loader(Teachers(local=Named), tmp_path / "file" / "kept")
        check(loader)
        loader.close()
    assert "answers of teachers are not kept: " in caplog.text


def test_a_storage_that_hangs_costs_a_bounded_time_and_what_comes_after_it_is_kept(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("edl_hvd.distill.kept._END_S", 0.2)
    monkeypatch.setattr("edl_hvd.distill.kept._FILE_BYTES", 1)
    hanging, going_on = threading.Event(), threading.Event()
    write = FileStorage.write_new

    def hang(storage: FileStorage, key: str, data: Any) -> None:
        hanging.set()
        assert going_on.wait(60)
        write(storage, key, data)

    monkeypatch.setattr(FileStorage, "write_new", hang)
    kept = KeptAnswers(str(tmp_path), None, None)
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            keep(kept, (number,), number)
            kept.settle()
    assert hanging.is_set()
    assert [record.message for record in caplog.records].count(
        f"answers of teachers are not kept: {kept._storage.url} has written nothing for 0 s"
    ) == 1
    monkeypatch.setattr("edl_hvd.distill.kept._END_S", 60.0)  # what goes on may be slow
    going_on.set()
    writing = kept._writing
    assert writing is not None
    writing.flush()
    keep(kept, (100,), 100)
    kept.close()
    found = KeptAnswers(str(tmp_path), None, None)
    assert [number for number in range(40) if find(found, (number,)) is not None] == list(range(16))
    assert equals(find(found, (100,)), (100,))


def test_what_may_not_be_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"views=0; expected a number of epochs of at least 1"):
        make_loader(Teachers(local=Named), tmp_path, views=0)
    with pytest.raises(UsageError, match=r"views=2 says when kept answers are used again, and none are kept"):
        make_loader(Teachers(local=Named), None, views=2)
    with pytest.raises(UsageError, match=r"is not a storage URL"):
        make_loader(Teachers(local=Named), "nothing:")
    with pytest.raises(UsageError, match=r"does not tell which model it is; give it an attribute `fingerprint`"):
        next(iter(make_loader(Teachers(local=Sums), tmp_path)))
    with pytest.raises(UsageError, match=r"SeededDataset.*|views=0"):
        edl_hvd.SeededDataset(Images(8), views=0)


def test_checks_tell_inputs_apart():
    seen = set()
    for salt in range(64):
        for check in check_rows(inputs_of(tuple(range(64)), salt)):
            assert -(1 << 63) <= check < 1 << 63
            seen.add(check)
    assert len(seen) == 64 * 64
    assert check_rows(to_arrays({"x": torch.zeros(1, 4)})) != check_rows(to_arrays({"y": torch.zeros(1, 4)}))
    assert check_rows(to_arrays({"x": torch.zeros(1, 4)})) != check_rows(to_arrays({"x": torch.zeros(1, 2, 2)}))


# --- with loaders ---


class Named(Sums):
    """A teacher that says which model it is."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(delay_s, print_as="sums-1")


class Noisy(Images):
    """Images with an augmentation."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + torch.rand(1), label


def make_loader(
    teachers: Teachers,
    keep: str | Path | None,
    micro_batch: int = 4,
    workers: int = 0,
    dataset: Any = None,
    **words: Any,
) -> DistillLoader:
    dataset = Images(62) if dataset is None else dataset
    batches = edl_hvd.ElasticBatchSampler(62, global_batch=8, micro_batch=micro_batch, seed=3)
    inner = DataLoader(dataset, batch_sampler=batches, num_workers=workers)
    return DistillLoader(inner, teachers, send=lambda batch: batch[0], keep=keep, **words)


def check(loader: DistillLoader, epoch: int = 0) -> int:
    """Go through an epoch; returns how many tasks teachers have got since the loader was made."""
    loader.batch_sampler.set_epoch(epoch)
    seen: list[int] = []
    for images, index, answer in loader:
        assert torch.equal(answer, sums(images))
        seen += index.tolist()
    assert sorted(seen) == list(range(62))
    service = loader._open.service
    return service.calling.window.given if service else 0


@pytest.mark.distill
@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_job_asks_no_teacher(tmp_path, workers):
    with fleet(tmp_path, Named(0.01), Named(0.01)) as teachers:
        for given, micro_batch in ((16, 4), (0, 4), (0, 8)):
            loader = make_loader(Teachers(teachers.source, port=teachers.port), tmp_path / "kept", micro_batch, workers)
            asked = check(loader)
            assert asked >= given if given else asked == 0  # a task that is late is given to the other teacher, too
            loader.close()
        other = make_loader(Teachers(teachers.source, port=teachers.port), tmp_path / "kept", dataset=Noisy(62))
        assert check(other) >= 16, "other inputs"
        other.close()
    # Whose answers they are is said, so that no teacher is needed at all.
    alone = Teachers(teachers.source, port=teachers.port, fingerprint="sums-1", patience="1s")
    loader = make_loader(alone, tmp_path / "kept", workers=workers)
    assert check(loader) == 0
    loader.close()


@pytest.mark.distill
def test_after_as_many_epochs_as_there_are_views_no_teacher_is_asked(tmp_path):
    with fleet(tmp_path, Named()) as teachers:
        dataset = edl_hvd.SeededDataset(Noisy(62), views=3)
        loader = make_loader(Teachers(teachers.source, port=teachers.port), tmp_path / "kept", dataset=dataset)
        assert [check(loader, epoch) for epoch in range(7)] == [16, 32, 48, 48, 48, 48, 48]
        loader.close()
        same = make_loader(Teachers(teachers.source, port=teachers.port), tmp_path / "same", views=1)
        assert [check(same, epoch) for epoch in range(3)] == [16, 16, 16]
        same.close()


def test_a_local_teacher_finds_what_was_kept_and_keeps_what_was_not(tmp_path):
    checks = 6  # five of the same input, and one beside other samples
    for calls in (16 + checks, 0):
        model = Counted()
        loader = make_loader(Teachers(local=lambda model=model: model), tmp_path)
        check(loader)
        loader.close()
        assert model.calls == calls


class Counted(Named):
    calls = 0

    def __call__(self, images):
        self.calls += 1
        return super().__call__(images)


# --- whose answers they are ---


@pytest.mark.distill
def test_the_fingerprint_is_part_of_the_state(tmp_path):
    with fleet(tmp_path, Sums(print_as="first"), Sums(print_as="second")) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, fingerprint="first")
        loader = make_loader(wanted, None)
        check(loader)
        loader.close()
        saved = wanted.state_dict()
        assert saved == {"fingerprint": "first"}
        resumed = Teachers(teachers.source, port=teachers.port)
        resumed.load_state_dict(saved)
        loader = make_loader(resumed, None)
        check(loader)
        calling = loader._open.service.calling
        assert calling.teaching.fingerprint == "first"
        # A worker that has met another teacher takes over what the world has learned from.
        resumed.load_state_dict({"fingerprint": "second"})
        check(loader)
        assert calling.teaching.fingerprint == "second"
        loader.close()
        with pytest.raises(
            edl_hvd.errors.StateError, match=r"learned from teachers with fingerprint first, and Teachers"
        ):
            Teachers(teachers.source, port=teachers.port, fingerprint="third").load_state_dict(saved)
    local = Teachers(local=lambda: torch.nn.Linear(4, 2))
    local.load_state_dict(saved)
    with pytest.raises(
        UsageError, match=r"the model of local= has fingerprint \w+, and the training learns from first"
    ):
        next(iter(make_loader(local, None)))
