"""Running pip: compiling Horovod's wheel, and installing packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from edl_hvd.build.edits.mends import MENDS
from edl_hvd.build.edits.release import RELEASE, mend, unpack
from edl_hvd.build.wheels import CMAKE_FOLDER
from edl_hvd.errors import BuildError

_PERCENT = re.compile(r"\[\s*(\d+)%\] (\S.*)")
_ERROR = re.compile(r"(error: |CMake Error|: fatal error:|^\s*ERROR: |nvcc fatal)")
# From here on pip and setuptools give their own account of the failure, which says nothing about its cause.
_AFTERMATH = re.compile(r"Traceback \(most recent call last\)|error: subprocess-exited-with-error")
_TAIL_LINES = 12
_WIDTH = 200
# A compiler's command line runs to thousands of characters.

# What is known to go wrong -> what to do about it.
_ADVICE = (
    (r"Python\.h: No such file", "install Python's headers, e.g. apt-get install python3-dev"),
    (r"unsupported GNU version|does not know C\+\+", "use another compiler: set CXX, e.g. CXX=g++-12"),
    (r"Killed signal|cannot allocate memory|internal compiler error: Killed", "memory ran out; pass --jobs 1"),
    (r"No matching distribution|Could not fetch|Connection", "the package index could not be reached"),
    (r"No space left on device", "the disk is full; set TMPDIR to a larger one"),
)


_PIP = (sys.executable, "-m", "pip")
# Built here, against this torch, or not at all: pip's cache and foreign wheels know only the version.
_OPTIONS = ("--no-deps", "--no-build-isolation", "--verbose", "--disable-pip-version-check")


def compile_wheel(environment: Mapping[str, str], scratch: Path, log: Path, on_progress: Callable[[int], None]) -> Path:
    """Fetch, mend and compile Horovod; blocks for minutes.

    Args:
        environment: Complete environment of the build, the plan's variables included.
        scratch: An empty folder for everything temporary; it also receives the wheel.
        log: Receives the whole output.
        on_progress: Called with the percentage done, rising from 0 to 100.

    Returns:
        The wheel, inside ``scratch``.

    Raises:
        BuildError: With the first errors, the last lines, and the path of ``log``; or the release is another one.
    """
    complete = _complete(environment, scratch)
    log.parent.mkdir(parents=True, exist_ok=True)
    source = unpack(_fetch_release(complete, scratch, log), scratch / "source")
    mend(source, MENDS)
    command = [*_PIP, "wheel", str(source), "--wheel-dir", str(scratch / "wheel"), "--no-cache-dir", *_OPTIONS]
    returncode = _run_logged(command, complete, log, on_progress)
    wheels = sorted((scratch / "wheel").glob("horovod-*.whl"))
    if returncode != 0 or not wheels:
        raise BuildError(explain_failure(log.read_text(errors="replace").splitlines(), log))
    return wheels[0]


def _complete(environment: Mapping[str, str], scratch: Path) -> Mapping[str, str]:
    """The environment, with what depends on the scratch folder."""
    inherited = environment.get("CPLUS_INCLUDE_PATH")
    return {
        **environment,
        "CMAKE_TOOLCHAIN_FILE": str(CMAKE_FOLDER / "toolchain.cmake"),
        "TMPDIR": str(scratch),
        # Horovod asks distutils for this folder, which Python 3.12 no longer has.
        "CPLUS_INCLUDE_PATH": os.pathsep.join(filter(None, [sysconfig.get_path("include"), inherited])),
        # pip unpacks into a folder with a random name; ccache is to see the same paths every time.
        "CCACHE_BASEDIR": str(scratch),
        "CCACHE_NOHASHDIR": "1",
    }


def _fetch_release(environment: Mapping[str, str], scratch: Path, log: Path) -> Path:
    """The archive of Horovod's sources, inside ``scratch``."""
    release = scratch / "release"
    fetch = [*_PIP, "download", f"horovod=={RELEASE}", "--no-binary", "horovod", "--dest", str(release), *_OPTIONS]
    if _run_logged(fetch, environment, log, lambda percent: None) != 0:
        raise BuildError(explain_failure(log.read_text(errors="replace").splitlines(), log))
    (archive,) = release.iterdir()
    return archive


def _run_logged(
    command: list[str], environment: Mapping[str, str], log: Path, on_progress: Callable[[int], None]
) -> int:
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        done = 0
        for line in process.stdout:
            record.write(line)
            match = _PERCENT.search(line)
            if match and int(match[1]) > done:
                done = int(match[1])
                on_progress(done)
        return process.wait()


def explain_failure(lines: Iterable[str], log: Path) -> str:
    """A message for a failed build: the first errors, the last lines, advice where the cause is known."""
    told = [line.rstrip()[:_WIDTH] for line in lines if line.strip()]
    end = next((number for number, line in enumerate(told) if _AFTERMATH.search(line)), 0)
    cause = told[:end] or told
    errors = list(dict.fromkeys(line.strip() for line in cause if _ERROR.search(line)))
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, "\n".join(cause))), None)
    parts = [f"Horovod {RELEASE} could not be built"]
    if advice:
        parts[0] += f": {advice}"
    if errors:
        parts += ["first errors:", *(f"  {line}" for line in errors[:3])]
    parts += [f"last lines of {log}:", *(f"  {line}" for line in cause[-_TAIL_LINES:])]
    return "\n".join(parts)


def install(requirements: list[str], environment: Mapping[str, str], *options: str) -> None:
    """``pip install``, quietly.

    Raises:
        BuildError: With pip's own last lines.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *options,
        *requirements,
    ]
    answer = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if answer.returncode != 0:
        tail = "\n".join(f"  {line}" for line in answer.stderr.strip().splitlines()[-_TAIL_LINES:])
        raise BuildError(f"pip could not install {', '.join(requirements)}:\n{tail}")
