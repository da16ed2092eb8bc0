"""Teachers that come, die, stand still and leave, in processes of their own."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from fleet import Images, Sums, fleet, sums
from students import check, make_loader, sampler
from waiting import soon, until

from edl_hvd.distill import Teachers
from edl_hvd.events import read_events

pytestmark = pytest.mark.distill


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
    """It stops with a micro-batch in hand, and the teachers that come then answer that one, too."""
    last = [index for indices in sampler(160) for index in indices][79]
    value = Images(160)[last][0].flatten()[0].item()
    with fleet(tmp_path, Sums(0.02, "stop", value)) as teachers:

        def is_stopped() -> bool:
            return " (stopped)" in Path(f"/proc/{teachers.processes[0].pid}/status").read_text()

        def help_when_it_is_stopped() -> None:
            until(is_stopped)
            teachers.start(Sums(0.02))

        helper = threading.Thread(target=help_when_it_is_stopped)
        helper.start()
        loader = make_loader(Teachers(teachers.source, port=teachers.port), 160)
        check(loader, 160)
        assert loader._open.service is not None
        assert loader._open.service.calling.outlook().window.hedges >= 1
        loader.close()
        soon(helper)


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
                service = loader._open.service
                assert service is not None
                until(lambda: service.calling.outlook().ready == 2)

        check(loader, 320, strike)
        loader.close()


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
        assert not wanted._asks._calling.window.past
        assert not wanted._asks._calling._answers
        wanted.close()


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
