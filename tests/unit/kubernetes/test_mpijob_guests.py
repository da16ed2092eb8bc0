"""MPIJobs that are resized with the jobs of the operator: their pods are the mpi-operator's and the scheduler's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_operator_turn import POOLS, PRIORITIES, World, item, pooled

from edl_hvd.kubernetes.parsing import read_guest, read_pod
from edl_hvd.kubernetes.planned import ResizeGuest
from edl_hvd.kubernetes.snapshot import ClusterSnapshot, SeenPod
from edl_hvd.kubernetes.status import resize_event
from edl_hvd.kubernetes.turn import Action, decide


def mpijob(name: str, replicas: int, least: object = 1, most: object = 4, cpu: str = "1") -> dict[str, Any]:
    container = {"name": "worker", "image": "i", "resources": {"requests": {"cpu": cpu}}}
    worker = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
    notes = {"edl-hvd.dev/min-workers": str(least), "edl-hvd.dev/max-workers": str(most)}
    return {
        "metadata": {"name": name, "namespace": "n", "uid": f"mpi-{name}", "resourceVersion": "1",
                     "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": notes},
        "spec": {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": worker}},
    }  # fmt: skip


def worker_pod(guest: dict[str, Any], number: int) -> SeenPod:
    meta = guest["metadata"]
    owner = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "name": meta["name"], "uid": meta["uid"]}
    return read_pod(
        {
            "metadata": {"name": f"{meta['name']}-worker-{number}", "namespace": "n", "uid": f"{meta['uid']}-{number}",
                         "labels": {"training.kubeflow.org/job-role": "worker"}, "ownerReferences": [owner]},
            "spec": guest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"],
        }
    )  # fmt: skip


class Shared(World):
    """The cluster with MPIJobs: surplus workers leave by number, new ones take the first room."""

    def __init__(self, nodes: dict[str, int], *items: dict[str, Any], guests: tuple[dict[str, Any], ...]) -> None:
        super().__init__(nodes, *items)
        self.guests = {one["metadata"]["name"]: one for one in guests}
        self.mpi_operator()

    def decide(self) -> tuple[Action, ...]:
        self.now_s += 1
        found = tuple(one for one in map(read_guest, self.guests.values()) if one is not None)
        seen = ClusterSnapshot(self.jobs(), self.nodes, tuple(self.pods.values()), PRIORITIES, self.reports, found)
        return decide(seen, self.now_s)

    def do(self, action: Action) -> None:
        if not isinstance(action, ResizeGuest):
            super().do(action)
            return
        guest = self.guests[action.job.name]
        assert guest["metadata"]["annotations"]["edl-hvd.dev/min-workers"] <= str(action.replicas)
        guest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = action.replicas
        self.mpi_operator()

    def leave(self) -> None:
        super().leave()
        self.mpi_operator()

    def mpi_operator(self) -> None:
        for guest in self.guests.values():
            wanted = guest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
            names = {pod.name: pod for pod in (worker_pod(guest, number) for number in range(wanted))}
            for name, pod in list(self.pods.items()):
                if pod.guest == guest["metadata"]["uid"] and name not in names:
                    if pod.is_bound:
                        self.pods[name] = replace(pod, is_deleting=True)
                    else:
                        del self.pods[name]
            self.pods.update({name: pod for name, pod in names.items() if name not in self.pods})
        for name, pod in self.pods.items():
            if pod.guest and not pod.is_bound:
                self.pods[name] = self._scheduled(pod)

    def _scheduled(self, pod: SeenPod) -> SeenPod:
        for node in self.nodes:
            used = sum(one.slots("cpu") for one in self.pods.values() if one.node == node.name and not one.is_over)
            if used + pod.slots("cpu") <= node.room("cpu"):
                return replace(pod, node=node.name, is_bound=True, phase="Running")
        return replace(pod, unschedulable_s=pod.unschedulable_s or self.now_s)

    def running(self, guest: str) -> int:
        return sum(pod.guest == f"mpi-{guest}" and pod.is_bound and not pod.is_deleting for pod in self.pods.values())


def test_an_mpijob_and_a_training_job_share_a_node() -> None:
    world = Shared({"a": 6}, guests=(mpijob("old", 2, 2, 6),))
    world.settle()
    assert world.running("old") == 6, "it fills what is idle"
    world.items["new"] = item("new", 2, 6)
    world.settle()
    assert (world.running("old"), len(world.workers("new"))) == (3, 3)
    world.items["new"]["spec"]["suspend"] = True
    world.settle()
    assert (world.running("old"), len(world.workers("new"))) == (6, 0)


def test_the_least_of_an_mpijob_is_never_taken() -> None:
    world = Shared({"a": 4}, guests=(mpijob("old", 4, 3, 4),))
    world.items["new"] = item("new", 2, 4)
    world.settle()
    assert (world.running("old"), len(world.workers("new"))) == (4, 0)
    assert world.condition("new", "Admitted")[0] == "False"


def test_a_worker_of_an_mpijob_that_waits_is_no_claim_of_others() -> None:
    world = Shared({"a": 4}, item("new", 1, 4), guests=(mpijob("old", 0, 1, 1),))
    world.settle()
    assert (world.running("old"), len(world.workers("new"))) == (1, 3)


def test_no_plan_moves_an_mpijob_to_other_nodes() -> None:
    world = Shared({}, guests=(mpijob("old", 2, 2, 4),))
    world.nodes = POOLS[1:2]
    world.mpi_operator()
    world.settle()
    assert world.running("old") == 4
    world.nodes = POOLS
    world.items["picky"] = pooled("picky", 1, 4, nodeSelector={"pool": "fast"})
    world.settle()
    assert {pod.node for pod in world.pods.values() if pod.guest} == {"fast"}
    assert (world.running("old"), len(world.workers("picky"))) == (2, 2), "what they share is what it is on"


@settings(max_examples=60)
@example([2], [], [(0, 1, 1), (1, 2, 0)])  # one that runs with fewer than its least, and keeps them
@given(
    st.lists(st.integers(2, 8), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4)), max_size=2),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=2),
)
def test_what_is_shared_with_mpijobs_settles_within_their_bounds(
    cores: list[int], jobs: list[tuple[int, int]], guests: list[tuple[int, int, int]]
) -> None:
    world = Shared(
        {f"node-{number}": count for number, count in enumerate(cores)},
        *[item(f"j{number}", least, least + more) for number, (least, more) in enumerate(jobs)],
        guests=tuple(
            mpijob(f"g{number}", replicas, least, least + more)
            for number, (replicas, least, more) in enumerate(guests)
        ),
    )  # fmt: skip
    world.settle()
    world.check_rooms()
    for number, (least, more) in enumerate(jobs):
        held = len(world.workers(f"j{number}"))
        assert held == 0 or least <= held <= least + more
    for number, (replicas, least, more) in enumerate(guests):
        wanted = world.guests[f"g{number}"]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
        assert wanted == replicas or least <= wanted <= least + more
        assert world.running(f"g{number}") == wanted or wanted == replicas, "what it was given is there"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"least": "two"}, "min-workers='two'"),
        ({"least": 3, "most": 2}, "not below the first"),
        ({"least": 0}, "at least 1"),
        ({"least": "٣"}, "expected two numbers"),
        ({"cpu": "0"}, "request neither"),
        ({"cpu": "lots"}, "do not read"),
    ],
)
def test_annotations_that_cannot_be_followed_leave_the_mpijob_as_it_is(change: dict[str, Any], words: str) -> None:
    given = mpijob("bad", 2, **change)
    found = read_guest(given)
    assert found is not None
    assert words in found.problem
    world = Shared({"a": 8}, item("good", 1, 8), guests=(given,))
    assert not any(isinstance(action, ResizeGuest) for action in world.decide())


def test_nobody_resizes_an_mpijob_that_did_not_ask_is_kueues_suspended_or_over() -> None:
    for change in (
        {"metadata": {"annotations": {}}},
        {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"spec": {"runPolicy": {"suspend": True}}},
        {"status": {"conditions": [{"type": "Succeeded", "status": "True"}]}},
    ):
        given = mpijob("job", 2)
        for part, values in change.items():
            given.setdefault(part, {}).update(values)
        assert read_guest(given) is None, change


def test_the_event_of_a_resize_is_the_mpijobs() -> None:
    guest = read_guest(mpijob("old", 2, 1, 4))
    assert guest is not None
    event = resize_event(guest, 4, "room is idle", 0.0)
    assert event["involvedObject"]["kind"] == "MPIJob"
    assert event["involvedObject"]["apiVersion"] == "kubeflow.org/v2beta1"
    assert (event["reason"], event["message"]) == ("Grown", "2 → 4 workers: room is idle")
