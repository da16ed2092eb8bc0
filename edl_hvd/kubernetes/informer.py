"""What the API server has, kept up by watches: each kind is listed once, and then told of every change.

A turn is made from what is kept here. So it must not be older than the operator's own writes, or a turn would do again
what the last one has done: the answers to writes are kept as well, until the watch has told of them.

resourceVersions of one kind are compared as the integers that they are, revisions of one etcd. Kubernetes promises
that from 1.35 on (KEP-5504), and earlier versions have always had it so. Those of two kinds are not compared.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import EdlHvdError, PlatformError
from edl_hvd.kubernetes.api import ApiServer, ResourceExpiredError, WatchEvent, WatchStream
from edl_hvd.kubernetes.parsing import read_guest, read_job, read_node, read_pod, read_priority
from edl_hvd.kubernetes.snapshot import (
    GROUP,
    MPI_GROUP,
    MPI_VERSION,
    VERSION,
    SeenGuest,
    SeenJob,
    SeenNode,
    SeenPod,
    SeenPriority,
)

_WATCH_S = 290
# The server ends a watch then, and the next one goes on from there: below the five minutes of many load balancers.
_LEAST_WATCH_S, _STEADY_S = 1.0, 30.0
# A watch that is over sooner, without an event, has failed; one that lasted longer ends a row of failures.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 30.0
_OPENED_S, _OPENED_AFTER_LIST_S = 1.0, 10.0
# In which a watch has to begin: what is known is older by that when turns are made again, until its events have come.

T = TypeVar("T")
_Key = tuple[str, str]


@dataclass(frozen=True)
class _Kept(Generic[T]):
    uid: str
    revision: int
    value: T


class ObjectCache(Generic[T]):
    """The objects of one kind. Any thread.

    Args:
        read: Makes of an object as JSON what is kept of it: with thousands of pods, only what turns read.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Kept[T]] = {}
        self._seen = 0
        self._written: set[_Key] = set()

    def values(self) -> tuple[T, ...]:
        """What is kept of each object."""
        with self._lock:
            return tuple(one.value for one in self._kept.values())

    def begin(self) -> None:
        """A list begins: it has everything that was written before."""
        with self._lock:
            self._written.clear()

    def replace(self, items: Mapping[_Key, _Kept[T]], version: str) -> None:
        """Take what was listed since :meth:`begin`, and what was written meanwhile and is newer than the list."""
        revision, kept = int(version), dict(items)
        with self._lock:
            for key in self._written & self._kept.keys():
                if self._kept[key].revision > revision:
                    kept[key] = self._kept[key]
            self._kept, self._seen = kept, revision

    def apply(self, event: WatchEvent) -> bool:
        """Take a change that the watch tells. Whether a turn would see it."""
        revision = _revision(event.item)
        is_bookmark = event.type == "BOOKMARK"
        one = None if is_bookmark else self.kept(event.item)
        with self._lock:
            self._seen = revision
            if one is None:
                return False
            key = key_of(event.item)
            old = self._kept.get(key)
            if event.type == "DELETED":
                if old is None or (old.uid != one.uid and old.revision > revision):
                    return False
                del self._kept[key]
                return True
            if old is not None and old.revision >= revision:
                return False  # the answer to a write of this operator was here before
            self._kept[key] = one
            return old is None or old.value != one.value

    def write(self, item: Mapping[str, Any]) -> None:
        """Take what the API server has answered to a write of this operator."""
        key, one = key_of(item), self.kept(item)
        with self._lock:
            old = self._kept.get(key)
            # What the watch has told already may have been changed or deleted since.
            if one.revision > self._seen and (old is None or old.revision < one.revision):
                self._kept[key] = one
                self._written.add(key)

    def kept(self, item: Mapping[str, Any]) -> _Kept[T]:
        """What is kept of an object."""
        return _Kept(item["metadata"]["uid"], _revision(item), self._read(item))


def key_of(item: Mapping[str, Any]) -> _Key:
    """Namespace and name of an object."""
    return item["metadata"].get("namespace") or "", item["metadata"]["name"]


