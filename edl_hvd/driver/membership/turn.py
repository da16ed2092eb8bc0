"""One turn of the membership: a pure function from what happens to what is done about it.

It does no I/O and reads no clock, so that tests drive it through any number of histories in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.driver.membership.decision import decide
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.events import Action, MembershipEvent
from edl_hvd.driver.membership.intake import apply
from edl_hvd.driver.membership.state import Membership


def advance(membership: Membership, event: MembershipEvent, now_s: float) -> tuple[Membership, tuple[Action, ...]]:
    """The next membership and what is to be done. Total: it accepts anything in any state.

    Args:
        membership: The one before.
        event: What has happened.
        now_s: When; never earlier than at the call before.
    """
    return advance_together(membership, (event,), now_s)


def advance_together(
    membership: Membership, news: Sequence[MembershipEvent], now_s: float
) -> tuple[Membership, tuple[Action, ...]]:
    """:func:`advance` for several events of one moment, with one decision after the last of them.

    The result is that of one call per event where nothing would be decided before the last, as for the same message
    of every member of a world. A simulated change of a world of 64 takes 2 decisions so, and not 128.

    Args:
        membership: The one before.
        news: What has happened, in order.
        now_s: When; never earlier than at the call before.
    """
    if membership.end is not None:
        return membership, ()
    draft = Draft(membership, now_s)
    for event in news:
        apply(draft, event)
    decide(draft)
    return draft.membership, tuple(draft.actions)
