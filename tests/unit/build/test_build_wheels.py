from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edl_hvd.build.plan import BuildPlan, GpuChoice, make_plan
from edl_hvd.build.tools import Tool
from edl_hvd.build.torch_facts import TorchFacts
from edl_hvd.build.wheels import WheelStore, wheel_facts, wheel_key

TORCH = TorchFacts("2.13.0+cpu", revision="cf30153")
COMPILER = Tool("/usr/bin/c++", "c++ 12.2.0")
FEATURES = ("avx", "f16c", "fma")
CPU_ONLY = GpuChoice(False, "no GPU")


def key(
    torch: TorchFacts = TORCH,
    plan: BuildPlan | None = None,
    compiler: Tool = COMPILER,
    features: tuple[str, ...] = FEATURES,
    environ: dict[str, str] | None = None,
) -> str:
    plan = plan or make_plan(torch, CPU_ONLY, None, 2, environ or {})
    return wheel_key(wheel_facts(torch, plan, compiler, features, environ or {}))


def test_the_same_facts_give_the_same_key() -> None:
    assert key() == key()


def test_how_fast_it_is_built_does_not_change_the_key() -> None:
    assert key(plan=make_plan(TORCH, CPU_ONLY, None, 16, {})) == key()


def test_a_gpu_that_is_not_built_for_does_not_change_the_key() -> None:
    assert key(torch=replace(TORCH, gpus=("90",))) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"torch": replace(TORCH, version="2.12.0+cpu")},
        {"torch": replace(TORCH, version="2.13.0+cu130", cuda="13.0")},
        {"torch": replace(TORCH, revision="another")},
        {"torch": replace(TORCH, cxx11_abi=False)},
        {"compiler": Tool("/usr/bin/clang++", "clang 19")},
        {"compiler": Tool("/usr/bin/c++", "c++ 14.1.0")},
        {"features": ("avx",)},
        {"environ": {"CXXFLAGS": "-O1"}},
        {"environ": {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"}},
        {"plan": make_plan(TORCH, CPU_ONLY, Tool("/usr/bin/mpicxx", "g++ 12"), 2, {})},
        {"plan": make_plan(TORCH, GpuChoice(True, ""), None, 2, {})},
    ],
    ids=lambda other: "-".join(other),
)
def test_anything_a_wheel_depends_on_changes_the_key(other: dict) -> None:
    assert key(**other) != key()


def test_the_store_gives_back_what_was_put_under_exactly_that_key(tmp_path: Path) -> None:
    store = WheelStore(tmp_path / "wheels")
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"first")
    assert store.find("a") is None
    kept = store.put("a", wheel, {"torch": "2.13.0"})
    assert store.find("a") == kept
    assert kept.read_bytes() == b"first"
    assert store.find("b") is None


def test_a_newer_wheel_of_the_same_key_takes_the_place_of_the_older(tmp_path: Path) -> None:
    store = WheelStore(tmp_path / "wheels")
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    for content in (b"first", b"second"):
        wheel.write_bytes(content)
        store.put("a", wheel, {})
    found = store.find("a")
    assert found is not None
    assert found.read_bytes() == b"second"
    assert [entry.name for entry in (tmp_path / "wheels").iterdir()] == ["a"]
