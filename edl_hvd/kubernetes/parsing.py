"""What the API server sends, read into the values of a snapshot; what does not read is its job's problem. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from edl_hvd.errors import UsageError
from edl_hvd.json_values import show
from edl_hvd.kubernetes.snapshot import (
    CPU,
    CPU_UNIT,
    FLOOR_CLASS,
    GPU,
    GROUP,
    GROUP_COUNT_NOTE,
    GROUP_LABEL,
    JOB_LABEL,
    KIND,
    LEAST_NOTE,
    MOST_NOTE,
    MPI_GROUP,
    MPI_KIND,
    MPI_ROLE_LABEL,
    NODE_ANNOTATION,
    QUEUE_LABEL,
    RESIZED_NOTE,
    ROLE_LABEL,
    TIER_LABEL,
    WORKER,
    Placement,
    PodGroup,
    SeenGuest,
    SeenJob,
    SeenNode,
    SeenPod,
    SeenPriority,
    Taint,
    Toleration,
    TrainingJobSpec,
)

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_CONDITION_TAINTS = "node.kubernetes.io/"
# What Kubernetes itself says of a node, such as that it is cordoned or short of memory.
_LONGEST_NAME = 50
# Of a job: its pods' names and labels are longer, and have 63 characters at most.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Of a job: its service's name begins with it, and is a DNS label of RFC 1035.
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?")
_FACTORS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20,
            "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}  # fmt: skip


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
    if not _NAME.fullmatch(name):
        raise _Rejected(
            "BadName",
            f"the name {show(name)} is not usable in Kubernetes; expected small letters, digits and '-', a letter "
            "first and a letter or digit last, e.g. 'resnet50'",
        )
    workers = spec.get("workers") or {}
    _check_bounds(workers)
    template = workers.get("template") or {}
    _check_containers(template)
    asked = _read_requests(template)
    _check_affinity(template)
    resource, unit = _counted(asked)
    if not unit:
        raise _Rejected(
            "BadTemplate",
            f"the containers of workers.template request neither {GPU} nor cpu; expected one of them, as workers are "
            "shared out by it",
        )
    least, most = workers["min"], workers["max"]
    return TrainingJobSpec(
        least, most, workers.get("slots") or (unit if resource == GPU else 1),
        spec.get("priorityClassName") or FLOOR_CLASS, bool(spec.get("suspend")) or most == 0,
        spec.get("checkpoint") or "", spec.get("retries", 3), template, resource, unit,
        read_placement(template["spec"]), spec.get("family") or "",
    )  # fmt: skip


def _check_bounds(workers: Mapping[str, Any]) -> None:
    """Reject numbers of workers that no job can have."""
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


def _check_containers(template: Mapping[str, Any]) -> None:
    """Reject a template whose first container does not say what to run."""
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


def _read_requests(template: Mapping[str, Any]) -> Mapping[str, int]:
    try:
        return requested(template["spec"])
    except UsageError as error:
        raise _Rejected("BadTemplate", f"the resources of workers.template do not read: {error}") from None


def _check_affinity(template: Mapping[str, Any]) -> None:
    """Reject a template that selects nodes in a way that plans do not know."""
    affinity = (template["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    if affinity.get(_REQUIRED):
        raise _Rejected(
            "BadTemplate",
            f"workers.template has a nodeAffinity.{_REQUIRED}, by which jobs are not planned; expected a nodeSelector "
            "with the labels that its nodes have",
        )


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
        placement=read_placement(template), resized_s=epoch_s(notes.get(RESIZED_NOTE)) or 0.0,
    )  # fmt: skip


def read_placement(spec: Mapping[str, Any]) -> Placement:
    """Which nodes the spec of a pod lets it be placed on."""
    tolerations = {
        Toleration(
            one.get("key") or "", None if one.get("operator") == "Exists" else one.get("value") or "",
            one.get("effect") or "",
        )
        for one in spec.get("tolerations") or []
    }  # fmt: skip
    return Placement(tuple(sorted((spec.get("nodeSelector") or {}).items())), tuple(sorted(tolerations, key=str)))


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


def _read_group(labels: Mapping[str, str], notes: Mapping[str, str]) -> PodGroup | None:
    name, count = labels.get(GROUP_LABEL, ""), notes.get(GROUP_COUNT_NOTE, "")
    return PodGroup(name, int(count)) if name and count.isdecimal() else None


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
        placement=read_placement(spec),
        is_choosy=_REQUIRED in affinity,
        address=status.get("podIP") or "",
        exit_code=end.get("exitCode"),
        words=words,
        finished_s=epoch_s(end.get("finishedAt")),
        group=_read_group(labels, notes),
        gates=tuple(one["name"] for one in spec.get("schedulingGates") or []),
    )  # fmt: skip
