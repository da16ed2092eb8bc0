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

_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LONGEST_SUBDOMAIN = 253
# Kubernetes' own rules for the names of objects; a part of a subdomain may have more than 63 characters there.
_PART = "[a-z0-9]+(?:(?:[_.]|__|-+)[a-z0-9]+)*"
_DOMAIN = (
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])"
)
_IMAGE = re.compile(
    rf"(?:(?P<domain>{_DOMAIN}(?::[0-9]+)?)/)?(?P<path>{_PART}(?:/{_PART})*)"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@(?:sha256:[a-f0-9]{64}|sha384:[a-f0-9]{96}|sha512:[a-f0-9]{128}))?"
)
# The grammar of references in the library 'distribution', by which kubelets and containerd read an image.
_LONGEST_PATH = 255
_IDENTIFIER = re.compile("[a-f0-9]{64}")
# Such a word means the identifier of an image on one host.
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
        UsageError: Kubernetes would refuse a name in it, one line for each; or the operator could not run it.
    """
    if problems := _wrong_names(request):
        raise UsageError("\n".join(problems))
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


def _wrong_names(request: JobRequest) -> list[str]:
    """Names that Kubernetes would refuse, or no kubelet could pull."""
    problems = []
    if request.namespace and not re.fullmatch(_LABEL, request.namespace):
        problems.append(
            f"--namespace {show(request.namespace)} is no DNS label (RFC 1123); expected 1 to 63 small letters, digits "
            "and '-', with a letter or digit at both ends, e.g. 'vision'"
        )
    name = request.priority_class
    if name and not (len(name) <= _LONGEST_SUBDOMAIN and _SUBDOMAIN.fullmatch(name)):
        problems.append(
            f"--priority {show(name)} is no DNS subdomain (RFC 1123), as names of PriorityClasses are; expected 1 to "
            f"{_LONGEST_SUBDOMAIN} small letters, digits, '-' and '.', with a letter or digit at both ends of each "
            "part, e.g. 'high'"
        )
    if not _is_image(request.image):
        problems.append(
            f"--image {show(request.image)} is no reference of an image; expected "
            "[REGISTRY[:PORT]/]NAME[:TAG][@DIGEST] with a NAME of small letters and digits, e.g. "
            "'registry.example:5000/team/resnet50:v1'"
        )
    return problems


def _is_image(text: str) -> bool:
    """Whether a kubelet can read this as a reference of an image.

    The first part is a registry only if it has a dot, a colon or a capital, or is ``localhost``.
    """
    match = _IMAGE.fullmatch(text)
    if match is None or _IDENTIFIER.fullmatch(text):
        return False
    return len(match["path"]) <= _LONGEST_PATH


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
