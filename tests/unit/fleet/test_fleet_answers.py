"""What a fleet answers to requests, usable ones and others."""

from __future__ import annotations

import json

import pytest

from edl_hvd.cli.fleet import OWN_FLAGS, read_flags
from edl_hvd.errors import UsageError
from edl_hvd.fleet import events, messages
from edl_hvd.fleet.answers import decide, read_request, what_if
from edl_hvd.fleet.hosts_source import read_hosts
from edl_hvd.fleet.messages import Agreed, PlanView, Refused
from edl_hvd.fleet.state import Fleet, FleetRules, JobPhase, JobSpec, total
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import QueueRule
from edl_hvd.protocol import encode

FOUR = (HostSlots("a", 2), HostSlots("b", 2))


def spec(name: str = "one", least: int = 1, most: int = 4, **more) -> JobSpec:
    return JobSpec(name, ("python", "train.py"), "/work", least, most, **more)


def fleet_with(*happened: events.FleetEvent, hosts: tuple[HostSlots, ...] = FOUR, **rules) -> Fleet:
    fleet = Fleet(FleetRules(**rules))
    for event in (events.HostsListed(hosts), *happened):
        fleet, _ = turn(fleet, event, 0.0)
    return fleet


def problem_of(fleet: Fleet, request) -> str:
    verdict = decide(fleet, request)
    assert isinstance(verdict.reply, Refused)
    assert verdict.event is None, "what is refused changes nothing"
    return verdict.reply.problem


@pytest.mark.parametrize(
    "request_",
    [
        messages.SubmitRequest(spec(variables=("A=b=c",), flags=("--drain-lead", "3"))),
        messages.ScaleRequest("one", 2),
        messages.StopRequest("one"),
        messages.ResumeRequest("one"),
        messages.DeleteRequest("one"),
        messages.ClaimRequest("web", 2, 1000, 60.0),
        messages.ClaimRequest("web", 2, 1000, None),
        messages.ReleaseRequest("web"),
        messages.ViewRequest(),
        messages.PlanRequest(FOUR, (spec(),), (messages.ClaimRequest("web", 2, 0, None),)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_reads_as_it_was_written(request_):
    assert read_request(encode(request_)) == request_


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "no JSON"),
        (b"[1, 2]", "'what' is None"),
        (b'{"what": "fly"}', "'what' is 'fly'"),
        (b'{"what": "scalerequest", "job": "one"}', "lacks 'most'"),
        (b'{"what": "scalerequest", "job": "one", "most": "2"}', "expected a whole number"),
        (b'{"what": "viewrequest", "more": 1}', "no field 'more'"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_a_line_that_is_no_request_is_refused(line, problem):
    reply = read_request(line)
    assert isinstance(reply, Refused)
    assert problem in reply.problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"least": 3, "most": 2}, "asks for at least 3 workers (--min) and at most 2 (--max); lower the one"),
        ({"least": 0}, "asks for 0 to 4 workers; expected 1 to"),
        ({"name": "../etc"}, "job name '../etc' is not usable"),
        ({"name": "a" * 64}, "expected 1 to 63"),
        ({"queue": ""}, "queue name '' is not usable"),
        ({"command": []}, "no command that can be run"),
        ({"command": ["a\0b"]}, "no command that can be run"),
        ({"variables": ["=b"]}, "expected NAME=VALUE"),
        ({"retries": -1}, "expected at least 0"),
        ({"priority": 10**10}, "priority 10000000000 is not usable"),
    ],
)
def test_a_job_that_cannot_be_is_refused_when_it_is_read(fields, problem):
    whole = {"name": "one", "command": ["true"], "folder": "/", "least": 1, "most": 4, **fields}
    reply = read_request(json.dumps({"what": "submitrequest", "spec": whole}).encode())
    assert isinstance(reply, Refused)
    assert problem in reply.problem


def test_two_jobs_of_one_name_are_refused_and_the_first_is_not_touched():
    fleet = fleet_with(events.JobSubmitted(spec()))
    assert "there is a job one already, which is starting" in problem_of(fleet, messages.SubmitRequest(spec(most=2)))


