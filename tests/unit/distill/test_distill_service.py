"""Students and teachers over real sockets; teachers are real processes that are killed and stopped."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from fleet import CLASSES, Fleet, Images, Sums, fleet, free_port, sums, within
from metadata_server import Ec2Metadata
from torch.utils.data import DataLoader
from waiting import LONG_S, soon

import edl_hvd
from edl_hvd import distill
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.calling import Calling
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.events import read_events

pytestmark = pytest.mark.distill

TOKEN = "a-token-of-sufficient-length"


def sampler(length: int, seed: int = 3) -> edl_hvd.ElasticBatchSampler:
    return edl_hvd.ElasticBatchSampler(length, global_batch=8, micro_batch=4, seed=seed)


def make_loader(teachers: Teachers, length: int = 64, workers: int = 0, side: int = 4, dataset=None) -> DistillLoader:
    dataset = dataset or Images(length, side)
    inner = DataLoader(dataset, batch_sampler=sampler(length), num_workers=workers)
    return DistillLoader(inner, teachers, send=lambda batch: batch[0])


def check(loader: DistillLoader, length: int = 64, struck=lambda number: None) -> None:
    """Go through an epoch: each sample once, in the sampler's order, each answer the right one."""
    seen = []
    for number, (images, index, answer) in enumerate(loader):
        assert torch.equal(answer, sums(images)), f"micro-batch {number}"
        seen += index.tolist()
        struck(number)
    assert seen == [index for indices in sampler(length) for index in indices]


def wait_for_teachers(loader: DistillLoader, count: int) -> None:
    service = loader._open.service
    assert service is not None
    within(LONG_S, lambda: service.calling.outlook().ready == count)


@pytest.mark.parametrize("workers", [0, 2])
def test_answers_come_in_order_and_are_those_of_the_model(tmp_path, workers):
    with fleet(tmp_path, Sums(), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), workers=workers)
        check(loader)
        check(loader)
        assert len(loader) == 8
        assert loader.dataset is loader.loader.dataset
        loader.close()


def test_without_a_service_the_same_script_computes_by_itself():
    check(make_loader(Teachers(local=Sums)))


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


class TwoSums:
    def __call__(self, inputs):
        total = inputs["a"].sum(1)
        return {"plus": total + inputs["b"], "minus": total - inputs["b"]}


