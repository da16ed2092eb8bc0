"""``edl-hvd teach``: a process for each device, which answers with a model for students in training."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import click

from edl_hvd.distill.finding import DEFAULT_PORT
from edl_hvd.gpus import count_gpus
from edl_hvd.settings import process_environment


@click.command("teach")
@click.argument("build")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of the first process; the others take the ones after it. 0 takes a free one.",
)
@click.option(
    "--listen", metavar="ADDRESS", default=None, help="Address to listen on. [0.0.0.0 with a token, else 127.0.0.1]"
)
@click.option(
    "--devices",
    default="all",
    show_default=True,
    help="One process for each: all GPUs (else one CPU), or a list such as cuda:0,cuda:1 or cpu,cpu.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most samples in a forward pass; tasks of several students are computed together up to it.",
)
@click.option("--threads", type=click.IntRange(1), default=None, help="Threads of torch in each process. [torch's own]")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="File that holds the token. [EDL_HVD_TEACHERS_TOKEN, or EDL_HVD_TEACHERS_TOKEN_FILE]",
)
@click.option(
    "--tls-cert",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="Certificate in PEM: students call by TLS, with its CA in EDL_HVD_TEACHERS_TLS_CA.",
)
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), default=None, help="Its key in PEM.")
def teach_command(
    build: str, port: int, listen: str | None, devices: str, max_batch: int, threads: int | None,
    token_file: str | None, tls_cert: str | None, tls_key: str | None,
) -> None:  # fmt: skip
    """Answer for students with the model that BUILD returns.

    BUILD is FILE.py:FUNCTION or MODULE:FUNCTION; the function takes no argument and returns a torch.nn.Module, or a
    callable of a tensor or a dict of tensors. SIGTERM, Ctrl-C and the notice of a spot host let the processes finish
    what they have, and end them with exit code 0.

    \b
    Examples:
      edl-hvd teach teacher.py:build
      edl-hvd teach teacher.py:build --port 7010 --devices cpu,cpu

    Exit code 2 when BUILD or a flag is not understood. Documents: docs/distillation.md.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together; one of them is missing")
    variables = process_environment()
    has_token = bool(
        token_file or variables.get("EDL_HVD_TEACHERS_TOKEN") or variables.get("EDL_HVD_TEACHERS_TOKEN_FILE")
    )
    address = listen or ("0.0.0.0" if has_token else "127.0.0.1")
    processes = []
    for number, device in enumerate(_devices(devices)):
        words = [sys.executable, "-m", "edl_hvd.distill", build, "--listen", address, "--max-batch", str(max_batch)]
        words += ["--port", str(port + number if port else 0), "--device", device]
        words += ["--threads", str(threads)] if threads else []
        words += ["--token-file", token_file] if token_file else []
        words += ["--tls-cert", tls_cert, "--tls-key", tls_key] if tls_cert and tls_key else []
        processes.append(subprocess.Popen(words, env=variables))
    sys.exit(_wait(processes))


def _devices(text: str) -> list[str]:
    if text != "all":
        return [word.strip() for word in text.split(",") if word.strip()]
    return [f"cuda:{number}" for number in range(count_gpus())] or ["cpu"]


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Pass signals on, and wait; the exit code is the first one that is not 0, as a shell has it."""
    told: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for process in processes:
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    codes = [process.wait() for process in processes]
    # One that was told to leave while it still loaded its model had nothing to finish.
    bad = (code for code in codes if code and not (told and code == -signal.SIGTERM))
    return next((128 - code if code < 0 else code for code in bad), 0)
