"""A server that speaks Google's metadata and the part of Compute Engine's REST that lists a group's instances.

The answers have the form that the API reference shows: instanceGroupManagers.listManagedInstances, instances.list,
machineTypes.get.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from metadata_server import GoogleMetadata, Reply, in_json

PROJECT = "my-project"
ZONE = "us-central1-a"
_COMPUTE = "/compute/v1/"

# What becomes of an answer of Compute Engine.
GARBLED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda body: body[: len(body) // 2],
    "not json": lambda body: b"upstream connect error",
    "a list": lambda body: b"[]",
    "a web page": lambda body: b"<html><body>Sign in to the hotel's network</body></html>",
    "nothing": lambda body: b"",
    "other fields": lambda body: body.replace(b'"currentAction"', b'"nextAction"'),
}
REFUSALS = {
    "throttled": (429, "rateLimitExceeded", "Quota exceeded for quota metric 'Read requests'"),
    "rate limited": (403, "rateLimitExceeded", "Rate Limit Exceeded"),
    "not allowed": (403, "forbidden", "Required 'compute.instanceGroupManagers.get' permission"),
    "no scope": (403, "insufficientPermissions", "Request had insufficient authentication scopes."),
    "down": (503, "backendError", "The service is currently unavailable."),
}
# The machine's service account is gone, the metadata server is not Google's, every token is refused.
DOUBTS = (*GARBLED, *REFUSALS, "cut off", "refuse", "second page fails", "wrong credentials", "no account", "stranger")


class GoogleServer(GoogleMetadata):
    """A project with groups of instances.

    Attributes:
        groups: Members by "zones/ZONE" or "regions/REGION" and name.
        instances: By zone and name.
        kinds: Types of machine by name.
        repeats_tokens: Every request is refused with a 401 that has the token in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.instances: dict[tuple[str, str], dict[str, Any]] = {}
        self.kinds: dict[str, dict[str, Any]] = {name: {"name": name} for name in ("e2-micro", "n1-standard-4")}
        self.texts |= {"project/project-id": PROJECT, "instance/zone": f"projects/123456/zones/{ZONE}"}
        self.tokens = 0
        self.repeats_tokens = False
        self.renew_token()

    def renew_token(self) -> None:
        """The token that was given out is good no more, though it said that it would be."""
        self.tokens += 1
        token = {"access_token": f"ya29.{self.tokens}", "expires_in": 3599, "token_type": "Bearer"}
        self.texts["instance/service-accounts/default/token"] = json.dumps(token)

    def add(self, group: str, name: str, scope: str = f"zones/{ZONE}", zone: str = ZONE, **more: Any) -> str:
        """An instance in a group, and its address; ``more``: "status", "action", "health", "gpus", "kind"."""
        number = len(self.instances) + 2
        address, kind, status = f"10.128.0.{number}", more.get("kind", "n1-standard-4"), more.get("status", "RUNNING")
        path = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}"
        member: dict[str, Any] = {
            "id": str(number),
            "instance": f"{path}/instances/{name}",
            "instanceStatus": status,
            "currentAction": more.get("action", "NONE"),
        }
        if "health" in more:
            member["instanceHealth"] = [
                {"healthCheck": f"{path}/healthChecks/h", "detailedHealthState": more["health"]}
            ]
        instance: dict[str, Any] = {
            "id": str(number),
            "name": name,
            "status": status,
            "machineType": f"{path}/machineTypes/{kind}",
            "zone": path,
            "networkInterfaces": [{"name": "nic0", "networkIP": address}],
            "creationTimestamp": "2026-11-22T01:00:00.000-08:00",
            "lastStartTimestamp": "2026-11-22T02:00:00.000-08:00",
        }
        if "gpus" in more:
            instance["guestAccelerators"] = [
                {"acceleratorType": f"{path}/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": more["gpus"]}
            ]
        self.groups.setdefault((scope, group), []).append(member)
        self.instances[zone, name] = instance
        return address

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if not path.startswith(_COMPUTE):
            reply = super().answer(method, path, headers)
            if self.behaviour == "no account" and path.endswith("/token"):
                return Reply(404, b"Not Found", reply.headers)
            return Reply(reply.status, reply.body) if self.behaviour == "stranger" else reply
        if self.repeats_tokens:
            return _refuse(401, "authError", f"no such token: {headers['authorization'].removeprefix('Bearer ')}")
        if self.behaviour == "wrong credentials" or headers.get("authorization") != f"Bearer ya29.{self.tokens}":
            return _refuse(401, "authError", "Invalid Credentials")
        if self.behaviour in REFUSALS:
            return _refuse(*REFUSALS[self.behaviour])
        asked = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        if self.behaviour == "second page fails" and "pageToken" in query:
            return _refuse(500, "backendError", "Internal error")
        reply = self._compute(method, asked.path.removeprefix(_COMPUTE), query)
        return Reply(reply.status, GARBLED.get(self.behaviour, bytes)(reply.body), reply.headers)

    def _compute(self, method: str, path: str, query: Mapping[str, str]) -> Reply:
        match = re.fullmatch(rf"projects/{PROJECT}/((?:zones|regions)/[\w-]+)/(\w+)(?:/([\w.-]+))?(?:/(\w+))?", path)
        if match is None:
            return _refuse(404, "notFound", f"The resource '{path}' was not found")
        scope, what, name, action = match.groups()
        if (method, what, action) == ("POST", "instanceGroupManagers", "listManagedInstances"):
            if (scope, name) not in self.groups:
                return _refuse(404, "notFound", f"The resource '{path}' was not found")
            return _page("managedInstances", self.groups[scope, name], query)
        if (method, what, name) == ("GET", "instances", None):
            here = [entry for (zone, _), entry in self.instances.items() if scope == f"zones/{zone}"]
            wanted = re.fullmatch(r'name eq "(.*)"', query.get("filter", 'name eq ".*"'))
            assert wanted is not None
            return _page("items", [entry for entry in here if re.fullmatch(wanted[1], entry["name"])], query)
        if (method, what) == ("GET", "machineTypes") and name in self.kinds:
            return in_json(self.kinds[name])
        return _refuse(404, "notFound", f"The resource '{path}' was not found")


def _page(items: str, found: list[dict[str, Any]], query: Mapping[str, str]) -> Reply:
    start, count = int(query.get("pageToken", "0")), int(query.get("maxResults", "500"))
    answer: dict[str, Any] = {items: found[start : start + count]} if found else {}
    if start + count < len(found):
        answer["nextPageToken"] = str(start + count)
    return in_json(answer)


def _refuse(status: int, reason: str, message: str) -> Reply:
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return in_json({"error": {"code": status, "message": message, "errors": errors}}, status)
