"""Where ``edl-hvd`` starts. A poll for hosts does not wait for the rest of the command line, which takes 0.3 s."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from edl_hvd.settings import process_environment

_POLL = Path(__file__).parents[1] / "discovery" / "polling" / "poll.py"


def main() -> None:
    """Run the command line, see ``main.py``; ``edl-hvd hosts SOURCE`` becomes a poll at once."""
    words = sys.argv[1:]
    if words[:1] == ["hosts"] and len(words) == 2 and not words[1].startswith("-"):
        become_poll(words[1])
    from edl_hvd.cli.main import main as run

    run()


def become_poll(source: str) -> NoReturn:
    """Replace this process by a poll of ``source``, as ``discovery_scripts/from_source`` makes it."""
    environment = process_environment()
    cache = environment.get("EDL_HVD_DISCOVERY_CACHE") or environment.get("TMPDIR") or "/tmp"
    sys.stdout.flush()
    # Without site-packages and PYTHON* variables a poll takes a third of the time, and nothing shadows anything.
    os.execv(sys.executable, [sys.executable, "-I", "-S", str(_POLL), cache, "source", source])


if __name__ == "__main__":
    main()
