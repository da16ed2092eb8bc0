"""Jobs over several hosts, and behind ssh; see ``tests/elastic`` for how a job is told and judged."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "elastic"), str(TESTS / "unit")]

from job_fixtures import alone, edlrun, run_job  # noqa: E402, F401  # fixtures
from over_ssh import aws, run_over_ssh, ssh, subnet  # noqa: E402, F401
