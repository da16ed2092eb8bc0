"""A made-up market: what its traces hold, and the one that is shipped."""

from __future__ import annotations

import math
import random
import shlex
from pathlib import Path
from statistics import mean

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl_hvd.cli.main import commands
from edl_hvd.errors import UsageError
from edl_hvd.traces.market import Market, _Fleet, generate
from edl_hvd.traces.text import format_trace, parse_trace, read_trace

SHIPPED = Path(__file__).parents[3] / "examples" / "traces" / "spot-day.csv"
CALM = Market(hosts=8, hours=6.0, shortages_per_day=0, life_h=1e9)


def made(*words: str) -> str:
    done = CliRunner().invoke(commands, ["trace", "generate", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_trace_that_is_shipped_is_what_its_first_line_makes() -> None:
    text = SHIPPED.read_text()
    program, *words = shlex.split(text.partition("\n")[0].removeprefix("# "))
    assert (program, words[:2]) == ("edl-hvd", ["trace", "generate"])
    assert made(*words[2:]) == text


def test_the_trace_that_is_shipped_is_a_day_of_sixteen_to_sixty_four_hosts() -> None:
    trace = read_trace(str(SHIPPED))
    counts = [count for _, count in trace.counts]
    assert (trace.end_s, min(counts), max(counts)) == (86400.0, 16, 64)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), st.floats(0, 50), st.floats(0, 1),
    st.floats(0.01, 100), st.sampled_from([0.0, 0.9]),
)  # fmt: skip
@example(0, 1, 1, 1e-308, 0.0, 1.0, 0.0)  # a shortage in longer than a number can say
def test_any_market_makes_a_trace_that_reads(
    seed: int, hosts: int, zones: int, shortages: float, share: float, minutes: float, price: float
) -> None:
    market = Market(hosts, 2.0, zones, 0.5, 0.8, shortages, share, minutes, minutes, price)
    trace = generate(market, seed)
    assert trace == generate(market, seed)
    assert parse_trace(format_trace(trace), "trace") == trace
    assert trace.end_s == 7200.0
    assert trace.most_hosts == hosts == len(trace.hosts_at(0))
    assert (trace.cost_usd is not None) == (price > 0)


def test_another_seed_is_another_trace() -> None:
    assert generate(Market(), 1) != generate(Market(), 2)


def test_without_shortages_nobody_goes_whose_life_is_long() -> None:
    trace = generate(CALM, 3)
    assert [(change.added, change.removed) for change in trace.changes[1:]] == [((), ())]


def test_lives_have_the_mean_and_the_shape_that_was_asked_for() -> None:
    """Of a Weibull distribution of shape k the part 1 - 1/e ends before mean / gamma(1 + 1/k)."""
    fleet = _Fleet(CALM, random.Random(1))
    lives = [fleet._weibull(100.0, 0.8) for _ in range(20_000)]
    assert mean(lives) == pytest.approx(100.0, rel=0.03)
    scale = 100.0 / math.gamma(1 + 1 / 0.8)
    assert mean(life < scale for life in lives) == pytest.approx(1 - 1 / math.e, abs=0.015)


def test_waits_are_exponential_and_prices_gaussian() -> None:
    fleet = _Fleet(CALM, random.Random(2))
    waits = [fleet._exponential(10.0) for _ in range(20_000)]
    assert mean(waits) == pytest.approx(10.0, rel=0.03)
    assert mean(wait < 10.0 for wait in waits) == pytest.approx(1 - 1 / math.e, abs=0.015)
    pushes = [fleet._gauss() for _ in range(20_000)]
    assert mean(pushes) == pytest.approx(0.0, abs=0.03)
    assert mean(push * push for push in pushes) == pytest.approx(1.0, abs=0.05)


def test_a_shortage_takes_many_of_one_zone_at_once_and_they_come_back() -> None:
    market = Market(
        hosts=60, hours=24.0, zones=3, shortages_per_day=2, shortage_share=1.0, shortage_min=10, wait_min=5, life_h=1e9
    )
    trace = generate(market, 5)
    bulks = [len(change.removed) for change in trace.changes if change.removed]
    assert bulks
    assert min(bulks) > 5, "a third of sixty, more or less"
    assert len(trace.hosts_at(trace.end_s)) > 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "0"], "hosts of a market is 0; expected a number, at least 1"),
        (["--hours", "0"], "hours of a market is 0.0; expected a number, more than 0"),
        (["--shortage-share", "1.5"], "expected a probability, 0 to 1"),
        (["--wait-min", "nan"], "wait_min of a market is nan"),
    ],
)
def test_a_market_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(commands, ["trace", "generate", *words])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_the_header_is_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    assert made("--zones", "2", "--hours", "1.5", "--output", str(path)) == ""
    assert path.read_text().startswith(
        "# edl-hvd trace generate --hosts 64 --hours 1.5 --zones 2 --seed 0\n0,add,node1\n"
    )
    done = CliRunner().invoke(commands, ["trace", "generate", "--output", str(tmp_path)])
    assert "Is a directory" in str(done.exception)
