"""Recorded jobs in virtual time: what holds under every policy, and the arithmetic of a job between two decisions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from cluster_profiles import cluster_data, write_profile
from recorded_trace import write_trace

from edl_hvd.errors import InternalError, UsageError
from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.jobs import ResizeCost
from edl_hvd.simulator.cluster.play import Setting
from edl_hvd.simulator.cluster.policies.by_name import POLICIES
from edl_hvd.simulator.cluster.profiles import read_application
from edl_hvd.simulator.cluster.recorded import (
    BY_GPU_HOURS,
    RecordedJob,
    RecordedRow,
    RecordedWorkload,
    drawn_laws,
    elastic,
    one_law,
    read_rows,
)
from edl_hvd.simulator.cluster.recorded_play import RunningJob, play_recorded
from edl_hvd.simulator.cluster.speedups import power_law, profile_law
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, as_asked

OWN = ResizeCost(change_s=1.0, start_s=30.0, join_s=30.0)
EQUAL = ResizeCost(change_s=30.0, start_s=30.0)
HOSTS = 10
LAW = one_law("0.85", power_law(0.85))


def setting(cost: ResizeCost = OWN, hosts: int = HOSTS) -> Setting:
    return Setting(hosts=hosts, host_slots=8, period_s=60.0, cost=cost)


def busy(rows: list[RecordedRow], stretch: float = 4.0, shrink: float = 0.0) -> RecordedWorkload:
    return elastic("busy", rows, LAW, HOSTS * 8, 8, stretch, shrink)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedRow]:
    """Three hundred jobs that keep eighty GPUs busy."""
    return read_rows(write_trace(tmp_path_factory.mktemp("trace") / "busy.csv", jobs=300))


class Recorder:
    """A policy that keeps what another one sees and gives.

    Args:
        name: The other policy's name.
    """

    def __init__(self, name: str) -> None:
        self.policy = POLICIES[name]()
        self.name = name
        self.seen: list[tuple[ClusterView, dict[str, Allocation]]] = []

    def prepare(self, job: AskedJob) -> JobShape:
        return self.policy.prepare(job)

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        given = self.policy.decide(view)
        self.seen.append((view, {name: dict(hosts) for name, hosts in given.items()}))
        return given


class TestEveryPolicy:
    @pytest.mark.parametrize("name", ["fifo", "fifo-backfill", "tiresias", "ranked", "ranked-blind", "ranked-undamped"])
    @pytest.mark.parametrize("cost", [OWN, EQUAL], ids=["own", "equal"])
    def test_every_job_ends_and_no_slot_is_given_twice(
        self, rows: list[RecordedRow], name: str, cost: ResizeCost
    ) -> None:
        policy = Recorder(name)
        workload = busy(rows)
        played = play_recorded(workload, policy, setting(cost)).played
        asked = {job.name: job for job in workload.jobs}
        for view, given in policy.seen:
            assert min(view.free(given.values())) >= 0
            for job, hosts in given.items():
                slots = sum(hosts.values())
                if name.startswith("ranked"):
                    assert asked[job].least <= slots <= asked[job].most_gpus
                else:
                    assert slots == asked[job].gpus
        assert [job.name for job in played.jobs] == [row.name for row in rows]
        assert all(job.waited_s >= 0 and job.completion_s > cost.start_s for job in played.jobs)
        for finished in played.jobs:
            # The least GPU-seconds that its work can take are those on the number that is most efficient: one.
            assert finished.gpu_s > asked[finished.name].work

    def test_a_gang_runs_for_as_long_as_it_did(self, rows: list[RecordedRow]) -> None:
        for job, row in zip(play_recorded(busy(rows), POLICIES["fifo"](), setting()).played.jobs, rows, strict=True):
            assert job.completion_s == pytest.approx(job.waited_s + OWN.start_s + row.duration_s)
            assert (job.submitted_s + job.waited_s) % 60 == 0

    def test_elastic_jobs_end_earlier_than_gangs(self, rows: list[RecordedRow]) -> None:
        elastic_s, gang_s = (
            play_recorded(busy(rows), POLICIES[name](), setting()).played.average_s for name in ("ranked", "fifo")
        )
        assert elastic_s < 0.5 * gang_s

    def test_the_same_play_twice_is_the_same(self, rows: list[RecordedRow]) -> None:
        first, second = (play_recorded(busy(rows[:100]), POLICIES["ranked"](), setting()) for _ in range(2))
        assert first == second

    def test_the_least_of_a_job_is_whole(self, rows: list[RecordedRow]) -> None:
        policy = Recorder("ranked")
        workload = busy(rows, shrink=0.5)
        least = {job.name: job.least for job in workload.jobs}
        assert least[next(row.name for row in rows if row.gpus == 16)] == 8
        play_recorded(workload, policy, setting())
        assert all(sum(hosts.values()) >= least[job] for _, given in policy.seen for job, hosts in given.items())

    def test_decisions_are_made_also_where_nothing_happens(self) -> None:
        workload = busy([RecordedRow("a", 0, 7200.0, 1)])
        alone = play_recorded(workload, POLICIES["fifo"](), setting()).played.decisions
        often = play_recorded(workload, POLICIES["fifo"](), setting(), longest_s=600.0).played.decisions
        assert (alone, often) == (1, 13)

    def test_a_policy_that_gives_a_slot_twice_is_refused(self, rows: list[RecordedRow]) -> None:
        class Twice:
            name = "twice"

            def prepare(self, job: AskedJob) -> JobShape:
                return as_asked(job)

            def decide(self, view: ClusterView) -> dict[str, Allocation]:
                return {job.name: {0: 5} for job in view.jobs}

        with pytest.raises(InternalError, match="gave 10 GPUs of a host with 8"):
            play_recorded(busy(rows), Twice(), setting())

    def test_a_policy_that_gives_nothing_is_refused(self, rows: list[RecordedRow]) -> None:
        class Nothing:
            name = "nothing"

            def prepare(self, job: AskedJob) -> JobShape:
                return as_asked(job)

            def decide(self, view: ClusterView) -> dict[str, Allocation]:
                return {}

        with pytest.raises(InternalError, match="policy nothing gives nothing to 5 jobs"):
            play_recorded(busy(rows[:5]), Nothing(), setting())

    def test_a_job_that_cannot_fit_is_refused(self) -> None:
        large = [RecordedRow("large", 0, 100.0, 81)]
        with pytest.raises(UsageError, match="job 'large' asks for 81 GPUs, and the cluster has 80"):
            busy(large)
        with pytest.raises(UsageError, match="job 'large' asks for 81 GPUs, and the cluster has 8"):
            play_recorded(elastic("w", large, LAW, 160, 8), POLICIES["fifo"](), setting(hosts=1))

    def test_optimus_needs_profiles(self, rows: list[RecordedRow]) -> None:
        with pytest.raises(UsageError, match="policy optimus needs the profile"):
            play_recorded(busy(rows), POLICIES["optimus"](), setting())


class TestRunningJob:
    def make(self, cost: ResizeCost, work: float = 1000.0) -> RunningJob:
        curve = Curve((1, 64), (1.0, 64.0))
        return RunningJob(RecordedJob("a", 0, 1, work, "linear", curve), cost)

    def test_a_start_and_a_change_cost_their_seconds(self) -> None:
        job = self.make(ResizeCost(change_s=20.0, start_s=30.0))
        job.give({0: 2}, 0.0)
        job.advance(40.0)
        assert job.left == 1000 - 2 * 10
        job.give({0: 4}, 40.0)
        assert job.end_s() == 40 + 20 + 980 / 4
        job.advance(1000.0)
        assert job.ended_s == 305

    def test_newcomers_hold_their_gpus_while_the_others_train_on(self) -> None:
        job = self.make(OWN)
        job.give({0: 2}, 0.0)
        job.advance(40.0)
        job.give({0: 2, 1: 4}, 40.0)
        job.advance(70.0)
        assert job.left == 1000 - 2 * (10 + 30)
        assert job.served_gpu_s == 2 * 40 + 6 * 30
        assert job.end_s() == pytest.approx(71 + 920 / 6)

    def test_a_job_that_shrinks_goes_on_after_a_change(self) -> None:
        job = self.make(OWN)
        job.give({0: 4}, 0.0)
        job.advance(40.0)
        job.give({0: 1}, 40.0)
        assert job.end_s() == 41 + 960
        assert job.changes == 1

    def test_a_job_that_moves_to_other_hosts_starts_anew(self) -> None:
        job = self.make(OWN)
        job.give({0: 4}, 0.0)
        job.advance(40.0)
        job.give({1: 4}, 40.0)
        assert job.end_s() == 70 + 960 / 4

    def test_a_job_that_is_stopped_keeps_its_work(self) -> None:
        job = self.make(OWN)
        job.give({0: 4}, 0.0)
        job.advance(40.0)
        job.give({}, 40.0)
        assert job.end_s() == math.inf
        job.advance(500.0)
        assert (job.left, job.served_gpu_s) == (960, 4 * 40)

    @pytest.mark.parametrize("seed", range(20))
    def test_the_end_that_is_foretold_is_the_end(self, seed: int) -> None:
        """In steps of any length, and after any changes."""
        dice = random.Random(seed)
        job, now_s = self.make(dice.choice((OWN, EQUAL)), work=20_000.0), 0.0
        while job.ended_s is None:
            job.give({host: dice.randint(1, 8) for host in range(dice.randint(0, 4))}, now_s)
            foretold_s = job.end_s()
            until_s = min(now_s + dice.expovariate(1 / 60), foretold_s + 5)
            while now_s < until_s:
                now_s = min(now_s + dice.expovariate(1 / 7), until_s)
                job.advance(now_s)
            if job.ended_s is None:
                assert job.end_s() == pytest.approx(foretold_s)
            else:
                assert job.ended_s == pytest.approx(foretold_s)
        assert job.left == 0


class TestLaws:
    def test_a_job_takes_as_long_as_recorded_on_its_own_gpus(self) -> None:
        [job] = elastic("w", [RecordedRow("a", 0, 500.0, 12)], LAW, 64, 8).jobs
        assert job.work / job.curve.at(12) == 500
        assert (job.most_gpus, job.curve.at(16)) == (48, pytest.approx(16**0.85))

    def test_what_is_drawn_depends_on_seed_and_name_alone(self) -> None:
        laws = {name: power_law(0.5) for _, names in BY_GPU_HOURS for name in names}
        rows = [RecordedRow(f"j{number}", 0, 1800.0, 1) for number in range(100)]
        first = [drawn_laws(laws)(row).name for row in rows]
        assert first == [drawn_laws(laws)(row).name for row in reversed(rows)][::-1]
        assert first != [drawn_laws(laws, seed=1)(row).name for row in rows]
        assert set(first) == {"cifar10", "ncf"}

    @pytest.mark.parametrize(
        ("hours", "gpus", "names"),
        [(0.5, 2, {"cifar10"}), (1.0, 1, {"bert", "deepspeech2"}), (50.0, 8, {"yolov3"}), (100.0, 8, {"imagenet"})],
    )
    def test_gpu_hours_choose_among_the_applications(self, hours: float, gpus: int, names: set[str]) -> None:
        laws = {name: power_law(0.5) for _, of in BY_GPU_HOURS for name in of}
        drawn = {drawn_laws(laws)(RecordedRow(f"j{number}", 0, 3600 * hours / gpus, gpus)).name for number in range(50)}
        assert drawn == names

    def test_a_job_of_one_gpu_only_gets_no_more(self) -> None:
        [job] = elastic("w", [RecordedRow("a", 0, 500.0, 1)], one_law("ncf", power_law(0.5)), 64, 8).jobs
        assert job.most_gpus == 1

    def test_the_law_of_a_profile_follows_its_steps(self, tmp_path: Path) -> None:
        write_profile(tmp_path, "bert")
        law = profile_law(read_application(tmp_path / "bert"))
        assert law(1) == 1
        assert 1 < law(2) < law(4) < 4
        assert law(3) == pytest.approx((law(2) + law(4)) / 2)
        assert law(256) >= law(64), "beyond what was measured nothing is lost"


class TestTraces:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("name,time\na,1\n", "expected a CSV file with the columns job_id"),
            ("job_id,submission_time,duration,num_gpu\n", "has no jobs"),
            ("job_id,submission_time,duration,num_gpu\na,soon,1,1\n", "not understood"),
            ("job_id,submission_time,duration,num_gpu\na,1,0,1\n", "more than 0 of both"),
            ("job_id,submission_time,duration,num_gpu\na,1,1,1\na,2,1,1\n", "a job twice"),
        ],
    )
    def test_a_trace_that_is_none_is_refused(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_rows(path)

    def test_rows_are_in_the_order_of_submission(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("job_id,submission_time,duration,num_gpu\nb,20,1,1\na,10,2,4\n")
        assert read_rows(path) == [RecordedRow("a", 10, 2.0, 4), RecordedRow("b", 20, 1.0, 1)]

    def test_the_recorded_cluster(self) -> None:
        """The first jobs of the largest trace, on fewer GPUs than they asked for together."""
        rows = read_rows(cluster_data() / "elasticflow" / "cluster04.csv")
        assert len(rows) == 15_802
        workload = elastic("cluster04", rows[:300], LAW, 256, 8)
        averages = {
            name: play_recorded(workload, POLICIES[name](), setting(hosts=32)).played.average_s
            for name in ("fifo", "ranked")
        }
        assert averages["ranked"] < 0.5 * averages["fifo"]
