"""What the operator sees of a cluster in one turn: jobs, nodes and pods as frozen values, and names of theirs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from edl_hvd.job_report import JobReport

GROUP, VERSION, KIND = "edl-hvd.dev", "v1alpha1", "TrainingJob"
JOB_LABEL, ROLE_LABEL, TIER_LABEL = f"{GROUP}/job", f"{GROUP}/role", f"{GROUP}/tier"
NODE_ANNOTATION = f"{GROUP}/node"
MPI_GROUP, MPI_VERSION, MPI_KIND = "kubeflow.org", "v2beta1", "MPIJob"
MPI_ROLE_LABEL = "training.kubeflow.org/job-role"
LEAST_NOTE, MOST_NOTE = f"{GROUP}/min-workers", f"{GROUP}/max-workers"
RESIZED_NOTE, WHY_NOTE = f"{GROUP}/resized-at", f"{GROUP}/why"
KUEUE = "kueue.x-k8s.io/"
QUEUE_LABEL, GROUP_LABEL = f"{KUEUE}queue-name", f"{KUEUE}pod-group-name"
GROUP_COUNT_NOTE = f"{KUEUE}pod-group-total-count"
WORKER, LAUNCHER = "worker", "launcher"
FLOOR, EXTRA = "floor", "extra"
FLOOR_CLASS, EXTRA_CLASS = "edl-hvd-floor", "edl-hvd-extra"
GPU, CPU = "nvidia.com/gpu", "cpu"
CPU_UNIT = 100
# Thousandths of a core that the planner counts as one slot.


@dataclass(frozen=True)
class Taint:
    """A taint of a node that keeps pods away (``NoSchedule`` or ``NoExecute``)."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class Toleration:
    """The taints that a pod tolerates; what is empty stands for any.

    >>> str(Toleration("team", "vision", "NoSchedule")), str(Toleration())
    ('team=vision:NoSchedule', '*')
    """

    key: str = ""
    value: str | None = None
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether a node with this taint is open to the pod."""
        return self.key in ("", taint.key) and self.effect in ("", taint.effect) and self.value in (None, taint.value)

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value}"
        return f"{self.key or '*'}{value}{f':{self.effect}' if self.effect else ''}"


@dataclass(frozen=True)
class Placement:
    """Which nodes a pod may be placed on.

    >>> str(Placement((("pool", "gpu"),))), str(Placement())
    ('pool=gpu', 'any')

    Attributes:
        selector: Labels that the node must have, sorted.
        tolerations: Taints that it may have, sorted.
    """

    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def admits(self, node: SeenNode) -> bool:
        """Whether a pod may be placed there, as far as labels and taints go."""
        return all(node.labels.get(name) == value for name, value in self.selector) and all(
            any(one.covers(taint) for one in self.tolerations) for taint in node.taints
        )

    def __str__(self) -> str:
        labels = ",".join(f"{name}={value}" for name, value in self.selector)
        taints = ",".join(map(str, self.tolerations))
        return " ".join(filter(None, (labels or "any", f"(tolerates {taints})" if taints else "")))


@dataclass(frozen=True)
class TrainingJobSpec:
    """What a job asks for.

    Attributes:
        least: Fewest workers (pods) with which it runs.
        most: Most workers; 0: it shall leave.
        slots: Processes per worker.
        priority_class: PriorityClass of the least.
        is_suspended: Whether it shall save a checkpoint and leave.
        checkpoint: URL of its checkpoints; empty: none.
        retries: Launchers that may fail.
        template: Pod template of a worker.
        resource: What the planner counts of it: GPUs, or else processors.
        unit: How many of these a worker takes: GPUs, or tenths of a core.
        placement: Nodes that its workers may be placed on.
        family: Name that jobs of its namespace share which are alike; empty: it is like no other.
    """

    least: int
    most: int
    slots: int
    priority_class: str
    is_suspended: bool
    checkpoint: str
    retries: int
    template: Mapping[str, Any] = field(compare=False)
    resource: str
    unit: int
    placement: Placement = Placement()
    family: str = ""


@dataclass(frozen=True)
class SeenJob:
    """A TrainingJob as the API server has it.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its identity.
        generation: Rises with each change of the spec.
        resource_version: For writes that lose against later ones.
        created_s: Seconds since the epoch.
        is_deleting: Whether it is being deleted.
        spec: What it asks for; ``None`` if that cannot be run.
        problem: Why not: a reason as in conditions, and a sentence; empty otherwise.
        problem_reason: The reason.
        status: Its status, as it was written last.
        queue: Kueue's LocalQueue for its workers; empty: none.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created_s: float
    is_deleting: bool
    spec: TrainingJobSpec | None
    problem_reason: str = ""
    problem: str = ""
    status: Mapping[str, Any] = field(default_factory=dict, compare=False)
    queue: str = ""

    api_version: ClassVar[str] = f"{GROUP}/{VERSION}"
    kind: ClassVar[str] = KIND

    @property
    def key(self) -> str:
        """Its name among all jobs of the cluster."""
        return f"{self.namespace}/{self.name}"

    def is_true(self, condition: str) -> bool:
        """Whether a condition of its status is true."""
        found = self.status.get("conditions") or []
        return any(one.get("type") == condition and one.get("status") == "True" for one in found)

    @property
    def is_over(self) -> bool:
        """Whether it is complete, or has failed for good."""
        return self.is_true("Complete") or self.is_true("Failed")


