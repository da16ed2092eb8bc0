import re

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import GlobalBatch, Ramp, WorkerBatch


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
        (lambda: GlobalBatch(100, micro_batch=48), "micro batch of 25 or 50, or a global batch of 96 or 144"),
        (lambda: GlobalBatch(7, micro_batch=2), "micro batch of 1 or 7, or a global batch of 6 or 8"),
        (
            lambda: WorkerBatch(8, learning_rate="cubic"),
            "'cubic' is not a rule; expected one of 'linear', 'sqrt'",
        ),
        (lambda: WorkerBatch("automatic"), "worker batch is 'automatic'"),  # type: ignore[arg-type]
        (lambda: WorkerBatch("auto"), "min=None and max=None; expected both"),
        (lambda: WorkerBatch("auto", min=4), "min=4 and max=None; expected both"),
        (lambda: WorkerBatch("auto", min=0, max=4), "min is 0"),
        (lambda: WorkerBatch("auto", min=8, max=4), "max=4 is less than min=8"),
        (lambda: WorkerBatch("auto", min=8, max=16, micro_batch=17), "micro batch is 17; expected 1 to 16"),
        (lambda: WorkerBatch(8, max=16), "WorkerBatch(8) was given bounds"),
        (lambda: WorkerBatch(8, warmup_samples=-1), "warmup_samples=-1"),
        (lambda: WorkerBatch(8, base_size=0), "base size is 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        make()


def test_a_function_of_the_scale_sets_the_learning_rate():
    policy = WorkerBatch(32, learning_rate=lambda scale: scale**0.75, base_size=2)
    assert policy.learning_rate_factor(2) == 1.0
    assert policy.learning_rate_factor(32) == 8.0


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), None, "much"])
def test_a_function_that_gives_no_factor_is_named(given):
    def halved(scale):
        return given

    with pytest.raises(UsageError, match=re.escape(f"learning_rate=halved gives {given!r} for a batch of 4 times")):
        WorkerBatch(32, learning_rate=halved).learning_rate_factor(4)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "adascale", lambda scale: scale])
def test_a_batch_that_is_chosen_begins_with_the_least_and_scales_from_there(rule):
    policy = WorkerBatch("auto", rule, min=8, max=64, micro_batch=32, base_size=2)
    assert [policy.global_batch(size) for size in (1, 2, 4)] == [8, 16, 32]
    assert policy.learning_rate_factor(2) == 1.0
    chosen = policy.with_batch(48, 4).with_batch(64, 4)
    assert (chosen.global_batch(4), chosen.micro_batch, chosen.base_samples) == (256, 32, 16)
    assert chosen.learning_rate_factor(4) == (4.0 if rule == "sqrt" else 16.0)
    assert chosen.with_batch(20, 4).micro_batch == 20, "the largest is that which the script gave"


def test_a_worker_alone_divides_its_batch_to_see_the_noise():
    assert WorkerBatch("auto", min=8, max=64).with_batch(8, 1).micro_batch == 4


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
