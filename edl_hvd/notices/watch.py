"""Watch for notices in a thread, and report each once."""

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
# Seconds to wait for a request under way: ``request.WHOLE_S`` and a second.


def open_watch(
    setting: str, told: Callable[[Notice], None], addresses: Addresses = STANDARD, every_s: float | None = None
) -> NoticeWatch | None:
    """Start a watch as ``EDL_HVD_NOTICES`` asks for; ``None`` if there is no platform to watch.

    Args:
        setting: "off", "auto", or the name of a platform; see ``platforms.SETTINGS``.
        told, every_s: See ``NoticeWatch``.
        addresses: Addresses of the platforms' services.

    Raises:
        UsageError: The setting is not known.
    """
    providers = find_providers(setting, addresses)
    if not providers:
        return None
    logger.info("watching for notices of %s", " and ".join(provider.name for provider in providers))
    watch = NoticeWatch(providers, told, every_s)
    watch.start()
    return watch


class NoticeWatch:
    """Watch of platforms, in one daemon thread.

    A platform that does not answer is logged once and asked again: a host may have no metadata service, and a pod no
    permission.

    Args:
        providers: Platforms to ask.
        told: Function that gets each distinct notice once, in that thread; it has to return soon, and must not raise.
        every_s: Seconds between two requests; ``None`` for those of each provider.
        clock: Clock of the requests.
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
        """Start, with the first requests at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, from any thread; no call of ``told`` begins after this."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self.ask_those_due())

    def ask_those_due(self) -> float:
        """Ask each platform that is due; return the seconds until the next is."""
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
        except Exception as error:  # a fault here must not stop training
            reason = f"internal error, please report: {type(error).__name__}: {error}"
        if provider not in self._in_trouble:
            self._in_trouble.add(provider)
            logger.info("no notices of %s for now, requests go on: %s", provider.name, " ".join(reason.split()))
        return None