def test_a_teacher_killed_in_mid_epoch_costs_no_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums(0.02), Sums(0.02), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160)
        check(loader, 160, lambda number: teachers.kill(number // 8) if number in (8, 16) else None)
        loader.close()
    events = read_events(tmp_path / "events.jsonl")
    kinds = [event["event"] for event in events]
    answers = next(event for event in events if event["event"] == "answers")
    assert 0.02 <= answers["compute_s"] < answers["compute_s"] + answers["wire_s"] + answers["waiting_s"]
    assert all(answers[name] >= 0 for name in ("read_s", "queued_s", "ready_s", "decode_s"))
    assert kinds.count("teacher_joined") == 3
    assert kinds.count("teacher_lost") == 2
    assert "answers" in kinds


def test_a_teacher_that_is_stopped_does_not_stop_the_training(tmp_path):
    with fleet(tmp_path, Sums(0.02), Sums(0.02), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160)

        def strike(number: int) -> None:
            if number == 8:
                teachers.signal(1, signal.SIGSTOP)

        check(loader, 160, strike)
        assert loader._open.service is not None
        assert loader._open.service.calling.outlook().window.hedges >= 1
        loader.close()


def test_a_teacher_that_leaves_on_sigterm_finishes_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums(0.05), Sums(0.05)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160)
        check(loader, 160, lambda number: teachers.signal(0, signal.SIGTERM) if number == 6 else None)
        soon(teachers.processes[0])
        assert teachers.processes[0].exitcode == 0
        assert loader._open.service is not None
        assert loader._open.service.calling.outlook().window.lost == 0
        loader.close()
    lost = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_lost"]
    assert [event["reason"] for event in lost] == ["it left"]
    assert lost[0]["tasks"] == 0


def test_all_teachers_gone_and_back(tmp_path):
    with fleet(tmp_path, Sums(), Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160, side=64)
        # A window of two micro-batches: what was answered before does not last.
        loader.teachers.limit_bytes = 1
        back_s: list[float] = []

        def strike(number: int) -> None:
            if number == 8:
                teachers.kill(0)
                teachers.kill(1)

                def revive() -> None:
                    time.sleep(1.0)
                    teachers.start(Sums(), 0)
                    back_s.append(time.monotonic())

                threading.Thread(target=revive).start()
            if number == 12:
                assert back_s

        check(loader, 160, strike)
        loader.close()


def test_teachers_are_added_while_the_epoch_runs(tmp_path):
    with fleet(tmp_path, Sums(0.1)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 320, workers=1)

        def strike(number: int) -> None:
            if number == 2:
                teachers.start(Sums())
            if number == 60:
                assert loader._open.service is not None
                assert loader._open.service.calling.outlook().ready == 2

        check(loader, 320, strike)
        loader.close()


# --- several kinds of teachers ---


class Doubled(Sums):
    """A teacher of another kind."""

    def __call__(self, images):
        return 2 * super().__call__(images)


class Wide(Sums):
    """A teacher of another vocabulary."""

    def __call__(self, images):
        return torch.cat([super().__call__(images)] * 2, dim=1)


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


def test_what_was_asked_for_survives_a_teacher_and_takes_no_more_memory_than_the_window(tmp_path):
    with fleet(tmp_path, Sums(0.02), Sums(0.02)) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, window_mb=1)
        inputs = [torch.full((4, 1 << 14), float(number)) for number in range(40)]  # a quarter of the window each
        asked = []
        for number, one in enumerate(inputs):
            asked.append(wanted.ask(one))
            if number == 20:
                teachers.kill(0)
        assert all(torch.equal(answer.result(), sums(one)) for answer, one in zip(asked, inputs, strict=True))
        assert wanted._asks is not None
        assert not wanted._asks._calling.window.left
        assert not wanted._asks._calling._answers
        wanted.close()


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


# --- on one host ---


def families(loader: DistillLoader) -> list[socket.AddressFamily]:
    assert loader._open.service is not None
    calling = loader._open.service.calling
    assert isinstance(calling, Calling)
    return [call.stream.connection.family for call in calling._calls.values()]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_a_teacher_of_the_same_host_is_called_over_a_unix_socket(tmp_path):
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        assert families(loader) == [socket.AF_UNIX]
        loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_who_takes_the_name_of_a_teachers_unix_socket_is_not_used(tmp_path):
    teachers = Fleet(tmp_path, TOKEN)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0edl_hvd/teacher/127.0.0.1:{teachers.port}")
        taken.listen()
        heard = bytearray()

        def pretend() -> None:
            connection, _ = taken.accept()
            with connection:
                connection.sendall(b'{"what":"nonce","fields":{"protocol":1,"nonce":"' + b"0" * 64 + b'"}}\n')
                connection.sendall(b'{"what":"proof","fields":{"proof":"' + b"0" * 64 + b'"}}\n')
                while chunk := connection.recv(1 << 16):
                    heard.extend(chunk)

        thread = threading.Thread(target=pretend)
        thread.start()
        try:
            teachers.start(Sums())
            loader = make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN))
            check(loader)
            assert families(loader) == [socket.AF_INET]
            soon(thread)
            loader.close()
        finally:
            teachers.close()
    assert b"arrays" not in heard


def test_an_address_of_another_host_is_none_of_this_one():
    from edl_hvd.distill.same_host import is_own

    assert is_own("127.0.0.1")
    assert is_own("::1")
    assert not is_own("192.0.2.1")
    assert not is_own("2001:db8::1")


# --- bad input ---