def test_a_job_that_can_never_fit_is_refused():
    fleet = fleet_with()
    problem = problem_of(fleet, messages.SubmitRequest(spec(least=5, most=5)))
    assert problem.startswith("job one needs at least 5 slots, and all hosts of the fleet together have 4; lower --min")
    assert decide(fleet, messages.SubmitRequest(spec(least=4))).event == events.JobSubmitted(spec(least=4))
    uneven = fleet_with(hosts=(HostSlots("a", 4), HostSlots("b", 2)), whole_hosts=True)
    assert "all whole hosts of the fleet together have 4" in problem_of(
        uneven, messages.SubmitRequest(spec(least=5, most=8))
    )


@pytest.mark.parametrize("hosts", [FOUR, ()], ids=["hosts", "no hosts yet"])
def test_a_job_that_the_limit_of_its_queue_never_holds_is_refused(hosts):
    fleet = fleet_with(hosts=hosts, queues=(QueueRule("vision", 2.0, 1), QueueRule("speech", 1.0)))
    assert problem_of(fleet, messages.SubmitRequest(spec(least=2, queue="vision"))) == (
        "job one needs at least 2 slots, and all jobs of queue 'vision' together may have 1; lower --min, or give "
        "another --queue"
    )
    for fits in (spec(least=1, queue="vision"), spec(least=2, queue="speech"), spec(least=2)):
        assert decide(fleet, messages.SubmitRequest(fits)).event == events.JobSubmitted(fits)


def test_a_job_that_whole_hosts_raise_above_the_limit_of_its_queue_is_refused():
    fleet = fleet_with(whole_hosts=True, queues=(QueueRule("vision", 1.0, 3),))
    assert "needs at least 4 slots" in problem_of(fleet, messages.SubmitRequest(spec(least=3, queue="vision")))
    assert not isinstance(decide(fleet, messages.SubmitRequest(spec(least=2, queue="vision"))).reply, Refused)


def test_a_job_whose_hosts_have_gone_waits_and_says_why():
    fleet = fleet_with(events.JobSubmitted(spec(least=4)), hosts=FOUR)
    fleet, _ = turn(fleet, events.RunStarted("one", 7, "token"), 1.0)
    fleet, _ = turn(fleet, events.RunEnded("one", 75, "all hosts were left", 3), 2.0)
    fleet, _ = turn(fleet, events.HostsListed((HostSlots("a", 2),)), 3.0)
    fleet, _ = turn(fleet, events.RunStarted("one", 8, "token"), 3.0)
    fleet, _ = turn(fleet, events.RunEnded("one", 75, "all hosts were left", 5), 4.0)
    assert fleet.jobs["one"].phase is JobPhase.WAITING
    assert fleet.jobs["one"].reason == "NeverFits"


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (messages.ScaleRequest("two", 3), "there is no job 'two'; the jobs are one"),
        (messages.ScaleRequest("one", 1), "expected 2, its minimum, to"),
        (messages.StopRequest("two"), "there is no job 'two'"),
        (messages.ResumeRequest("one"), "expected one that was stopped or has failed"),
        (messages.DeleteRequest("two"), "there is no job 'two'"),
        (messages.DeleteRequest("one"), "job one is starting; stop it first: edl-hvd fleet stop one"),
        (messages.ReleaseRequest("web"), "there is no claim 'web'; there are no claims"),
        (messages.ClaimRequest("web", 5, 0, None), "needs 5 slots, and all hosts of the fleet together have 4"),
        (messages.ClaimRequest("web", 0, 0, None), "asks for 0 slots; expected 1"),
        (messages.ClaimRequest("Web!", 1, 0, None), "claim name 'Web!' is not usable"),
        (messages.ClaimRequest("web", 1, 0, -1.0), "more than 0 s"),
    ],
)
def test_a_request_that_means_nothing_is_refused(request_, problem):
    assert problem in problem_of(fleet_with(events.JobSubmitted(spec(least=2))), request_)


def test_an_ended_job_is_neither_scaled_nor_stopped_but_a_failed_one_goes_on():
    begun = (events.JobSubmitted(spec()), events.RunStarted("one", 7, "token"))
    complete = fleet_with(*begun, events.RunEnded("one", 0, ""))
    assert "job one is complete" in problem_of(complete, messages.ScaleRequest("one", 2))
    assert "job one is complete already" in problem_of(complete, messages.StopRequest("one"))
    failed = fleet_with(*begun, events.RunEnded("one", 1, "a mistake"))
    assert decide(failed, messages.ResumeRequest("one")).event == events.JobResumeAsked("one")


