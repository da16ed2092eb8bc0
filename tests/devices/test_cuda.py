"""Horovod with CUDA and NCCL. Several workers share one GPU, so a machine with one is enough."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gpu_script
import harness
import pytest
import torch
from chaos import SeededFault
from invariants import check_counters, check_ledger, check_no_step_lost, check_replicas
from training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SCRIPT = Path(gpu_script.__file__)
EDLRUN = Path(sys.executable).with_name("edlrun")
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}
HOSTS = ("localhost:2", "127.0.0.1:1", "127.1:1")


def learned(
    folder: Path, *flags: str, hosts: tuple[str, ...] = (), variables: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """What the script's workers have learned, by rank; without hosts it runs alone, without a launcher."""
    folder.mkdir()
    program = [sys.executable, str(SCRIPT), str(folder), *flags]
    (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    slots = str(sum(int(host.partition(":")[2]) for host in hosts))
    limits = ["-np", slots, "--min-np", "1" if "--deaths" in flags else slots, "--max-np", slots]
    launch = [str(EDLRUN), *limits, "--discover", f"file:{folder}/hosts", "--host-failures", "100"] if hosts else []
    with open(folder / "output.txt", "w+") as output:
        environment = {**os.environ, **LOOPBACK, **variables}
        done = subprocess.run([*launch, *program], env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        assert done.returncode == 0, output.read()[-6000:]
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def test_gradients_are_summed_by_nccl_also_where_workers_share_a_gpu(tmp_path):
    log = tmp_path / "nccl.txt"
    found = learned(tmp_path / "job", hosts=HOSTS[:2], variables={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)})
    assert [each["size"] for each in found] == [3, 3, 3]
    assert "nranks 3" in log.read_text()
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_mixed_precision_learns_what_plain_pytorch_learns(tmp_path, precision):
    (expected,) = learned(tmp_path / "plain", "--plain", "--precision", precision)
    found = learned(tmp_path / "job", "--precision", precision, hosts=HOSTS[:1])
    if precision == "float16":
        falls = [later < earlier for earlier, later in pairwise(expected["scales"])]
        assert falls.count(True) == 1, "the step that overflows"
        assert len(set(expected["scales"])) > 3, "steps after which the scale grows"
    within = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}[precision]
    for each in found:
        assert each["scales"] == expected["scales"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=within, nan_ok=True)
        for name, weight in each["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=within, atol=within)


def test_exact_gives_the_same_bits_in_every_world(tmp_path):
    (alone,) = learned(tmp_path / "alone", "--exact")
    for hosts in (HOSTS[:1], HOSTS[:2]):
        found = learned(tmp_path / f"of{len(hosts)}", "--exact", hosts=hosts)
        assert {each["digest"] for each in found} == {alone["digest"]}


def test_members_that_die_while_the_communicator_forms_hold_up_nobody(tmp_path):
    found = learned(tmp_path / "job", "--exact", "--steps", "100", "--deaths", "6", hosts=HOSTS[:2])
    assert len(list((tmp_path / "job").glob("death.*"))) == 6
    (alone,) = learned(tmp_path / "alone", "--exact", "--steps", str(len(found[0]["losses"])))
    assert {each["digest"] for each in found} == {alone["digest"]}


def test_workers_killed_at_random_moments_leave_right_sums(tmp_path):
    chance = random.SystemRandom()
    faults = tuple(
        SeededFault("kill one", chance.getrandbits(30), step=3, after=number - 1 if number else None,
                    delay_s=chance.uniform(0.05, 4.0))
        for number in range(8)
    )  # fmt: skip
    job = harness.Job(
        hosts=("localhost:2", "127.0.0.1:2"), faults=faults, launcher="edlrun", environment=LOOPBACK,
        training=Training(linger_s=1.0, device="cuda", hidden=512, layers=3, extra=("long",)),
        flags=("--host-failures", "1000"),
    )  # fmt: skip
    outcome = harness.run(job, tmp_path / "job")
    assert outcome.exit_code == 0, outcome.output[-4000:]
    assert outcome.fired == dict.fromkeys(range(len(faults)), 1)
    check_replicas(outcome)
    check_no_step_lost(job, outcome)
    check_ledger(job, outcome)
    check_counters(job.training, outcome)


@pytest.mark.parametrize(("before", "after"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_checkpoint_of_one_device_goes_on_on_another(tmp_path, before, after):
    settings = {"EDL_HVD_CHECKPOINT": str(tmp_path / "kept"), "EDL_HVD_CHECKPOINT_EVERY": "3steps"}
    (expected,) = learned(tmp_path / "whole", "--device", after, "--steps", "12")
    learned(tmp_path / "first", "--device", before, "--steps", "8", variables=settings)
    (found,) = learned(tmp_path / "second", "--device", after, "--steps", "12", variables=settings)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-3, atol=1e-4)
