"""Jobs of the elastic tests, with faults that a seed chooses."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))

from job_fixtures import alone, edlrun, run_either, run_job  # noqa: F401  # fixtures
