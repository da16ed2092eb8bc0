"""Newcomers take the state over while the others train, under ``edlrun``."""

from __future__ import annotations

import pytest
from faults import add_host, kill, pass_by
from harness import Outcome
from training import Training

ONE_HOST = ("localhost:1",)
TWO_HOSTS = ("localhost:1", "127.0.0.1:1")
NEWCOMER = "127.1:0"


def sizes(outcome: Outcome) -> list[int]:
    return [event["size"] for event in outcome.events if event["event"] == "world_formed"]


@pytest.mark.parametrize(
    "training",
    [
        Training(until_size=3, hidden=300, extra=("scheduler",)),
        Training(until_size=3, optimizer="adamw", commit_every=3, loader_workers=1),
    ],
    ids=["sgd-scheduler", "adamw-commits"],
)
def test_newcomers_follow_the_training_and_join_with_its_very_state(edlrun, training):
    faults = (add_host("127.0.0.1:1", step=5), add_host(f"{NEWCOMER[:-2]}:1", after=0, delay_s=0.1))
    outcome = edlrun(ONE_HOST, *faults, training=training)
    assert {line["worker"] for line in outcome.lines("followed")} == {"127.0.0.1:0", NEWCOMER}
    assert "another state than expected" not in outcome.output


def test_a_newcomer_among_members_with_batchnorm_statistics_of_their_own_is_believed(edlrun):
    training = Training(until_size=3, extra=("statistics",))
    outcome = edlrun(TWO_HOSTS, add_host(f"{NEWCOMER[:-2]}:1", step=5), training=training)
    assert [line["worker"] for line in outcome.lines("followed")] == [NEWCOMER]
    assert "another state than expected" not in outcome.output


def test_weights_that_the_script_moves_besides_reach_the_newcomer_all_the_same(edlrun):
    training = Training(until_size=2, extra=("clip",))
    outcome = edlrun(ONE_HOST, add_host("127.0.0.1:1", step=5), training=training)
    assert len(outcome.lines("followed")) == 1
    assert "another state than expected" in outcome.output


def test_a_newcomer_that_dies_while_it_follows_costs_the_others_nothing(edlrun):
    faults = (add_host("127.1:1", step=5), kill(worker=NEWCOMER, at="followed"))
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=3))
    assert sizes(outcome)[-1] == 3


@pytest.mark.parametrize("worker", TWO_HOSTS)
def test_a_member_that_dies_while_a_newcomer_follows_is_done_without(edlrun, worker):
    """One of them is the newcomer's donor."""
    member = worker.replace(":1", ":0")
    faults = (add_host("127.1:1", step=5), pass_by(worker=NEWCOMER, at="following"), kill(worker=member, after=1))
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=3))
    assert outcome.reports[0]["size"] == 3


def test_a_donor_that_dies_in_its_last_word_is_done_without(edlrun):
    """What no optimizer step moves is sent when the world is left, here 100 MB, and the donor is killed meanwhile."""
    donor = "127.0.0.1:0"
    faults = (add_host("127.1:1", step=3), kill(worker=donor, at="ready", step=3))
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=3, commit_every=4, extra=("table",)))
    struck = next(line["t"] for line in outcome.lines("fired") if line["worker"] == donor)
    entered = [line for line in outcome.lines("enter") if line["t"] > struck]
    assert NEWCOMER in {line["worker"] for line in entered}
    assert not [line for line in outcome.lines("followed") if line["t"] < entered[0]["t"]], "the last word was complete"
