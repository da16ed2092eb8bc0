"""``worker_script.py``, which also writes down how it ended: of a worker that is cut off nobody else can tell."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "elastic"))

from worker_script import main


def run(folder: Path) -> None:
    code: object = 0
    try:
        main(folder)
    except SystemExit as leaving:
        code = leaving.code
        raise
    except BaseException as error:
        code = repr(error)
        raise
    finally:
        nccl = os.environ.get("NCCL_SOCKET_IFNAME")
        name = f"{os.environ['EDL_HVD_DRIVER_WORKER'].replace(':', '.')}.{os.getpid()}"
        (folder / "exits").mkdir(exist_ok=True)
        (folder / "exits" / name).write_text(json.dumps({"code": code, "t": time.monotonic(), "nccl": nccl}))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
