"""The Lease of the operator, which several threads of one operator renew, and which others want."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, cast

from clocks import FakeClock

from edl_hvd.errors import ObjectExistsError, ObjectMissingError
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.leadership import ACT_WITHIN_S, LEASE_S, RENEW_EVERY_S, Leadership

ROUNDS, THREADS = 20, 8


class LeaseServer:
    """One object, which is replaced only by those who know its version."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.lease: dict[str, Any] | None = None

    def get(self, path: str) -> dict[str, Any]:
        self.requests["GET"] += 1
        if self.lease is None:
            raise ObjectMissingError(path)
        return deepcopy(self.lease)

    def create(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        return self.write("POST", "0", manifest)

    def replace(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        return self.write("PUT", manifest["metadata"]["resourceVersion"], manifest)

    def write(self, verb: str, version: str, manifest: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.001)  # for other threads
        with self.lock:
            self.requests[verb] += 1
            if version != ("0" if self.lease is None else self.lease["metadata"]["resourceVersion"]):
                raise ObjectExistsError("it was written meanwhile")
            self.lease = deepcopy(manifest)
            self.lease["metadata"]["resourceVersion"] = str(int(version) + 1)
            return deepcopy(self.lease)


def test_threads_of_one_operator_take_nothing_from_each_other() -> None:
    server, clock = LeaseServer(), FakeClock()
    leadership = Leadership(cast(ApiServer, server), "edl-hvd", "me", clock)
    leadership.renew()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(ROUNDS):
            clock.sleep(RENEW_EVERY_S)
            for done in [pool.submit(leadership.renew) for _ in range(THREADS)]:
                done.result(300)
            assert leadership.may_act
    assert server.requests == {"GET": 1, "POST": 1, "PUT": ROUNDS}, "one request for each renewal"


def test_what_others_write_into_it_is_read_before_the_next_renewal() -> None:
    server, clock = LeaseServer(), FakeClock()
    api = cast(ApiServer, server)
    mine, other = Leadership(api, "edl-hvd", "me", clock), Leadership(api, "edl-hvd", "other", clock)
    mine.renew()
    assert server.lease is not None
    server.lease["metadata"].update(resourceVersion="7", annotations={"note": "of a person"})
    clock.sleep(RENEW_EVERY_S)
    mine.renew()
    assert mine.may_act
    assert server.lease["metadata"]["annotations"] == {"note": "of a person"}
    other.renew()
    clock.sleep(ACT_WITHIN_S)
    assert not mine.may_act, "it could not renew it"
    clock.sleep(LEASE_S)
    other.renew()
    assert other.may_act
    mine.renew()
    assert not mine.may_act
