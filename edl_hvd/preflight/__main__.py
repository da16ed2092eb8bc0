"""Measures the host it runs on: for ``edlrun --preflight``, which starts it there, or for a person.

    python -m edl_hvd.preflight

Started by hand it prints what it has measured and ends with exit code 0, or 1 if the host is of no use.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from edl_hvd.errors import PlatformError
from edl_hvd.preflight.devices import measure
from edl_hvd.preflight.exchange import exchange
from edl_hvd.settings import Driver, process_environment

_CONNECT_S = 10.0


def main() -> int:
    """See the module; the exit code."""
    environ = process_environment()
    driver = Driver.from_environment(environ)
    if driver is not None:
        with suppress(ConnectionError):  # who asks no more does not need the answer
            _serve(driver)
        return 0
    measured = measure(environ)
    if measured.fault:
        print(f"{socket.gethostname()}: {measured.fault}", file=sys.stderr)
        return 1
    many = f"{measured.count} GPU{'s' * (measured.count > 1)}" if measured.device == "cuda" else "no GPU"
    slowest = ", on the slowest" if measured.count > 1 else ""
    print(f"{socket.gethostname()}: {many}; {measured.gflop_s:.3g} GFLOP/s in a matrix product in float32{slowest}")
    return 0


def _serve(driver: Driver) -> None:
    """Say what was measured, then meet whomever the driver names, until it hangs up (``driver/preflight/``)."""
    with socket.create_connection((driver.address, driver.port), _CONNECT_S) as line:
        line.settimeout(None)

        def say(**fields: Any) -> None:
            line.sendall(json.dumps(fields).encode() + b"\n")

        say(token=driver.token, worker=driver.worker, life=driver.life, pid=os.getpid())
        for asked in line.makefile("rb"):
            news = json.loads(asked)
            if news["what"] == "measure":
                say(what="measured", **asdict(measure(process_environment())))
                continue
            _meet(say, news["pair"], news["own"] or line.getsockname()[0], news)


def _meet(say: Callable[..., None], pair: int, own: str, news: Mapping[str, Any]) -> None:
    def listening(port: int) -> None:
        say(what="listening", pair=pair, port=port)

    try:
        seconds = exchange(own, news["other"] or own, news["port"], news["interface"], listening)
        say(what="met", pair=pair, seconds=seconds, problem="")
    except PlatformError as error:
        say(what="met", pair=pair, seconds=0.0, problem=str(error))


if __name__ == "__main__":
    sys.exit(main())
