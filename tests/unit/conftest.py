"""Fixtures that several of these tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_hvd.driver.job_folder import files as job_files
from edl_hvd.settings import runtime_folders


@pytest.fixture
def runtime(tmp_path, monkeypatch) -> Path:
    """This user's runtime folder, for one test alone."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    # Other jobs of this user may be entered in /tmp.
    monkeypatch.setattr(job_files, "runtime_folders", lambda: runtime_folders()[:1])
    return folder / "edl_hvd"
