"""A script that was written for Horovod is told, name by name, what to write."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import edl_hvd
from edl_hvd import horovod_names

THEIRS = """
import horovod.torch as hvd
print(*(name for name in dir(hvd) if not name.startswith("_")), "|",
      *(name for name in dir(hvd.elastic) if not name.startswith("_")))
"""


def test_every_public_name_of_horovod_is_here_or_explained():
    printed = subprocess.run([sys.executable, "-c", THEIRS], stdout=subprocess.PIPE, text=True, check=True).stdout
    names, _, of_elastic = printed.partition("|")
    assert "broadcast_parameters" in names
    assert "TorchState" in of_elastic
    assert set(names.split()) - set(edl_hvd.__all__) == set(horovod_names.INSTEAD)
    assert set(of_elastic.split()) - set(horovod_names.INSTEAD_OF_ELASTIC) == set()


@pytest.mark.parametrize("name", sorted(horovod_names.INSTEAD))
def test_a_name_of_horovod_raises_one_sentence(name):
    with pytest.raises(AttributeError, match=rf"^edl_hvd has no '{name}', which Horovod has; \w.*\(docs/") as raised:
        getattr(edl_hvd, name)
    assert "\n" not in str(raised.value)
    assert not hasattr(edl_hvd, name)


@pytest.mark.parametrize("name", sorted(horovod_names.INSTEAD_OF_ELASTIC))
def test_a_name_of_horovods_elastic_module_raises_one_sentence(name):
    with pytest.raises(AttributeError, match=rf"^edl_hvd\.elastic has no '{name}', which Horovod has; \w"):
        getattr(edl_hvd.elastic, name)


def test_the_most_frequent_ones_say_what_to_write():
    assert "remove it; entering the function decorated" in horovod_names.explain("broadcast_parameters")
    assert 'write op="mean"' in horovod_names.explain("Average")
    assert "`edl-hvd doctor`" in horovod_names.explain("nccl_built")
    assert "write @edl_hvd.elastic" in horovod_names.explain_elastic("run")


def test_a_name_that_nobody_has_is_an_ordinary_mistake():
    with pytest.raises(AttributeError, match=r"^module 'edl_hvd' has no attribute 'allrduce'$"):
        edl_hvd.allrduce  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="it is a decorator"):
        edl_hvd.elastic.walk  # type: ignore[attr-defined]  # noqa: B018


def test_the_decorator_still_shows_what_it_takes():
    assert "checkpoint_every" in inspect.signature(edl_hvd.elastic).parameters
    assert "survive changes of the world" in (inspect.getdoc(edl_hvd.elastic) or "")
    assert edl_hvd.elastic.__name__ == "elastic"


def test_the_table_is_not_loaded_before_it_is_needed():
    script = "import sys, edl_hvd; print(*(name in sys.modules for name in ('edl_hvd.horovod_names', 'torch')))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
