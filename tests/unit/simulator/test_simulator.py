"""A job on a trace in virtual time: this project, the models of the others, and what is counted."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_simulator_turns import random_trace

from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.simulator.baselines import StockElastic, restart_from_checkpoints
from edl_hvd.simulator.comparison import Comparison, SimulationPlan, compare
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.edlrun_model import DriverSimulation
from edl_hvd.simulator.timeline import Result, Timeline, sum_up
from edl_hvd.simulator.virtual_time import HostNames
from edl_hvd.traces.market import Market, generate
from edl_hvd.traces.text import read_trace
from edl_hvd.traces.trace import HostChange, Trace
from edl_hvd.values import Interval

RECORDED = os.environ.get("EDL_HVD_TRACES")
COSTS = Costs(start_s=10, step_s=1, restore_s=5, resize_s=2, recover_s=1, follow_s=4, copy_s=0, write_s=3,
              checkpoint_s=2, gloo_timeout_s=30, reset_s=1)  # fmt: skip


def trace_of(*changes: tuple[float, str, str]) -> Trace:
    """Moments, and the letters of the hosts that come and go then."""
    return Trace(tuple(HostChange(time_s, tuple(come), tuple(gone)) for time_s, come, gone in changes))


def spans_of(trace: Trace, rules: Rules | None = None, every_s: float = 1e9, notice_s: float = 0.0) -> list[tuple]:
    """From when to when this project trains with how many, and until when it counts."""
    timeline = Timeline(every_s, COSTS.copy_s, COSTS.write_s)
    DriverSimulation(trace, COSTS, rules or Rules(1, 1, 9), timeline, notice_s=notice_s).run()
    return [(round(s.start_s, 3), round(s.end_s, 3), s.size, round(s.kept_s, 3)) for s in timeline.spans]


class TestThisProject:
    def test_the_first_world_forms_when_all_have_started(self) -> None:
        assert spans_of(trace_of((0, "ab", ""), (100, "", ""))) == [(12, 100, 2, 100)]

    def test_the_others_go_on_when_a_host_is_gone_and_lose_the_step_in_flight(self) -> None:
        trace = trace_of((0, "abc", ""), (50.5, "", "b"), (100, "", ""))
        assert spans_of(trace) == [(12, 50.5, 3, 50), (51.5, 100, 2, 100)]

    def test_a_new_host_starts_and_follows_while_the_others_train(self) -> None:
        """Seen at 50, started at 60, caught up at 64, when a step is just finished; nobody else is on the way."""
        trace = trace_of((0, "a", ""), (50, "b", ""), (100, "", ""))
        assert spans_of(trace) == [(12, 64, 1, 64), (66, 100, 2, 100)]

    def test_those_that_come_within_the_time_to_settle_join_together(self) -> None:
        trace = trace_of((0, "a", ""), (50, "b", ""), (51.3, "c", ""), (100, "", ""))
        assert [size for _, _, size, _ in spans_of(trace)] == [1, 2, 3], "they are found by two questions"
        trace = trace_of((0, "a", ""), (50.1, "b", ""), (50.3, "c", ""), (100, "", ""))
        assert [size for _, _, size, _ in spans_of(trace)] == [1, 3], "by the same one"

    def test_all_is_lost_since_the_newest_checkpoint_when_every_host_goes_at_once(self) -> None:
        trace = trace_of((0, "ab", ""), (60, "", "ab"), (70, "c", ""), (120, "", ""))
        assert spans_of(trace, every_s=20) == [(12, 60, 2, 52), (86, 120, 1, 120)], "started at 80, then 1 and 5 s"
        assert spans_of(trace) == [(12, 60, 2, 12), (81, 120, 1, 120)], "without one there is nothing to read"

    def test_a_checkpoint_that_is_not_yet_in_storage_does_not_count(self) -> None:
        trace = trace_of((0, "a", ""), (54, "", "a"), (55, "b", ""), (100, "", ""))
        assert spans_of(trace, every_s=20)[0] == (12, 54, 1, 32), "that of 52 was written until 55"

    def test_a_host_that_is_known_to_go_is_left_ten_seconds_before_and_nothing_is_lost(self) -> None:
        trace = trace_of((0, "ab", ""), (80, "", "b"), (100, "", ""))
        assert spans_of(trace, notice_s=20) == [(12, 70, 2, 70), (72, 100, 1, 100)]

    def test_the_last_host_that_is_known_to_go_saves_a_checkpoint(self) -> None:
        trace = trace_of((0, "a", ""), (80, "", "a"), (90, "b", ""), (150, "", ""))
        first, second = spans_of(trace, notice_s=20)
        assert first == (12, 60, 1, 60), "nothing is lost"
        assert second[0] == 90 + 10 + 2 + 5

    def test_below_the_least_number_nobody_trains(self) -> None:
        trace = trace_of((0, "ab", ""), (50, "", "b"), (80, "c", ""), (120, "", ""))
        assert spans_of(trace, Rules(2, 2, 9)) == [(12, 50, 2, 50), (95, 120, 2, 120)]
        assert spans_of(trace, Rules(1, 1, 9))[1] == (51, 94, 1, 94)

    def test_a_job_whose_last_host_goes_for_good_has_lost_what_no_checkpoint_holds(self) -> None:
        trace = trace_of((0, "ab", ""), (60, "", "b"), (80, "", "a"), (1000, "", ""))
        assert spans_of(trace, every_s=20)[-1] == (61, 80, 1, 72)
        assert spans_of(trace) == [(12, 60, 2, 12), (61, 80, 1, 61)], "there is none"
        assert spans_of(trace, notice_s=20)[-1][3] == 60, "it was told, and saved"

    def test_a_job_that_has_ended_for_want_of_hosts_is_run_again_from_its_checkpoint(self) -> None:
        trace = trace_of((0, "a", ""), (60, "", "a"), (200, "b", ""), (300, "", ""))
        timeline = Timeline(20.0, 0.0, 3.0)
        simulation = DriverSimulation(trace, COSTS, Rules(1, 1, 9, elastic_timeout_s=50), timeline)
        simulation.run()
        assert simulation.runs == 2
        assert [(span.start_s, span.kept_s) for span in timeline.spans] == [(12, 52), (217, 300)]


def test_a_name_rests_before_another_host_gets_it() -> None:
    names = HostNames(rest_s=10.0)
    assert [names.give(host, 0.0) for host in "ab"] == ["host1", "host2"]
    assert names.take_back("a", 5.0) == "host1"
    assert [names.give("c", 15.0), names.give("d", 15.1)] == ["host3", "host1"]
    assert names.given == ("host2", "host3", "host1")


class TestRestartFromCheckpoints:
    def spans(self, trace: Trace, every_s: float) -> list[tuple[float, float, int, float]]:
        timeline = Timeline(every_s, COSTS.checkpoint_s, COSTS.checkpoint_s)
        restart_from_checkpoints(trace, COSTS, timeline)
        return [(span.start_s, span.end_s, span.size, span.kept_s) for span in timeline.spans]

    def test_each_change_costs_a_start_and_the_work_since_the_checkpoint(self) -> None:
        trace = trace_of((0, "ab", ""), (50, "", "b"), (100, "c", ""), (130, "", ""))
        assert self.spans(trace, 20) == [(10, 50, 2, 30), (65, 100, 1, 85), (115, 130, 2, 130)]

    def test_without_a_checkpoint_it_begins_anew(self) -> None:
        assert self.spans(trace_of((0, "ab", ""), (50, "", "b"), (100, "", "")), 1e9) == [
            (10, 50, 2, 10),
            (60, 100, 1, 100),
        ]

    def test_a_change_while_it_starts_makes_it_start_again(self) -> None:
        trace = trace_of((0, "a", ""), (8, "b", ""), (16, "c", ""), (40, "", ""))
        assert self.spans(trace, 1e9) == [(26, 40, 3, 40)]

    def test_a_host_that_is_replaced_at_once_is_a_change(self) -> None:
        assert len(self.spans(trace_of((0, "a", ""), (50, "b", "a"), (100, "", "")), 20)) == 2


class TestStockElastic:
    def spans(self, trace: Trace, every_s: float = 1e9) -> list[tuple[float, float, int, float]]:
        timeline = Timeline(every_s, COSTS.checkpoint_s, COSTS.checkpoint_s)
        StockElastic(trace, COSTS, timeline).run()
        return [(span.start_s, span.end_s, span.size, span.kept_s) for span in timeline.spans]

    def test_three_or_more_wait_for_the_timeout_when_one_is_lost(self) -> None:
        trace = trace_of((0, "abc", ""), (50.5, "", "b"), (100, "", ""))
        assert self.spans(trace) == [(11, 50.5, 3, 50), (81.5, 100, 2, 100)]

    def test_of_two_the_other_goes_on_at_once(self) -> None:
        assert self.spans(trace_of((0, "ab", ""), (50, "", "b"), (100, "", ""))) == [(11, 50, 2, 50), (51, 100, 1, 100)]

    def test_everybody_waits_for_a_newcomer(self) -> None:
        trace = trace_of((0, "a", ""), (49.5, "b", ""), (100, "", ""))
        assert self.spans(trace) == [(11, 50, 1, 50), (61, 100, 2, 100)]

    def test_who_comes_meanwhile_joins_the_same_world(self) -> None:
        trace = trace_of((0, "abc", ""), (50, "", "c"), (60, "d", ""), (79, "e", ""), (120, "", ""))
        assert self.spans(trace) == [(11, 50, 3, 50), (90, 120, 4, 120)]

    def test_when_all_are_gone_it_starts_again_from_a_checkpoint(self) -> None:
        trace = trace_of((0, "a", ""), (60, "", "a"), (70, "b", ""), (120, "", ""))
        assert self.spans(trace, every_s=20) == [(11, 60, 1, 51), (86, 120, 1, 120)]

    def test_hosts_that_leave_before_they_have_started_change_nothing(self) -> None:
        trace = trace_of((0, "a", ""), (50, "b", ""), (55, "", "b"), (100, "", ""))
        assert self.spans(trace) == [(11, 50, 1, 50), (61, 100, 1, 100)]
        assert self.spans(trace_of((0, "a", ""), (5, "", "a"), (50, "b", ""), (70, "", ""))) == [(61, 70, 1, 70)]


class TestAccounting:
    @pytest.mark.parametrize("seed", range(12))
    def test_the_parts_make_up_what_was_possible(self, seed: int) -> None:
        chance = random.Random(seed)
        plan = SimulationPlan(
            random_trace(chance, 2000.0),
            replace(COSTS, copy_s=0.5),
            min_np=chance.choice((1, 2)),
            checkpoint_every=Interval(chance.choice((30.0, 300.0)), "seconds"),
            notice_s=chance.choice((0.0, 60.0)),
            elastic_timeout_s=chance.choice((60.0, 600.0)),
        )
        for result in compare(plan).results.values():
            parts = (result.useful, result.lost, result.stalled, result.still, result.waiting)
            assert sum(parts) == pytest.approx(result.possible)
            assert min(parts) >= -1e-9
            assert result.possible == pytest.approx(plan.trace.host_seconds)
            self.check_curve(result, plan)

    def check_curve(self, result: Result, plan: SimulationPlan) -> None:
        """The curve holds all of the useful work."""
        comparison = Comparison(plan, {}, {}, 1)
        most = comparison.possible_between([0.0, *(time_s for time_s, _ in result.curve)])
        useful = sum(value * each for (_, value), each in zip(result.curve, most, strict=True) if value is not None)
        assert useful == pytest.approx(result.useful)
        assert all(value is None or -1e-9 <= value <= 1 + 1e-9 for _, value in result.curve)

    def test_checkpoints_stall_and_the_last_one_may_be_cut_off(self) -> None:
        timeline = Timeline(10.0, 2.0, 2.0)
        timeline.trained(0, 31, 4)
        result = sum_up(timeline, trace_of((0, "abcd", ""), (31, "", "")))
        assert (timeline.checkpoints, timeline.safe_s) == (3, 20)
        assert (result.stalled, result.useful) == (4 * 5, 4 * 26)

    def test_what_hosts_cost_is_shared_out_over_what_was_useful(self) -> None:
        timeline = Timeline(1e9, 0.0, 0.0)
        timeline.trained(1800, 3600, 2)
        result = sum_up(timeline, trace_of((0, "ab", ""), (3600, "", "")).priced(3.0))
        assert (result.goodput, result.still_s, result.cost_usd, result.usd_per_useful_hour) == (0.5, 1800, 6.0, 6.0)

    def test_a_trace_without_hosts_for_any_time_is_refused(self) -> None:
        with pytest.raises(UsageError, match="holds no host for any time"):
            SimulationPlan(trace_of((0, "a", "")))
        with pytest.raises(UsageError, match="500 steps between checkpoints: expected a time, or 'auto'"):
            SimulationPlan(trace_of((0, "a", ""), (1, "", "")), checkpoint_every=Interval.parse("500 steps"))


@pytest.mark.parametrize("seed", [1, 3])
def test_auto_is_as_good_for_the_others_as_any_interval(seed: int) -> None:
    """Also where all hosts go at times, and where they go at once at the end of a quiet day."""
    market = generate(Market(hosts=3, hours=12, life_h=0.5), seed)
    quiet = trace_of((0, "abc", ""), (30_000, "", "ab"), (30_001, "", "c"), (30_500, "d", ""), (36_000, "", ""))
    for trace in (market, quiet):
        best = compare(SimulationPlan(trace)).results
        for every_s in (5, 10, 20, 30, 60, 100, 200, 300, 600, 1000, 3000, 20_000):
            found = compare(SimulationPlan(trace, stock_checkpoint_every=Interval(every_s, "seconds"))).results
            for system in ("restart", "horovod"):
                assert found[system].goodput < best[system].goodput + 0.002, (system, every_s)


def test_the_interval_of_this_project_is_the_rule_that_jobs_follow() -> None:
    """With each loss of all hosts it gets shorter; a host that others outlive changes nothing."""
    trace = trace_of((0, "ab", ""), *((5000.0 + number, "", "") for number in range(3)), (20_000, "", ""))
    assert compare(SimulationPlan(trace)).every_s["edl_hvd"] == pytest.approx(155, abs=1)
    survived = [change for at_s in range(1000, 20_000, 1000) for change in ((at_s, "", "b"), (at_s + 300, "b", ""))]
    assert compare(SimulationPlan(trace_of((0, "ab", ""), *survived))).every_s["edl_hvd"] > 170
    lost = [change for at_s in range(1000, 20_000, 1000) for change in ((at_s, "", "ab"), (at_s + 300, "ab", ""))]
    assert compare(SimulationPlan(trace_of((0, "ab", ""), *lost))).every_s["edl_hvd"] < 60


def test_on_markets_in_which_all_hosts_go_at_times_the_default_makes_the_most_of_them() -> None:
    for seed in range(4):
        results = compare(SimulationPlan(generate(Market(hosts=2, hours=24, life_h=1.0), seed))).results
        assert results["edl_hvd"].goodput > max(results[system].goodput for system in ("restart", "horovod")), seed


@pytest.mark.parametrize("notice_s", [0.0, 120.0])
def test_the_lines_of_code_that_are_run_grow_with_the_changes_and_not_with_their_square(notice_s: float) -> None:
    def lines_of(changes: int) -> int:
        """Lines run in the simulator's files; all hosts go each time, and there is never a checkpoint."""
        trace = trace_of(
            *((100.0 * number, *(("ab", "") if number % 2 == 0 else ("", "ab"))) for number in range(changes))
        )
        plan = SimulationPlan(trace, COSTS, checkpoint_every=Interval(1e9, "seconds"),
                    stock_checkpoint_every=Interval(1e9, "seconds"), notice_s=notice_s)  # fmt: skip
        count = 0

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            if "/edl_hvd/simulator/" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace_line

        before = sys.gettrace()
        sys.settrace(trace_line)
        try:
            compare(plan)
        finally:
            sys.settrace(before)
        return count

    few, many = lines_of(60), lines_of(240)
    assert many < 4.5 * few, (few, many)


