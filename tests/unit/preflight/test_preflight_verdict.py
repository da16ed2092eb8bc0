"""Which hosts are good enough to get workers, and who meets whom to find out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.preflight.devices import measure, wrong_rows
from edl_hvd.preflight.measured import HostFindings, Measured
from edl_hvd.preflight.verdict import judge, pairs

CPU = Measured("cpu", 1, 100.0)
GPUS = Measured("cuda", 4, 10_000.0)
OTHERS = [HostFindings("a", 4, GPUS, 0.002), HostFindings("b", 4, replace(GPUS, gflop_s=9_000.0), 0.003)]


@pytest.mark.parametrize(
    ("findings", "fault"),
    [
        (HostFindings("c", 4, GPUS, 0.004), ""),
        (HostFindings("c", 4, replace(GPUS, gflop_s=4_751.0), 0.004), ""),
        (
            HostFindings("c", 4, replace(GPUS, gflop_s=4_700.0), 0.004),
            "4.7e+03 GFLOP/s in a matrix product on its slowest GPU, the others 9.5e+03; "
            "at least 4.75e+03 is asked for",
        ),
        (
            HostFindings("c", 4, GPUS, 0.0051),
            "an allreduce of 1 MiB takes it 5.1 ms, the others 2.5 ms; at most 5 ms is asked for",
        ),
        (HostFindings("c", 4, replace(GPUS, count=3), 0.002), "torch sees 3 of the 4 GPUs that its slots stand for"),
        (HostFindings("c", 4, CPU, 0.002), "torch sees no GPU on it; the others have one"),
        (HostFindings("c", 4, replace(GPUS, fault="device cuda:1 failed"), 0.002), "device cuda:1 failed"),
        (HostFindings("c", 4, None, None, "ended with exit code 255"), "ended with exit code 255"),
        (
            HostFindings("c", 4, GPUS, None, "no allreduce with 10.0.0.1: timed out"),
            "no allreduce with 10.0.0.1: timed out",
        ),
    ],
)
def test_a_host_is_compared_with_the_others(findings, fault):
    assert judge(findings, OTHERS) == fault


def test_alone_a_host_is_held_against_nothing_but_itself():
    assert judge(HostFindings("a", 1, replace(CPU, gflop_s=0.001)), []) == ""
    assert judge(HostFindings("a", 1, replace(CPU, fault="a matrix product failed")), []) == "a matrix product failed"


def test_hosts_of_another_kind_are_no_measure_for_a_product():
    assert judge(HostFindings("c", 4, GPUS, 0.002), [HostFindings("a", 1, CPU, 0.002)]) == ""


def test_a_wider_bound_lets_more_in():
    slow = HostFindings("c", 4, replace(GPUS, gflop_s=2_000.0), 0.009)
    assert "GFLOP/s" in judge(slow, OTHERS, bound=4.0)
    assert judge(slow, OTHERS, bound=5.0) == ""


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=70), st.integers(1, 5))
def test_in_each_turn_everybody_meets_one_other_and_nobody_twice(numbers, turns):
    hosts = [f"node-{number}" for number in numbers]
    met = pairs(hosts, turns)
    rounds = len(hosts) - 1 if len(hosts) % 2 == 0 else len(hosts)
    assert len(met) == max(0, min(turns, rounds if len(hosts) > 1 else 1 if hosts else 0))
    for turn in met:
        busy = list(itertools.chain(*turn))
        assert len(busy) == len(set(busy))
        assert len(busy) >= len(hosts) - 1, "one has no partner where their number is odd"
    everyone = [frozenset(pair) for turn in met for pair in turn]
    assert len(everyone) == len(set(everyone))


@given(st.integers(0, 63), st.integers(0, 63), st.sampled_from([1.0, -1.0, 0.5, 1e9]))
def test_one_wrong_number_in_a_product_is_found_wherever_it_is(row, column, error):
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randint(-4, 5, (64, 64), generator=generator).float() for _ in range(2))
    product = left @ right
    assert wrong_rows(left, right, product) == 0
    product[row, column] += error
    assert wrong_rows(left, right, product) == 1


def test_a_gpu_that_torch_does_not_see_is_a_fault_unless_it_is_hidden(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    if torch.cuda.is_available():
        pytest.skip("torch sees GPUs here")
    unseen = measure({}, nodes=tmp_path)
    assert unseen.fault.startswith(f"its system has 2 GPUs, torch {torch.__version__} sees none; see nvidia-smi")
    hidden = measure({"CUDA_VISIBLE_DEVICES": ""}, nodes=tmp_path)
    assert (hidden.device, hidden.count, hidden.fault) == ("cpu", 1, "")
    assert hidden.gflop_s > 0
