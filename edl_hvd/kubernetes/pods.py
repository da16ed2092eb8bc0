"""The objects of one job: its launcher, its workers, the service and the token by which these find and trust it. Pure.

The launcher is an ``edlrun`` that waits for agents, each worker an agent (``edl-hvd join``). Neither has rights in the
cluster. Everything belongs to the TrainingJob, and goes with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from edl_hvd.kubernetes.snapshot import (
    EXTRA_CLASS,
    FLOOR,
    GROUP,
    GROUP_COUNT_NOTE,
    GROUP_LABEL,
    JOB_LABEL,
    KIND,
    LAUNCHER,
    NODE_ANNOTATION,
    QUEUE_LABEL,
    ROLE_LABEL,
    TIER_LABEL,
    VERSION,
    WORKER,
    PodGroup,
    SeenJob,
    TrainingJobSpec,
)
from edl_hvd.settings import FAMILY_TIMINGS
from edl_hvd.timings import Timing, timings_text

AGENTS_PORT, STATUS_PORT = 7077, 9401
TOKEN_FOLDER = "/etc/edl-hvd"
_ROLE_NOTE, _RETRIABLE_NOTE = "kueue.x-k8s.io/role-hash", "kueue.x-k8s.io/retriable-in-group"
_LOST_NODE_S = 40
# A pod on a node that is not reached is replaced after this time.
_LEAST_GRACE_S = 30


def launcher_name(job: SeenJob) -> str:
    """The name of a job's launcher, and of its service."""
    return f"{job.name}-launcher"


def worker_name(job: SeenJob, number: int) -> str:
    """The name of a worker; a name that is taken cannot be taken twice, whatever an operator believes."""
    return f"{job.name}-worker-{number}"


def _metadata(job: SeenJob, name: str, role: str, template: dict[str, Any] | None = None) -> dict[str, Any]:
    given = (template or {}).get("metadata") or {}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**(given.get("labels") or {}), JOB_LABEL: job.name, ROLE_LABEL: role},
        "annotations": dict(given.get("annotations") or {}),
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid, "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }  # fmt: skip


def token_manifest(job: SeenJob, token: str) -> dict[str, Any]:
    """The secret that agents and launcher prove to each other."""
    meta = _metadata(job, f"{job.name}-token", "token")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"token": token}}


def service_manifest(job: SeenJob) -> dict[str, Any]:
    """The name under which workers find the launcher."""
    spec = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "ports": [{"name": "agents", "port": AGENTS_PORT}],
        "selector": {JOB_LABEL: job.name, ROLE_LABEL: LAUNCHER},
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, launcher_name(job), LAUNCHER),
        "spec": spec,
    }


def launcher_manifest(job: SeenJob, spec: TrainingJobSpec, family: Sequence[Timing] = ()) -> dict[str, Any]:
    """The launcher's pod: the worker's image and settings, the resources of a small process.

    Args:
        job: The job.
        spec: What it asks for.
        family: How long steps took in other jobs of its family.
    """
    pod = _pod(job, spec, launcher_name(job), LAUNCHER)
    container = pod["spec"]["containers"][0]
    training = [*(container.get("command") or []), *(container.pop("args", None) or [])]
    least = str(spec.least * spec.slots)
    container["command"] = [
        "edlrun", "-np", least, "--min-np", least, "--agents-port", str(AGENTS_PORT), "--token-file",
        f"{TOKEN_FOLDER}/token", "--status-port", f"$(POD_IP):{STATUS_PORT}",
        # What an earlier launcher of this job has left behind is this job's.
        *(["--take-over"] if spec.checkpoint and job.status.get("launched") else []), *training,
    ]  # fmt: skip
    container["resources"] = {"requests": {"cpu": "100m"}}
    if family:
        container["env"].append({"name": FAMILY_TIMINGS, "value": timings_text(family)})
    pod["spec"]["containers"] = [container]
    pod["spec"]["priorityClassName"] = spec.priority_class
    return pod


def worker_manifest(
    job: SeenJob, spec: TrainingJobSpec, number: int, node: str, tier: str, group: PodGroup | None = None
) -> dict[str, Any]:
    """A worker's pod, for one node; Kueue admits it with its group, if it has one."""
    pod = _pod(job, spec, worker_name(job, number), WORKER)
    pod["metadata"]["labels"][TIER_LABEL] = tier
    pod["metadata"]["annotations"][NODE_ANNOTATION] = node
    if job.queue:
        _queue(pod["metadata"], job, group)
    container = pod["spec"]["containers"][0]
    container.pop("args", None)
    grace_s = max(1, pod["spec"]["terminationGracePeriodSeconds"] - 5)
    container["command"] = [
        "edl-hvd", "join", f"{launcher_name(job)}.{job.namespace}.svc:{AGENTS_PORT}", "--host", "$(POD_IP)", "--slots",
        str(spec.slots), "--token-file", f"{TOKEN_FOLDER}/token", "--grace", f"{grace_s}s",
    ]  # fmt: skip
    pod["spec"]["priorityClassName"] = spec.priority_class if tier == FLOOR else EXTRA_CLASS
    wish = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = pod["spec"].setdefault("affinity", {})
    affinity["nodeAffinity"] = {
        **(affinity.get("nodeAffinity") or {}),
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [wish]},
    }
    return pod


def _queue(meta: dict[str, Any], job: SeenJob, group: PodGroup | None) -> None:
    """Hand a worker to Kueue: together with its group, or by itself, so that Kueue can take it alone.

    Kueue counts the pods of a group by role, of which it takes 18, and it makes a role of each affinity unless it is
    given one: a replacement on another node would be a stranger to the group. A group that is not retriable ends with
    its last pod; else Kueue holds the pods of a job that has left, and their quota, until others replace them.
    """
    meta["labels"][QUEUE_LABEL] = job.queue
    if group is not None:
        meta["labels"][GROUP_LABEL] = group.name
        meta["annotations"] |= {GROUP_COUNT_NOTE: str(group.count), _ROLE_NOTE: WORKER, _RETRIABLE_NOTE: "false"}


def _pod(job: SeenJob, spec: TrainingJobSpec, name: str, role: str) -> dict[str, Any]:
    template = copy.deepcopy(dict(spec.template))
    pod: dict[str, Any] = template["spec"]
    pod["restartPolicy"] = "Never"
    pod["automountServiceAccountToken"] = False
    pod.setdefault("terminationGracePeriodSeconds", _LEAST_GRACE_S)
    pod.setdefault("volumes", []).append({"name": "edl-hvd-token", "secret": {"secretName": f"{job.name}-token"}})
    lost = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": _LOST_NODE_S} for what in ("not-ready", "unreachable")
    ]  # fmt: skip
    pod["tolerations"] = [*(pod.get("tolerations") or []), *lost]
    container = pod["containers"][0]
    container.setdefault("volumeMounts", []).append(
        {"name": "edl-hvd-token", "mountPath": TOKEN_FOLDER, "readOnly": True}
    )
    more: list[dict[str, Any]] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if spec.checkpoint:
        more.append({"name": "EDL_HVD_CHECKPOINT", "value": spec.checkpoint})
    container["env"] = [*(container.get("env") or []), *more]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, name, role, template), "spec": pod}
