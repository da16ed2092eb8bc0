"""The API server: lists, and writes that lose against later ones. Everything is JSON as the server has it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, PlatformError, UsageError

_PAGE = 500
_RIGHTS = "apply the operator's manifests again, which hold the rights that it needs"
_MOST_STARTS = 3
# A list that expires while its pages are read is read again.


class ApiServer:
    """One cluster, reached as its kubeconfig, or the pod that this runs in, says.

    Args:
        rights: What to do where a right is missing, for messages.

    Attributes:
        namespace: Where the kubeconfig, or the pod, wants things to be.
        requests: Number of requests by verb and code of the answer; code 0: none came.

    Raises:
        UsageError: lightkube is missing, or nothing says where the cluster is.
    """

    def __init__(self, rights: str = _RIGHTS) -> None:
        self._rights = rights
        self.requests: Counter[tuple[str, int]] = Counter()
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

    def list(self, path: str) -> Iterator[dict[str, Any]]:
        """All objects at a path, in pages.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        for start in range(_MOST_STARTS):
            items: list[dict[str, Any]] = []
            mark = ""
            while True:
                query = f"{path}?limit={_PAGE}" + (f"&continue={mark}" if mark else "")
                code, answer = self._request("GET", query)
                if code == 410 and start + 1 < _MOST_STARTS:
                    break
                self._check(code, answer, "GET", path)
                items += answer.get("items") or []
                mark = (answer.get("metadata") or {}).get("continue") or ""
                if not mark:
                    return iter(items)
        raise PlatformError(f"GET {path}: the list has expired {_MOST_STARTS} times while it was read; try again")

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
            answer = self._client.request(verb, path, content=content, headers={"Content-Type": kind})
            found = answer.json()
        except Exception as error:  # of httpx, whichever name lightkube's version of it has; or no JSON
            self.requests[verb, 0] += 1
            raise PlatformError(f"{verb} {path}: the API server does not answer: {error}") from None
        self.requests[verb, answer.status_code] += 1
        return answer.status_code, found if isinstance(found, dict) else {}

    def _check(self, code: int, answer: Mapping[str, Any], verb: str, path: str) -> None:
        if code < 300:
            return
        text = f"{verb} {path}: {code}: {answer.get('message') or answer}"
        if code == 404:
            raise ObjectMissingError(text)
        if code == 409:
            raise ObjectExistsError(text)
        if code in (401, 403):
            text += f"; {self._rights}"
        raise PlatformError(text)
