"""Terminals and files that lack characters which the commands print."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from job_folders import everything, leave

from edl_hvd.cli.main import main


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_printed_as_a_question_mark(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """As with PYTHONIOENCODING=ascii, or a terminal of another time."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, write_through=True))
    monkeypatch.setattr("edl_hvd.cli.main.commands", lambda: print("12 steps · ▇ → ä"))
    main()
    assert printed.getvalue().decode(encoding) == {
        "ascii": "12 steps ? ? ? ?\n", "latin-1": "12 steps · ? ? ä\n"
    }[encoding]  # fmt: skip


@pytest.mark.usefixtures("runtime")
def test_status_prints_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    leave(tmp_path / "job", everything())
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["edl-hvd", "status", str(tmp_path / "job")])
    with pytest.raises(SystemExit):
        main()
    assert "?" in printed.getvalue().decode("ascii")