def test_a_change_of_the_hosts_takes_few_calls_for_each_host() -> None:
    """39 in this project's code, where they were 94: a change of 64 hosts is 192 news of workers."""
    hosts, changes = [f"n{number}" for number in range(32)], 40
    trace = Trace((
        HostChange(0.0, tuple(hosts)),
        *(HostChange(100.0 * number, (), (hosts[number % 32],)) if number % 2
          else HostChange(100.0 * number, (hosts[number % 32 - 1],), ()) for number in range(1, changes)),
        HostChange(100.0 * changes),
    ))  # fmt: skip
    simulation = DriverSimulation(trace, Costs(), Rules(1, 1, len(hosts)), Timeline(1e9, 0.0, 0.0))
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and ("/edl_hvd/" in frame.f_code.co_filename or frame.f_code.co_name == "replace")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        simulation.run()
    finally:
        sys.setprofile(before)
    assert count < 50 * changes * len(hosts), count / changes / len(hosts)


def test_progress_is_told_while_a_long_trace_runs() -> None:
    told: list[tuple[str, float]] = []
    compare(SimulationPlan(generate(Market(hosts=4, hours=6), 1)), lambda system, done: told.append((system, done)))
    for system in ("horovod", "edl_hvd"):
        shares = [done for name, done in told if name == system]
        assert len(shares) > 10
        assert 0 <= min(shares) <= max(shares) <= 1
        assert max(shares) > 0.9


def test_this_project_makes_the_most_of_the_hosts() -> None:
    results = compare(SimulationPlan(generate(Market(hosts=8, hours=12), 3))).results
    assert results["restart"].goodput < results["horovod"].goodput < results["edl_hvd"].goodput
    assert results["edl_hvd"].goodput > 0.997


def test_on_the_recorded_trace_of_p3_all_but_a_five_hundredth_is_useful() -> None:
    if not RECORDED:
        pytest.skip("EDL_HVD_TRACES does not name a folder of recorded traces")
    trace = read_trace(str(Path(RECORDED) / "p3-trace.csv")).divided(12)
    assert compare(SimulationPlan(trace)).results["edl_hvd"].goodput >= 0.998
