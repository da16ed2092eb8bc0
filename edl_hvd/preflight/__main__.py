"""Measures the host it runs on: for ``edlrun --preflight``, which starts it there, or for a person.

    python -m edl_hvd.preflight

Started by hand it prints what it has measured and ends with exit code 0, or 1 if the host is of no use.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from edl_hvd import protocol
from edl_hvd.errors import PlatformError
from edl_hvd.preflight.devices import measure
from edl_hvd.preflight.exchange import exchange
from edl_hvd.preflight.messages import TO_PROBE, Listening, Measure, Meet, Met
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

        def say(message: protocol.Message) -> None:
            line.sendall(protocol.encode(message))

        say(protocol.Hello(driver.token, driver.worker, driver.incarnation))
        for asked in line.makefile("rb"):
            match protocol.decode(asked, TO_PROBE):
                case Measure():
                    say(measure(process_environment()))
                case Meet() as meeting:
                    _meet(say, meeting, meeting.own or line.getsockname()[0])


def _meet(say: Callable[[protocol.Message], None], meeting: Meet, own: str) -> None:
    def listening(port: int) -> None:
        say(Listening(meeting.pair, port))

    try:
        seconds = exchange(own, meeting.other or own, meeting.port, meeting.interface, listening)
        say(Met(meeting.pair, seconds))
    except PlatformError as error:
        say(Met(meeting.pair, 0.0, str(error)))


if __name__ == "__main__":
    sys.exit(main())
