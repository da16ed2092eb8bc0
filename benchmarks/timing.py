"""Reads from a job's trace how long it took to train on."""

from __future__ import annotations

from typing import Any

from harness import Outcome


def next_world(outcome: Outcome, moment: float, without: str | None = None) -> list[dict[str, Any]]:
    """What its members wrote when they entered the first world after a moment that does not hold a worker."""
    worlds: dict[int, list[dict[str, Any]]] = {}
    for line in outcome.lines("enter"):
        if line["t"] > moment:
            worlds.setdefault(line["generation"], []).append(line)
    return next(world for _, world in sorted(worlds.items()) if without not in [line["worker"] for line in world])


def next_step(outcome: Outcome, world: list[dict[str, Any]]) -> float:
    """When the last of its members has completed the first step in that world: its next one begins."""
    steps = outcome.lines("step")
    return max(
        next(
            line["t"]
            for line in steps
            if line["pid"] == entry["pid"] and line["t"] > entry["t"] and line["step"] > entry["step"]
        )
        for entry in world
    )
