"""What the demo of distillation reads out of its workers' notes, and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[3] / "examples" / "distill"


@pytest.fixture
def story(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delitem(sys.modules, "story", raising=False)
    import story

    return story


def note(step: int, generation: int, size: int, rank: int, indices: list[int], answer: str = "a") -> dict[str, Any]:
    taken = [{"indices": indices, "answer": answer}]
    return {"step": step, "generation": generation, "size": size, "rank": rank, "at_s": 10.0 + step, "taken": taken}


LINES = [
    note(0, 1, 1, 0, [0, 1]),
    note(1, 1, 1, 0, [2, 3]),  # the world breaks, and a larger one takes this step
    note(1, 2, 2, 0, [3]),
    note(1, 2, 2, 1, [2]),
    note(2, 3, 1, 0, [1, 0]),
    note(3, 3, 1, 0, [3, 3]),
    {"epoch": 0, "loss": 2.0, "accuracy": 0.5, "at_s": 12.0},
    {"epoch": 1, "loss": 1.0, "accuracy": 0.75, "at_s": 14.0},
]


def test_the_newest_try_of_a_step_counts(story):
    steps = story.counted_steps(LINES)
    assert [[part.indices for part in step.parts] for step in steps] == [[(0, 1)], [(2,), (3,)], [(1, 0)], [(3, 3)]]
    assert story.sizes(steps) == (1, 2, 1)


def test_an_epoch_with_a_sample_twice_is_not_whole(story):
    steps = story.counted_steps(LINES)
    assert story.whole_epochs(steps, 4, 2) == 1
    assert story.whole_epochs(steps[:2], 4, 2) == 1


def test_half_a_line_of_a_killed_worker_is_left_out(story, tmp_path):
    (tmp_path / "7.jsonl").write_text(json.dumps(LINES[0]) + "\n" + json.dumps(LINES[1])[:20])
    assert story.read_notes(tmp_path) == [LINES[0]]


def test_the_picture_is_drawn(story, tmp_path):
    steps = story.counted_steps(LINES)
    looks = [story.Look(10.0, 1, 8, 2), story.Look(12.0, 3, 8, 1)]
    marks = [story.Mark(11.5, "a teacher is killed", is_loss=True)]
    found = {"teachers elsewhere": story.accuracies(LINES), "labels only": [0.4, 0.5]}
    speeds = {"no teacher": 300.0, "teachers elsewhere": 290.0, "teacher in each worker": 110.0}
    story.draw(story.Story(steps, looks, marks, found, speeds), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
