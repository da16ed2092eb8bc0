"""What every test may rely on: the settings are the defaults, and nothing outside its own folder is touched."""

from __future__ import annotations

import os

import pytest

# Two cores run several workers at a time; a pool of threads in each makes all of them slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in list(os.environ):
        if name.startswith(("EDL_HVD_", "HOROVOD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDL_HVD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    runtime = tmp_path_factory.getbasetemp() / "runtime"
    runtime.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
