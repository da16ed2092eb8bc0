"""The lease on a checkpoint URL: one run at a time writes there, and a later owner shuts an earlier one out for good.

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
import math
import os
import socket
import threading
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from edl_hvd.checkpoint.format import document, object_keys
from edl_hvd.clock import Clock
from edl_hvd.errors import ObjectExistsError, ObjectMissingError, OwnedError, StorageError, UsageError
from edl_hvd.json_values import former_names, formerly, renamed
from edl_hvd.process_identity import is_alive, pid_namespace, start_token
from edl_hvd.storage import Storage

_LOG = logging.getLogger(__name__)

BEAT_S = 5.0
# Each is a listing and a small write: twelve of both a minute, which on S3 cost about 5.20 dollars a month.

PATIENCE_S = 3 * BEAT_S
# Two signs of life may be lost or late.

_SUCCESSOR_S = 2.0
# The process is known to have ended: long enough for another worker of its job to take its place.

_CLOSING_S = 5.0
# A last renewal that takes longer is left to the end of the process.

_LOOK_S = 0.5

_MOST_RACES = 20
# Somebody else is faster once or twice. More often it is a storage that refuses to create what it does not list.

_KEPT = 3  # of the entries of former owners; only the newest matters, and one before it should that be damaged
_LONGEST_TEXT = 1000

_FAILED = "failed"


@dataclass(frozen=True)
class LossHistory:
    """What has become of a URL's former owners.

    Attributes:
        losses: Owners all of whose workers went without having saved what they held.
        watched_s: Seconds for which there was an owner.
    """

    losses: int = 0
    watched_s: float = 0.0


@dataclass(frozen=True)
class LeaseHolder:
    """A process that speaks for a run.

    Attributes:
        run: Name of the run; its workers know it from their launcher.
        host, pid: Host and number of the process, for people.
        pid_namespace, start_token: What tells whether the process lives, where that can be told; see
            ``process_identity.py``.
        since: UTC time in ISO 8601 form, for people.
    """

    run: str
    host: str
    pid: int
    pid_namespace: str = field(metadata=formerly("numbering"))
    start_token: str = field(metadata=formerly("mark"))
    since: str

    @classmethod
    def this_process(cls, run: str, clock: Clock) -> LeaseHolder:
        since = datetime.fromtimestamp(clock.wall_s(), timezone.utc).isoformat(timespec="seconds")
        return cls(run, socket.gethostname(), os.getpid(), pid_namespace(), start_token(os.getpid()), since)

    @property
    def has_ended(self) -> bool | None:
        """Whether the process is gone; ``None`` where that cannot be told from here."""
        if not self.pid_namespace or self.pid_namespace != pid_namespace():
            return None
        return not is_alive(self.pid, self.start_token)

    def to_json(self) -> dict[str, Any]:
        """As the storage holds it: under the former names of its fields.

        An earlier version that cannot read who owns the URL would take it over from a job that lives.
        """
        written = {present: former for former, present in former_names(type(self)).items()}
        return {written.get(name, name): value for name, value in vars(self).items()}

    def __str__(self) -> str:
        return f"the job on host {self.host}, process {self.pid}, which has written there since {self.since}"


@dataclass(frozen=True)
class LeaseRenewal:
    """A sign of life: the process that speaks for the owner now, a number that rises, and whether it is the last.

    Attributes:
        process: Process that renews.
        number: Number that rises.
        ended: Whether the owner has ended, so that the URL is free.
        failed: Whether the process has gone by an error of the script, because it was told to, or having saved what the
            owner held: no host is lost with it, and other workers of the owner may live.
    """

    process: LeaseHolder
    number: int
    ended: bool
    failed: bool = False

    def encode(self) -> bytes:
        # Earlier versions know three fields, and take what is not true for an owner that may live.
        ended: bool | str = _FAILED if self.failed else self.ended
        return document.encode({"process": self.process.to_json(), "number": self.number, "ended": ended})

    @classmethod
    def decode(cls, data: bytes) -> LeaseRenewal:
        content = document.fields(document.decode(data), "its content", ("process", "number", "ended"))
        number, ended = document.whole_number(content["number"], "'number' of its content"), content["ended"]
        return cls(
            _decode_holder(content["process"], "'process' of its content"), number, ended is True, ended == _FAILED
        )


def acquire(storage: Storage, process: LeaseHolder, clock: Clock, take_over: bool = False) -> int:
    """Become the owner of a URL. Blocks while it is not certain that the present one has ended.

    Args:
        storage: Storage at the URL.
        process: Process that speaks for the run.
        clock: Clock that measures and waits.
        take_over: Whether to become the owner although the present one may live.

    Returns:
        The number of the owner that ``process`` has become.

    Raises:
        OwnedError: Another run owns it, and lives.
        StorageError: The storage does not answer, or does not list what it says is there.
    """
    for race in range(_MOST_RACES):
        if race:
            clock.sleep(_LOOK_S)
        newest = newest_owner(storage)
        if newest and not take_over:
            former = _read_holder(storage, newest)
            if former is None or former.run != process.run:
                _wait_until_gone(storage, newest, former, clock)
        number = newest + 1
        try:
            storage.write_new(object_keys.owner_key(number), document.encode(process.to_json()))
        except ObjectExistsError:
            continue  # somebody else was faster
        past = _past(storage, newest, take_over)
        storage.write(object_keys.alive_key(number), LeaseRenewal(process, 0, ended=False).encode())
        _accept(storage, number, past)
        return number
    raise StorageError(
        f"cannot become the owner of {storage.url}: the storage says {_MOST_RACES} times in a row that "
        f"{object_keys.owner_key(number)!r} exists already, and is not listed; see whether listings are allowed there "
        "and show all objects (on S3: s3:ListBucket for this prefix)"
    )


def history(storage: Storage, number: int) -> LossHistory:
    """What the owner ``number`` has found of those before it; nothing where that is not known.

    Raises:
        StorageError: The storage does not answer.
    """
    return _history_in(_read(storage, object_keys.accepted_key(number)))


def newest_owner(storage: Storage) -> int:
    """The number of the newest owner; 0 if the URL has never had one."""
    return next(iter(object_keys.owners(storage.list(object_keys.OWNERS))), 0)


def check_owner(storage: Storage, number: int) -> None:
    """Refuse to go on where there is a later owner.

    If this succeeds after a manifest was written, later owners will find the checkpoint.

    Raises:
        OwnedError: There is a later owner than ``number``.
        StorageError: The storage does not answer.
    """
    newest = newest_owner(storage)
    if newest > number:
        other = _read_holder(storage, newest)
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
        return object_keys.owner_of(manifest_key) >= self.number or manifest_key in self.accepted


EVERYTHING = Rule(0, frozenset())


def rule(storage: Storage) -> Rule:
    """What counts now. Ask after the manifests were listed.

    The list of an owner that died while it wrote it, or a damaged one, does not count: what counted before it does.

    Raises:
        StorageError: The storage does not answer.
    """
    for number in object_keys.accepting_owners(storage.list(object_keys.OWNERS)):
        accepted = _read(storage, object_keys.accepted_key(number))
        if accepted is not None:
            keys = accepted.get("manifests")
            keys = keys if isinstance(keys, list) else []
            return Rule(number, frozenset(key for key in keys if isinstance(key, str)))
    return EVERYTHING


class Heartbeat:
    """Renewal of the lease in the background, until it is stopped.

    Args:
        storage: Storage at the URL.
        owner: Number of the owner.
        process: Process that speaks for it from now on.
        beat_s: Time between two renewals in seconds, greater than 0.

    Attributes:
        lost: Reason why this process may write there no more; ``None`` while it may.
    """

    def __init__(self, storage: Storage, owner: int, process: LeaseHolder, beat_s: float = BEAT_S) -> None:
        self.lost: OwnedError | None = None
        self._storage = storage
        self._owner = owner
        self._process = process
        self._beat_s = beat_s
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._beat, name="edl-hvd-heartbeat", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Renew now, not at the next beat, and so find out whether this is the owner still. Does not block."""
        self._wake.set()

    def stop(self, ended: bool, failed: bool = False) -> None:
        """Renew no more; with ``ended`` or ``failed`` once more, to say so. Blocks for that renewal only.

        Raises nothing: without the last renewal the next owner waits some seconds.
        """
        self._stopped = True
        self._wake.set()
        if not (ended or failed) or self.lost is not None:
            return
        self._thread.join(_CLOSING_S)
        if not self._thread.is_alive():
            self._write(0, ended, failed)

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._write(number, ended=False)
            self._wake.wait(self._beat_s)
            self._wake.clear()
            if self._stopped:
                return

    def _write(self, number: int, ended: bool, failed: bool = False) -> None:
        try:
            check_owner(self._storage, self._owner)
            renewal = LeaseRenewal(self._process, number, ended, failed)
            self._storage.write(object_keys.alive_key(self._owner), renewal.encode())
        except OwnedError as error:
            self.lost = error
            self._stopped = True
            self._wake.set()
        except StorageError as error:
            _LOG.warning("cannot tell that this job still uses %s: %s", self._storage.url, error)


