import pytest

from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import GlobalBatch, WorkerBatch
from edl_hvd.rescale.ramp import Ramp


def test_a_global_batch_does_not_depend_on_the_world():
    policy = GlobalBatch(256, micro_batch=32)
    assert {policy.global_batch(size) for size in range(1, 9)} == {256}
    assert {policy.learning_rate_factor(size) for size in range(1, 9)} == {1.0}


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_a_worker_batch_scales_batch_and_learning_rate(rule, factor):
    policy = WorkerBatch(32, learning_rate=rule, base_size=2)
    assert policy.global_batch(8) == 256
    assert policy.learning_rate_factor(8) == pytest.approx(factor)
    assert policy.learning_rate_factor(2) == 1.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GlobalBatch(0), "global batch is 0"),
        (lambda: GlobalBatch(8, micro_batch=9), "micro batch is 9; expected 1 to 8"),
        (lambda: WorkerBatch(8, learning_rate="cubic"), "'cubic' is not a rule"),
        (lambda: WorkerBatch(8, warmup_samples=-1), "warmup_samples=-1"),
        (lambda: WorkerBatch(8, base_size=0), "base size is 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        make()


def test_a_ramp_without_length_jumps():
    assert Ramp().toward(4.0, samples=100, length=0).factor(100) == 4.0


def test_a_ramp_moves_linearly_and_then_stays():
    ramp = Ramp().toward(3.0, samples=100, length=200)
    assert [ramp.factor(samples) for samples in (100, 150, 300, 1000)] == [1.0, 1.5, 3.0, 3.0]


def test_a_resize_during_warm_up_goes_on_from_where_the_factor_stands():
    ramp = Ramp().toward(3.0, samples=0, length=100).toward(1.0, samples=50, length=100)
    assert [ramp.factor(samples) for samples in (50, 100, 150)] == [2.0, 1.5, 1.0]


def test_rejoining_at_the_same_size_does_not_restart_the_warm_up():
    ramp = Ramp().toward(3.0, samples=0, length=100)
    assert ramp.toward(3.0, samples=50, length=100) is ramp
