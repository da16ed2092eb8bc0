"""Which of several operators acts: the one that holds the Lease.

An operator that could not renew the Lease for some time stops acting, by its own clock, before any other can begin.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError
from edl_hvd.kubernetes.api import ApiServer

LEASE_NAME = "edl-hvd-operator"
LEASE_S, ACT_WITHIN_S, RENEW_EVERY_S = 15, 10.0, 2.0


class Leadership:
    """The Lease that one operator holds. Any thread.

    Args:
        api: The API server.
        namespace: Namespace of the Lease.
        identity: The name of this operator; one that comes again under its name goes on at once.
        clock: For how long the Lease was not renewed; the other holder's times are only compared with each other.
    """

    def __init__(self, api: ApiServer, namespace: str, identity: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._api, self._identity, self._clock = api, identity, clock
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed_s: float | None = None
        self._seen: tuple[str, float] | None = None
        self._held: dict[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def may_act(self) -> bool:
        """Whether this operator holds the Lease, and no other can have taken it."""
        renewed_s = self._renewed_s
        return renewed_s is not None and self._clock.monotonic_s() - renewed_s < ACT_WITHIN_S

    def renew(self) -> None:
        """Take the Lease, or keep it, if that is due and possible.

        Raises:
            PlatformError: The API server is away, or refuses.
        """
        with self._lock:  # two at once would take it from each other
            self._renew()

    def _renew(self) -> None:
        began_s = self._clock.monotonic_s()
        if self._renewed_s is not None and began_s - self._renewed_s < RENEW_EVERY_S:
            return
        lease, self._held = self._held, None
        if lease is not None and self.may_act:
            with suppress(ObjectExistsError, ObjectMissingError):  # someone else has written it
                self._write(lease, began_s)
                return
        try:
            lease = self._api.get(f"{self._folder}/{LEASE_NAME}")
        except ObjectMissingError:
            lease = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE_NAME}, "spec": {}
            }  # fmt: skip
        spec: dict[str, Any] = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity):
            self._renewed_s = None
            mark = str((lease["metadata"].get("resourceVersion"), holder))
            if self._seen is None or self._seen[0] != mark:
                self._seen = (mark, began_s)
            if began_s - self._seen[1] < (spec.get("leaseDurationSeconds") or LEASE_S):
                return
        try:
            self._write(lease, began_s)
        except ObjectExistsError:
            self._renewed_s = None

    def _write(self, lease: dict[str, Any], began_s: float) -> None:
        spec: dict[str, Any] = lease["spec"]
        now = datetime.fromtimestamp(self._clock.wall_s(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec.update(holderIdentity=self._identity, leaseDurationSeconds=LEASE_S, renewTime=now)
        if "resourceVersion" in lease["metadata"]:
            self._held = self._api.replace(f"{self._folder}/{LEASE_NAME}", lease)
        else:
            self._held = self._api.create(self._folder, lease)
        self._renewed_s = began_s

    def release(self) -> None:
        """Let another operator take the Lease at once."""
        if not self.may_act:
            return
        self._renewed_s = None
        path = f"{self._folder}/{LEASE_NAME}"
        try:
            lease = self._api.get(path)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._api.replace(path, lease)
        except EdlHvdError:
            pass  # it runs out by itself