def _revision(item: Mapping[str, Any]) -> int:
    return int(item["metadata"]["resourceVersion"])


class Informer(Generic[T]):
    """One kind of objects, which a thread of its own lists and watches. Any thread asks.

    After an error, it lists anew, after 1 to 30 s. While it cannot watch, it is not current.

    Args:
        api: The API server.
        path: Where the objects are.
        read: Makes of an object as JSON what is kept of it.
        news: Set at every change that a turn would see.
        watch_s: Seconds after which the server ends a watch, for the next one.
        clock: For how long a watch has lasted.
    """

    def __init__(
        self, api: ApiServer, path: str, read: Callable[[Mapping[str, Any]], T], news: threading.Event,
        watch_s: int = _WATCH_S, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._api, self._path, self._news, self._watch_s, self._clock = api, path, news, watch_s, clock
        self.cache = ObjectCache(read)
        self._chance = random.Random()  # so that not all kinds of all operators come back at once
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._stream: WatchStream | None = None
        self._is_current = False
        self._problem: PlatformError | None = None
        self._thread = threading.Thread(target=self._run, name=f"edl_hvd watch {path}", daemon=True)

    def start(self) -> None:
        """Begin to list and watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop. Does not wait for the thread, which ends once the answer that it waits for has come."""
        self._ending.set()
        with self._lock:
            if self._stream is not None:
                self._stream.end()

    @property
    def is_current(self) -> bool:
        """Whether the cache is kept up: it was listed, and a watch tells every change.

        Raises:
            PlatformError: It is not, for this reason; it will be tried again.
        """
        with self._lock:
            if self._problem is not None:
                raise PlatformError(str(self._problem))
            return self._is_current

    def _run(self) -> None:
        failures, listed_s = 0, 0.0
        while not self._ending.is_set():
            problem: PlatformError | None = None
            listed_s = float("inf")
            try:
                version = self._list()
                listed_s = self._clock.monotonic_s()
                version = self._follow(version, _OPENED_AFTER_LIST_S)
                while not self._ending.is_set():
                    version = self._follow(version, _OPENED_S)
            except ResourceExpiredError:
                pass  # a new list is all that is needed
            except EdlHvdError as error:
                problem = PlatformError(str(error))
            except Exception as error:
                problem = PlatformError(f"{self._path} does not read: {type(error).__name__}: {error}")
            is_first = failures == 0 or self._clock.monotonic_s() - listed_s >= _STEADY_S
            failures = 1 if is_first else failures + 1
            self._set(is_current=False, problem=problem)
            if problem is not None or not is_first:
                self._ending.wait(pause_s(failures, self._chance.random()))

    def _set(self, is_current: bool, problem: PlatformError | None = None) -> None:
        with self._lock:
            has_changed = (is_current, problem is None) != (self._is_current, self._problem is None)
            self._is_current, self._problem = is_current, problem
        if has_changed:
            self._news.set()

    def _list(self) -> str:
        self.cache.begin()
        items, version = {}, ""
        for page in self._api.pages(self._path):
            version = page.version
            items.update({key_of(item): self.cache.kept(item) for item in page.items})
        self.cache.replace(items, version)
        return version

    def _follow(self, version: str, within_s: float) -> str:
        """Watch until the server ends it; the version to go on from."""
        began_s, told = self._clock.monotonic_s(), 0
        stream = self._api.watch(self._path, version, self._chance.randint(self._watch_s * 9 // 10, self._watch_s))
        try:
            opened_s = self._clock.monotonic_s()
            if opened_s - began_s > within_s:
                text = f"WATCH {self._path}: it began after {opened_s - began_s:.1f} s"
                raise ResourceExpiredError(text) if within_s == _OPENED_S else PlatformError(text)
            with self._lock:
                self._stream = stream
                if self._ending.is_set():
                    stream.end()
            self._set(is_current=True)
            for event in stream:
                if self._ending.is_set():
                    break
                told += 1
                version = event.item["metadata"]["resourceVersion"]
                if self.cache.apply(event):
                    self._news.set()
        finally:
            with self._lock:
                self._stream, self._is_current = None, False
            stream.close()
        if not told and self._clock.monotonic_s() - opened_s < _LEAST_WATCH_S and not self._ending.is_set():
            raise PlatformError(f"WATCH {self._path}: it was over within {_LEAST_WATCH_S:g} s, without an event")
        return version


def pause_s(failures: int, chance: float) -> float:
    """Seconds before a list is tried again.

    >>> pause_s(1, 0.0), pause_s(1, 1.0), pause_s(3, 1.0), pause_s(100, 1.0)
    (1.0, 2.0, 8.0, 30.0)

    Args:
        failures: Failures in a row, at least 1.
        chance: A random number between 0 and 1.
    """
    most_s = min(_MOST_PAUSE_S, 2.0 ** min(failures, 10))
    return _LEAST_PAUSE_S + chance * (most_s - _LEAST_PAUSE_S)


@dataclass(frozen=True)
class KnownObjects:
    """The objects of a cluster that turns read.

    Attributes:
        jobs: Training jobs.
        nodes: Nodes.
        pods: Pods, also those of others.
        priorities: PriorityClasses.
        guests: MPIJobs that may be resized.
    """

    jobs: tuple[SeenJob, ...]
    nodes: tuple[SeenNode, ...]
    pods: tuple[SeenPod, ...]
    priorities: tuple[SeenPriority, ...]
    guests: tuple[SeenGuest, ...] = ()


class ClusterWatch:
    """All kinds of objects that turns read, with what this operator has written.

    One thread asks and tells what it has written.

    Args:
        api: The API server.
        news: Set at every change that a turn would see.
        with_mpijobs: Whether MPIJobs are watched as well.
    """

    def __init__(self, api: ApiServer, news: threading.Event, with_mpijobs: bool = False) -> None:
        self._jobs = Informer(api, f"/apis/{GROUP}/{VERSION}/trainingjobs", read_job, news)
        self._nodes = Informer(api, "/api/v1/nodes", read_node, news)
        self._pods = Informer(api, "/api/v1/pods", read_pod, news)
        self._priorities = Informer(api, "/apis/scheduling.k8s.io/v1/priorityclasses", read_priority, news)
        self._guests = Informer(api, f"/apis/{MPI_GROUP}/{MPI_VERSION}/mpijobs", read_guest, news)
        always = (self._jobs, self._nodes, self._pods, self._priorities)
        self._informers = (*always, self._guests) if with_mpijobs else always
        self._leaving: set[str] = set()
        for one in self._informers:
            one.start()

    def close(self) -> None:
        """Stop watching."""
        for one in self._informers:
            one.close()

    def known(self) -> KnownObjects | None:
        """What is known; ``None``: not all of it is as it is now, which will be news.

        Raises:
            PlatformError: The API server is away, or refuses to show a kind.
        """
        current = [one.is_current for one in self._informers]  # of each: one may have a problem
        if not all(current):
            return None
        pods = self._pods.cache.values()
        self._leaving &= {pod.uid for pod in pods}
        return KnownObjects(
            self._jobs.cache.values(),
            self._nodes.cache.values(),
            tuple(replace(pod, is_deleting=True) if pod.uid in self._leaving else pod for pod in pods),
            self._priorities.cache.values(),
            tuple(guest for guest in self._guests.cache.values() if guest is not None),
        )

    def job_written(self, answer: Mapping[str, Any]) -> None:
        """The API server has taken a job, or its status, and has answered this."""
        self._jobs.cache.write(answer)

    def guest_written(self, answer: Mapping[str, Any]) -> None:
        """The API server has taken an MPIJob, and has answered this."""
        self._guests.cache.write(answer)

    def pod_created(self, answer: Mapping[str, Any]) -> None:
        """The API server has created a pod, and has answered this."""
        self._pods.cache.write(answer)

    def pod_deleted(self, uid: str) -> None:
        """A pod is leaving, or has left: what the watch tells of it later is older than that, or that it has gone."""
        self._leaving.add(uid)