def test_a_deleted_job_is_gone_and_its_name_is_free_as_soon_as_its_folder_is():
    begun = (events.JobSubmitted(spec()), events.RunStarted("one", 7, "token"))
    left_over = fleet_with(*begun, events.RunObserved("one", FOUR[:1]), events.RunEnded("one", 0, ""))
    assert "some of its workers are still ending" in problem_of(left_over, messages.DeleteRequest("one"))
    complete = fleet_with(*begun, events.RunEnded("one", 0, ""))
    event = decide(complete, messages.DeleteRequest("one")).event
    assert event == events.JobDeleted("one")
    deleted, actions = turn(complete, event, 1.0)
    assert events.RemoveFolder("one") in actions
    assert list(deleted.jobs) == []
    assert "is not removed yet" in problem_of(deleted, messages.SubmitRequest(spec()))
    again, _ = turn(deleted, events.FolderRemoved("one"), 2.0)
    assert decide(again, messages.SubmitRequest(spec())).event == events.JobSubmitted(spec())


def test_what_if_says_what_would_be_and_does_nothing():
    fleet = fleet_with(events.JobSubmitted(spec()))
    request = messages.PlanRequest((), (spec("two"),), (messages.ClaimRequest("web", 1, 1000, None),))
    view = what_if(fleet, request, 5.0)
    assert isinstance(view, PlanView)
    gets = {share.name: share.gets for share in view.shares}
    assert gets.keys() == {"one", "two", "web"}
    assert sum(gets.values()) == 4
    assert min(gets.values()) >= 1
    assert {share.name: share.has for share in view.shares} == {"one": 4, "two": 0, "web": 0}
    more = what_if(fleet, messages.PlanRequest((HostSlots("a", 1),), (spec("two"),)), 5.0)
    assert isinstance(more, PlanView)
    assert sum(total(share.hosts) for share in more.shares) == 1
    assert isinstance(what_if(fleet, messages.PlanRequest((), (spec(),)), 5.0), Refused)


def test_what_if_says_why_a_claim_would_have_no_room():
    claims = (messages.ClaimRequest("db", 3, 1000, None), messages.ClaimRequest("web", 2, 1000, None))
    view = what_if(fleet_with(events.JobSubmitted(spec())), messages.PlanRequest((), (), claims), 5.0)
    assert isinstance(view, PlanView)
    says = {share.name: share.why for share in view.shares}
    assert says["db"] == "3 of 3 slots, priority 1000"
    assert says["web"].startswith("0 of 2 slots, priority 1000; WaitsForRoom: it needs 2 slots, and at most 1 can be")


def test_agreements_name_the_next_step():
    fleet = fleet_with(events.JobSubmitted(spec()))
    reply = decide(fleet, messages.StopRequest("one")).reply
    assert reply == Agreed("one saves a checkpoint and stops; go on with: edl-hvd fleet resume one")


@pytest.mark.parametrize(
    "flag", [*OWN_FLAGS, "-n", "--num-proc", "--min-num-proc", "--max-num-proc=", "-H", "-hostfile"]
)
def test_flags_that_the_fleet_gives_itself_are_refused(flag):
    with pytest.raises(UsageError, match="the fleet gives"):
        read_flags(f"--drain-lead 3 {flag} x")


@pytest.mark.parametrize(
    ("hosts", "discover", "problem"),
    [
        (None, None, "-H and --discover are missing; expected one of them"),
        ("a:1", "file:x", "both say where the hosts are"),
        ("a:x", None, "-H 'a:x': .*not understood"),
        (None, "file:{empty}", "lists no host"),
        (None, "file:{missing}", "cannot read the hosts file"),
        (None, "fly:x", "--discover 'fly:x'"),
    ],
)
def test_a_source_that_lists_nobody_is_refused(tmp_path, hosts, discover, problem):
    (tmp_path / "empty").write_text("# nobody\n")
    where = discover and discover.format(empty=tmp_path / "empty", missing=tmp_path / "missing")
    with pytest.raises(UsageError, match=problem):
        read_hosts(hosts, where)
