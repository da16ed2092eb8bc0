"""Prints what a worker finds where it starts."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def variable_of_job() -> bytes:
    return f"EDL_HVD_TEST_JOB={os.environ['EDL_HVD_TEST_JOB']}".encode()


def found() -> dict[str, object]:
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return {
        "words": sys.argv,
        "name": __name__,
        "file": __file__,
        "imports from": sys.path[0],
        "folder": os.getcwd(),
        "variables": sorted(os.environ),
        "given": os.environ["GIVEN"],
        "job in /proc": variable_of_job() in Path("/proc/self/environ").read_bytes().split(b"\0"),
        "leads a session": os.getsid(0) == os.getpid(),
        "parent": "edlrun" in Path(f"/proc/{os.getppid()}/cmdline").read_text(),
        "input": sys.stdin.read(),
        "descriptors": sorted(target.partition(":")[0] for target in opened),
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
        "streams": [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "main": sys.modules["__main__"].__dict__ is globals(),
    }


if __name__ == "__main__":
    print(f"found {json.dumps(found())}")
    print("half a line", end="")
    sys.exit(int(sys.argv[1]))
