"""That the sentence of a share is true: of each plan for a random cluster, and of cases by hand."""

from __future__ import annotations

import re

import pytest
from random_clusters import Question, question_with_services, random_question

from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Curve, JobAsk, Plan, PlanRules, QueueRule, Room

LINEAR = (Curve((1, 8), (1.0, 8.0)),)


def reasons(slots: int, asks: list[JobAsk], *queues: QueueRule) -> dict[str, str]:
    """The reasons on one host."""
    return {share.job: share.why for share in plan([Room("a", slots)], [], asks, PlanRules(queues=queues), 0.0).shares}


@pytest.mark.parametrize(
    ("asks", "queues", "why"),
    [
        (("default", "default"), (), "1 of 4: its minimum; no further slot is free"),
        (("default",), (QueueRule("default", limit=1),), "1 of 4: its minimum; the jobs of queue 'default' together"
                                                         " may have 1"),
    ],
)  # fmt: skip
def test_a_job_without_a_rival_is_not_said_to_have_one(
    asks: tuple[str, ...], queues: tuple[QueueRule, ...], why: str
) -> None:
    jobs = [JobAsk(f"job{number}", queue, most=4, curves=LINEAR) for number, queue in enumerate(asks)]
    assert set(reasons(2, jobs, *queues).values()) == {why}


def untrue(question: Question, found: Plan) -> list[str]:
    """The jobs whose reason names others that have not what it says."""
    asks = {ask.job: ask for ask in question.asks}
    got = {share.job: share.slots for share in found.shares}
    limits = {rule.queue: rule.limit for rule in question.rules.queues}
    wrong = []
    for share in found.shares:
        ask, why = asks[share.job], share.why
        takers = re.findall(r"the minimum of job '([^']*)'", why)
        rich = [job for job, slots in got.items() if job != share.job and slots > asks[job].least]
        if (
            not set(takers) <= got.keys()
            or ("it gives slots" in why and share.slots >= ask.held)
            or ("worth more to other jobs" in why and not rich)
            or ("together may have" in why and limits.get(ask.queue) is None)
        ):
            wrong.append(share.job)
    return wrong


@pytest.mark.parametrize("ask", [random_question, question_with_services])
def test_a_reason_names_no_job_that_has_not_what_it_says(ask) -> None:
    questions = {seed: ask(seed) for seed in range(500)}
    found = {seed: wrong for seed, question in questions.items() if (wrong := untrue(question, question.answer()))}
    assert found == {}
