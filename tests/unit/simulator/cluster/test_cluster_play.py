"""A cluster in virtual time: the published numbers of others, and what holds under every policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from cluster_profiles import cluster_data, write_profile, write_workload

from edl_hvd.errors import UsageError
from edl_hvd.simulator.cluster.jobs import ResizeCost, SimulatedJob
from edl_hvd.simulator.cluster.play import EQUAL_COSTS, OWN_COSTS, Played, Setting, play
from edl_hvd.simulator.cluster.policies.by_name import KNOWS, POLICIES
from edl_hvd.simulator.cluster.policies.fifo import FirstInFirstOut
from edl_hvd.simulator.cluster.policies.fulfilment import fulfilment_numbers
from edl_hvd.simulator.cluster.policies.optimus import Optimus
from edl_hvd.simulator.cluster.policies.tiresias import Tiresias
from edl_hvd.simulator.cluster.profiles import GradientStatistics, StepTime, read_application
from edl_hvd.simulator.cluster.throughput_fit import (
    BatchBounds,
    MeasuredStep,
    StepModel,
    _Measured,
    best_batches,
    fit,
)
from edl_hvd.simulator.cluster.workload import Workload, read_workload

SMALL = Setting(hosts=2, host_slots=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Six jobs that come within ten minutes, on eight GPUs."""
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("bert", "ncf"):
        write_profile(folder / "profiles", name)
    rows = [(10, "bert", 4, 64), (70, "bert", 8, 64), (100, "ncf", 1, 64), (130, "bert", 2, 16), (400, "bert", 4, 64),
            (500, "ncf", 2, 64)]  # fmt: skip
    return read_workload(write_workload(folder / "workloads" / "small.csv", rows))


class TestPublishedNumbers:
    """Those of Pollux's artifact, to the last digit: its jobs are played here as there."""

    @pytest.mark.parametrize(("policy", "average_s"), [(Tiresias, 3469.69375), (Optimus, 5301.875)])
    def test_the_mean_completion_time_of_workload_6(self, policy: type, average_s: float) -> None:
        workload = read_workload(cluster_data() / "pollux" / "workloads" / "workload-6.csv")
        assert play(workload, policy()).average_s == average_s


class TestEveryPolicy:
    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("setting", [SMALL, replace(OWN_COSTS, hosts=2)], ids=["equal", "own"])
    def test_all_jobs_end(self, small: Workload, name: str, setting: Setting) -> None:
        """The play itself refuses a policy that gives more than a host has."""
        played = play(small, POLICIES[name](), setting)
        assert [job.name for job in played.jobs] == [job.name for job in small.jobs]
        assert all(job.completion_s > 0 and job.waited_s >= 0 and job.gpu_s > 0 for job in played.jobs)
        assert all(sum(at.slots.values()) <= 8 for at in played.history)
        assert name in KNOWS

    def test_the_same_play_twice_is_the_same(self, small: Workload) -> None:
        assert play(small, POLICIES["ranked"](), SMALL) == play(small, POLICIES["ranked"](), SMALL)

    def test_elastic_jobs_wait_less_than_gangs(self, small: Workload) -> None:
        elastic, gang = (play(small, POLICIES[name](), SMALL) for name in ("ranked", "fifo"))
        assert elastic.waited_s < 60 < gang.waited_s


@pytest.mark.parametrize(("name", "first", "second"), [("ranked", 2, 8), ("ranked-doubling", 1, 2)])
def test_a_job_that_has_measured_its_steps_may_have_all_that_its_curve_says(
    small: Workload, name: str, first: int, second: int
) -> None:
    played = play(Workload("one", small.jobs[:1]), POLICIES[name](), SMALL)
    assert [at.slots["bert-0"] for at in played.history][:2] == [first, second]


def test_a_job_of_a_family_begins_with_what_another_has_measured(small: Workload) -> None:
    first, second = small.jobs[0], replace(small.jobs[1], time_s=100_000)
    alone, alike = (
        play(Workload("two", (first, second)), POLICIES[name](), SMALL) for name in ("ranked", "ranked-families")
    )
    assert alone.jobs[0] == alike.jobs[0]
    begun = [
        next(at.slots["bert-1"] for at in played.history if at.slots.get("bert-1")) for played in (alone, alike)
    ]  # fmt: skip
    assert begun == [2, 8], "it need not find out on two GPUs what eight bring"
    assert alike.jobs[1].completion_s < alone.jobs[1].completion_s


