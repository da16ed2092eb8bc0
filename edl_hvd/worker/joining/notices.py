"""What a worker does when its host is about to go: it tells its launcher, as far as that listens, and leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edl_hvd.notices.notice import Notice
from edl_hvd.notices.platforms import Addresses
from edl_hvd.notices.watch import NoticeWatch, open_watch
from edl_hvd.worker.joining.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


def watch_for_notices(
    setting: str, addresses: Mapping[str, str], unsaid_s: float, rendezvous: Rendezvous
) -> NoticeWatch | None:
    """Ask the platform in a thread from now on; ``None`` where there is none to ask. One worker of each host does.

    Args:
        setting: ``Settings.notices``.
        addresses: Of platforms that are to be asked elsewhere than where every machine of theirs is, by name.
        unsaid_s: What counts as left where a notice does not say.
        rendezvous: Told of each notice, in that thread.
    """

    def told(notice: Notice) -> None:
        rendezvous.host_going(unsaid_s if notice.deadline_s is None else max(0.0, notice.deadline_s))
        logger.warning("notice for this host: %s", notice.words)

    return open_watch(setting, told, Addresses(**addresses))
