"""Jobs of the elastic tests, with faults that a seed chooses."""

from __future__ import annotations

import pytest
from job_fixtures import alone, edlrun, run_either, run_job  # noqa: F401  # fixtures


@pytest.fixture
def preloaded() -> bool:
    """Workers are started as users start them."""
    return False
