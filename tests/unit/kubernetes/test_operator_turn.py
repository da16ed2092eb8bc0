"""Turns of the operator on clusters that are values: what is done is applied, up to any point, and seen again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl_hvd.errors import UsageError
from edl_hvd.job_report import JobReport
from edl_hvd.kubernetes.parsing import quantity, read_job, read_pod, requested
from edl_hvd.kubernetes.planned import ResizeGuest
from edl_hvd.kubernetes.snapshot import (
    EXTRA,
    EXTRA_CLASS,
    FLOOR,
    FLOOR_CLASS,
    LAUNCHER,
    NODE_ANNOTATION,
    ROLE_LABEL,
    TIER_LABEL,
    WORKER,
    ClusterSnapshot,
    Placement,
    PodGroup,
    SeenJob,
    SeenNode,
    SeenPod,
    Taint,
)
from edl_hvd.kubernetes.status import events_of
from edl_hvd.kubernetes.turn import Action, CreatePod, DeletePod, WriteStatus, decide

ASKED = st.tuples(st.integers(1, 3), st.integers(0, 6), st.sampled_from(["500m", "1", "2"]))
PRIORITIES = {FLOOR_CLASS: 0, EXTRA_CLASS: -10}


def item(name: str, least: Any, most: Any, cpu: str = "1", **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "i", "command": ["python", "t.py"], "resources": {"requests": {"cpu": cpu}}}
    workers = {"min": least, "max": most, "template": {"spec": {"containers": [container]}}}
    return {
        "metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1",
                     "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"workers": workers, **spec},
    }  # fmt: skip


class World:
    """A cluster as values: pods that are created are bound and run at once, pods that are deleted leave later."""

    def __init__(self, nodes: dict[str, int], *items: dict[str, Any]) -> None:
        self.nodes = tuple(SeenNode(name, {"cpu": cores * 1000}, True) for name, cores in nodes.items())
        self.items = {one["metadata"]["name"]: one for one in items}
        self.pods: dict[str, SeenPod] = {}
        self.reports: dict[str, JobReport] = {}
        self.now_s, self.born, self.version = 1_800_000_000.0, 0, 1

    def decide(self) -> tuple[Action, ...]:
        self.now_s += 1
        snapshot = ClusterSnapshot(self.jobs(), self.nodes, tuple(self.pods.values()), PRIORITIES, self.reports)
        return decide(snapshot, self.now_s)

    def jobs(self) -> tuple[SeenJob, ...]:
        return tuple(map(read_job, self.items.values()))

    def do(self, action: Action) -> None:
        assert not isinstance(action, ResizeGuest)
        if isinstance(action, WriteStatus):
            self.version += 1
            one = self.items[action.job.name]
            one["status"] = dict(action.status)
            one["metadata"]["resourceVersion"] = str(self.version)
        elif isinstance(action, DeletePod):
            if action.pod.is_over or action.grace_s == 0:
                self.pods.pop(action.pod.name)
            else:
                self.pods[action.pod.name] = replace(self.pods[action.pod.name], is_deleting=True)
        elif action.manifest["metadata"]["name"] not in self.pods:
            self._bind(action)
            self.check_rooms()

    def _bind(self, action: CreatePod) -> None:
        meta, spec = action.manifest["metadata"], action.manifest["spec"]
        requests, role = requested(spec), meta["labels"][ROLE_LABEL]
        node = meta["annotations"].get(NODE_ANNOTATION) or self.nodes[0].name
        self.born += 1
        self.pods[meta["name"]] = SeenPod(
            "n", meta["name"], f"pod-{self.born}", node, role == WORKER, "Running", created_s=self.now_s,
            requests=requests if role == WORKER else {}, priority=PRIORITIES[spec["priorityClassName"]],
            job=action.job.uid, role=role, tier=meta["labels"].get(TIER_LABEL, ""),
            group=read_pod({**action.manifest, "metadata": {**meta, "uid": ""}}).group,
        )  # fmt: skip

    def leave(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_deleting}

    def settle(self) -> None:
        for _ in range(60):
            actions = self.decide()
            for action in actions:
                self.do(action)
            if not actions and not any(pod.is_deleting for pod in self.pods.values()):
                return
            self.leave()
        raise AssertionError(f"it does not settle: {self.decide()}")

    def workers(self, job: str) -> list[SeenPod]:
        return [pod for pod in self.pods.values() if pod.job == f"uid-{job}" and pod.role == WORKER]

    def check_rooms(self) -> None:
        for node in self.nodes:
            used = sum(pod.slots("cpu") for pod in self.pods.values() if pod.node == node.name and not pod.is_over)
            assert used <= node.room("cpu"), f"{node.name} is given twice"

    def condition(self, job: str, kind: str) -> tuple[str, str]:
        found = {one["type"]: one for one in self.items[job]["status"]["conditions"]}
        return found[kind]["status"], found[kind]["reason"]


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 6), st.sampled_from(["500m", "1", "2"])), min_size=1, max_size=4
    ),
    st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.integers(0, 3)), max_size=8),
)
@example([6], [(1, 0, "500m"), (2, 0, "2"), (1, 1, "1"), (1, 0, "2")], [(8, False, 0)])
@example([6, 4], [(1, 2, "1"), (1, 0, "2"), (2, 1, "1"), (1, 2, "1")], [(7, False, 0), (4, False, 0)])
def test_an_operator_that_is_killed_after_any_action_does_no_harm(
    cores: list[int], asked: list[tuple[int, int, str]], kills: list[tuple[int, bool, int]]
) -> None:
    jobs = [item(f"j{number}", least, least + more, cpu) for number, (least, more, cpu) in enumerate(asked)]
    world = World({f"node-{number}": count for number, count in enumerate(cores)}, *jobs)
    for done, has_left, lost in kills:
        for action in world.decide()[:done]:
            world.do(action)
        if has_left:
            world.leave()
        for name in sorted(world.pods)[:lost]:
            world.pods.pop(name)
    world.settle()
    world.check_rooms()
    before = dict(world.pods)
    for number, (least, more, _) in enumerate(asked):
        held = len(world.workers(f"j{number}"))
        assert held == 0 or least <= held <= least + more
    assert world.decide() == ()
    assert world.pods == before


def test_room_is_given_on_when_its_pods_have_gone() -> None:
    world = World({"a": 4}, item("one", 1, 4))
    world.settle()
    assert len(world.workers("one")) == 4
    world.items["two"] = item("two", 2, 2)
    for action in world.decide():
        world.do(action)
    assert sum(pod.is_deleting for pod in world.workers("one")) == 2
    assert world.workers("two") == []
    again = world.decide()
    assert not any(isinstance(action, DeletePod) for action in again), "no more is taken than needed"
    world.leave()
    world.settle()
    assert (len(world.workers("one")), len(world.workers("two"))) == (2, 2)


def test_a_worker_of_the_least_stays_until_the_one_that_replaces_it_runs() -> None:
    world = World({"a": 1, "b": 1}, item("one", 1, 1))
    world.settle()
    [old] = world.workers("one")
    other = "b" if old.node == "a" else "a"
    world.items["one"]["status"]["placed"]["nodes"] = [{"node": other, "workers": 1}]
    new = replace(old, name="one-worker-7", uid="pod-7", node=other, phase="Pending")
    world.pods[new.name] = new

    def deleted() -> list[str]:
        return [action.pod.name for action in world.decide() if isinstance(action, DeletePod)]

    assert deleted() == [], "the job would have no worker"
    waiting = replace(new, is_bound=False)
    world.pods[new.name] = waiting
    assert deleted() == [], "the scheduler has not looked at it yet"
    for held in (replace(waiting, unschedulable_s=world.now_s), replace(waiting, gates=("kueue.x-k8s.io/admission",))):
        world.pods[new.name] = held
        assert deleted() == [old.name], "one that has no place may need the room of the old one"
    world.pods[new.name] = replace(new, phase="Running")
    assert deleted() == [old.name]


def test_workers_of_the_least_stay_while_their_successors_wait_for_room() -> None:
    """The room of the successors is free, or of pods that leave; where it is the old workers' own, nobody waits."""
    world = World({"a": 1, "b": 1, "c": 1}, item("one", 1, 1), item("two", 1, 1))
    world.settle()
    (one,), (two,) = world.workers("one"), world.workers("two")
    [other] = {"a", "b", "c"} - {one.node, two.node}

    def moved(**to: str) -> list[str]:
        for job, node in to.items():
            world.items[job]["status"]["placed"]["nodes"] = [{"node": node, "workers": 1}]
        return [action.pod.name for action in world.decide() if isinstance(action, DeletePod)]

    assert moved(one=other) == [], "its successor's node is free"
    guest = SeenPod("n", "guest", "pod-9", other, True, "Running", True, requests={"cpu": 1000})
    world.pods["guest"] = guest
    assert moved(one=other) == [], "the pod there leaves"
    del world.pods["guest"]
    assert sorted(moved(one=two.node, two=one.node)) == [one.name, two.name], "each waits for the other's room"
    assert moved(one=two.node, two=other) == [one.name], "two's successor has room at once"


