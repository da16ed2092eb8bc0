"""Whose state is in doubt, when the members of a broken world have come apart."""

import pytest

from edl_hvd.worker.keeping.certainty import Certainty, without_doubtful
from edl_hvd.worker.keeping.memory import _PLACES

AT_COMMIT, MOVED, DISTURBED = _PLACES - 1, 1, 0


def standing(commit, place=AT_COMMIT):
    return commit * _PLACES + place


@pytest.mark.parametrize(
    ("commits", "certain", "generations", "kept"),
    [
        ([7, 7], [6, 6], [3, 3], [7, 7]),  # all got there: nobody's sum can have failed
        ([7, 8], [6, 7], [3, 3], [7, -1]),
        ([7, 8, 8], [6, 7, 7], [3, 3, 3], [7, -1, -1]),
        ([7, 9], [6, 7], [3, 3], [7, -1]),  # two commits without a collective between them
        ([8, 8], [7, 8], [3, 3], [8, 8]),
        ([7, 8, -1], [6, 7, -1], [3, 3, 0], [7, -1, -1]),  # a newcomer
        ([8, 8, 8], [7, 7, -1], [3, 3, 0], [8, 8, 8]),  # one that has followed
        ([7, 8], [6, 7], [2, 3], [7, 8]),  # it is of an older world, and was not there
        ([-1, -1], [-1, -1], [0, 0], [-1, -1]),
        ([-1, 0], [-1, -1], [0, 0], [-1, 0]),
    ],
)
def test_what_one_has_reached_and_another_of_its_world_has_not_is_in_doubt(commits, certain, generations, kept):
    standings = [standing(commit) if commit >= 0 else -1 for commit in commits]
    certainties = [Certainty(*numbers) for numbers in zip(certain, generations, strict=True)]
    assert without_doubtful(standings, certainties) == [standing(commit) if commit >= 0 else -1 for commit in kept]


@pytest.mark.parametrize(("place", "doubtful"), [(MOVED, True), (DISTURBED, False)], ids=["moved", "disturbed"])
def test_who_failed_after_its_optimizer_had_moved_counts_and_whom_its_script_has_moved_does_not(place, doubtful):
    standings = [standing(7, place), standing(8)]
    kept = [standing(7, place), -1 if doubtful else standing(8)]
    assert without_doubtful(standings, [Certainty(6, 3), Certainty(7, 3)]) == kept
