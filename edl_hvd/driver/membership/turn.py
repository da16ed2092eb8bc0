"""One turn of the membership: a pure function from what happens to what is done about it.

It does no I/O and reads no clock, so that tests drive it through any number of histories in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.driver.membership.decision import decide
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.happenings import Action, Happening
from edl_hvd.driver.membership.intake import take
from edl_hvd.driver.membership.state import Membership


def advance(membership: Membership, happening: Happening, now_s: float) -> tuple[Membership, tuple[Action, ...]]:
    """The next membership and what is to be done. Total: it accepts anything in any state.

    Args:
        membership: The one before.
        happening: What has happened.
        now_s: When; never earlier than at the call before.
    """
    return advance_together(membership, (happening,), now_s)


def advance_together(
    membership: Membership, news: Sequence[Happening], now_s: float
) -> tuple[Membership, tuple[Action, ...]]:
    """:func:`advance` for several happenings of one moment, with one decision after the last of them.

    The result is that of one call per happening where nothing would be decided before the last, as for the same message
    of every member of a world. A simulated change of a world of 64 takes 2 decisions so, and not 128.

    Args:
        membership: The one before.
        news: What has happened, in order.
        now_s: When; never earlier than at the call before.
    """
    if membership.end is not None:
        return membership, ()
    draft = Draft(membership, now_s)
    for happening in news:
        take(draft, happening)
    decide(draft)
    return draft.membership, tuple(draft.actions)
