"""Where teachers are: a host source, asked again and again, as addresses to call.

A host's slots are its teachers: those of ``host:3`` listen on the service's port and the two after it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping

from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.combined import read_source, start_now
from edl_hvd.discovery.watch import HostWatch
from edl_hvd.distill.conversation import Address
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

DEFAULT_PORT = 7010
_LEAST_EVERY_S = 1.0
_RESOLVE_EVERY_S = 10.0
# A name may lead elsewhere after its host was replaced.
_HIGHEST_PORT = 65535


def addresses_of(hosts: Iterable[HostSlots], port: int) -> tuple[Address, ...]:
    """The addresses of the teachers on hosts.

    >>> [str(one) for one in addresses_of([HostSlots("a", 2), HostSlots("b", 1)], 7010)]
    ['a:7010', 'a:7011', 'b:7010']

    Args:
        hosts: Hosts, whose slots are teachers.
        port: Port of the first teacher of each host.
    """
    return tuple(
        Address(entry.host, port + number)
        for entry in hosts
        for number in range(entry.slots)
        if port + number <= _HIGHEST_PORT
    )


def read_teachers(source: str) -> PolledSource:
    """Return the source that a text describes.

    Raises:
        UsageError: The text is not understood.
    """
    try:
        return read_source(source, start_now)
    except UsageError as error:
        raise UsageError(f"teachers {source!r}: {error}") from error


class Finding:
    """Watches a source, in threads of its own.

    Args:
        source: Text of the source.
        port: Port of the first teacher of each host.
        found: Told the addresses, with the numeric address of each, whenever they have changed.
        blame: Told why an address cannot be called.
    """

    def __init__(
        self,
        source: str,
        port: int,
        found: Callable[[Mapping[Address, str]], None],
        blame: Callable[[Address, str], None],
    ) -> None:
        question = read_teachers(source)
        self._port, self._found, self._blame = port, found, blame
        self._problem = ""
        self._hosts: tuple[HostSlots, ...] = ()
        self._has_changed = threading.Event()
        self._closing = False
        self._watch = HostWatch(
            question.source, self._change, self._note, every_s=max(_LEAST_EVERY_S, question.refresh_s),
            damping=Damping() if question.is_damped else None,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._resolve_all, name="edl_hvd teachers' names", daemon=True)
        self._watch.start()
        self._thread.start()

    @property
    def problem(self) -> str:
        """What is wrong with the source; empty if it answers."""
        return self._problem

    def close(self) -> None:
        """Stop asking."""
        self._closing = True
        self._has_changed.set()
        self._watch.close()

    def _note(self, problem: str) -> None:
        self._problem = problem

    def _change(self, hosts: tuple[HostSlots, ...]) -> None:
        self._hosts, self._problem = hosts, ""
        self._has_changed.set()

    def _resolve_all(self) -> None:
        told: dict[Address, str] | None = None
        while True:
            self._has_changed.wait(_RESOLVE_EVERY_S)
            self._has_changed.clear()
            if self._closing:
                return
            numeric: dict[Address, str] = {}
            for entry in self._hosts:
                self._resolve(entry, numeric)
            if numeric != told:
                told = numeric
                self._found(numeric)

    def _resolve(self, entry: HostSlots, numeric: dict[Address, str]) -> None:
        addresses = addresses_of([entry], self._port)
        try:
            there = socket.getaddrinfo(entry.host, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            for address in addresses:
                self._blame(address, f"its name does not resolve: {error}")
            return
        numeric.update(dict.fromkeys(addresses, str(there)))
