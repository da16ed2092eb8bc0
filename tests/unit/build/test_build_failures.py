from __future__ import annotations

from pathlib import Path

import pytest

from edl_hvd.build.compile import explain_failure

LOG = Path("/home/ada/.cache/edl_hvd/logs/horovod-0123.log")


def explain(text: str) -> str:
    return explain_failure(text.splitlines(), LOG)


def test_a_failed_build_names_its_first_error_its_last_lines_and_the_whole_log() -> None:
    lines = [f"  [ {n}%] Building CXX object {n}.cc.o" for n in range(1, 90)]
    lines[40] = "/tmp/x/mpi_ops_v2.cc:12:10: fatal error: torch/extension.h: No such file or directory"
    message = explain("\n".join(lines))
    assert "fatal error: torch/extension.h" in message
    assert "89.cc.o" in message
    assert str(LOG) in message
    assert len(message.splitlines()) < 20


def test_pips_account_of_the_failure_does_not_hide_the_cause() -> None:
    message = explain(
        "CMake Error at standard.cmake:8 (message): /usr/bin/c++ (GNU 8.5.0) does not know C++20\n"
        '  File "<string>", line 2, in <module>\n'
        "error: subprocess-exited-with-error\n"
        "note: This error originates from a subprocess, and is likely not a problem with pip.\n"
        "Failed to build horovod\n"
    )
    assert "CMake Error at standard.cmake:8" in message
    assert "subprocess" not in message


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("torch/extension.h:5: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("#error -- unsupported GNU version! gcc versions later than 15 are not supported!", "CXX"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "package index"),
        ("fatal error: error writing to /tmp/cc.s: No space left on device", "TMPDIR"),
    ],
)
def test_a_known_cause_comes_with_its_remedy_in_the_first_line(line: str, advice: str) -> None:
    assert advice in explain(line).splitlines()[0]