def slots_at_first(played: Played) -> list[str]:
    """Jobs in the order of their first slots."""
    starts = {job.name: job.submitted_s + job.waited_s for job in played.jobs}
    return sorted(starts, key=lambda name: starts[name])


def test_backfill_lets_small_jobs_pass(small: Workload) -> None:
    strict, backfill = (play(small, FirstInFirstOut(has_backfill), SMALL) for has_backfill in (False, True))
    assert slots_at_first(strict)[:3] == ["bert-0", "bert-1", "ncf-2"]
    assert slots_at_first(backfill)[:3] == ["bert-0", "ncf-2", "bert-3"]


def test_fulfilment_takes_nothing_from_a_rich_job_below_its_threshold() -> None:
    assert fulfilment_numbers({"rich": 60, "poor": 2}, {"rich": (2, 60), "poor": (2, 60)}, 100, 36) == {
        "rich": 59,
        "poor": 2,
    }


class TestJobs:
    def make(self, small: Workload, cost: ResizeCost) -> SimulatedJob:
        return SimulatedJob(small.jobs[0], None, 64, cost)

    def test_a_change_costs_its_seconds(self, small: Workload) -> None:
        job = self.make(small, ResizeCost(change_s=30.0, start_s=20.0))
        job.give({0: 2}, 0.0)
        job.advance(20.0)
        assert job.progress == 0
        job.advance(10.0)
        first = job.progress
        assert first > 0
        job.give({0: 4}, 30.0)
        job.advance(30.0)
        assert job.progress == first

    def test_newcomers_hold_their_slots_while_the_others_train_on(self, small: Workload) -> None:
        job = self.make(small, ResizeCost(change_s=1.0, start_s=0.0, join_s=30.0))
        job.give({0: 2}, 0.0)
        job.advance(10.0)
        before = job.progress
        job.give({0: 4}, 10.0)
        job.advance(30.0)
        assert job.progress == pytest.approx(4 * before)
        assert job.placement == (2,)
        job.advance(10.0)
        assert job.placement == (4,)

    def test_an_epoch_may_end_in_a_part_of_a_second(self, small: Workload) -> None:
        job = self.make(small, ResizeCost(change_s=0.3, start_s=0.3))
        job.give({0: 2}, 0.0)
        job.advance(1.3)
        job.progress = job.application.progress_at[1] - 3.6 * job.progress
        job.advance(3.7)
        assert (job.epoch, job.now_s) == (1, pytest.approx(5.0))

    def test_a_job_that_moves_to_other_hosts_starts_again(self, small: Workload) -> None:
        job = self.make(small, ResizeCost(change_s=1.0, start_s=25.0, join_s=30.0))
        job.give({0: 2}, 0.0)
        job.advance(30.0)
        before = job.progress
        job.give({1: 4}, 30.0)
        job.advance(25.0)
        assert (job.progress, job.placement) == (before, (4,))

    def test_a_job_is_on_its_way_to_its_last_epoch(self, small: Workload) -> None:
        job = self.make(small, ResizeCost(0.0, 0.0))
        whole = job.left
        job.give({0: 4}, 0.0)
        job.advance(100.0)
        assert job.left == pytest.approx(whole - job.progress * job.application.base_batch)


