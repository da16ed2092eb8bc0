"""Which newcomers are given the state again, because theirs is not that of the members."""

import pytest

from edl_hvd.worker.commits.commit import Freshness
from edl_hvd.worker.commits.state_sync import drop_diverged


class Gathered:
    """Collectives that bring these digests together."""

    def __init__(self, *digests: int) -> None:
        self.digests = digests

    def gather_integers(self, row):
        return [[digest] for digest in self.digests]


@pytest.mark.parametrize(
    ("held", "unverified", "digests", "expected"),
    [
        ([7, 7], [False, True], [1, 1], [7, 7]),
        ([7, 7], [False, True], [1, 2], [7, -1]),
        ([7, 7], [True, False], [1, 2], [-1, 7]),  # the first rank is a diverged one, and no measure for the others
        ([7, 7, 7], [True, False, True], [2, 1, 1], [-1, 7, 7]),
        ([7, 7, 7], [False, False, True], [1, 2, 2], [7, 7, 7]),  # the second one was followed: BatchNorm statistics
        ([7, 7, 7], [False, False, True], [1, 2, 3], [7, 7, -1]),
        ([6, 7], [True, False], [2, 1], [6, 7]),  # it is behind anyway
        ([7, 7], [True, True], [1, 1], [7, 7]),
        ([-1, -1], [False, False], [1, 2], [-1, -1]),
    ],
)
def test_a_newcomer_whose_fingerprint_differs_from_that_of_the_members_is_given_the_state(
    held, unverified, digests, expected
):
    found = drop_diverged(Gathered(*digests), lambda: 0, [Freshness(number, 0) for number in held], unverified)
    assert found == [Freshness(number, 0) for number in expected]