@pytest.mark.parametrize("least", [1, 2])
def test_a_job_of_extras_alone_gets_workers_of_its_minimum_again(least: int) -> None:
    """One extra after the other is replaced, once the node with the minimum has gone."""
    world = SlowWorld({"a": 1, "b": 1, "c": 1, "d": 1}, item("one", least, 4))
    for _ in range(20):
        world.turn()
    lost = next(pod for pod in world.workers("one") if pod.tier == FLOOR)
    world.nodes = tuple(node for node in world.nodes if node.name != lost.node)
    del world.pods[lost.name]
    for _ in range(40):
        world.turn()
        assert world.running("one") >= least
    assert sum(pod.tier == FLOOR for pod in world.workers("one")) == least
    assert (len(world.workers("one")), world.decide()) == (3, ())


def test_the_scheduler_and_the_plan_take_a_worker_once() -> None:
    """A service comes to a node of two jobs: the scheduler takes one's extra there, and the plan not the other's."""
    world = World({"a": 2, "b": 2, "c": 2}, item("one", 1, 4), item("two", 1, 4))
    world.settle()
    least, mine = (pod for pod in world.workers("one") if pod.node == "a")
    extra = next(pod for pod in world.workers("two") if pod.node == "b")
    assert (least.tier, mine.tier, extra.tier) == (FLOOR, EXTRA, EXTRA)
    world.pods[mine.name] = replace(mine, node="b")
    world.items["one"]["status"]["placed"]["nodes"] = [{"node": "a", "workers": 1}, {"node": "b", "workers": 2}]
    world.pods[extra.name] = replace(extra, node="a")
    world.items["two"]["status"]["placed"]["nodes"] = [{"node": "a", "workers": 1}, {"node": "c", "workers": 2}]
    assert world.decide() == ()
    world.pods[extra.name] = replace(extra, node="a", is_deleting=True)
    world.pods["web"] = SeenPod("web", "web", "web-1", requests={"cpu": 1000}, nominated="a")
    deleted = [action.pod.name for action in world.decide() if isinstance(action, DeletePod)]
    assert deleted == []