class TestModels:
    def true_model(self) -> StepModel:
        return StepModel(0.05, 0.004, 0.06, 0.002, 0.01, 0.001, 1.5)

    def measured(self, sizes: list[tuple[int, int, int]]) -> dict[MeasuredStep, StepTime]:
        model = self.true_model()
        found = {}
        for hosts, gpus, local in sizes:
            step_s = float(model.step_s(numpy.array(hosts), numpy.array(gpus), local, 1))
            found[MeasuredStep(hosts, gpus, local)] = StepTime(step_s, step_s - (model.alpha + model.beta * local))
        return found

    def test_the_fit_finds_the_model_that_made_the_steps(self) -> None:
        sizes = [(1, 1, 16), (1, 1, 64), (1, 2, 32), (1, 4, 32), (2, 8, 32), (4, 16, 16), (4, 16, 64)]
        found = fit(self.measured(sizes))
        for size in [*sizes, (3, 12, 48)]:
            [truth], [model] = (
                [float(one.step_s(numpy.array(size[0]), numpy.array(size[1]), size[2], 1))]
                for one in (self.true_model(), found)
            )
            assert model == pytest.approx(truth, rel=0.03)

    def test_the_gradient_is_that_of_the_error(self) -> None:
        from scipy.optimize import approx_fprime

        steps = self.measured([(1, 1, 16), (1, 2, 32), (1, 4, 64), (2, 8, 32), (4, 16, 16)])
        hosts, gpus, local_batch = (
            numpy.array(of) for of in zip(*((s.hosts, s.gpus, s.local_batch) for s in steps), strict=True)
        )
        compute_s = numpy.array([time.compute_s for time in steps.values()])
        step_s = numpy.array([time.step_s for time in steps.values()])
        measured = _Measured(hosts, gpus, local_batch, compute_s, step_s)
        place = numpy.array([0.1, 0.01, 0.2, 0.03, 0.1, 0.02, 1.3])
        numeric = approx_fprime(place, lambda at: measured.error(at)[0], 1e-7)
        assert measured.error(place)[1] == pytest.approx(numeric, rel=1e-3, abs=1e-5)

    def test_noise_makes_the_best_batch_larger(self) -> None:
        bounds = BatchBounds(base=16, largest=256, smallest_local=4, largest_local=64)
        quiet, loud = (
            best_batches(self.true_model(), GradientStatistics(1.0, variance), bounds, [(1, 4)])[0]
            for variance in (0.1, 100.0)
        )
        assert quiet.local_batch * quiet.passes < loud.local_batch * loud.passes

    def test_one_gpu_makes_a_larger_batch_in_two_passes(self) -> None:
        bounds = BatchBounds(base=16, largest=64, smallest_local=4, largest_local=64)
        [best] = best_batches(self.true_model(), GradientStatistics(1.0, 1e6), bounds, [(1, 1)])
        assert best.passes == 2


class TestProfiles:
    def test_steps_are_on_the_line_between_those_measured(self, tmp_path: Path) -> None:
        write_profile(tmp_path, "bert")
        app = read_application(tmp_path / "bert")
        low, high, between = (app.step((4,), local).step_s for local in (16, 32, 24))
        assert between == pytest.approx((low + high) / 2)
        assert app.step((2, 2), 16) == app.step((2, 2), 16)
        assert app.step((1, 1, 1), 16).step_s > app.step((3,), 16).step_s, "taken from the sizes that were measured"

    def test_what_was_not_measured_is_refused(self, tmp_path: Path) -> None:
        write_profile(tmp_path, "bert")
        app = read_application(tmp_path / "bert")
        with pytest.raises(UsageError, match="says nothing of 65 samples"):
            app.step((4,), 65)

    @pytest.mark.parametrize(
        ("break_it", "says"),
        [
            (lambda folder: (folder / "placements.csv").unlink(), "cannot be read"),
            (lambda folder: (folder / "scalability.csv").write_text("a,b\n1,2\n"), "cannot be read"),
            (lambda folder: [path.unlink() for path in folder.glob("validation-*")], "holds no validation"),
        ],
    )
    def test_a_profile_that_lacks_something_is_refused(
        self, tmp_path: Path, break_it: Callable[[Path], Any], says: str
    ) -> None:
        write_profile(tmp_path, "bert")
        break_it(tmp_path / "bert")
        with pytest.raises(UsageError, match=says):
            read_application(tmp_path / "bert")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("name,time\na,1\n", "expected a CSV file with the columns"),
            ("name,time,application,num_replicas,batch_size\n", "has no jobs"),
            ("name,time,application,num_replicas,batch_size\na,soon,bert,1,16\n", "not understood"),
            ("name,time,application,num_replicas,batch_size\na,1,gpt,1,16\n", "'gpt' is not known"),
        ],
    )
    def test_a_workload_that_is_none_is_refused(self, tmp_path: Path, text: str, says: str) -> None:
        write_profile(tmp_path / "profiles", "bert")
        path = tmp_path / "workloads" / "w.csv"
        path.parent.mkdir()
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_workload(path)

    def test_a_job_that_cannot_fit_is_refused(self, small: Workload) -> None:
        with pytest.raises(UsageError, match="asks for 8 GPUs, and the cluster has 4"):
            play(small, FirstInFirstOut(), replace(EQUAL_COSTS, hosts=1))
