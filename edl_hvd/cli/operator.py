"""``edl-hvd operator``: training jobs on Kubernetes."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import ExitStack
from importlib.resources import files

import click

from edl_hvd.cli.metrics_text import check_prometheus, operator_metrics
from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.status_server import StatusServer
from edl_hvd.values import read_seconds


@click.command("operator")
@click.option("--manifests", is_flag=True, help="Print what the cluster needs, for 'kubectl apply -f -', and end.")
@click.option("--mpijobs", is_flag=True,
              help="Also resize MPIJobs of Kubeflow that ask for it; their CRD must be there.")  # fmt: skip
@click.option("--namespace", default="edl-hvd", show_default=True, help="Namespace of the Lease of the leader.")
@click.option("--identity", default=None, help="Name of this operator among several.  [its host's]")
@click.option("--every", default="500ms", show_default=True, help="Least time between two turns, which follow changes.")
@click.option("--metrics-port", "where", metavar="[ADDRESS:]PORT",
              help="Serve /metrics for Prometheus; on 127.0.0.1 unless told otherwise.")  # fmt: skip
def operator_command(
    manifests: bool, mpijobs: bool, namespace: str, identity: str | None, every: str, where: str | None,
) -> None:  # fmt: skip
    """Run the TrainingJobs of a Kubernetes cluster.

    It shares out the nodes among the jobs, makes room for more urgent pods of others, and writes into each job's
    status why it has what it has. It may be killed at any moment. It finds the cluster as kubectl does, or by the
    service account of its pod. Needs edl-hvd[kubernetes].

    \b
    Examples:
      edl-hvd operator --manifests
      edl-hvd operator --manifests --mpijobs
      edl-hvd operator
      edl-hvd operator --metrics-port 0.0.0.0:9400

    Exit code 0: it was told to end. 1: no plan could be made. 2: an argument is wrong, or no cluster is known.
    Documents: docs/kubernetes.md.
    """
    if manifests:
        click.echo(_manifests(mpijobs), nl=False)
        return
    from edl_hvd.kubernetes.api import ApiServer
    from edl_hvd.kubernetes.leadership import Leadership
    from edl_hvd.kubernetes.operator import Operator

    try:
        every_s = read_seconds("--every", every)
        api = ApiServer()
    except UsageError as error:
        click.echo(f"edl-hvd operator: {error}", err=True)
        sys.exit(2)
    operator = Operator(
        api,
        Leadership(api, namespace, identity or socket.gethostname()),
        lambda text: click.echo(f"edl-hvd operator: {text}", err=True),
        every_s,
        with_mpijobs=mpijobs,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: operator.end())
    with ExitStack() as open_here:
        if where is not None:
            try:
                check_prometheus()
                server = open_here.enter_context(
                    StatusServer(where, {"/metrics": lambda: operator_metrics(operator.view())})
                )
            except EdlHvdError as error:
                click.echo(f"edl-hvd operator: {error}", err=True)
                sys.exit(2)
            click.echo(f"edl-hvd operator: metrics are at {server.url}metrics", err=True)
        operator.run()


def _manifests(with_mpijobs: bool) -> str:
    folder = files("edl_hvd.kubernetes") / "manifests"
    text = (folder / "operator.yaml").read_text(encoding="utf-8")
    if not with_mpijobs:
        return text
    # The Deployment is the last of them: its command is told to look for MPIJobs.
    text = text.replace("command: [edl-hvd, operator]", "command: [edl-hvd, operator, --mpijobs]")
    return f"{text}---\n{(folder / 'mpijobs.yaml').read_text(encoding='utf-8')}"
