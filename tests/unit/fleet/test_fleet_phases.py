"""The phases of a fleet's jobs: what is asked of them, and that files and answers hold the words of before."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.fleet import events
from edl_hvd.fleet.state import Fleet, FleetJob, JobPhase, JobSpec
from edl_hvd.fleet.store import FILE, FleetStore
from edl_hvd.json_values import as_fields, read_fields

WORDS = ["waiting", "starting", "running", "stopping", "stopped", "complete", "failed"]
JOB = FleetJob(JobSpec("one", ("true",), "/", 1, 2), 3.0)


def test_the_words_are_those_of_before_in_their_order() -> None:
    assert [str(phase) for phase in JobPhase] == WORDS
    assert f"job one is {JobPhase.FAILED} already" == "job one is failed already"


@pytest.mark.parametrize(
    ("question", "yes"),
    [
        ("is_alive", {"starting", "running", "stopping"}),
        ("keeps_slots", {"starting", "running"}),
        ("wants_slots", {"waiting", "starting", "running"}),
        ("is_ended", {"complete", "failed"}),
        ("is_at_rest", {"complete", "failed", "stopped"}),
        ("can_resume", {"stopped", "failed"}),
    ],
)
def test_what_is_asked_of_a_phase(question: str, yes: set[str]) -> None:
    assert {phase.value for phase in JobPhase if getattr(phase, question)} == yes


@pytest.mark.parametrize("word", WORDS)
def test_a_file_holds_the_words_of_before(word: str, tmp_path: Path) -> None:
    job = replace(JOB, phase=JobPhase(word))
    fleet = Fleet(jobs={"one": job})
    store = FleetStore(tmp_path)
    store.keep(Fleet(), fleet, 1.0, 2.0, events.TimePassed(), ())
    kept = store.read().fleet
    store.close()
    file = sqlite3.connect(tmp_path / FILE)
    ((text,),) = file.execute("SELECT value FROM job").fetchall()
    file.close()
    assert text == json.dumps({**asdict(job), "phase": word})
    assert kept == fleet
    assert kept.jobs["one"].phase is job.phase


@pytest.mark.parametrize("word", ["", "Waiting", "runing", None, 1, ["waiting"]])
def test_another_word_is_no_phase(word: object) -> None:
    with pytest.raises(UsageError, match=r"FleetJob\.phase is .*; expected one of 'waiting', 'starting', "):
        read_fields(FleetJob, {**json.loads(json.dumps(as_fields(JOB))), "phase": word})