class SlowWorld(World):
    """Workers run three turns after they are created, and have gone three turns after they were told to leave."""

    def __init__(self, nodes: dict[str, int], *items: dict[str, Any]) -> None:
        super().__init__(nodes, *items)
        self.left_s: dict[str, float] = {}

    def turn(self) -> None:
        for action in self.decide():
            self.do(action)
        for name, pod in list(self.pods.items()):
            if pod.is_deleting and self.now_s >= self.left_s.setdefault(name, self.now_s) + 3:
                del self.pods[name], self.left_s[name]
            elif pod.role == WORKER and not pod.is_deleting:
                is_slow = self.now_s < pod.created_s + 3
                self.pods[name] = replace(pod, phase="Pending" if is_slow else "Running")
        for name, pod in list(self.pods.items()):
            if pod.nominated and self.free(pod.nominated) >= 0:
                self.pods[name] = replace(pod, nominated="", node=pod.nominated, is_bound=True, phase="Running")

    def free(self, node: str) -> int:
        """Tenths of cores of a node that no pod has or waits for."""
        there = [pod for pod in self.pods.values() if node in (pod.node, pod.nominated) and not pod.is_over]
        [room] = [one.room("cpu") for one in self.nodes if one.name == node]
        return room - sum(pod.slots("cpu") for pod in there)

    def serve(self, name: str, choice: int) -> None:
        """A service of one core comes: the scheduler binds it, or takes an extra for it, or lets it wait."""
        service = SeenPod("web", name, name, requests={"cpu": 1000}, created_s=self.now_s)
        roomy = [node.name for node in self.nodes if self.free(node.name) >= 10]
        extras = sorted(name for name, pod in self.pods.items() if pod.tier == EXTRA and not pod.is_deleting)
        if roomy:
            self.pods[name] = replace(service, node=roomy[0], is_bound=True, phase="Running")
        elif extras:
            victim = self.pods[extras[choice % len(extras)]]
            self.pods[victim.name] = replace(victim, is_deleting=True)
            self.pods[name] = replace(service, nominated=victim.node)
        else:
            self.pods[name] = replace(service, unschedulable_s=self.now_s)

    def running(self, job: str) -> int:
        return sum(pod.phase == "Running" and not pod.is_deleting for pod in self.workers(job))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(2, 4), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 2)), max_size=8),
)
def test_no_job_has_fewer_than_its_least_while_services_come_and_go(
    cores: list[int], asked: list[tuple[int, int]], steps: list[tuple[int, list[int], int]]
) -> None:
    jobs = [item(f"j{number}", least, least + more) for number, (least, more) in enumerate(asked)]
    world = SlowWorld({f"node-{number}": count for number, count in enumerate(cores)}, *jobs)
    leasts = {f"j{number}": least for number, (least, _) in enumerate(asked)}
    had: set[str] = set()

    def play(turns: int) -> None:
        for _ in range(turns):
            world.turn()
            world.check_rooms()
            had.update(job for job, least in leasts.items() if world.running(job) >= least)
            assert {job: world.running(job) for job in had if world.running(job) < leasts[job]} == {}

    play(20)
    services = 0
    for turns, come, go in steps:
        for choice in come:
            services += 1
            world.serve(f"web-{services}", choice)
        for name in sorted(name for name in world.pods if name.startswith("web-"))[:go]:
            del world.pods[name]
        play(turns)
    play(20)


