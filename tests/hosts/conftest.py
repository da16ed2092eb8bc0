"""Jobs over several hosts, and behind ssh; see ``tests/elastic`` for how a job is told and judged."""

from __future__ import annotations

from job_fixtures import alone, edlrun, preloaded, run_job  # noqa: F401  # fixtures
from over_ssh import aws, run_over_ssh, ssh, subnet  # noqa: F401
