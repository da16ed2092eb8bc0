"""What the operator sees, as frozen values: training jobs, nodes and pods. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, ClassVar

from edl_hvd.errors import UsageError
from edl_hvd.job_report import JobReport

GROUP, VERSION, KIND = "edl-hvd.dev", "v1alpha1", "TrainingJob"
JOB_LABEL, ROLE_LABEL, TIER_LABEL = f"{GROUP}/job", f"{GROUP}/role", f"{GROUP}/tier"
NODE_ANNOTATION = f"{GROUP}/node"
MPI_GROUP, MPI_VERSION, MPI_KIND = "kubeflow.org", "v2beta1", "MPIJob"
MPI_ROLE_LABEL = "training.kubeflow.org/job-role"
LEAST_NOTE, MOST_NOTE = f"{GROUP}/min-workers", f"{GROUP}/max-workers"
RESIZED_NOTE, WHY_NOTE = f"{GROUP}/resized-at", f"{GROUP}/why"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
WORKER, LAUNCHER = "worker", "launcher"
FLOOR, EXTRA = "floor", "extra"
FLOOR_CLASS, EXTRA_CLASS = "edl-hvd-floor", "edl-hvd-extra"
GPU, CPU = "nvidia.com/gpu", "cpu"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
CPU_UNIT = 100
# Thousandths of a core that the planner counts as one slot.
_CONDITION_TAINTS = "node.kubernetes.io/"
# What Kubernetes itself says of a node, such as that it is cordoned or short of memory.
_LONGEST_NAME = 50
# Of a job: its pods' names and labels are longer, and have 63 characters at most.
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?")
_FACTORS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20,
            "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}  # fmt: skip


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

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Placement:
        """What the spec of a pod says."""
        tolerations = {
            Toleration(
                one.get("key") or "", None if one.get("operator") == "Exists" else one.get("value") or "",
                one.get("effect") or "",
            )
            for one in spec.get("tolerations") or []
        }  # fmt: skip
        return cls(tuple(sorted((spec.get("nodeSelector") or {}).items())), tuple(sorted(tolerations, key=str)))

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


def quantity(value: object) -> float:
    """A quantity of Kubernetes as a number.

    >>> quantity("1500m"), quantity("2Gi"), quantity(4), quantity("1e3")
    (1.5, 2147483648.0, 4.0, 1000.0)

    Raises:
        UsageError: It is none.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise UsageError(f"{value!r} is no quantity; expected a number with a suffix of Kubernetes, e.g. 500m or 2Gi")
    return float(match[1] + (match[2] or "")) * _FACTORS.get(match[3] or "", 1.0)


def epoch_s(text: object) -> float | None:
    """A time of the API server as seconds since the epoch.

    >>> epoch_s("1970-01-01T00:01:00Z"), epoch_s(None)
    (60.0, None)
    """
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()


def read_job(item: Mapping[str, Any]) -> SeenJob:
    """A TrainingJob; what is wrong with its spec becomes its problem."""
    meta = item["metadata"]
    spec, reason, problem = None, "", ""
    try:
        spec = _read_spec(meta["name"], item.get("spec") or {})
    except _Rejected as rejected:
        reason, problem = rejected.reason, str(rejected)
    return SeenJob(
        meta.get("namespace", ""), meta["name"], meta["uid"], meta.get("generation", 0), meta["resourceVersion"],
        epoch_s(meta.get("creationTimestamp")) or 0.0, "deletionTimestamp" in meta, spec, reason, problem,
        item.get("status") or {}, (meta.get("labels") or {}).get(QUEUE_LABEL, ""),
    )  # fmt: skip


