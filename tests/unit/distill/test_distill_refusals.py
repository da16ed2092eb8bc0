"""What students refuse, and what they say: wrong answers, wrong models, nobody there, arguments out of range."""

from __future__ import annotations

import threading

import pytest
import torch
from fleet import CLASSES, Images, Sums, fleet, free_port, sums
from students import check, make_loader, sampler
from torch.utils.data import DataLoader
from waiting import soon, until

from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.outputs import find_nan, to_arrays
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.events import read_events

pytestmark = pytest.mark.distill


def wait_for_teachers(loader: DistillLoader, count: int) -> None:
    service = loader._open.service
    assert service is not None
    until(lambda: service.calling.outlook().ready == count)


def test_a_liar_with_other_shapes_is_put_out_and_the_others_answer(tmp_path, monkeypatch):
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv("EDL_HVD_EVENTS", str(events))
    with fleet(tmp_path, Sums(trouble="shape")) as teachers:

        def help_when_it_is_out() -> None:
            until(lambda: events.exists() and any(one["event"] == "teacher_lost" for one in read_events(events)))
            teachers.start(Sums())

        helper = threading.Thread(target=help_when_it_is_out)
        helper.start()
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        loader.close()
        soon(helper)
    lost = [event for event in read_events(events) if event["event"] == "teacher_lost"]
    assert lost
    assert "expected logits float32[4, 5]" in lost[0]["reason"]


