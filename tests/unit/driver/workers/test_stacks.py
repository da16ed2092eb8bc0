"""Reading where a worker stands from what py-spy and Python's fault handler print."""

from __future__ import annotations

import pytest

from edl_hvd.driver.workers.stacks import place_in, shows_stack

FAULT_HANDLER = """\
Thread 0x00007f19d093c6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/job/other.py", line 3 in heart

Current thread 0x00007f19d15bbb80 (most recent call first):
  File "/job/train.py", line 71 in augment
  File "/job/train.py", line 10 in <module>
""".splitlines()
IN_A_LIBRARY = """\
Thread 0x00007f19d15bbb80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 701 in __next__
  File "/job/edl_hvd/worker/batch_loops/batches.py", line 88 in _next
  File "/job/my files/train.py", line 5 in <module>
""".splitlines()
PY_SPY = """\
Process 10895: python /job/train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 10895 (active+gil): "MainThread"
    sleep (/job/helpers (old).py:12)
    <module> (/job/train.py:6)
Thread 10912 (idle): "edl-heartbeat"
    Condition.wait (/usr/lib/python3.11/threading.py:331)
""".splitlines()


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (FAULT_HANDLER, "train.py:71 in augment"),
        (IN_A_LIBRARY, "threading.py:331 in wait, called from train.py:5 in <module>"),
        (PY_SPY, "helpers (old).py:12 in sleep"),
        (["something else that was printed", *FAULT_HANDLER, "and more"], "train.py:71 in augment"),
        (IN_A_LIBRARY[:3], "threading.py:331 in wait"),
        (["no stack at all"], ""),
        ([], ""),
    ],
)
def test_the_place_of_the_main_thread_is_found(lines, place):
    assert place_in(lines) == place


def test_a_stack_is_told_from_other_output():
    assert [line for line in (*FAULT_HANDLER, *PY_SPY) if shows_stack(line)] == [
        FAULT_HANDLER[0], FAULT_HANDLER[4], PY_SPY[3], PY_SPY[6]
    ]  # fmt: skip
    assert not shows_stack("Thread safety (see the manual) matters")
