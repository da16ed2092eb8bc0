"""What is kept of a fleet, and what a killed daemon leaves."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import replace

import pytest
from fleet_world import World

from edl_hvd.errors import StorageError, UsageError
from edl_hvd.fleet import events
from edl_hvd.fleet import store as store_module
from edl_hvd.fleet.events import Tell, event_as_json
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import Fleet, FleetRules, JobSpec
from edl_hvd.fleet.store import FILE, FleetEntry, FleetStore, read_fleet_history
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import QueueRule

HOSTS = (HostSlots("a", 2), HostSlots("b", 2))


def lived(seed: int, steps: int = 25) -> World:
    world = World(seed, HOSTS)
    world.happen(events.RulesGiven(FleetRules((QueueRule("vision", 2.0, 3),), favour_short=0.5)))
    for _ in range(steps):
        world.anything()
        world.pass_time()
    return world


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fleet_reads_as_it_was_kept_after_every_event(tmp_path, seed):
    store, fleet = FleetStore(tmp_path), Fleet()
    for at_s, event, _ in lived(seed).history:
        after, actions = turn(fleet, event, at_s)
        store.keep(fleet, after, at_s, 1e9 + at_s, event, actions)
        fleet = after
    kept = store.read()
    assert kept.fleet == fleet
    assert list(kept.fleet.jobs) == list(fleet.jobs), "in the order in which they were submitted"
    assert kept.wall_s == 1e9 + kept.at_s
    store.close()
    again = FleetStore(tmp_path)
    assert again.read() == kept
    again.close()
    decisions = list(decide_again(read_fleet_history(tmp_path)))
    assert not any(decision.differs for decision in decisions)
    assert decisions[-1].fleet == fleet


def history_bytes(store: FleetStore) -> int:
    return int(store._file.execute("SELECT total(length(event) + length(actions)) FROM history").fetchone()[0])


def tells_of(entry: FleetEntry, job: str) -> bool:
    about = {action.about for action in entry.actions if isinstance(action, Tell)}
    return job in about or entry.event == events.JobDeleted(job)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_history_has_a_bound_and_is_decided_again_from_the_oldest_that_is_kept(tmp_path, monkeypatch, seed):
    most = 20_000
    monkeypatch.setattr(store_module, "HISTORY_BYTES", most)
    store, fleet, largest, told = FleetStore(tmp_path), Fleet(), 0, []
    lines = lived(seed, 200).history
    for number, (at_s, event, _) in enumerate(lines):
        after, actions = turn(fleet, event, at_s)
        store.keep(fleet, after, at_s, 1e9 + at_s, event, actions)
        fleet = after
        told.append((at_s, event, actions))
        largest = max(largest, len(json.dumps(event_as_json(event))) + sum(map(len, map(str, actions))) * 2)
        assert history_bytes(store) <= most + 2 * largest
        if number % 101 == 0:
            entries = list(read_fleet_history(tmp_path))
            assert [(entry.at_s, entry.event, entry.actions) for entry in entries] == told[-len(entries) :]
            assert not any(decision.differs for decision in decide_again(entries))
            for name in fleet.jobs:
                of_job = list(read_fleet_history(tmp_path, name))
                assert of_job == [replace(entry, before=None) for entry in entries if tells_of(entry, name)]
        if number % 61 == 0:
            store.close()
            store = FleetStore(tmp_path)
    kept = store.read().fleet
    assert kept == fleet
    assert list(kept.jobs) == list(fleet.jobs), "in the order in which they were submitted"
    decisions = list(decide_again(read_fleet_history(tmp_path)))
    assert len(decisions) < len(lines), "something was removed"
    assert history_bytes(store) > most / 4, "and not more than needed"
    assert decisions[-1].fleet == fleet
    store.close()


def test_a_history_that_grew_before_it_had_a_bound_gets_one(tmp_path, monkeypatch):
    store, fleet, lines = FleetStore(tmp_path), Fleet(), lived(5, 200).history
    for number, (at_s, event, _) in enumerate(lines):
        if number == len(lines) // 2:
            assert history_bytes(store) > 50_000
            store.close()
            monkeypatch.setattr(store_module, "HISTORY_BYTES", 10_000)
            store = FleetStore(tmp_path)
        after, actions = turn(fleet, event, at_s)
        store.keep(fleet, after, at_s, 1e9 + at_s, event, actions)
        fleet = after
    assert history_bytes(store) < 20_000
    decisions = list(decide_again(read_fleet_history(tmp_path)))
    assert not any(decision.differs for decision in decisions)
    assert decisions[-1].fleet == store.read().fleet == fleet
    store.close()


def test_what_was_not_kept_as_a_whole_was_not_kept(tmp_path):
    store = FleetStore(tmp_path)
    before, _ = turn(Fleet(), events.HostsListed(HOSTS), 0.0)
    store.keep(Fleet(), before, 0.0, 0.0, events.HostsListed(HOSTS), ())
    event = events.JobSubmitted(JobSpec("one", ("true",), "/", 1, 1))
    after, _ = turn(before, event, 1.0)
    with pytest.raises(TypeError):
        store.keep(before, after, 1.0, 1.0, event, [Tell("one", b"no text")])  # type: ignore[arg-type]
    assert store.read().fleet == before
    assert len(list(read_fleet_history(tmp_path))) == 1
    store.close()


def test_a_disk_that_takes_no_more_is_an_error_and_not_a_decision(tmp_path):
    store = FleetStore(tmp_path)
    store._file.execute("PRAGMA max_page_count = 8")
    fleet = Fleet()

    def submit(number: int) -> Fleet:
        event = events.JobSubmitted(JobSpec(f"job{number}", ("true", "x" * 2000), "/", 1, 1))
        after, actions = turn(fleet, event, float(number))
        store.keep(fleet, after, float(number), 0.0, event, actions)
        return after

    for number in range(100):
        try:
            fleet = submit(number)
        except StorageError as error:
            problem = str(error)
            break
    assert "database or disk is full" in problem
    kept = store.read().fleet
    assert kept.jobs.keys() == fleet.jobs.keys()
    store.close()


@pytest.mark.parametrize("content", [b"no database at all, but some text\n" * 99, b""])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    if content:
        with pytest.raises(StorageError, match="cannot be used"):
            FleetStore(tmp_path)
        with pytest.raises(UsageError, match="does not read"):
            list(read_fleet_history(tmp_path))
    else:
        assert FleetStore(tmp_path).read().fleet == Fleet()


def test_its_files_are_readable_for_this_user_alone(tmp_path):
    """Variables of a job's environment may be secrets, and the folder may have been there before."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        store = FleetStore(tmp_path)
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
        assert modes == {FILE: "0o600", f"{FILE}-wal": "0o600", f"{FILE}-shm": "0o600"}
        store.close()
    finally:
        os.umask(before)


