"""A step in which all weights are 0, as where all of its labels are to be ignored, is that of plain PyTorch.

Its loss is NaN and its gradient is 0, so momentum moves the weights.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from catalogue.losses import ignored_labels_ours, ignored_labels_plain
from idioms import Job
from simulation import Fault, Simulation

from edl_hvd.errors import EdlHvdWarning

EPOCHS = 4  # the last step of the third one has no label


FAULT = Fault(30, worker=0, leaves=(0,), joins=1)


@pytest.mark.parametrize(("size", "micro_batch", "exact", "fault"), [
    (1, 3, False, None), (1, None, False, None), (1, 3, True, None), (2, 3, False, None), (2, 3, False, FAULT),
    (3, 6, False, None), (3, None, False, None), (3, None, False, FAULT), (3, 3, True, None), (3, 3, True, FAULT),
])  # fmt: skip
def test_a_step_of_nothing_is_that_of_plain_pytorch(size, micro_batch, exact, fault):
    plain = ignored_labels_plain(Job(epochs=EPOCHS))
    assert sum(map(math.isnan, plain["losses"])) == 1
    job = Job(micro_batch, epochs=EPOCHS, exact=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        outcomes = Simulation(size, fault).run(lambda: ignored_labels_ours(job))
    for found in outcomes:
        torch.testing.assert_close(found["losses"], plain["losses"], rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(found["model"].state_dict(), plain["model"].state_dict(), rtol=1e-4, atol=1e-5)
