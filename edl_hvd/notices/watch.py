"""Asking for notices in a thread, and telling of each once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.notices.notice import Notice, Provider
from edl_hvd.notices.platforms import STANDARD, Addresses, find_providers

logger = logging.getLogger(__name__)

STOP_S = 5.0
# Longest wait for a question that is under way: ``asking.WHOLE_S``, and some.


def open_watch(
    setting: str, told: Callable[[Notice], None], addresses: Addresses = STANDARD, every_s: float | None = None
) -> NoticeWatch | None:
    """A watch as ``EDL_HVD_NOTICES`` says, started; ``None`` when there is nothing to watch.

    Args:
        setting: "off", "auto", or a platform's name; see ``places.SETTINGS``.
        told, every_s: See ``NoticeWatch``.
        addresses: Where to ask.

    Raises:
        UsageError: There is no such setting.
    """
    providers = find_providers(setting, addresses)
    if not providers:
        return None
    logger.info("watching for notices of %s", " and ".join(provider.name for provider in providers))
    watch = NoticeWatch(providers, told, every_s)
    watch.start()
    return watch


class NoticeWatch:
    """Asks platforms again and again, in one daemon thread.

    A platform that does not answer is asked on; that is logged once, since a host without a metadata service, or a
    pod without the permission, would say it for ever.

    Args:
        providers: Whom to ask.
        told: Called from the thread once for each distinct notice; has to return soon, and not to raise.
        every_s: Between two questions; ``None``: as each provider says.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        told: Callable[[Notice], None],
        every_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._told = told
        self._every_s = every_s
        self._clock = clock
        self._due_s = {provider: clock.monotonic_s() for provider in providers}
        self._known: set[Notice] = set()
        self._in_trouble: set[Provider] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="edl_hvd notices", daemon=True)

    def start(self) -> None:
        """Begin, with the first questions at once."""
        self._thread.start()

    def stop(self) -> None:
        """End; no call of ``told`` begins after this, from whatever thread it is called."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self.ask_those_due())

    def ask_those_due(self) -> float:
        """Ask every platform whose time has come; returns the seconds until the next one's."""
        for provider, due_s in self._due_s.items():
            if due_s > self._clock.monotonic_s():
                continue
            notice = self._ask(provider)
            if self._stopping.is_set():
                break
            if notice is not None and notice not in self._known:
                self._known.add(notice)
                self._told(notice)
            every_s = provider.every_s if self._every_s is None else self._every_s
            self._due_s[provider] = self._clock.monotonic_s() + every_s
        return max(0.0, min(self._due_s.values()) - self._clock.monotonic_s())

    def _ask(self, provider: Provider) -> Notice | None:
        try:
            return provider.ask()
        except PlatformError as error:
            reason = str(error)
        except Exception as error:  # a fault here is no reason to stop training
            reason = f"internal error, please report: {type(error).__name__}: {error}"
        if provider not in self._in_trouble:
            self._in_trouble.add(provider)
            logger.info("no notices of %s for now, asking on: %s", provider.name, " ".join(reason.split()))
        return None
