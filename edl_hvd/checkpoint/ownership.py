"""Who may write checkpoints at a URL: one run at a time, and a later owner shuts an earlier one out for good.

Owners have numbers, given by creating ``owners/<number>.json``, which only one can do. Of an earlier owner counts what
the present one found when it came, and nothing that is added later. A writer that was paused, cut off or taken for dead
and goes on finds that it is not the newest, and if it does not look it adds files that nobody reads.

In this order, so that whoever was told that a checkpoint is written finds it:

    the writer    creates its manifest             looks whether it is still the newest owner
    the next one  creates its ``owners/`` entry    lists the manifests, and creates the list of those it accepts

Whether an owner lives is told by ``alive``, which it writes anew every few seconds. Clocks are not compared: whoever
wants to be the next watches whether it changes.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, fields
from datetime import datetime, timezone

from edl_hvd.checkpoint import decoding, document, layout
from edl_hvd.clock import Clock
from edl_hvd.errors import ObjectExistsError, ObjectMissingError, OwnedError, UsageError
from edl_hvd.process_identity import is_alive, pid_namespace, start_token
from edl_hvd.storage import Storage

_LOG = logging.getLogger(__name__)

BEAT_S = 5.0
# Twelve small writes a minute; on S3 those of a month cost about 2.60 dollars.

PATIENCE_S = 3 * BEAT_S
# Two signs of life may be lost or late.

_SUCCESSOR_S = 2.0
# The process is known to have ended: long enough for another worker of its job to take its place.

_LOOK_S = 0.5
_KEPT = 3  # of the entries of former owners; only the newest matters, and one before it should that be damaged
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class Owner:
    """A process that speaks for a run.

    Attributes:
        run: Names the run; its workers know it from their launcher.
        host, pid: For people.
        numbering, mark: Tell whether the process lives, where that can be told; see ``process_identity.py``.
        since: UTC time in ISO 8601 form, for people.
    """

    run: str
    host: str
    pid: int
    numbering: str
    mark: str
    since: str

    @classmethod
    def this_process(cls, run: str, clock: Clock) -> Owner:
        since = datetime.fromtimestamp(clock.wall_s(), timezone.utc).isoformat(timespec="seconds")
        return cls(run, socket.gethostname(), os.getpid(), pid_namespace(), start_token(os.getpid()), since)

    @property
    def has_ended(self) -> bool | None:
        """Whether the process is gone; ``None`` where that cannot be told from here."""
        if not self.numbering or self.numbering != pid_namespace():
            return None
        return not is_alive(self.pid, self.mark)

    def __str__(self) -> str:
        return f"the job on host {self.host}, process {self.pid}, which has written there since {self.since}"


@dataclass(frozen=True)
class Sign:
    """A sign of life: the process that speaks for the owner now, how many it has given, and whether it was the last."""

    process: Owner
    number: int
    ended: bool

    def encode(self) -> bytes:
        return document.encode({**vars(self), "process": vars(self.process)})

    @classmethod
    def decode(cls, data: bytes) -> Sign:
        content = decoding.fields(document.decode(data), "its content", [field.name for field in fields(cls)])
        number = decoding.whole_number(content["number"], "'number' of its content")
        return cls(_decode_owner(content["process"], "'process' of its content"), number, content["ended"] is True)


def take(storage: Storage, process: Owner, clock: Clock, take_over: bool = False) -> int:
    """Become the owner of a URL. Blocks while it is not certain that the present one has ended.

    Args:
        storage: Where.
        process: Who.
        clock: Waits.
        take_over: Do not ask whether the present owner lives.

    Returns:
        The number of the owner that ``process`` has become.

    Raises:
        OwnedError: Another run owns it, and lives.
        StorageError: The storage does not answer.
    """
    while True:
        newest = newest_owner(storage)
        if newest and not take_over:
            former = _read_owner(storage, newest)
            if former is None or former.run != process.run:
                _wait_until_gone(storage, newest, former, clock)
        number = newest + 1
        try:
            storage.write_new(layout.owner_key(number), document.encode(vars(process)))
        except ObjectExistsError:
            continue  # somebody else was faster
        storage.write(layout.alive_key(number), Sign(process, 0, ended=False).encode())
        _accept(storage, number)
        return number


def newest_owner(storage: Storage) -> int:
    """Its number; 0 if nobody has ever owned the URL."""
    return next(iter(layout.owners(storage.list(layout.OWNERS))), 0)


def check_owner(storage: Storage, number: int) -> None:
    """Whoever is told that a checkpoint is written can rely on it if this succeeds after its manifest was written.

    Raises:
        OwnedError: There is a later owner than ``number``.
        StorageError: The storage does not answer.
    """
    newest = newest_owner(storage)
    if newest > number:
        other = _read_owner(storage, newest)
        raise OwnedError(
            f"{storage.url} was taken over by {other or 'another job'}; this one may not write checkpoints there any "
            "more. To go on from where it stands, start it with another checkpoint URL"
        )


@dataclass(frozen=True)
class Rule:
    """Which manifests count: of owners from ``number`` on all, of those before it the ones in ``accepted``."""

    number: int
    accepted: frozenset[str]

    def counts(self, manifest_key: str) -> bool:
        return layout.owner_of(manifest_key) >= self.number or manifest_key in self.accepted


EVERYTHING = Rule(0, frozenset())


def rule(storage: Storage) -> Rule:
    """What counts now. Ask after the manifests were listed.

    The list of an owner that died while it wrote it, or a damaged one, does not count: what counted before it does.

    Raises:
        StorageError: The storage does not answer.
    """
    for number in layout.accepting_owners(storage.list(layout.OWNERS)):
        accepted = _read(storage, layout.accepted_key(number))
        if accepted is not None:
            keys = accepted.get("manifests")
            keys = keys if isinstance(keys, list) else []
            return Rule(number, frozenset(key for key in keys if isinstance(key, str)))
    return EVERYTHING


def _accept(storage: Storage, number: int) -> None:
    """Let count what is there, and forget owners of long ago."""
    found = layout.manifests(storage.list(layout.ROOT))
    before = rule(storage)
    accepted = sorted(key for keys in found.values() for key in keys if before.counts(key))
    storage.write_new(layout.accepted_key(number), document.encode({"manifests": accepted}))
    for old in layout.owners(storage.list(layout.OWNERS))[_KEPT:]:
        for key in (layout.alive_key(old), layout.accepted_key(old), layout.owner_key(old)):
            storage.delete(key)


def _wait_until_gone(storage: Storage, number: int, owner: Owner | None, clock: Clock) -> None:
    """Return when the owner has ended; raises ``OwnedError`` when it turns out to live, and to go on living.

    It may be about to end: workers whose driver is gone save what they hold.
    """
    start_s = changed_s = clock.monotonic_s()
    first = sign = _read_sign(storage, number)
    while sign is None or not sign.ended:
        gone = sign.process.has_ended if sign is not None else None
        now_s = clock.monotonic_s()
        if gone and now_s - changed_s >= _SUCCESSOR_S:
            return
        if now_s - start_s >= PATIENCE_S:
            if gone is False or sign != first:
                raise OwnedError(
                    f"cannot write checkpoints to {storage.url}: it belongs to {owner or 'another job'}, and is alive; "
                    "end that job, choose another URL, or take it over with 'edlrun --take-over' or "
                    "EDL_HVD_TAKE_OVER=1, which ends that job"
                )
            return
        if now_s == start_s:
            _LOG.warning(
                "%s belongs to %s; waiting up to %.0f s to see whether it lives",
                storage.url, owner or "another job", PATIENCE_S,
            )  # fmt: skip
        clock.sleep(_LOOK_S)
        before, sign = sign, _read_sign(storage, number)
        changed_s = changed_s if sign == before else clock.monotonic_s()


def _read_sign(storage: Storage, number: int) -> Sign | None:
    try:
        return Sign.decode(storage.read(layout.alive_key(number), limit_bytes=document.LARGEST_BYTES))
    except UsageError:
        raise
    except (ObjectMissingError, ValueError):
        return None


def _read_owner(storage: Storage, number: int) -> Owner | None:
    content = _read(storage, layout.owner_key(number))
    try:
        return None if content is None else _decode_owner(content, "its content")
    except ValueError:
        return None


def _decode_owner(value: object, what: str) -> Owner:
    names = [field.name for field in fields(Owner)]
    content = decoding.fields(value, what, names)
    pid = decoding.whole_number(content["pid"], f"'pid' of {what}")
    run, host, numbering, mark, since = (
        decoding.text(content[name], f"{name!r} of {what}", _LONGEST_TEXT) for name in names if name != "pid"
    )
    return Owner(run, host, pid, numbering, mark, since)


def _read(storage: Storage, key: str) -> dict[str, object] | None:
    """A document's content; ``None`` if there is none that is whole."""
    try:
        return document.decode(storage.read(key, limit_bytes=document.LARGEST_BYTES))
    except UsageError:
        raise
    except (ObjectMissingError, ValueError):
        return None
