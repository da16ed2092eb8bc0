"""Running jobs from tests, and the same tests on stock Horovod."""

from __future__ import annotations

from job_fixtures import alone, edlrun, preloaded, run_either, run_job, store  # noqa: F401  # fixtures