def test_a_launcher_that_failed_counts_once() -> None:
    world = World({"a": 2}, item("one", 1, 1, retries=1))
    world.settle()
    world.pods["one-launcher"] = replace(world.pods["one-launcher"], phase="Failed", exit_code=1)
    world.do(world.decide()[0])
    assert world.items["one"]["status"]["launcher"]["failures"] == 1
    assert not any(isinstance(action, WriteStatus) for action in world.decide()), "the same launcher is seen again"
    world.settle()
    assert world.pods["one-launcher"].phase == "Running"
    world.pods["one-launcher"] = replace(world.pods["one-launcher"], phase="Failed", exit_code=75)
    world.settle()
    assert world.items["one"]["status"]["launcher"]["failures"] == 1
    world.pods["one-launcher"] = replace(world.pods["one-launcher"], phase="Failed", exit_code=1)
    world.settle()
    assert world.condition("one", "Failed") == ("True", "LauncherFailed")
    assert world.workers("one") == []


def test_a_job_that_is_suspended_leaves_with_its_launcher_first() -> None:
    world = World({"a": 2}, item("one", 1, 2))
    world.settle()
    world.items["one"]["spec"]["suspend"] = True
    deleted = [action.pod.role for action in world.decide() if isinstance(action, DeletePod)]
    assert deleted == [LAUNCHER]
    world.settle()
    assert world.pods == {}
    assert world.condition("one", "Suspended") == ("True", "UserAsked")


def test_workers_that_fail_at_once_are_not_replaced_without_end() -> None:
    world = World({"a": 8}, item("one", 1, 2))
    world.settle()
    for _ in range(3):
        for pod in world.workers("one"):
            failed = replace(pod, phase="Failed", exit_code=1, finished_s=world.now_s)
            world.pods[pod.name] = pod if pod.is_over else failed
        for action in world.decide():
            world.do(action)
    assert len(world.workers("one")) == 4
    assert not any(isinstance(action, CreatePod) for action in world.decide())
    world.now_s += 20
    world.settle()
    assert len(world.workers("one")) == 2