def test_a_wrong_token_is_said_at_once_and_no_data_travels(tmp_path):
    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, token=TOKEN + "x")
        with pytest.raises(NoTeacherError, match=r"localhost:\d+: it refused: the token is another one") as caught:
            next(iter(make_loader(wanted)))
        assert str(teachers.port) in str(caught.value)
        assert "edl-hvd teach" in str(caught.value)
        check(make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN)))


def test_a_stranger_in_a_teachers_place_gets_no_data(tmp_path):
    """It listens where a teacher was, and does not know the token."""
    heard = bytearray()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(
                json.dumps({"what": "nonce", "fields": {"protocol": 1, "nonce": "0" * 64}}).encode() + b"\n"
            )
            connection.sendall(json.dumps({"what": "proof", "fields": {"proof": "0" * 64}}).encode() + b"\n")
            while chunk := connection.recv(1 << 16):
                heard.extend(chunk)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        (tmp_path / "teachers.txt").write_text("localhost:1\n")
        wanted = Teachers(f"file:{tmp_path / 'teachers.txt'}", port=server.getsockname()[1], token=TOKEN)
        with pytest.raises(NoTeacherError, match="it holds another token"):
            next(iter(make_loader(wanted)))
        soon(thread)
    assert b"arrays" not in heard
    assert len(heard) < 1000


def test_a_liar_with_other_shapes_is_put_out_and_the_others_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums(trouble="shape"), Sums(0.02)) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        loader.close()
    lost = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_lost"]
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
    within(LONG_S, lambda: set(threading.enumerate()) <= before)


def test_a_source_that_lists_nobody_is_named_in_the_error(tmp_path):
    (tmp_path / "teachers.txt").write_text("# none yet\n")
    loader = make_loader(Teachers(f"file:{tmp_path / 'teachers.txt'}", patience="1s"))
    with pytest.raises(NoTeacherError, match=r"teachers\.txt lists no host"):
        next(iter(loader))
    loader.close()


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
        within(LONG_S, lambda: any("fingerprint" in str(event) for event in read_events(tmp_path / "events.jsonl")))
        assert [event["fingerprint"] for event in events if event["event"] == "teacher_joined"] == ["first"]
        loader.close()


def test_a_teacher_of_another_vocabulary_is_refused_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        teachers.start(Wide())
        check(loader)
        within(
            LONG_S, lambda: any(event["event"] == "teacher_refused" for event in read_events(tmp_path / "events.jsonl"))
        )
        check(loader)
        loader.close()
    refused = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_refused"]
    assert refused[0]["teacher"] == f"localhost:{teachers.port + 1}"
    assert refused[0]["reason"] == (
        "it answers logits float32[10] per sample, the first teacher logits float32[5]; serve the same model everywhere"
    )


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
        within(
            LONG_S, lambda: {thread for thread in threading.enumerate() if "QueueFeeder" not in thread.name} <= before
        )


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


def test_tasks_of_several_students_are_computed_together(tmp_path):
    with fleet(tmp_path, Batches(), max_batch=64) as teachers:
        results: list[int] = []

        def study() -> None:
            loader = make_loader(Teachers(teachers.source, port=teachers.port), 240)
            for _, _, answer in loader:
                results.append(int(answer.max()))
            loader.close()

        threads = [threading.Thread(target=study) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            soon(thread)
        assert len(results) == 3 * 60
        assert max(results) > 4, "the largest batch is of several tasks"


class Batches:
    def __call__(self, images):
        is_probe = len(images) <= 2
        time.sleep(0.01)
        return torch.full((len(images), 1), 0.0 if is_probe else float(len(images)))


# --- strangers ---


def test_ten_thousand_malformed_messages_to_a_teacher_change_nothing(tmp_path):
    from test_distill_frames import malformed

    chance = random.Random(9)
    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        address = ("127.0.0.1", teachers.port)
        before = _memory_mb(teachers)
        sent = 0
        while sent < 10_000:
            with socket.create_connection(address, timeout=60) as connection:
                connection.settimeout(60)
                for _ in range(chance.randint(1, 4)):
                    sent += 1
                    if chance.random() < 0.2:
                        line = b'{"what":"nonce","fields":{"protocol":1,"nonce":"' + b"0" * 64 + b'"}}\n'
                    else:
                        line = malformed(chance)
                    try:
                        connection.sendall(line)
                    except OSError:
                        break
        assert _memory_mb(teachers) < before + 32
        check(make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN)))


