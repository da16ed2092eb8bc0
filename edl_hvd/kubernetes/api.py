"""The API server: lists, watches, and writes that lose against later ones. Everything is JSON as the server has it."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, PlatformError, UsageError

_PAGE = 500
_RIGHTS = "apply the operator's manifests again, which hold the rights that it needs"
_MOST_STARTS = 3
# A list that expires while its pages are read is read again.
_ANSWER_S = 10.0
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
# A watch may be silent for minutes: only probes tell that the other end is gone. A system without them waits longer.


class ResourceExpiredError(PlatformError):
    """A list or a watch begins at a version that the API server does not keep any more."""


@dataclass(frozen=True)
class ListPage:
    """A part of a list.

    Attributes:
        items: Objects.
        version: resourceVersion of the whole list, the same on each page.
    """

    items: tuple[Mapping[str, Any], ...]
    version: str


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch.

    Attributes:
        type: ADDED, MODIFIED, DELETED or BOOKMARK.
        item: The object after the change; of a bookmark only its resourceVersion.
    """

    type: str
    item: Mapping[str, Any]


class WatchStream:
    """An open watch. One thread iterates over it and closes it; any thread may end it.

    Args:
        answer: The answer of the HTTP library, whose body is not read yet.
        path: What is watched, for messages.
    """

    def __init__(self, answer: Any, path: str) -> None:
        self._answer, self._path = answer, path
        self._socket: socket.socket | None = None
        stream = answer.extensions.get("network_stream")
        if stream is not None:
            self._socket = stream.get_extra_info("socket")
        if self._socket is not None:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE:
                    if hasattr(socket, name):
                        self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __iter__(self) -> Iterator[WatchEvent]:
        """Each event, until the server ends the watch as it was told to. Blocks.

        Raises:
            PlatformError: The connection is gone, or the server reports an error.
            ResourceExpiredError: The watch has to begin with a new list.
        """
        chunks, rest = self._answer.iter_bytes(), b""
        while True:
            try:
                chunk = next(chunks, None)
            except Exception as error:  # of httpx, whichever name lightkube's version of it has
                raise PlatformError(f"WATCH {self._path}: the connection is gone: {error}") from None
            if chunk is None:
                return
            # Not by the lines of a text: these also end where an annotation holds a character such as NEL.
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                yield self._event(line)

    def _event(self, line: bytes) -> WatchEvent:
        try:
            found = json.loads(line)
            event = WatchEvent(found["type"], found["object"])
        except (ValueError, TypeError, KeyError):
            raise PlatformError(f"WATCH {self._path}: no event of Kubernetes: {line[:200]!r}") from None
        if event.type != "ERROR":
            return event
        text = f"WATCH {self._path}: {event.item.get('code')}: {event.item.get('message') or event.item}"
        raise ResourceExpiredError(text) if event.item.get("code") == 410 else PlatformError(text)

    def end(self) -> None:
        """Let the iteration end, from any thread."""
        if self._socket is not None:
            with suppress(OSError):
                # Not that of a TLS socket, which also takes away what the other thread is reading with.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):  # it may be broken
            self._answer.close()


