"""Jobs of the elastic tests, with faults that a seed chooses."""

from __future__ import annotations

from job_fixtures import alone, edlrun, run_either, run_job  # noqa: F401  # fixtures
