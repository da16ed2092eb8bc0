"""One turn of the membership: a pure function from what happens to what is done about it.

It does no I/O and reads no clock, so that tests drive it through any number of histories in virtual time.
"""

from __future__ import annotations

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
    if membership.end is not None:
        return membership, ()
    draft = Draft(membership, now_s)
    take(draft, happening)
    decide(draft)
    return draft.membership, tuple(draft.actions)
