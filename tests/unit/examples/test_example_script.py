"""The demo's director: one scene after the other, driven by what happens, never by the clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "imagenet"))  # as if the example had been started

from script import SCRIPT, Director, Scene, shifted

JOIN = Scene("a host joins", 0.1, "add", "b", 2)
KILL = Scene("a worker is killed", 0.2, "kill", "a", 1)


def world(generation: int, size: int) -> dict[str, Any]:
    return {"event": "world_formed", "generation": generation, "size": size}


def commit(generation: int, samples: int) -> dict[str, Any]:
    return {"event": "commit", "generation": generation, "samples": samples}


def director() -> Director:
    return Director(1000, (JOIN, KILL))


def test_nothing_is_due_before_training_runs():
    assert director().next_scene() is None


def test_a_scene_is_due_once_training_is_far_enough_and_given_out_once():
    d = director()
    d.observe(world(1, 1))
    d.observe(commit(1, 99))
    assert d.next_scene() is None
    d.observe(commit(1, 100))
    assert d.next_scene() == JOIN
    assert d.next_scene() is None
    assert d.playing == JOIN


def test_the_next_scene_waits_until_the_one_before_has_trained_a_step():
    d = director()
    d.observe(world(1, 1))
    d.observe(commit(1, 100))
    d.next_scene()
    d.observe(commit(1, 900))  # far beyond the next scene's moment, still in the old world
    assert d.next_scene() is None
    d.observe(world(2, 2))
    assert d.next_scene() is None
    d.observe(commit(2, 910))
    assert d.next_scene() == KILL


def test_a_world_of_the_wrong_size_does_not_end_a_scene():
    d = director()
    d.observe(world(1, 1))
    d.observe(commit(1, 100))
    d.next_scene()
    d.observe(world(2, 1))
    d.observe(commit(2, 300))
    assert d.playing == JOIN


def test_scenes_that_did_not_happen_are_known():
    d = director()
    d.observe(world(1, 1))
    d.observe(commit(1, 100))
    d.next_scene()
    assert (d.playing, d.waiting) == (JOIN, (KILL,))


def test_the_script_has_all_that_can_happen_to_a_host():
    assert [(scene.action, scene.size) for scene in SCRIPT] == [("add", 2), ("kill", 1), ("add", 2), ("remove", 1)]
    assert [scene.at for scene in SCRIPT] == sorted(scene.at for scene in SCRIPT)


def test_another_schedule_has_the_same_scenes_in_the_same_order_at_other_moments():
    assert shifted(SCRIPT, 0) == SCRIPT
    for seed in range(1, 50):
        scenes = shifted(SCRIPT, seed)
        assert [scene.title for scene in scenes] == [scene.title for scene in SCRIPT]
        assert [scene.at for scene in scenes] == sorted(scene.at for scene in scenes)
        assert all(0 < scene.at < 1 for scene in scenes)
        assert scenes != SCRIPT
