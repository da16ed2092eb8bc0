"""The job's seed reaches what the script has not seeded itself, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# A process of its own: what another test has seeded stays seeded.
SCRIPT = """
import json, os, random
import numpy, torch
{before}
import edl_hvd
from edl_hvd.data.randomness import seed_unseeded

seed_unseeded(5)
{after}
print(json.dumps([torch.rand(1).item(), random.random(), numpy.random.rand()]))
"""
ALL = "torch.manual_seed(3); random.seed(3); numpy.random.seed(3)"


def drawn(before: str = "", after: str = "") -> list[float]:
    code = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def of_the_job() -> list[float]:
    return drawn()


@pytest.fixture(scope="module")
def of_the_script() -> list[float]:
    return drawn(after=ALL)


def test_processes_that_seed_nothing_draw_the_same(of_the_job: list[float]) -> None:
    assert drawn("torch.rand(1), random.random(), numpy.random.rand()") == of_the_job


def test_a_script_that_seeds_itself_draws_its_own_numbers(of_the_job: list[float], of_the_script: list[float]) -> None:
    assert not set(of_the_job) & set(of_the_script)
    assert drawn(before=ALL) == of_the_script


def test_a_large_seed_counts_as_one() -> None:
    large = "torch.manual_seed(2**63 + 1)"
    assert drawn(before=large)[0] == drawn(after=large)[0]


def test_what_a_script_seeds_alone_stays_and_the_other_is_seeded(
    of_the_job: list[float], of_the_script: list[float]
) -> None:
    torchs = drawn(before="torch.manual_seed(3); random.seed(3)")
    assert torchs == [*of_the_script[:2], of_the_job[2]]
    numpys = drawn(before="numpy.random.seed(3); random.seed(3)")
    assert numpys == [of_the_job[0], *of_the_script[1:]]
