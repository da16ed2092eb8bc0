"""What a loader gives: each answer once, in order, of one kind of teachers or several; real teachers in processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fleet import Images, Sums, fleet, sums
from students import check, make_loader, sampler
from torch.utils.data import DataLoader
from waiting import until

from edl_hvd import distill
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.teacher_counts import answer_counts

pytestmark = pytest.mark.distill


@pytest.mark.parametrize("workers", [0, 2])
def test_answers_come_in_order_and_are_those_of_the_model(tmp_path, workers):
    with fleet(tmp_path, Sums(), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), workers=workers)
        check(loader)
        check(loader)
        assert len(loader) == 8
        assert loader.dataset is loader.loader.dataset
        loader.close()


def test_a_pass_that_nobody_iterates_ends_the_processes_of_its_loader(tmp_path):
    """They end while a world forms, and not beside the first step of the next one."""
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), workers=2)
        before = set(multiprocessing.active_children())
        batches = iter(loader)
        next(batches)
        readers = set(multiprocessing.active_children()) - before
        assert len(readers) == 2
        del batches
        until(lambda: not any(reader.is_alive() for reader in readers))
        check(loader)
        loader.close()


def test_without_a_service_the_same_script_computes_by_itself():
    check(make_loader(Teachers(local=Sums)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_answer_of_an_earlier_pass_is_not_used_for_another_input_at_its_place(tmp_path, workers):
    class Augmented(Images):
        def __getitem__(self, index):
            image, number = super().__getitem__(index)
            return image + torch.randn(image.shape), number

    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), workers=workers, dataset=Augmented(64))
        for _ in range(2):
            check(loader)
        loader.close()


class TwoSums:
    def __call__(self, inputs):
        total = inputs["a"].sum(1)
        return {"plus": total + inputs["b"], "minus": total - inputs["b"]}


def test_a_batch_may_be_a_dict_or_a_tensor_and_send_several_tensors(tmp_path):
    with fleet(tmp_path, TwoSums()) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port)
        dataset = [{"image": torch.full((2,), float(index)), "other": torch.tensor(index)} for index in range(8)]
        inner = DataLoader(dataset, batch_sampler=sampler(8))  # type: ignore[arg-type]
        loader = DistillLoader(inner, wanted, send=lambda batch: {"a": batch["image"], "b": batch["other"]})
        for batch in loader:
            assert set(batch) == {"image", "other", "answer"}
            assert torch.equal(batch["answer"]["plus"], batch["image"].sum(1) + batch["other"])
            assert torch.equal(batch["answer"]["minus"], batch["image"].sum(1) - batch["other"])
        loader.close()


def test_an_error_of_the_data_set_comes_where_its_batch_would(tmp_path):
    class Broken(Images):
        def __getitem__(self, index):
            if index == order[20]:
                raise KeyError("sample is gone")
            return super().__getitem__(index)

    order = [index for indices in sampler(64) for index in indices]
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), dataset=Broken(64))
        seen: list[int] = []

        def read_all() -> None:
            for _, index, _ in loader:
                seen.extend(index.tolist())

        with pytest.raises(KeyError):
            read_all()
        assert seen == order[:20]
        loader.close()


def test_teachers_have_as_much_as_fits_while_the_script_trains(tmp_path):
    """A micro-batch that is taken makes room for the next one at once, not when the script asks again."""

    class Noted(Images):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    dataset = Noted(64, side=300)  # a micro-batch of 1.4 MB, so that the window holds the two that it always holds
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port, window_mb=1), dataset=dataset)
        check(loader, 64, lambda number: _equal(dataset.read, min(64, 4 * (number + 3))))
        loader.close()


def test_every_stage_of_a_micro_batch_is_told_from_the_second_one_on(tmp_path):
    with fleet(tmp_path, Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        passing = iter(loader)
        next(passing)
        next(passing)
        counts = answer_counts.look()
        assert counts is not None
        assert counts.stages is not None
        assert min(counts.stages.read_s, counts.stages.compute_s, counts.stages.decode_s) > 0
        loader.close()


def _equal(one: int, other: int) -> None:
    assert one == other


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_begins_where_the_last_one_was_left_asks_nothing_again(tmp_path, workers):
    """As after a resize in which a worker keeps its micro-batches, some of which are rolled back."""
    with fleet(tmp_path, Sums(0.02), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160, workers=workers)
        for _ in range(3):
            passing = iter(loader)
            for _ in range(8):
                next(passing)
        check(loader, 160)
        assert loader._open.service is not None
        window = loader._open.service.calling.outlook().window
        assert window.given <= 40 * 1.1, f"{window.given} tasks were given out for 40 micro-batches"
        loader.close()


def test_a_loader_that_is_forgotten_ends_its_threads(tmp_path):
    before = set(threading.enumerate())
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), workers=1)
        next(iter(loader))
        del loader
        until(lambda: {thread for thread in threading.enumerate() if "QueueFeeder" not in thread.name} <= before)


def test_exact_answers_do_not_depend_on_the_fleet(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    torch.set_num_threads(1)
    bits = []
    for count in (0, 1, 3, 8):
        with fleet(tmp_path, *(model for _ in range(count)), max_batch=64) as teachers:
            wanted = Teachers(teachers.source if count else None, port=teachers.port, local=lambda: model, exact=True)
            loader = make_loader(wanted, 62, side=16)
            bits.append(torch.cat([answer for _, _, answer in loader]))
            loader.close()
    assert all(torch.equal(bits[0], other) for other in bits[1:])


# --- several kinds of teachers ---


class Doubled(Sums):
    """A teacher of another kind."""

    def __call__(self, images):
        return 2 * super().__call__(images)


@contextmanager
def two_kinds(folder: Path, is_local: bool, other=Doubled) -> Iterator[dict[str, Teachers]]:
    """The teachers "plain" and "other"."""
    if is_local:
        yield {"plain": Teachers(local=Sums), "other": Teachers(local=other)}
        return
    for name in ("a", "b"):
        (folder / name).mkdir()
    with fleet(folder / "a", Sums(0.01), Sums(0.01)) as plain, fleet(folder / "b", other(0.01)) as others:
        yield {
            "plain": Teachers(plain.source, port=plain.port), "other": Teachers(others.source, port=others.port),
        }  # fmt: skip


@pytest.mark.parametrize("is_local", [True, False])
def test_several_teachers_answer_each_batch(tmp_path, is_local):
    with two_kinds(tmp_path, is_local) as teachers:
        inner = DataLoader(Images(64), batch_sampler=sampler(64))
        loader = DistillLoader(inner, teachers, send=lambda batch: batch[0])
        count = 0
        for images, _, answer in loader:
            assert torch.equal(answer["plain"], sums(images))
            assert torch.equal(answer["other"], 2 * sums(images))
            assert torch.equal(distill.average(answer), torch.stack(list(answer.values())).mean(0))
            count += 1
        assert count == 16
        loader.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_samples_are_routed_to_teachers_by_a_key(tmp_path, is_local):
    with two_kinds(tmp_path, is_local) as teachers:
        inner = DataLoader(Images(64), batch_sampler=sampler(64))
        # The first eight samples all belong to one kind, so that there are batches with one teacher.
        names = ["plain" if index % 3 or index < 8 else "other" for index in range(64)]
        loader = DistillLoader(
            inner, teachers, send=lambda batch: batch[0], route=lambda batch: [names[index] for index in batch[1]]
        )
        seen: list[int] = []
        for images, index, answer in loader:
            factors = torch.tensor([1.0 if names[one] == "plain" else 2.0 for one in index]).unsqueeze(1)
            assert torch.equal(answer, factors * sums(images))
            seen += index.tolist()
        assert sorted(seen) == list(range(64))
        loader.close()


# --- inputs that are no part of a data set ---


@pytest.mark.parametrize("is_local", [True, False])
def test_teachers_are_asked_for_inputs_of_the_scripts_own(tmp_path, is_local):
    with fleet(tmp_path, *([] if is_local else [Sums(0.01), Sums(0.02)])) as teachers:
        wanted = Teachers(None if is_local else teachers.source, port=teachers.port, local=Sums if is_local else None)
        inputs = [torch.randn(1 + number % 4, 3) for number in range(40)]
        asked = [wanted.ask(one) for one in inputs]
        del asked[5], inputs[5]  # one that is not needed after all
        for one, answer in reversed(list(zip(inputs, asked, strict=True))):
            assert torch.equal(answer.result(), sums(one))
            assert torch.equal(answer.result(), sums(one)), "once more"
            assert answer.is_done
        wanted.close()
