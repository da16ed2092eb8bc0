"""How fast the storage carries a large object to S3 and back, beside boto3's own transfers and torch's checkpoints.

    python benchmarks/storage.py [--size-mb 512] [--turns 5] [--limit-mb-per-s 80] [--starts-only]

First what it takes a new process to open a storage of each cloud, beside one that imports the package alone; nothing
is contacted. Then it starts two servers on this machine (``storage_sink.py``): one as fast as sockets go, one that
carries so much per connection, as S3 does. To them it carries, in turn:

- ``edl_hvd``: ``write`` from memory, ``read_into`` memory; its defaults.
- ``boto3``: one ``upload_file`` and ``download_file``, its defaults, of a file in memory where the system has such a
  folder. The body's cryptographic signature, which boto3 leaves out over https, is left out here too.
- ``torch``: ``torch.distributed.checkpoint`` over ``s3torchconnector``, one rank, two threads, 16 MiB tensors; it also
  arranges the tensors in files and copies them out again. Left out where ``pip install 's3torchconnector[dcp]'`` was
  not run.

Prints medians, and what of the processor's time the client took, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import torch
from botocore.config import Config

from edl_hvd.storage import open_storage

MEMORY_FOLDER = Path("/dev/shm")
TENSOR_BYTES = 16 * 1024 * 1024
STARTS = 9


class Cost(NamedTuple):
    seconds: float
    processor_s: float


class Client(NamedTuple):
    """One way to carry the data; ``check`` says whether what came back is what was sent."""

    name: str
    upload: Callable[[], object]
    download: Callable[[], object]
    check: Callable[[], bool]


def of_storage(data: torch.Tensor) -> Client:
    storage = open_storage("s3://bucket/edl_hvd")
    source, back = memoryview(data.numpy()).cast("B"), bytearray(data.nbytes)
    return Client(
        "edl_hvd",
        lambda: storage.write("large", source),
        lambda: storage.read_into("large", 0, back),
        lambda: back == source,
    )


def of_boto3(data: torch.Tensor, folder: Path) -> Client:
    client = boto3.session.Session().client("s3", config=Config(s3={"payload_signing_enabled": False}))
    source, back = folder / "source", folder / "back"
    source.write_bytes(memoryview(data.numpy()).cast("B"))
    return Client(
        "boto3",
        lambda: client.upload_file(str(source), "bucket", "boto3/large"),
        lambda: client.download_file("bucket", "boto3/large", str(back)),
        lambda: source.read_bytes() == back.read_bytes(),
    )


def of_torch(data: torch.Tensor) -> Client:
    import torch.distributed.checkpoint as checkpoint
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    def cut(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {str(number): part for number, part in enumerate(tensor.split(TENSOR_BYTES // 4))}

    where: dict[str, Any] = {"region": "us-east-1", "path": "s3://bucket/torch/"}
    where["s3client_config"] = S3ClientConfig(force_path_style=True)
    back = torch.zeros_like(data)
    return Client(
        "torch",
        lambda: checkpoint.save(cut(data), storage_writer=S3StorageWriter(**where, thread_count=2)),
        lambda: checkpoint.load(cut(back), storage_reader=S3StorageReader(**where)),
        lambda: torch.equal(back, data),
    )


@contextmanager
def sink(bytes_per_s: float | None) -> Iterator[None]:
    """A server of its own process; boto3 and the like find it in the environment."""
    command = [sys.executable, str(Path(__file__).with_name("storage_sink.py"))]
    if bytes_per_s is not None:
        command += ["--bytes-per-s", str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        os.environ.update(
            AWS_ENDPOINT_URL=process.stdout.readline().strip(),
            AWS_ACCESS_KEY_ID="benchmark",
            AWS_SECRET_ACCESS_KEY="benchmark",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
            STORAGE_SINK_PROCESS=str(process.pid),
        )
        try:
            yield
        finally:
            process.stdin.close()


def cost(act: Callable[[], object]) -> Cost:
    began_s, processor_s = time.monotonic(), time.process_time()
    act()
    return Cost(time.monotonic() - began_s, time.process_time() - processor_s)


def measure(data: torch.Tensor, folder: Path, turns: int) -> dict[tuple[str, str], list[Cost]]:
    """Every client in turn, once more than is counted: the first time makes connections and finds memory."""
    clients = [of_storage(data), of_boto3(data, folder)]
    if find_spec("s3torchconnector"):
        clients.append(of_torch(data))
    costs: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(turns + 1):
        for client in clients:
            for direction, act in (("up", client.upload), ("down", client.download)):
                found = cost(act)
                if turn:
                    costs.setdefault((direction, client.name), []).append(found)
            if turn == 0 and not client.check():
                raise SystemExit(f"{client.name}: what came back is not what was sent")
    return costs


def show(server: str, size_bytes: int, costs: dict[tuple[str, str], list[Cost]]) -> None:
    for direction in ("up", "down"):
        names = [name for where, name in costs if where == direction]
        speed, processor = {}, {}
        for name in names:
            found = costs[direction, name]
            speed[name] = size_bytes / 1e6 / statistics.median(one.seconds for one in found)
            processor[name] = statistics.median(one.processor_s for one in found) / (size_bytes / 1e9)
        cells = [f"{name} {speed[name]:5.0f} MB/s {processor[name]:4.2f} s/GB" for name in names]
        ratios = [f"{speed['edl_hvd'] / speed[name]:.1f} x {name}" for name in names[1:]]
        print(f"{server:>10} {direction:>4}   {'   '.join(cells)}   {', '.join(ratios)}", flush=True)


def show_starts() -> None:
    """Processor time of new processes that open a storage: the median, and what is more than without one."""
    variables = {
        **{"AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"},
        **{"GOOGLE_BEARER_TOKEN": "x", "AZURE_STORAGE_ACCOUNT_NAME": "x", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"},
    }
    program = "import sys, edl_hvd.storage; [edl_hvd.storage.open_storage(url) for url in sys.argv[1:]]"
    urls = ("", "gs://bucket/run", "az://container/run", "s3://bucket/run")
    taken: dict[str, list[float]] = {url: [] for url in urls}
    for _ in range(STARTS):
        for url in urls:  # in turn
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            words = [sys.executable, "-c", program, *([url] if url else [])]
            subprocess.run(words, check=True, env={**os.environ, **variables})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken[url].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    without_s = statistics.median(taken[""])
    for url in urls:
        median_s = statistics.median(taken[url])
        print(
            f"start {url or 'without a storage':20} {median_s:5.2f} s of processor time, {median_s - without_s:+5.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit-mb-per-s", type=float, default=80)
    parser.add_argument("--starts-only", action="store_true")
    arguments = parser.parse_args()
    show_starts()
    if arguments.starts_only:
        return
    warnings.simplefilter("ignore")  # torch's, about a world of one
    if not find_spec("s3torchconnector"):
        print("torch.distributed.checkpoint is left out: s3torchconnector is not installed")
    data = torch.rand(arguments.size_mb * 1_000_000 // 4)
    for server, bytes_per_s in (("unlimited", None), ("limited", arguments.limit_mb_per_s * 1e6)):
        parent = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
        with sink(bytes_per_s), tempfile.TemporaryDirectory(dir=parent) as folder:
            show(server, data.nbytes, measure(data, Path(folder), arguments.turns))


if __name__ == "__main__":
    main()
