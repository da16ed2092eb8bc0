"""The driver's limit of open descriptors: three connections of each worker, and three pipes of each process."""

import subprocess
import sys

import pytest

LIMIT = """
import resource
from edl_hvd.driver.run import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "then"), [(256, 900, (900, 900)), (512, 512, (512, 512))], ids=["raised", "at its end"]
)
def test_it_is_raised_as_far_as_the_system_allows(soft: int, hard: int, then: tuple[int, int]) -> None:
    words = [sys.executable, "-c", LIMIT.format(soft=soft, hard=hard)]
    found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert tuple(map(int, found.split())) == then
