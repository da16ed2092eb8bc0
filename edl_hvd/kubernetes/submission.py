"""The TrainingJob that a user submits with one command. Pure; what it makes is read as the operator will read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl_hvd.errors import UsageError
from edl_hvd.json_values import show
from edl_hvd.kubernetes.parsing import quantity, read_job
from edl_hvd.kubernetes.snapshot import CPU, GPU, GROUP, KIND, VERSION

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class JobRequest:
    """What a user asks for.

    Attributes:
        name: Name of the job.
        command: What each worker runs.
        image: Image that holds the script, torch, Horovod and this package.
        least: Fewest workers (pods).
        most: Most workers.
        namespace: Where the job is to be; empty: where the user's kubeconfig says.
        priority_class: PriorityClass of the least; empty: the operator's own.
        checkpoint: URL of the checkpoints; empty: none.
        retries: Launchers that may fail.
        gpus: GPUs of a worker, a process for each; 0: none.
        cpu: Processors of a worker, a quantity of Kubernetes; empty: one without GPUs, else none.
        memory: Memory of a worker, a quantity; empty: not said.
        variables: Environment variables as ``NAME=VALUE``.
        family: Name that jobs share which are alike; empty: none.
    """

    name: str
    command: tuple[str, ...]
    image: str
    least: int
    most: int
    namespace: str = ""
    priority_class: str = ""
    checkpoint: str = ""
    retries: int = 3
    gpus: int = 0
    cpu: str = ""
    memory: str = ""
    variables: tuple[str, ...] = ()
    family: str = ""


def job_manifest(request: JobRequest) -> dict[str, Any]:
    """The TrainingJob, as ``kubectl apply`` takes it.

    Raises:
        UsageError: The operator could not run it.
    """
    asked: dict[str, str] = {}
    if request.cpu or not request.gpus:
        asked[CPU] = request.cpu or "1"
    if request.memory:
        quantity(request.memory)
        asked["memory"] = request.memory
    container: dict[str, Any] = {
        "name": "main",
        "image": request.image,
        "command": [_literal(word) for word in request.command],
    }
    if request.variables:
        container["env"] = [_variable(text) for text in request.variables]
    container["resources"] = {"requests": asked} if asked else {}
    if request.gpus:
        container["resources"]["limits"] = {GPU: request.gpus}
    meta = {"name": request.name, **({"namespace": request.namespace} if request.namespace else {})}
    spec: dict[str, Any] = {}
    if request.priority_class:
        spec["priorityClassName"] = request.priority_class
    if request.checkpoint:
        spec["checkpoint"] = _literal(request.checkpoint)
    if request.family:
        spec["family"] = request.family
    spec["retries"] = request.retries
    spec["workers"] = {
        "min": request.least, "max": request.most, "template": {"spec": {"containers": [container]}}
    }  # fmt: skip
    manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "spec": spec}
    seen = read_job({**manifest, "metadata": {**meta, "uid": "", "resourceVersion": ""}})
    if seen.spec is None:
        if seen.problem_reason in ("BadName", "NameTooLong"):
            raise UsageError(f"{seen.problem}; choose another --name")
        raise UsageError(f"job {request.name}: {seen.problem}")
    return manifest


def dropped_fields(manifest: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """The fields of a job's spec that its cluster has dropped, because it knows an older TrainingJob.

    >>> dropped_fields({"spec": {"family": "text", "retries": 3}}, {"spec": {"retries": 3, "suspend": False}})
    ['spec.family']

    Args:
        manifest: What was submitted.
        made: What the API server has made of it.
    """
    return [f"spec.{name}" for name in manifest["spec"] if name not in made["spec"]]


def _variable(text: str) -> dict[str, str]:
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise UsageError(f"variable {show(text)} is not usable; expected NAME=VALUE")
    return {"name": match[1], "value": _literal(match[2])}


def _literal(text: str) -> str:
    """The text as a pod has to name it, where Kubernetes expands ``$(NAME)`` and reads ``$$`` as ``$``."""
    return text.replace("$", "$$")
