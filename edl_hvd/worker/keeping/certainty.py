"""Which commits are beyond doubt, when the members of a broken world have come apart.

A collective that has succeeded here need not have brought the right numbers. Of a member whose own part of it fails,
because a third one has died, Horovod's thread goes on to its next message; Gloo takes that one for the missing piece
of the last, as it is no longer than what is expected (``Pair::prepareRead``), and the sum is complete, with garbage in
it. No later collective succeeds, because the member that failed takes part in none.

So a commit is certain once a collective has succeeded after it. One that is not, and that another member of the same
world has not come to, is given up: all go on from the commit that they are certain of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.worker.keeping.memory import commit_of, is_disturbed


@dataclass
class Certainty:
    """Of one worker.

    Attributes:
        commit: The last commit that is certain; -1 for none.
        generation: Of the last world in which all members stood at one commit, this worker among them.
    """

    commit: int = -1
    generation: int = 0


def without_doubtful(standings: Sequence[int], certainties: Sequence[Certainty]) -> list[int]:
    """How good a state each member holds, -1 where it is in doubt.

    Args:
        standings: ``Memory.standing`` of each member of the new world.
        certainties: What each is certain of.
    """
    sure = max(certainty.commit for certainty in certainties)
    newest = max(certainty.generation for certainty in certainties)
    stayed_there = sure >= 0 and any(
        certainty.generation == newest and commit_of(standing) == sure and not is_disturbed(standing)
        for standing, certainty in zip(standings, certainties, strict=True)
    )
    return [-1 if stayed_there and commit_of(standing) > sure else standing for standing in standings]