class ApiServer:
    """One cluster, reached as its kubeconfig, or the pod that this runs in, says.

    Args:
        rights: What to do where a right is missing, for messages.

    Attributes:
        namespace: Where the kubeconfig, or the pod, wants things to be.

    Raises:
        UsageError: lightkube is missing, or nothing says where the cluster is.
    """

    def __init__(self, rights: str = _RIGHTS) -> None:
        self._rights = rights
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        try:
            from lightkube.config.client_adapter import Client, ConnectionParams
            from lightkube.config.kubeconfig import KubeConfig
            from lightkube.core.exceptions import ConfigError
        except ImportError:
            raise UsageError("Kubernetes needs lightkube; run pip install 'edl-hvd[kubernetes]'") from None
        try:
            # The client of lightkube's own HTTP library, with the cluster's certificates and this user's proof.
            config: Any = KubeConfig.from_env().get()
            self._client: Any = Client(config, ConnectionParams())
            self.namespace: str = config.namespace
        except (ConfigError, OSError, ValueError) as error:
            raise UsageError(
                f"no cluster is known: {error}; expected a pod with a service account, KUBECONFIG, or ~/.kube/config"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @property
    def requests(self) -> dict[tuple[str, int], int]:
        """Number of requests by verb and code of the answer, so far; code 0: none came. LIST and WATCH are verbs."""
        with self._lock:
            return dict(self._requests)

    def list(self, path: str) -> Iterator[dict[str, Any]]:
        """All objects at a path.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        for _ in range(_MOST_STARTS):
            with suppress(ResourceExpiredError):
                return iter([dict(item) for page in self.pages(path) for item in page.items])
        raise PlatformError(f"LIST {path}: the list has expired {_MOST_STARTS} times while it was read; try again")

    def pages(self, path: str) -> Iterator[ListPage]:
        """All objects at a path, as they were when the first page was asked for.

        Raises:
            ResourceExpiredError: The pages were read too slowly; read them anew.
            PlatformError: The API server is away, or refuses.
        """
        mark = ""
        while True:
            query = f"{path}?limit={_PAGE}" + (f"&continue={mark}" if mark else "")
            code, answer = self._request("LIST", query)
            self._check(code, answer, "LIST", path)
            meta = answer.get("metadata") or {}
            yield ListPage(tuple(answer.get("items") or ()), meta.get("resourceVersion") or "")
            mark = meta.get("continue") or ""
            if not mark:
                return

    def watch(self, path: str, version: str, within_s: int) -> WatchStream:
        """Open a watch: what has changed at a path since a version, and what will.

        Args:
            path: What is watched.
            version: resourceVersion of a list, of an object or of a bookmark.
            within_s: Seconds after which the server ends it.

        Raises:
            ResourceExpiredError: The server does not keep the changes since that version any more.
            PlatformError: The API server is away, or refuses.
        """
        query = f"{path}?watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={within_s}"
        bounds = (_ANSWER_S, within_s + _ANSWER_S, _ANSWER_S, _ANSWER_S)
        try:
            answer = self._client.send(self._client.build_request("GET", query, timeout=bounds), stream=True)
        except Exception as error:  # of httpx, whichever name lightkube's version of it has
            self._count("WATCH", 0)
            raise PlatformError(f"WATCH {path}: the API server does not answer: {error}") from None
        self._count("WATCH", answer.status_code)
        if answer.status_code < 300:
            return WatchStream(answer, path)
        found = None
        with suppress(Exception):  # no JSON, or a connection that ends: the code says enough
            answer.read()
            found = answer.json()
        answer.close()
        self._check(answer.status_code, found if isinstance(found, dict) else {}, "WATCH", path)
        raise PlatformError(f"WATCH {path}: {answer.status_code}")

    def get(self, path: str) -> dict[str, Any]:
        """One object.

        Raises:
            ObjectMissingError: There is none.
            PlatformError: The API server is away, or refuses.
        """
        return self._checked("GET", path)

    def create(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object.

        Raises:
            ObjectExistsError: One of that name is there.
            PlatformError: The API server is away, or refuses.
        """
        return self._checked("POST", path, manifest)

    def replace(self, path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object.

        Raises:
            ObjectExistsError: It has been written since it was read.
            PlatformError: The API server is away, or refuses.
        """
        return self._checked("PUT", path, manifest)

    def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object.

        Raises:
            ObjectExistsError: It has been written since it was read.
            ObjectMissingError: There is none.
            PlatformError: The API server is away, or refuses.
        """
        return self._checked("PATCH", path, change)

    def delete(self, path: str, uid: str, grace_s: int | None) -> None:
        """Delete an object, if it is the one that is meant.

        Raises:
            ObjectExistsError: Another one has its name.
            ObjectMissingError: There is none.
            PlatformError: The API server is away, or refuses.
        """
        grace = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self._checked("DELETE", path, {"preconditions": {"uid": uid}, **grace})

    def _checked(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        code, answer = self._request(verb, path, body)
        self._check(code, answer, verb, path)
        return answer

    def _request(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        content = None if body is None else json.dumps(body).encode()
        try:
            method = "GET" if verb == "LIST" else verb
            answer = self._client.request(method, path, content=content, headers={"Content-Type": kind})
            found = answer.json()
        except Exception as error:  # of httpx, whichever name lightkube's version of it has; or no JSON
            self._count(verb, 0)
            raise PlatformError(f"{verb} {path}: the API server does not answer: {error}") from None
        self._count(verb, answer.status_code)
        return answer.status_code, found if isinstance(found, dict) else {}

    def _count(self, verb: str, code: int) -> None:
        with self._lock:
            self._requests[verb, code] += 1

    def _check(self, code: int, answer: Mapping[str, Any], verb: str, path: str) -> None:
        if code < 300:
            return
        text = f"{verb} {path}: {code}: {answer.get('message') or answer}"
        if code == 404:
            raise ObjectMissingError(text)
        if code == 409:
            raise ObjectExistsError(text)
        if code == 410:
            raise ResourceExpiredError(text)
        if code in (401, 403):
            text += f"; {self._rights}"
        raise PlatformError(text)