def _memory_mb(teachers: Fleet) -> float:
    text = Path(f"/proc/{teachers.processes[0].pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def test_ten_thousand_malformed_messages_to_a_student_change_nothing(tmp_path):
    """Teachers that talk nonsense at every stage, some of them after a right proof."""
    from test_distill_frames import malformed

    from edl_hvd import proof

    chance, sent = random.Random(4), [0]
    is_over = threading.Event()

    def babble(server: socket.socket) -> None:
        server.settimeout(0.2)
        while not is_over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            with connection:
                connection.settimeout(5)
                with suppress(OSError, ValueError, KeyError):
                    talk(connection)

    def talk(connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        nonce = "0" * 64

        def say(what: str, **fields: object) -> None:
            connection.sendall(json.dumps({"what": what, "fields": fields}).encode() + b"\n")

        depth = chance.randrange(4)
        if depth:
            say("nonce", protocol=1, nonce=nonce)
            theirs = json.loads(lines.readline())["fields"]["nonce"]
            lines.readline()
        if depth > 1:
            say("proof", proof=proof.prove(TOKEN, proof.TEACHER, nonce, theirs))
            lines.readline()
        if depth > 2:
            row = {"name": "logits", "dtype": "float32", "shape": [CLASSES]}
            say("teaching", process=str(chance.random()), model="m", fingerprint="", answer=[row], max_batch=8)
            say("want")
            lines.readline()
        for _ in range(40):
            sent[0] += 1
            connection.sendall(malformed(chance))

    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        servers = [socket.create_server(("127.0.0.1", teachers.port + number)) for number in range(1, 41)]
        threads = [threading.Thread(target=babble, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        teachers.list(41)
        loader = make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while sent[0] < 10_000:
            check(loader)
            calling = loader._open.service.calling
            calling._dial_s = 0.0
            calling._book.call_at_once()  # nonsense is called again after ten seconds; here at once
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)
        is_over.set()
        for thread in threads:
            soon(thread)
        for server in servers:
            server.close()
        loader.close()


# --- the command line ---


def test_teach_serves_a_file_and_teachers_shows_it(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef build():\n    torch.manual_seed(1)\n    return torch.nn.Linear(3, 2)\n"
    )
    (tmp_path / "token").write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "edl_hvd.cli.main"]
    port = free_port()
    words = [*command, "teach", f"{tmp_path}/model.py:build", "--port", str(port), "--devices", "cpu,cpu",
             "--listen", "127.0.0.1", "--token-file", str(tmp_path / "token"), "--threads", "1"]  # fmt: skip
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert teach.stdout is not None
        lines = {teach.stdout.readline(), teach.stdout.readline()}
        assert lines == {f"Linear answers at 127.0.0.1:{port}\n", f"Linear answers at 127.0.0.1:{port + 1}\n"}
        (tmp_path / "teachers.txt").write_text("localhost:3\n")
        show = [*command, "teachers", f"file:{tmp_path}/teachers.txt", "--port", str(port)]
        shown = subprocess.run(
            [*show, "--token-file", str(tmp_path / "token"), "--json"], capture_output=True, text=True
        )
        entries = json.loads(shown.stdout)["teachers"]
        assert shown.returncode == 0
        assert [entry.get("model") for entry in entries] == ["Linear", "Linear", None]
        assert entries[0]["fingerprint"] == entries[1]["fingerprint"]
        assert entries[2]["problem"] == "Connection refused"
        without = subprocess.run(show, capture_output=True, text=True)
        assert without.returncode == 1
        assert "the token is another one" in " ".join(without.stdout.split())
        data = [(torch.full((3,), float(number)), number) for number in range(8)]
        inner = DataLoader(data, batch_sampler=sampler(8))  # type: ignore[arg-type]
        wanted = Teachers(f"file:{tmp_path}/teachers.txt", port=port, token_file=tmp_path / "token")
        loader = DistillLoader(inner, wanted, send=lambda batch: batch[0])
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        for inputs, _, answer in loader:
            torch.testing.assert_close(answer, model(inputs).detach())
        loader.close()
    finally:
        teach.send_signal(signal.SIGTERM)
        assert soon(teach) == 0
        teach.stdout.close()


def test_a_teacher_whose_host_will_go_leaves_and_another_one_answers(tmp_path):
    """EC2 tells that it will end the host: no answer is lost, and ``edl-hvd teach`` ends with exit code 0."""
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef build():\n    torch.manual_seed(1)\n    return torch.nn.Linear(3, 2)\n"
    )
    with Ec2Metadata() as metadata:
        noticed = {"EDL_HVD_NOTICES": "ec2", "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
        fleet_of: list[subprocess.Popen[str]] = []
        port = free_port(2)
        try:
            for number, variables in enumerate((noticed, {"EDL_HVD_NOTICES": "off"})):
                words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--port",
                         str(port + number), "--devices", "cpu", "--listen", "127.0.0.1", "--threads", "1"]  # fmt: skip
                teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
                fleet_of.append(teach)
                assert teach.stdout is not None
                assert "answers at" in teach.stdout.readline()
            (tmp_path / "teachers.txt").write_text("localhost:2\n")
            data = [(torch.full((3,), float(number)), number) for number in range(64)]
            inner = DataLoader(data, batch_sampler=sampler(64))  # type: ignore[arg-type]
            loader = DistillLoader(
                inner, Teachers(f"file:{tmp_path}/teachers.txt", port=port), send=lambda batch: batch[0]
            )
            torch.manual_seed(1)
            model, seen = torch.nn.Linear(3, 2), []
            for place, (inputs, numbers, answer) in enumerate(loader):
                torch.testing.assert_close(answer, model(inputs).detach())
                seen += numbers.tolist()
                if place == 2:
                    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 100))
                    metadata.texts["spot/instance-action"] = json.dumps({"action": "terminate", "time": moment})
                    assert soon(fleet_of[0]) == 0
            loader.close()
            assert sorted(seen) == list(range(64))
            assert fleet_of[0].stdout is not None
            assert "leaving: EC2 will terminate this spot instance" in fleet_of[0].stdout.read()
            assert fleet_of[1].poll() is None
        finally:
            for teach in fleet_of:
                teach.terminate()
                assert soon(teach) == 0
                if teach.stdout is not None:
                    teach.stdout.close()


def test_a_teacher_that_is_told_to_leave_while_it_loads_ends_well(tmp_path):
    (tmp_path / "model.py").write_text(
        "import time\n\ndef build():\n    print('loads', flush=True)\n    time.sleep(600)\n"
    )
    words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--devices", "cpu,cpu"]
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert teach.stdout is not None
    assert [teach.stdout.readline(), teach.stdout.readline()] == ["loads\n", "loads\n"]
    teach.send_signal(signal.SIGTERM)
    assert soon(teach) == 0
    teach.stdout.close()


def test_teach_without_a_token_does_not_listen_to_the_network(tmp_path):
    (tmp_path / "model.py").write_text("def build():\n    return abs\n")
    words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--listen", "0.0.0.0"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "would answer anybody" in ended.stderr


@pytest.mark.parametrize("build", ["nothing", "nowhere.py:build", "os:nothing"])
def test_teach_says_what_it_cannot_load(build):
    ended = subprocess.run([sys.executable, "-m", "edl_hvd.distill", build], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("edl-hvd teach: ")
    assert "Traceback" not in ended.stderr


def test_the_command_line_comes_without_torch():
    code = "import sys, edl_hvd.cli.main, edl_hvd.distill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
