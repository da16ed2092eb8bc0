"""``edl-hvd train``: one command for a script, wherever it is to run."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edl_hvd.cli.find_job import refuse
from edl_hvd.cli.fleet_client import STATE, submit_job
from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError, UsageError
from edl_hvd.fleet.messages import is_served
from edl_hvd.fleet.state import JobSpec
from edl_hvd.fleet.store import FILE
from edl_hvd.json_values import show
from edl_hvd.kubernetes.snapshot import GROUP, VERSION
from edl_hvd.kubernetes.submission import JobRequest, dropped_fields, job_manifest
from edl_hvd.settings import process_environment

FAILED, WRONG = 1, 2
HERE, FLEET, KUBERNETES = "on this machine", "in a fleet", "on Kubernetes"
# Where each option means something; the others mean the same everywhere.
_ONLY = {
    "name": (FLEET, KUBERNETES), "priority": (FLEET, KUBERNETES), "retries": (FLEET, KUBERNETES),
    "family": (FLEET, KUBERNETES),
    "image": (KUBERNETES,), "namespace": (KUBERNETES,), "gpus": (KUBERNETES,), "cpu": (KUBERNETES,),
    "memory": (KUBERNETES,),
}  # fmt: skip
_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


@click.command("train", context_settings={"allow_interspersed_args": False})
@click.option("--min", "least", type=click.IntRange(1), default=1, show_default=True, help="Fewest workers.")
@click.option("--max", "most", type=click.IntRange(1), help="Most workers.  [--min]")
@click.option("--checkpoint", metavar="URL", default="", help="Where checkpoints go, e.g. s3://bucket/resnet50.")
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="Environment variable of its workers.")
@click.option("--name", help="Name of the job.  [that of the script]")
@click.option("--priority", metavar="N|CLASS",
              help="A number in a fleet, a PriorityClass on Kubernetes.  [0, edl-hvd-floor]")  # fmt: skip
@click.option("--family", metavar="NAME", default="",
              help="Jobs of one family are alike: each begins with what the others have measured.")  # fmt: skip
@click.option("--retries", type=click.IntRange(0), help="Runs that may fail.  [0 in a fleet, 3 on Kubernetes]")
@click.option("--fleet", "state_dir", metavar="DIR", type=click.Path(path_type=Path),
              help=f"Submit to the fleet with this folder.  [{STATE}, if one is there]")  # fmt: skip
@click.option("--here", is_flag=True, help="Run on this machine, even if a fleet is here.")
@click.option("--kubernetes", is_flag=True, help="Submit a TrainingJob to the cluster of the kubeconfig.")
@click.option("--image", help="Kubernetes: image that holds the script, torch, Horovod and edl_hvd.")
@click.option("-n", "--namespace", help="Kubernetes: namespace of the job.  [the kubeconfig's]")
@click.option("--gpus", type=click.IntRange(0), help="Kubernetes: GPUs of a worker, a process for each.  [0]")
@click.option("--cpu", metavar="Q", help="Kubernetes: processors of a worker.  [1 without GPUs]")
@click.option("--memory", metavar="Q", help="Kubernetes: memory of a worker, e.g. 8Gi.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, for Kubernetes as YAML, and end.")
@click.argument("command", metavar="SCRIPT...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def train_command(
    context: click.Context, least: int, most: int | None, checkpoint: str, variables: Sequence[str], name: str | None,
    priority: str | None, family: str, retries: int | None, state_dir: Path | None, here: bool, kubernetes: bool,
    image: str | None, namespace: str | None, gpus: int | None, cpu: str | None, memory: str | None, dry_run: bool,
    command: Sequence[str],
) -> None:  # fmt: skip
    """Train with --min to --max workers, wherever that is.

    SCRIPT is a Python file that uses edl_hvd, with its arguments, or any command. With --kubernetes it becomes a
    TrainingJob; else a job of the fleet in this folder; without a fleet it runs here, under edlrun, on --max workers.
    It is refused where the daemon of that fleet is down.

    \b
    Examples:
      edl-hvd train --min 1 --max 4 train.py
      edl-hvd train --max 8 --kubernetes --image registry/resnet50 train.py
      edl-hvd train --kubernetes --image registry/resnet50 --dry-run train.py

    Exit code: that of edlrun if it runs here. Otherwise 0: submitted. 1: the fleet or the API server does not answer,
    or refuses. 2: an argument is wrong, or the job can never run. Documents: docs/cluster.md, docs/kubernetes.md.
    """
    words = ("python", *command) if command[0].endswith(".py") else tuple(command)
    fleet = (state_dir or Path(STATE)).expanduser()
    most = least if most is None else most
    name = name or _name_of(command)
    try:
        where = _place_of(fleet, state_dir is not None, here, kubernetes)
        _check_options(context, where)
        if where == KUBERNETES:
            request = JobRequest(
                name, words, image or "", least, most, namespace or "", priority or "", checkpoint,
                3 if retries is None else retries, gpus or 0, cpu or "", memory or "", tuple(variables), family,
            )  # fmt: skip
            _submit_to_kubernetes(request, dry_run)
        elif where == FLEET:
            added = (f"EDL_HVD_CHECKPOINT={checkpoint}",) if checkpoint else ()
            spec = JobSpec(
                name, words, str(Path.cwd()), least, most, _number(priority), variables=(*variables, *added),
                retries=retries or 0, family=family,
            )  # fmt: skip
            _submit_to_fleet(fleet, spec, dry_run)
        else:
            _run_here(words, least, most, _environment(checkpoint, variables), dry_run)
    except UsageError as error:
        *others, last = str(error).split("\n")
        for problem in others:
            click.echo(f"error: {problem}", err=True)
        refuse(last, WRONG)


def _place_of(fleet: Path, has_fleet: bool, here: bool, kubernetes: bool) -> str:
    """Where the job is to run: where an option says, else in the fleet of this folder, else on this machine.

    Ends the program where that fleet has no daemon: its jobs may train on the slots of this machine.
    """
    if has_fleet + here + kubernetes > 1:
        raise UsageError("--fleet, --here and --kubernetes were given together; expected one of them")
    if kubernetes:
        return KUBERNETES
    if here:
        return HERE
    if has_fleet or is_served(fleet):
        return FLEET
    if (fleet / FILE).exists():
        refuse(
            f"the fleet in {fleet} has no daemon; start it with 'edl-hvd fleet serve', or give --here to run on this "
            "machine without it",
            FAILED,
        )
    return HERE


def _check_options(context: click.Context, where: str) -> None:
    """Refuse an option that would do nothing there, and the lack of one that is needed."""
    for parameter in context.command.params:
        places = _ONLY.get(parameter.name or "", (where,))
        if where not in places and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            hint = " or ".join({FLEET: "--fleet DIR", KUBERNETES: "--kubernetes"}[place] for place in places)
            raise UsageError(
                f"{parameter.opts[-1]} has no effect {where}, where this job would run; use it with {hint}"
            )
    if where == KUBERNETES and not context.params["image"]:
        raise UsageError(
            "--kubernetes was given without --image; expected the image that holds the script, torch, Horovod and "
            "edl_hvd"
        )


def _name_of(command: Sequence[str]) -> str:
    """The script's name, as a name of a job.

    >>> _name_of(["python", "-u", "src/Train_ResNet.py", "--epochs", "9"])
    'train-resnet'
    >>> _name_of(["3d_unet.py"])
    'job-3d-unet'
    """
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or "job"
    return f"job-{name}" if name[0].isdigit() else name


def _number(priority: str | None) -> int:
    try:
        return int(priority or "0")
    except ValueError:
        raise UsageError(f"--priority {show(priority)} is no number; in a fleet a whole number is expected") from None


def _environment(checkpoint: str, variables: Sequence[str]) -> dict[str, str]:
    wrong = next((text for text in variables if not _VARIABLE.fullmatch(text)), None)
    if wrong is not None:
        raise UsageError(f"--env {show(wrong)} is not usable; expected NAME=VALUE")
    added = {"EDL_HVD_CHECKPOINT": checkpoint} if checkpoint else {}
    return {**dict(text.split("=", 1) for text in variables), **added}


def _run_here(words: Sequence[str], least: int, most: int, variables: Mapping[str, str], dry_run: bool) -> None:
    """Become ``edlrun``."""
    if least > most:
        raise UsageError(f"--min {least} is above --max {most}; lower the one or raise the other")
    flags = ["-np", str(most), "--min-np", str(least), "-H", f"localhost:{most}", *words]
    if dry_run:
        assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        click.echo(" ".join([*assigned, shlex.join(["edlrun", *flags])]))
        return
    click.echo(f"runs on this machine: {shlex.join(['edlrun', *flags])}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "edl_hvd.cli.edlrun", *flags]
    os.execve(sys.executable, command, {**process_environment(), **variables})


def _submit_to_fleet(fleet: Path, spec: JobSpec, dry_run: bool) -> None:
    if dry_run:
        words = shlex.join(spec.command)
        click.echo(f"would submit {words} to the fleet in {fleet} as {spec.name}, {spec.least} to {spec.most}")
        return
    submit_job(fleet, spec)


def _submit_to_kubernetes(request: JobRequest, dry_run: bool) -> None:
    manifest = job_manifest(request)
    if request.checkpoint and not _REMOTE.match(request.checkpoint):
        problem = (
            f"--checkpoint {show(request.checkpoint)} is a folder in the file system of a pod, and goes with the pod; "
            "expected a URL such as s3://bucket/resnet50"
        )
        if not dry_run:
            raise UsageError(f"{problem}, or a volume in the file that --dry-run prints")
        click.echo(f"{problem}, or a volume for it in this file", err=True)
    if dry_run:
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError:
            raise UsageError("YAML needs PyYAML; run pip install 'edl-hvd[kubernetes]'") from None
        click.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)
        return
    from edl_hvd.kubernetes.api import ApiServer

    api = ApiServer(rights="ask for the role 'edit' in that namespace, which may create TrainingJobs")
    namespace = request.namespace or api.namespace
    try:
        made = api.create(f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs", manifest)
    except ObjectExistsError:
        refuse(
            f"there is a TrainingJob {request.name} in namespace {namespace} already; choose another --name, or remove "
            f"it: kubectl -n {namespace} delete tj {request.name}",
            WRONG,
        )
    except ObjectMissingError as error:
        refuse(
            f"{error}; expected a namespace that exists, in a cluster that knows TrainingJobs: 'edl-hvd operator "
            "--manifests | kubectl apply -f -' teaches it",
            FAILED,
        )
    except EdlHvdError as error:
        refuse(str(error), FAILED)
    finally:
        api.close()
    if dropped := dropped_fields(manifest, made):
        click.echo(
            f"the cluster knows an older TrainingJob, and has dropped {', '.join(dropped)}; teach it this one, and "
            "submit the job once more: edl-hvd operator --manifests | kubectl apply -f -",
            err=True,
        )
    click.echo(f"TrainingJob {namespace}/{request.name} is submitted; kubectl -n {namespace} get tj {request.name}")
