"""What signals ask ``edlrun`` for: to save and stop, or to stop at once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from clocks import FakeClock

from edl_hvd.driver.run import ShutdownRequests

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("sent", "is_urgent"),
    [
        ([(TERM, 0.0), (TERM, 0.0)], False),
        ([(TERM, 0.0), (TERM, 0.5), (TERM, 0.4)], False),
        ([(TERM, 0.0), (TERM, 0.6), (TERM, 0.4)], True),
        ([(TERM, 0.0), (TERM, 1.0)], True),
        ([(TERM, 0.0), (INT, 0.0)], True),
        ([(INT, 0.0), (TERM, 0.0)], True),
        ([(INT, 0.0), (INT, 0.0)], True),
    ],
)
def test_sigterm_within_a_second_of_sigterm_is_the_same_request(
    sent: list[tuple[signal.Signals, float]], is_urgent: bool
) -> None:
    """GNU timeout sends it to edlrun and to its group; each signal comes so long after the one before."""

    async def test() -> None:
        clock, firsts, heard = FakeClock(), list[int](), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        requests = ShutdownRequests(lambda: firsts.append(1), clock)
        with requests.handling_signals():
            for number, after_s in sent:
                clock.sleep(after_s)
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), signal.SIGUSR1)
                await heard.wait()  # signals are handled in the order in which they come
                heard.clear()
            assert (requests.is_requested(), requests.is_urgent(), len(firsts)) == (True, is_urgent, 1)

    asyncio.run(test())