def note_saved(storage: Storage, number: int, process: LeaseHolder) -> None:
    """Note that the owner's last commit is saved, so that no loss counts. By a worker that does not renew the lease.

    It does not know whether the one that does is alive, so a later owner still waits for signs of life. Raises nothing:
    without this note a loss is counted that was none.
    """
    try:
        check_owner(storage, number)
        renewal = _read_renewal(storage, number)
        if renewal is None or not (renewal.ended or renewal.failed):
            note = LeaseRenewal(process, 0, ended=False, failed=True)
            storage.write(object_keys.alive_key(number), note.encode())
    except StorageError as error:
        _LOG.warning("cannot tell that the last commit is saved in %s: %s", storage.url, error)


def _past(storage: Storage, newest: int, take_over: bool) -> LossHistory:
    """The history up to the end of the owner ``newest``; by the storage's own clock, where it tells the time."""
    if not newest:
        return LossHistory()
    before = history(storage, newest)
    written_s = {entry.key: entry.written_s for entry in storage.list(object_keys.OWNERS)}
    begun_s, seen_s = (written_s.get(key(newest)) for key in (object_keys.owner_key, object_keys.alive_key))
    watched_s = max(0.0, seen_s - begun_s) if begun_s is not None and seen_s is not None else 0.0
    renewal = _read_renewal(storage, newest)
    # Who is taken over from may well live: its hosts have not gone.
    is_loss = not take_over and (renewal is None or not (renewal.ended or renewal.failed))
    return LossHistory(before.losses + is_loss, before.watched_s + watched_s)