def test_answers_that_hold_nan_are_never_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums(trouble="nan"), Sums(0.01), Sums(0.01)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port, window_mb=1), 160, side=64)
        check(loader, 160, lambda number: wait_for_teachers(loader, 3) if number == 0 else None)
        loader.close()
    refused = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_refused"]
    assert refused
    assert refused[0]["reason"] == "its answer 'logits' holds NaN"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nan_is_told_from_infinities_wherever_it_is(dtype):
    for shape in ((1, 1), (3, 5), (64, 1000), (0, 5)):
        answer = torch.randn(shape).to(dtype)
        answer[: len(answer) // 2] = float("inf")
        answer[len(answer) // 2 :, ::2] = -float("inf")
        assert not find_nan(to_arrays({"rest": answer, "indices": torch.zeros(shape, dtype=torch.int32)}))
        for row in {0, len(answer) - 1} if len(answer) else set():
            broken = answer.clone()
            broken[row, -1] = float("nan")
            assert find_nan(to_arrays({"first": answer, "rest": broken})) == "its answer 'rest' holds NaN"


@pytest.mark.parametrize("trouble", ["die", "raise", "nan"])
def test_an_input_that_every_teacher_fails_on_ends_the_training_and_not_the_fleet(tmp_path, trouble):
    """The input is sample 5; 6 teachers there are, and at least 3 outlive it."""
    dataset = Images(64)
    bad = dataset[5][0].flatten()[0].item()
    count = 6 if trouble == "die" else 2
    with fleet(tmp_path, *(Sums(0.01, trouble, bad) for _ in range(count))) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        with pytest.raises(
            UsageError, match=r"\d times a teacher was lost with, or failed on, the micro-batch at epoch 0"
        ) as caught:
            check(loader)
        assert "5" in str(caught.value).partition("(samples")[2].partition(")")[0]
        if trouble == "raise":
            assert "this input is not for me" in str(caught.value)
        if trouble == "die":
            assert sum(process.is_alive() for process in teachers.processes.values()) >= 3
        loader.close()


def test_no_teacher_within_patience_is_one_clear_error_and_leaves_no_thread(tmp_path):
    (tmp_path / "teachers.txt").write_text("localhost:2\n")
    port = free_port()
    before = set(threading.enumerate())
    loader = make_loader(Teachers(f"file:{tmp_path / 'teachers.txt'}", port=port, patience="1s"), workers=1)
    with pytest.raises(
        NoTeacherError, match=rf"localhost:{port}: Connection refused; localhost:{port + 1}: Connection"
    ):
        next(iter(loader))
    loader.close()
    until(lambda: set(threading.enumerate()) <= before)


def test_a_source_that_lists_nobody_is_named_in_the_error(tmp_path):
    (tmp_path / "teachers.txt").write_text("# none yet\n")
    loader = make_loader(Teachers(f"file:{tmp_path / 'teachers.txt'}", patience="1s"))
    with pytest.raises(NoTeacherError, match=r"teachers\.txt lists no host"):
        next(iter(loader))
    loader.close()


# --- models ---


def test_a_model_that_does_not_take_the_inputs_is_named(tmp_path):
    with fleet(tmp_path, torch.nn.Linear(7, 2)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        with pytest.raises(
            NoTeacherError, match=r"the model Linear fails on one micro-batch of logits float32\[1, 4, 4\]"
        ):
            next(iter(loader))
        loader.close()


def test_a_model_that_answers_by_chance_is_refused(tmp_path):
    with fleet(tmp_path, Chance()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        with pytest.raises(NoTeacherError, match="it answers the same input in two ways"):
            next(iter(loader))
        loader.close()


class Chance:
    def __call__(self, images):
        return torch.randn(len(images), CLASSES)


def test_teachers_with_other_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums(print_as="first"), Sums(print_as="second")) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port, fingerprint="first"))
        check(loader)
        events = read_events(tmp_path / "events.jsonl")
        until(lambda: any("fingerprint" in str(event) for event in read_events(tmp_path / "events.jsonl")))
        assert [event["fingerprint"] for event in events if event["event"] == "teacher_joined"] == ["first"]
        loader.close()


class Wide(Sums):
    """A teacher of another vocabulary."""

    def __call__(self, images):
        return torch.cat([super().__call__(images)] * 2, dim=1)


def test_a_teacher_of_another_vocabulary_is_refused_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        teachers.start(Wide())
        check(loader)
        until(lambda: any(event["event"] == "teacher_refused" for event in read_events(tmp_path / "events.jsonl")))
        check(loader)
        loader.close()
    refused = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_refused"]
    assert refused[0]["teacher"] == f"localhost:{teachers.port + 1}"
    assert refused[0]["reason"] == (
        "it answers logits float32[10] per sample, the first teacher logits float32[5]; serve the same model everywhere"
    )


# --- scripts ---


def test_what_is_wrong_with_several_teachers_is_said(tmp_path):
    inner = DataLoader(Images(64), batch_sampler=sampler(64))
    several = {"plain": Teachers(local=Sums), "other": Teachers(local=Wide)}

    def first(teachers, route=None):
        return next(iter(DistillLoader(inner, teachers, send=lambda batch: batch[0], route=route)))

    with pytest.raises(UsageError, match="teachers are an empty dict"):
        first({})
    with pytest.raises(UsageError, match="teachers are int"):
        first({"plain": 3})
    with pytest.raises(UsageError, match="route= chooses among several teachers"):
        first(Teachers(local=Sums), lambda batch: batch[1])
    with pytest.raises(
        UsageError, match="route returned nobody for epoch 0, positions 0 to 3; expected one of plain, o"
    ):
        first(several, lambda batch: ["plain", "nobody", "plain", "plain"])
    with pytest.raises(UsageError, match="route returned 3 names for epoch 0"):
        first(several, lambda batch: ["plain"] * 3)
    with pytest.raises(UsageError, match=r"answer in different types per sample: 'plain': logits torch.float32 \(5,\)"):
        first(several, lambda batch: ["plain", "other", "plain", "plain"])
    (tmp_path / "teachers.txt").write_text("localhost:1\n")
    with pytest.raises(UsageError, match="the teachers plain have a source, and the others have none"):
        first({"plain": Teachers(f"file:{tmp_path / 'teachers.txt'}"), "other": Teachers(local=Sums)})


def test_what_may_not_be_asked_for_is_said(tmp_path):
    wanted = Teachers(local=Sums)
    with pytest.raises(UsageError, match="ask was given what cannot travel: a list is neither"):
        wanted.ask([1, 2])
    with pytest.raises(UsageError, match="expected the same number of samples"):
        wanted.ask({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(UsageError, match="at least 1"):
        wanted.ask(torch.zeros(0, 2))
    with fleet(tmp_path, Sums(trouble="raise", trigger=7.0), Sums(trouble="raise", trigger=7.0)) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port)
        good, bad = wanted.ask(torch.zeros(2, 3)), wanted.ask(torch.full((2, 3), 7.0))
        assert torch.equal(good.result(), sums(torch.zeros(2, 3)))
        with pytest.raises(UsageError, match=r"failed on, an input of 2 samples that was asked for: .*not for me"):
            bad.result()
        with pytest.raises(UsageError, match="not for me"):
            bad.result()
        assert torch.equal(wanted.ask(torch.ones(2, 3)).result(), sums(torch.ones(2, 3))), "others go on"
        wanted.close()
    (tmp_path / "none.txt").write_text("localhost:1\n")
    wanted = Teachers(f"file:{tmp_path / 'none.txt'}", port=free_port(), patience="1s")
    with pytest.raises(NoTeacherError, match="an input that was asked for waits for one"):
        wanted.ask(torch.zeros(2, 3)).result()
    wanted.close()


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (lambda batch: None, "send returned a NoneType"),
        (lambda batch: {"a": 1}, "send returned a dict of int"),
        (lambda batch: batch[0][:1], "expected the batch as the first dimension"),
        (lambda batch: batch[0].to(torch.complex64), "is a tensor of complex64"),
    ],
)
def test_what_send_may_not_return_is_said(send, words):
    inner = DataLoader(Images(8), batch_sampler=sampler(8))
    with pytest.raises(UsageError, match=words):
        next(iter(DistillLoader(inner, Teachers(local=Sums), send=send)))


def test_a_script_without_any_teacher_is_told_so():
    with pytest.raises(UsageError, match="there are no teachers"):
        Teachers()


@pytest.mark.parametrize(
    "arguments",
    [{"outputs": "top"}, {"outputs": "top_k=0"}, {"window_mb": 0}, {"port": 0}, {"patience": "3 steps"}, {"token": "x"},
     {"source": "nowhere:x"}, {"local": 3}, {"token_file": "/nowhere/token"}],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(UsageError):
        Teachers(**{"local": Sums, **arguments})


def test_loaders_whose_order_is_not_known_are_refused():
    with pytest.raises(UsageError, match="has no batch_sampler"):
        DistillLoader([1, 2], Teachers(local=Sums), send=lambda batch: batch)