class _Rejected(Exception):
    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _read_spec(name: str, spec: Mapping[str, Any]) -> TrainingJobSpec:
    if len(name) > _LONGEST_NAME:
        raise _Rejected("NameTooLong", f"the name has {len(name)} characters; expected {_LONGEST_NAME} at most")
    workers = spec.get("workers") or {}
    least, most = workers.get("min"), workers.get("max")
    if not (isinstance(least, int) and isinstance(most, int) and least >= 1 and most >= 0):
        raise _Rejected(
            "BadNumbers", f"workers.min is {least!r}, max {most!r}; expected min of at least 1, max of 0 or more"
        )
    if 0 < most < least:
        raise _Rejected(
            "MinAboveMax",
            f"workers.min is {least} and max {most}; expected max of at least {least}, or 0 to suspend the job",
        )
    template = workers.get("template") or {}
    containers = (template.get("spec") or {}).get("containers") or []
    if not containers or not isinstance(containers[0], dict):
        raise _Rejected(
            "BadTemplate", "workers.template.spec has no container; expected one with an image and a command"
        )
    first = containers[0]
    if not first.get("image") or not [*(first.get("command") or []), *(first.get("args") or [])]:
        raise _Rejected(
            "BadTemplate",
            "the first container of workers.template has no image or no command; expected both, the command being "
            "that of the training, e.g. [python, train.py]",
        )
    try:
        asked = requested(template["spec"])
    except UsageError as error:
        raise _Rejected("BadTemplate", f"the resources of workers.template do not read: {error}") from None
    affinity = (template["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    if affinity.get(_REQUIRED):
        raise _Rejected(
            "BadTemplate",
            f"workers.template has a nodeAffinity.{_REQUIRED}, by which jobs are not planned; expected a nodeSelector "
            "with the labels that its nodes have",
        )
    resource, unit = _counted(asked)
    if not unit:
        raise _Rejected(
            "BadTemplate",
            f"the containers of workers.template request neither {GPU} nor cpu; expected one of them, as workers are "
            "shared out by it",
        )
    return TrainingJobSpec(
        least, most, workers.get("slots") or (unit if resource == GPU else 1),
        spec.get("priorityClassName") or FLOOR_CLASS, bool(spec.get("suspend")) or most == 0,
        spec.get("checkpoint") or "", spec.get("retries", 3), template, resource, unit,
        Placement.of(template["spec"]),
    )  # fmt: skip


def _counted(asked: Mapping[str, int]) -> tuple[str, int]:
    """What the planner counts of a worker, and how many of these it takes; 0: it requests nothing of the kind."""
    resource = GPU if asked.get(GPU) else CPU
    return resource, -(-asked.get(resource, 0) // (CPU_UNIT if resource == CPU else 1))


def read_guest(item: Mapping[str, Any]) -> SeenGuest | None:
    """An MPIJob, with what is wrong with its annotations; ``None``: nobody asks to have it resized, or nobody may.

    That is so without the annotations, while Kueue manages it or it is suspended, and once it is over.
    """
    meta, spec = item["metadata"], item.get("spec") or {}
    notes = meta.get("annotations") or {}
    conditions = (item.get("status") or {}).get("conditions") or []
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    is_over = "deletionTimestamp" in meta or bool({"Succeeded", "Failed"} & true)
    is_held = QUEUE_LABEL in (meta.get("labels") or {}) or bool((spec.get("runPolicy") or {}).get("suspend"))
    if is_over or is_held or not {LEAST_NOTE, MOST_NOTE} & notes.keys():
        return None
    found = SeenGuest(
        meta.get("namespace", ""), meta["name"], meta["uid"], meta["resourceVersion"],
        epoch_s(meta.get("creationTimestamp")) or 0.0,
    )  # fmt: skip
    workers = (spec.get("mpiReplicaSpecs") or {}).get("Worker") or {}
    template = (workers.get("template") or {}).get("spec") or {}
    numbers = [notes.get(name) or "" for name in (LEAST_NOTE, MOST_NOTE)]
    if not all(one.isascii() and one.isdecimal() and len(one) < 7 for one in numbers) or not (
        1 <= int(numbers[0]) <= int(numbers[1])
    ):
        return replace(
            found,
            problem=f"its annotations are {LEAST_NOTE}={numbers[0]!r} and {MOST_NOTE}={numbers[1]!r}; expected two "
            "numbers, at least 1, the second not below the first",
        )
    try:
        resource, unit = _counted(requested(template))
    except UsageError as error:
        return replace(found, problem=f"the resources of its workers do not read: {error}")
    if not unit:
        return replace(found, problem=f"its workers request neither {GPU} nor cpu; expected one of them")
    return replace(
        found, least=int(numbers[0]), most=int(numbers[1]), replicas=workers.get("replicas") or 0,
        priority_class=template.get("priorityClassName") or "", resource=resource, unit=unit,
        placement=Placement.of(template), resized_s=epoch_s(notes.get(RESIZED_NOTE)) or 0.0,
    )  # fmt: skip


def requested(spec: Mapping[str, Any]) -> dict[str, int]:
    """What a pod requests: GPUs, and thousandths of cores. Init containers count by the largest, overhead is added.

    Raises:
        UsageError: A quantity does not read.
    """

    def of(containers: Iterable[Mapping[str, Any]], name: str) -> list[float]:
        found = []
        for one in containers:
            resources = one.get("resources") or {}
            limit = (resources.get("limits") or {}).get(name, 0)
            found.append(quantity((resources.get("requests") or {}).get(name, limit)))
        return found

    result = {}
    for name in (GPU, CPU):
        amount = max(
            sum(of(spec.get("containers") or [], name)), max(of(spec.get("initContainers") or [], name), default=0)
        )
        amount += quantity((spec.get("overhead") or {}).get(name, 0))
        if amount:
            result[name] = -int(-amount * (1000 if name == CPU else 1) // 1)
    return result


def read_node(item: Mapping[str, Any]) -> SeenNode:
    """A node."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    found = status.get("allocatable") or {}
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or []}
    taints = [one for one in spec.get("taints") or [] if one.get("effect") in ("NoSchedule", "NoExecute")]
    given = tuple(
        Taint(one.get("key") or "", one.get("value") or "", one["effect"])
        for one in taints if not (one.get("key") or "").startswith(_CONDITION_TAINTS)
    )  # fmt: skip
    allocatable = {
        name: int(quantity(found[name]) * (1000 if name == CPU else 1)) for name in (GPU, CPU) if name in found
    }
    is_open = conditions.get("Ready") == "True" and not spec.get("unschedulable")
    return SeenNode(meta["name"], allocatable, is_open and len(given) == len(taints), meta.get("labels") or {}, given)


def read_priority(item: Mapping[str, Any]) -> SeenPriority:
    """A PriorityClass."""
    return SeenPriority(item["metadata"]["name"], item.get("value") or 0)


def read_pod(item: Mapping[str, Any]) -> SeenPod:
    """A pod."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    owner: dict[str, Any] = next((one for one in meta.get("ownerReferences") or [] if one.get("kind") == KIND), {})
    is_ours = JOB_LABEL in labels and owner.get("apiVersion", "").startswith(f"{GROUP}/")
    host: dict[str, Any] = next((one for one in meta.get("ownerReferences") or [] if one.get("kind") == MPI_KIND), {})
    is_guest = labels.get(MPI_ROLE_LABEL) == WORKER and host.get("apiVersion", "").startswith(f"{MPI_GROUP}/")
    scheduled: dict[str, Any] = next(
        (one for one in status.get("conditions") or [] if one.get("type") == "PodScheduled"), {}
    )
    is_lost = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    ended = [(one.get("state") or {}).get("terminated") or {} for one in status.get("containerStatuses") or []]
    end = next((one for one in ended if one), {})
    words = " ".join(filter(None, (status.get("reason"), status.get("message"), end.get("reason"), end.get("message"))))
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    try:
        requests = requested(spec)
    except UsageError:
        requests = {}
    return SeenPod(
        meta.get("namespace", ""), meta["name"], meta["uid"],
        node=spec.get("nodeName") or (notes.get(NODE_ANNOTATION, "") if is_ours else ""),
        is_bound=bool(spec.get("nodeName")),
        phase=status.get("phase") or "Pending",
        is_deleting="deletionTimestamp" in meta,
        created_s=epoch_s(meta.get("creationTimestamp")) or 0.0,
        requests=requests,
        priority=spec.get("priority") or 0,
        job=owner.get("uid", "") if is_ours else "",
        role=labels.get(ROLE_LABEL, "") if is_ours else "",
        tier=labels.get(TIER_LABEL, "") if is_ours else "",
        guest=host.get("uid", "") if is_guest else "",
        nominated=status.get("nominatedNodeName") or "",
        unschedulable_s=epoch_s(scheduled.get("lastTransitionTime")) if is_lost else None,
        placement=Placement.of(spec),
        is_choosy=_REQUIRED in affinity,
        address=status.get("podIP") or "",
        exit_code=end.get("exitCode"),
        words=words,
        finished_s=epoch_s(end.get("finishedAt")),
    )  # fmt: skip