def test_a_pod_of_others_that_waits_gets_room_once() -> None:
    world = World({"a": 4}, item("one", 1, 4))
    world.settle()
    world.pods["web"] = SeenPod("n", "web", "w", requests={"cpu": 2000}, unschedulable_s=world.now_s)
    world.settle()
    assert len(world.workers("one")) == 2
    world.now_s += 500
    world.settle()
    assert len(world.workers("one")) == 4, "it needs something else than room"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min": 3, "max": 2}, "MinAboveMax"),
        ({"min": "two"}, "BadNumbers"),
        ({"template": {}}, "BadTemplate"),
        ({"template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}}, "BadTemplate"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused_with_its_reason(change: dict[str, Any], reason: str) -> None:
    world = World({"a": 4}, item("bad", 1, 1), item("good", 1, 1))
    world.items["bad"]["spec"]["workers"].update(change)
    world.settle()
    assert world.condition("bad", "Accepted") == ("False", reason)
    assert (len(world.workers("bad")), len(world.workers("good"))) == (0, 1)


@pytest.mark.parametrize(
    ("name", "reason"), [("3d", "BadName"), ("a.b", "BadName"), ("a" * 51, "NameTooLong"), ("a-3", "Valid")]
)
def test_a_name_that_no_service_can_have_is_refused(name: str, reason: str) -> None:
    world = World({"a": 4}, item(name, 1, 1))
    world.settle()
    assert world.condition(name, "Accepted") == (str(reason == "Valid"), reason)
    assert len(world.workers(name)) == (reason == "Valid")


def test_events_of_one_change_have_the_same_names_whoever_writes_them() -> None:
    world = World({"a": 4}, item("one", 1, 1))
    [written] = [action for action in world.decide() if isinstance(action, WriteStatus)]
    found = events_of(written.job, written.status, world.now_s)
    assert {event["reason"] for event in found} == {"Valid", "Floor", "Grown"}
    again = events_of(written.job, written.status, world.now_s + 5)
    assert [event["metadata"] for event in again] == [event["metadata"] for event in found]


@pytest.mark.parametrize("text", ["", "-1", "1 Gi", "lots", "1Zi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="quantity"):
        quantity(text)


def test_workers_go_where_they_bring_more() -> None:
    world = World({"a": 4, "b": 4}, item("flat", 1, 8), item("steep", 1, 8))
    world.settle()
    assert len(world.workers("flat")) == len(world.workers("steep")) == 4, "of none anything is known"
    sizes = tuple(range(1, 9))
    world.reports = {
        "uid-flat": JobReport("training", 4, 9, sizes=sizes, goodput=(100.0, *(101.0 + 0.1 * one for one in range(7)))),
        "uid-steep": JobReport("training", 4, 9, sizes=sizes, goodput=tuple(100.0 * one for one in sizes)),
    }
    world.now_s += 3600
    world.settle()
    assert len(world.workers("steep")) > 5 > len(world.workers("flat")) >= 1


def test_a_curve_that_is_none_counts_as_unknown() -> None:
    world = World({"a": 4}, item("job", 1, 4))
    world.settle()
    world.items["job"]["status"]["measured"] = {"sizes": [4, 2], "goodput": [1.0, -1.0]}
    world.settle()
    assert len(world.workers("job")) == 4


def test_a_job_begins_with_what_another_of_its_family_has_measured() -> None:
    world = World({"a": 6}, item("one", 1, 4, family="text"))
    world.settle()
    rows = [[1, 8, 1, 0.1, 1, 1]]
    world.items["one"]["status"]["measured"] = {"sizes": [1, 2, 4], "goodput": [10.0, 10.1, 10.2], "timings": rows}
    world.items["two"] = item("two", 1, 4, family="text")
    world.items["other"] = item("other", 1, 4, family="else")
    elsewhere = world.items["elsewhere"] = item("elsewhere", 1, 4, family="text")
    elsewhere["metadata"]["namespace"] = "m"
    given = {
        action.job.name: {one["name"]: one.get("value") for one in container["env"]}
        for action in world.decide() if isinstance(action, CreatePod)
        for container in action.manifest["spec"]["containers"] if container["command"][0] == "edlrun"
    }  # fmt: skip
    assert {name: found.get("EDL_HVD_FAMILY_TIMINGS") for name, found in given.items()} == {
        "two": "[[1, 8, 1, 0.1, 1, 1]]", "other": None, "elsewhere": None,
    }  # fmt: skip
    del world.items["elsewhere"]
    world.now_s += 3600
    world.settle()
    workers = {name: len(world.workers(name)) for name in world.items}
    assert workers == {"one": 1, "two": 1, "other": 4}, "what does not scale is given one, also before it has trained"


def test_measurements_that_somebody_has_spoilt_count_as_none() -> None:
    world = World({"a": 4}, item("one", 1, 2, family="text"), item("two", 1, 2, family="text"))
    world.settle()
    world.items["one"]["status"]["measured"] = {"sizes": [2, 1], "goodput": [1.0, 1.0], "timings": [["x"]]}
    world.settle()
    assert {name: len(world.workers(name)) for name in world.items} == {"one": 2, "two": 2}


def test_a_job_of_a_queue_hands_its_workers_to_kueue() -> None:
    queued = item("job", 2, 3)
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    world, made = World({"a": 4}, queued), {}
    for _ in range(2):
        for action in world.decide():
            world.do(action)
            if isinstance(action, CreatePod):
                made[action.manifest["metadata"]["name"]] = action.manifest["metadata"]
    least, extra, launcher = made["job-worker-0"], made["job-worker-2"], made["job-launcher"]
    assert least["labels"]["kueue.x-k8s.io/queue-name"] == extra["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert least["labels"]["kueue.x-k8s.io/pod-group-name"].startswith("job-")
    assert least["annotations"] | {
        "kueue.x-k8s.io/pod-group-total-count": "2", "kueue.x-k8s.io/role-hash": "worker",
        "kueue.x-k8s.io/retriable-in-group": "false",
    } == least["annotations"]  # fmt: skip
    assert "kueue.x-k8s.io/pod-group-name" not in extra["labels"], "it can be taken by itself"
    assert not any("kueue" in name for name in {**launcher["labels"], **launcher["annotations"]})
    plain = World({"a": 4}, item("job", 2, 3)).decide()
    assert "kueue" not in str([action.manifest for action in plain if isinstance(action, CreatePod)])


POOLS = (
    SeenNode("plain", {"cpu": 4000}, True),
    SeenNode("fast", {"cpu": 4000}, True, {"pool": "fast"}),
    SeenNode("taken", {"cpu": 4000}, True, {"pool": "taken"}, (Taint("team", "vision", "NoSchedule"),)),
)


def placed(world: World, job: str) -> set[str]:
    world.settle()
    return {pod.node for pod in world.workers(job)}


def pooled(name: str, least: int, most: int, **spec: Any) -> dict[str, Any]:
    made = item(name, least, most)
    made["spec"]["workers"]["template"]["spec"].update(spec)
    return made


def test_a_job_goes_where_its_labels_and_tolerations_let_it() -> None:
    vision = [{"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}]
    for spec, nodes in (
        ({"nodeSelector": {"pool": "fast"}}, {"fast"}),
        ({"nodeSelector": {"pool": "taken"}, "tolerations": vision}, {"taken"}),
        ({"nodeSelector": {"pool": "taken"}, "tolerations": [{"operator": "Exists"}]}, {"taken"}),
        ({"tolerations": [{"key": "team", "value": "speech"}]}, {"plain", "fast"}),
        ({}, {"plain", "fast"}),
    ):
        world = World({}, pooled("job", 1, 12, **spec))
        world.nodes = POOLS
        assert placed(world, "job") == nodes, spec


def test_tolerations_that_differ_in_their_value_alone_are_told_apart() -> None:
    def tainted(name: str) -> SeenNode:
        return SeenNode(name, {"cpu": 4000}, True, {}, (Taint("team", name, "NoSchedule"),))

    def for_team(name: str) -> dict[str, Any]:
        return pooled(name, 1, 4, tolerations=[{"key": "team", "value": name, "effect": "NoSchedule"}])

    world = World({}, for_team("speech"), for_team("vision"))
    world.nodes = (tainted("speech"), tainted("vision"))
    assert placed(world, "speech") == {"speech"}
    assert placed(world, "vision") == {"vision"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=6), st.one_of(st.none(), st.floats(0, 1e15)),
    st.one_of(st.none(), st.floats(0, 1e15)),
)  # fmt: skip
def test_no_report_spoils_the_plan_of_the_others(
    goodput: list[float], left: float | None, change_s: float | None
) -> None:
    world = World({"a": 6, "b": 4}, item("liar", 1, 8), item("honest", 2, 8))
    world.settle()
    world.reports = {
        "uid-liar": JobReport("training", 1, 9, None, None, tuple(range(1, len(goodput) + 1)), tuple(goodput), left,
                              change_s)
    }  # fmt: skip
    world.now_s += 3600
    world.decide()
    for action in world.decide():
        world.do(action)
    world.settle()
    assert len(world.workers("honest")) >= 2


def test_a_job_that_no_node_admits_waits_and_says_so() -> None:
    world = World({}, pooled("job", 1, 2, nodeSelector={"pool": "none"}))
    world.nodes = POOLS
    assert placed(world, "job") == set()
    assert world.condition("job", "Accepted") == ("False", "NeverFits")
    assert "hosts of kind pool=none" in world.items["job"]["status"]["why"]


def test_jobs_for_unlike_nodes_share_those_that_admit_both() -> None:
    world = World({}, pooled("picky", 2, 4, nodeSelector={"pool": "fast"}), item("easy", 1, 8))
    world.nodes = POOLS
    assert placed(world, "picky") == {"fast"}
    assert len(world.workers("picky")) >= 2
    assert len(world.workers("easy")) >= 4
    assert "taken" not in placed(world, "easy")


def test_a_job_moves_to_nodes_that_others_cannot_use_and_never_stands_still() -> None:
    world = SlowWorld({}, item("easy", 1, 4))
    world.nodes = POOLS[1:2]
    for _ in range(20):
        world.turn()
    assert [pod.node for pod in world.workers("easy")] == ["fast"] * 4
    world.nodes = POOLS
    world.items["picky"] = pooled("picky", 1, 4, nodeSelector={"pool": "fast"})
    for _ in range(60):
        world.turn()
        assert any(pod.phase == "Running" and not pod.is_deleting for pod in world.workers("easy"))
    assert [pod.node for pod in world.workers("easy")] == ["plain"] * 4
    assert [pod.node for pod in world.workers("picky")] == ["fast"] * 4


def test_a_job_in_a_queue_stays_on_its_nodes_where_a_move_would_stop_it() -> None:
    queued = item("easy", 1, 4)
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    world = World({}, queued)
    world.nodes = POOLS[1:2]
    world.settle()
    world.nodes = POOLS
    world.items["picky"] = pooled("picky", 1, 4, nodeSelector={"pool": "fast"})
    assert placed(world, "easy") == {"fast"}
    assert (len(world.workers("easy")), len(world.workers("picky"))) == (2, 2)


def test_workers_stay_on_a_node_that_is_cordoned() -> None:
    world = World({}, pooled("picky", 1, 2, nodeSelector={"pool": "fast"}), item("easy", 4, 4))
    world.nodes = POOLS
    world.settle()
    before = set(world.pods)
    world.nodes = tuple(replace(node, is_open=False) for node in POOLS)
    world.settle()
    assert set(world.pods) == before


def queued_world(least: int, most: int, nodes: dict[str, int]) -> World:
    made = item("job", least, most)
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    world = World(nodes, made)
    world.settle()
    return world


def groups(world: World) -> list[PodGroup | None]:
    return [pod.group for pod in sorted(world.workers("job"), key=lambda pod: pod.name) if not pod.is_deleting]


def test_a_lost_worker_is_replaced_in_its_group_once_kueue_counts_it_no_more() -> None:
    world = queued_world(2, 2, {"a": 4})
    first, second = groups(world)
    assert first == second
    world.pods["job-worker-0"] = replace(world.pods["job-worker-0"], is_deleting=True)
    for action in world.decide():
        world.do(action)
    assert groups(world) == [first], "three would be one too many"
    world.pods["job-worker-0"] = replace(world.pods["job-worker-0"], phase="Failed")
    for action in world.decide():
        world.do(action)
    assert groups(world) == [first, first]


def held_by_kueue(world: World, *names: str, **changes: Any) -> None:
    for name in names:
        waits: dict[str, Any] = {"phase": "Pending", "is_bound": False, "gates": ("kueue.x-k8s.io/admission",)}
        world.pods[name] = replace(world.pods[name], created_s=world.now_s, **{**waits, **changes})
    world.settle()


def message(world: World, kind: str) -> str:
    [found] = [one["message"] for one in world.items["job"]["status"]["conditions"] if one["type"] == kind]
    return str(found)


def test_workers_that_a_scheduling_gate_holds_are_told_in_the_status() -> None:
    world = queued_world(2, 3, {"a": 4})
    held_by_kueue(world, "job-worker-0")
    assert message(world, "Resizing") == (
        "2 of 3 workers run; the scheduling gate kueue.x-k8s.io/admission holds 1; "
        "'kubectl -n n describe workloads.kueue.x-k8s.io' says why"
    )
    assert world.condition("job", "Admitted") == ("True", "Floor"), "as many as its minimum run"
    held_by_kueue(world, "job-worker-1")
    assert world.condition("job", "Admitted") == ("False", "WaitsForQuota")
    assert "holds 2; 'kubectl -n n describe" in message(world, "Admitted")


def test_extras_do_not_take_the_quota_that_the_minimum_waits_for() -> None:
    world = queued_world(2, 4, {"a": 4})
    held_by_kueue(world, "job-worker-0")
    assert sorted(world.pods) == ["job-launcher", *(f"job-worker-{number}" for number in range(4))]
    held_by_kueue(world, "job-worker-1", "job-worker-2", "job-worker-3")
    world.now_s += 10
    world.settle()
    assert [pod.tier for pod in world.workers("job")] == ["floor", "floor"]
    held_by_kueue(world, "job-worker-0", "job-worker-1", phase="Running", is_bound=True, gates=())
    assert [pod.tier for pod in world.workers("job")] == ["floor", "floor", "extra", "extra"]


def test_a_running_extra_leaves_when_the_minimum_has_been_taken() -> None:
    world = queued_world(2, 3, {"a": 4})
    held_by_kueue(world, "job-worker-0", "job-worker-1")
    assert len(world.workers("job")) == 3, "workers that replace lost ones are admitted at once where there is quota"
    world.now_s += 10
    world.settle()
    assert [pod.tier for pod in world.workers("job")] == ["floor", "floor"]


def test_a_worker_whose_node_is_not_of_its_flavor_is_told_in_the_status() -> None:
    world = queued_world(2, 2, {"a": 4})
    given = Placement((("type", "spot"),))
    held_by_kueue(world, "job-worker-0", "job-worker-1", gates=(), placement=given)
    assert message(world, "Resizing") == (
        "0 of 2 workers run; 2 workers cannot start on a: it has no type=spot, as Kueue's flavor asks for; "
        "give the job a nodeSelector with the labels of one flavor"
    )
    world.nodes = tuple(replace(node, labels={"type": "spot"}) for node in world.nodes)
    world.settle()
    assert message(world, "Resizing") == "0 of 2 workers run"


def test_a_worker_that_succeeded_keeps_its_place_in_the_group_and_another_is_taken_alone() -> None:
    world = queued_world(2, 2, {"a": 4})
    lost = world.pods["job-worker-0"]
    world.pods[lost.name] = replace(lost, phase="Succeeded", is_deleting=True)
    for action in world.decide():
        world.do(action)
    assert groups(world) == [lost.group, None]


def test_a_larger_minimum_joins_no_group_that_is_full_and_all_anew_are_a_new_one() -> None:
    world = queued_world(2, 2, {"a": 4})
    before = groups(world)
    world.items["job"]["spec"]["workers"].update(min=3, max=3)
    world.settle()
    assert groups(world) == [*before, None]
    world.pods = {name: pod for name, pod in world.pods.items() if pod.role != WORKER}
    world.settle()
    [after] = set(groups(world))
    assert after is not None
    assert after not in before
    assert after.count == 3


def test_workers_of_a_node_that_is_drained_are_replaced_on_others() -> None:
    world = World({"a": 2, "b": 4}, item("job", 2, 2))
    world.settle()
    [node] = placed(world, "job")
    world.nodes = tuple(replace(one, is_open=one.name != node) for one in world.nodes)
    first, second = sorted(pod.name for pod in world.workers("job"))
    del world.pods[first]
    world.settle()
    assert sorted(pod.node for pod in world.workers("job")) == ["a", "b"], "the other one has not been evicted"
    del world.pods[second]
    world.settle()
    assert len(world.workers("job")) == 2
    assert node not in placed(world, "job")


def test_a_wish_about_nodes_that_is_not_planned_is_refused_and_others_are_kept() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    world = World({"a": 4}, pooled("job", 1, 1, affinity={"nodeAffinity": {required: terms}}))
    world.settle()
    assert world.condition("job", "Accepted") == ("False", "BadTemplate")
    assert "expected a nodeSelector" in world.items["job"]["status"]["why"]
    apart = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    actions = World({"a": 4}, pooled("job", 1, 1, affinity=apart)).decide()
    [worker] = [one for one in actions if isinstance(one, CreatePod) and "worker" in one.manifest["metadata"]["name"]]
    assert worker.manifest["spec"]["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