def _history_in(content: dict[str, object] | None) -> LossHistory:
    losses, watched_s = ((content or {}).get(name, 0) for name in ("losses", "watched_s"))
    if not isinstance(losses, int) or not isinstance(watched_s, int | float) or not 0 <= watched_s < math.inf:
        return LossHistory()
    return LossHistory(max(0, losses), float(watched_s))


def _accept(storage: Storage, number: int, past: LossHistory) -> None:
    """Accept the checkpoints that are there, and forget owners of long ago."""
    found = object_keys.manifests(storage.list(object_keys.ROOT))
    before = rule(storage)
    accepted = sorted(key for keys in found.values() for key in keys if before.counts(key))
    storage.write_new(object_keys.accepted_key(number), document.encode({"manifests": accepted, **vars(past)}))
    for old in object_keys.owners(storage.list(object_keys.OWNERS))[_KEPT:]:
        for key in (object_keys.alive_key(old), object_keys.accepted_key(old), object_keys.owner_key(old)):
            storage.delete(key)


def _wait_until_gone(storage: Storage, number: int, owner: LeaseHolder | None, clock: Clock) -> None:
    """Return when the owner has ended; raises ``OwnedError`` when it turns out to live, and to go on living.

    It may be about to end: workers whose driver is gone save what they hold.
    """
    start_s = changed_s = clock.monotonic_s()
    first = renewal = _read_renewal(storage, number)
    while renewal is None or not renewal.ended:
        gone = renewal.process.has_ended if renewal is not None else None
        now_s = clock.monotonic_s()
        if gone and now_s - changed_s >= _SUCCESSOR_S:
            return
        if now_s - start_s >= PATIENCE_S:
            if gone is False or renewal != first:
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
        before, renewal = renewal, _read_renewal(storage, number)
        changed_s = changed_s if renewal == before else clock.monotonic_s()


def _read_renewal(storage: Storage, number: int) -> LeaseRenewal | None:
    try:
        return LeaseRenewal.decode(storage.read(object_keys.alive_key(number), limit_bytes=document.LARGEST_BYTES))
    except UsageError:
        raise
    except (ObjectMissingError, ValueError):
        return None


def _read_holder(storage: Storage, number: int) -> LeaseHolder | None:
    content = _read(storage, object_keys.owner_key(number))
    try:
        return None if content is None else _decode_holder(content, "its content")
    except ValueError:
        return None


def _decode_holder(value: object, what: str) -> LeaseHolder:
    names = [field.name for field in fields(LeaseHolder)]
    content = document.fields(renamed(LeaseHolder, document.mapping(value, what)), what, names)
    pid = document.whole_number(content["pid"], f"'pid' of {what}")
    texts = {
        name: document.text(content[name], f"{name!r} of {what}", _LONGEST_TEXT) for name in names if name != "pid"
    }
    return LeaseHolder(pid=pid, **texts)


def _read(storage: Storage, key: str) -> dict[str, object] | None:
    """A document's content; ``None`` if there is none that is whole. A damaged one is read twice."""
    for _ in range(2):
        try:
            return document.decode(storage.read(key, limit_bytes=document.LARGEST_BYTES))
        except UsageError:
            raise
        except ObjectMissingError:
            return None
        except ValueError:
            continue  # a bit may have flipped on the way
    return None
