"""Running jobs from tests, and the same tests on stock Horovod."""

from __future__ import annotations

import sys
from pathlib import Path

# The workers import these modules as scripts do, from their own folder; the tests do the same.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "contract"))  # its servers

from job_fixtures import alone, edlrun, run_either, run_job, store  # noqa: F401  # fixtures