def test_a_file_of_another_version_is_refused(tmp_path):
    FleetStore(tmp_path).close()
    file = sqlite3.connect(tmp_path / FILE)
    with file:
        file.execute("UPDATE fact SET value = 'edl_hvd fleet 9'")
    file.close()
    with pytest.raises(StorageError, match=r"holds 'edl_hvd fleet 9'; expected .* name another --state"):
        FleetStore(tmp_path)


def test_there_is_no_history_where_there_is_no_fleet(tmp_path):
    with pytest.raises(UsageError, match="holds no fleet that this user can read; expected the --state"):
        list(read_fleet_history(tmp_path))
    with pytest.raises(UsageError, match="holds no fleet that this user can read; expected the --state"):
        list(read_fleet_history(tmp_path / ("long" * 100)))


@pytest.mark.parametrize("name", ["a#b", "a?mode=rwc", "50%25", "two words", "füße"])
def test_a_history_is_read_in_a_folder_of_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    store = FleetStore(folder)
    store.keep(Fleet(), Fleet(hosts=HOSTS), 1.0, 1.0, events.HostsListed(HOSTS), ())
    store.close()
    assert [entry.event for entry in read_fleet_history(folder)] == [events.HostsListed(HOSTS)]
    assert [path.name for path in tmp_path.iterdir()] == [name]