@dataclass(frozen=True)
class SeenGuest:
    """An MPIJob of Kubeflow whose number of workers is planned with those of training jobs.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its identity.
        resource_version: For writes that lose against later ones.
        created_s: Seconds since the epoch.
        least: Fewest workers, by its annotation.
        most: Most workers.
        replicas: Workers that it asks the mpi-operator for.
        priority_class: PriorityClass of its workers; empty: the cluster's default.
        resource: What the planner counts of it.
        unit: How many of these a worker takes.
        placement: Nodes that its workers may be placed on.
        resized_s: When the operator last changed the number of its workers.
        problem: Why it cannot be planned; empty: it can.
    """

    namespace: str
    name: str
    uid: str
    resource_version: str
    created_s: float
    least: int = 0
    most: int = 0
    replicas: int = 0
    priority_class: str = ""
    resource: str = CPU
    unit: int = 0
    placement: Placement = Placement()
    resized_s: float = 0.0
    problem: str = ""

    api_version: ClassVar[str] = f"{MPI_GROUP}/{MPI_VERSION}"
    kind: ClassVar[str] = MPI_KIND

    @property
    def key(self) -> str:
        """Its name among all jobs of the cluster."""
        return f"{self.namespace}/{self.name} (MPIJob)"


@dataclass(frozen=True)
class SeenNode:
    """A node.

    Attributes:
        name: Its name.
        allocatable: What pods may use of it: GPUs, and thousandths of cores.
        is_open: Whether pods may be placed there anew: it is ready, not cordoned, and not short of anything.
        labels: Its labels.
        taints: Taints that people have given it, which keep pods away but those that tolerate them.
    """

    name: str
    allocatable: Mapping[str, int]
    is_open: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()

    def room(self, resource: str) -> int:
        """Slots of a resource, as the planner counts them."""
        return self.allocatable.get(resource, 0) // (CPU_UNIT if resource == CPU else 1)


@dataclass(frozen=True)
class PodGroup:
    """Pods that Kueue admits together.

    Attributes:
        name: Its name in the namespace.
        count: Number of its pods.
    """

    name: str
    count: int


@dataclass(frozen=True)
class SeenPod:
    """A pod.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its identity.
        node: Where it runs; for a worker that waits, where it is to run; else empty.
        is_bound: Whether it is on that node already.
        phase: As Kubernetes has it.
        is_deleting: Whether it is being deleted.
        created_s: Seconds since the epoch.
        requests: What it requests: GPUs, and thousandths of cores.
        priority: Its priority.
        job: UID of the job that it belongs to; empty: not one of the operator's.
        role: Worker or launcher, for those.
        tier: Floor or extra, for workers.
        guest: UID of the MPIJob of which it is a worker; empty: of none.
        nominated: Node that the scheduler empties for it.
        unschedulable_s: Since when the scheduler finds no place for it; ``None``: it does, or has not looked.
        placement: Nodes that it may be placed on.
        is_choosy: Whether it has other wishes about its node.
        address: Its IP address, once it has one.
        exit_code: Exit code of its first container that has ended; ``None``: none has.
        words: What is known about its end.
        finished_s: When that was.
        group: Pod group of Kueue that it belongs to; ``None``: none.
        gates: Scheduling gates that hold it.
    """

    namespace: str
    name: str
    uid: str
    node: str = ""
    is_bound: bool = False
    phase: str = "Pending"
    is_deleting: bool = False
    created_s: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)
    priority: int = 0
    job: str = ""
    role: str = ""
    tier: str = ""
    guest: str = ""
    nominated: str = ""
    unschedulable_s: float | None = None
    placement: Placement = Placement()
    is_choosy: bool = False
    address: str = ""
    exit_code: int | None = None
    words: str = ""
    finished_s: float | None = None
    group: PodGroup | None = None
    gates: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether its containers have ended for good; it holds no room any more."""
        return self.phase in ("Succeeded", "Failed")

    def slots(self, resource: str) -> int:
        """Slots of a resource that it takes, as the planner counts them."""
        return -(-self.requests.get(resource, 0) // (CPU_UNIT if resource == CPU else 1))


@dataclass(frozen=True)
class SeenPriority:
    """A PriorityClass.

    Attributes:
        name: Its name.
        value: The priority of its pods.
    """

    name: str
    value: int


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster, as the operator sees it in one turn.

    Attributes:
        jobs: Training jobs.
        nodes: Nodes.
        pods: Pods, also those of others.
        priorities: The value of each PriorityClass.
        reports: What jobs have said of their work, by UID.
        guests: MPIJobs that may be resized.
    """

    jobs: tuple[SeenJob, ...]
    nodes: tuple[SeenNode, ...]
    pods: tuple[SeenPod, ...]
    priorities: Mapping[str, int] = field(default_factory=dict)
    reports: Mapping[str, JobReport] = field(default_factory=dict)
    guests: tuple[SeenGuest, ...] = ()
