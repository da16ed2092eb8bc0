"""Each case runs in a process of its own: operators, once declared, stay for the life of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def run(program: str, *path: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def make_torchvision(folder: Path, body: str, library: bytes | None) -> None:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(body)
    if library is not None:
        (folder / "torchvision" / "_C.so").write_bytes(library)


REFERS_TO_NMS = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*_): ...\n"
DEFINE = "from edl_hvd.compat.torchvision_operators import define_missing_operators as define\n"


def test_a_torchvision_whose_library_does_not_load_can_be_imported(tmp_path: Path) -> None:
    make_torchvision(tmp_path, REFERS_TO_NMS, b"not a library")
    with pytest.raises(AssertionError, match="torchvision::nms does not exist"):
        run("import torchvision", tmp_path)
    assert run(DEFINE + "print(define(), define()); import torchvision", tmp_path) == "True True"


def test_nothing_is_declared_where_torchvision_has_no_library_or_is_absent(tmp_path: Path) -> None:
    make_torchvision(tmp_path, "", None)
    assert run(DEFINE + "print(define())", tmp_path) == "False"


def test_the_installed_torchvision_can_be_imported_and_used() -> None:
    pytest.importorskip("edl_hvd.compat.torchvision_operators")
    program = DEFINE + (
        "define()\nimport torch, torchvision\n"
        "model = torchvision.models.resnet18(num_classes=10).eval()\n"
        "print(tuple(model(torch.zeros(1, 3, 32, 32)).shape))"
    )
    assert run(program) == "(1, 10)"
