"""Ready pods with given labels as hosts, from the cluster's API server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, HostDetails, Permission, Source
from edl_hvd.discovery.sources.web import RetryAfter, http_get, is_clear_text, read_address, read_token, ssl_context
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.http_client import HttpAnswer, seconds_since_epoch
from edl_hvd.settings import process_environment

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# Folder in which kubelet puts a pod's token, the cluster's certificates and the namespace (Kubernetes: "Accessing the
# Kubernetes API from a Pod").
MOST_STARTS = 3
# A list that expires (410 Gone) while its pages are read is read again, up to three times in a row.
_NEXT_STEPS = {
    401: "the token is not valid, or no longer; kubelet renews the one in the pod",
    403: "allow its service account to list pods in this namespace",
    429: "the API server is asked too often; raise --refresh",
}


class Kubernetes(Source):
    """The ready pods that a label selector finds in a namespace, by IP address.

    A pod that is being deleted is left out as soon as its deletion is known, and has a notice with the rest of its
    grace period. The slots of a pod are the limit of ``resource`` of its containers.

    Requests go to the API server (``GET /api/v1/namespaces/NAMESPACE/pods``, Kubernetes API reference, "list or watch
    objects of kind Pod") with the token of this pod, which is read each time, because kubelet renews it.

    Args:
        selector: Label selector as for ``kubectl get pods --selector``.
        server: URL of the API server, e.g. "https://10.0.0.1:443"; http only on this machine (``kubectl proxy``).
        namespace: Namespace of the pods.
        token_file: File with a bearer token; ``None`` for requests without one.
        ca_file: File of certificates that verify the server; ``None`` for those of this machine.
        slots: Number of slots of each pod; ``None`` for the limit of ``resource`` of its containers.
        resource: Name of a resource, e.g. "nvidia.com/gpu".
        page_size: Pods per page of the server; all pages are read.
    """

    def __init__(
        self,
        selector: str,
        server: str,
        namespace: str,
        token_file: str | None = None,
        ca_file: str | None = None,
        slots: int | None = None,
        resource: str = "nvidia.com/gpu",
        page_size: int = 500,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        address = read_address(server, "--server")
        if is_clear_text(address):
            raise UsageError(f"--server {server!r} would be asked unencrypted; expected https://HOST:PORT")
        if not re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", namespace):
            raise UsageError(f"--namespace {namespace!r} is not usable; expected small letters, digits and '-'")
        self._server = server.rstrip("/")
        self._selector = selector
        self._namespace = namespace
        self._token_file = token_file
        self._ca_file = ca_file
        self._slots = slots
        self._resource = resource
        self._page_size = page_size
        self._clock = clock
        self._retry_after = RetryAfter(clock)

    def answer(self) -> Answer:
        pods, now_s = self._pods()
        hosts, details, left_out, notices = [], {}, {}, {}
        name = "without a name"
        for pod in pods:
            try:
                name, why = pod["metadata"]["name"], reason_to_leave_out(pod)
                if "deletionTimestamp" in pod["metadata"] and _address(pod):
                    notices[_address(pod)] = max(0.0, seconds_since_epoch(pod["metadata"]["deletionTimestamp"]) - now_s)
                if why:
                    left_out[name] = why
                    continue
                hosts.append(self._host(pod, name))
                details[hosts[-1].host] = describe(pod)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                if isinstance(error, UsageError):
                    raise DiscoveryError(f"pod {name}: {error}") from error
                raise DiscoveryError(
                    f"the API server lists something that is not a pod: {type(error).__name__}: {error}"
                ) from error
        # A new host under the address of one that is deleted is not about to go.
        here = {entry.host for entry in hosts}
        notices = {host: seconds for host, seconds in notices.items() if host not in here}
        return Answer(tuple(hosts), notices, details, left_out)

    def _host(self, pod: Mapping[str, Any], name: str) -> HostSlots:
        address = _address(pod)
        if not address:
            raise DiscoveryError(f"pod {name} has no IPv4 address; Horovod's host:slots form knows no others")
        slots = self._slots if self._slots is not None else count_resource(pod, self._resource)
        if not slots:
            raise DiscoveryError(f"pod {name} may use no {self._resource}; give it some, or give --slots")
        return HostSlots(address, slots)

    def _pods(self) -> tuple[list[Mapping[str, Any]], float]:
        """The pods with the labels, and the server's time."""
        for _ in range(MOST_STARTS):
            pods: list[Mapping[str, Any]] = []
            for answer in self._pages():
                if answer.status == 410:
                    break
                if answer.status != 200:
                    raise DiscoveryError(self._explain(answer))
                pods += _read_list(answer)["items"]
            else:
                return pods, answer.now_s(self._clock)
        raise DiscoveryError(f"the API server's list of pods expired {MOST_STARTS} times while it was read")

    def _pages(self) -> Iterator[HttpAnswer]:
        more = ""
        while True:
            words = {
                "labelSelector": self._selector,
                "limit": str(self._page_size),
                **({"continue": more} if more else {}),
            }
            answer = self._ask(f"/api/v1/namespaces/{self._namespace}/pods?{urlencode(words)}")
            yield answer
            more = _read_list(answer)["metadata"].get("continue") or ""
            if not more:
                return

    def _ask(self, path: str) -> HttpAnswer:
        """Make a request with the present token; repeat it if the server refuses one that was renewed meanwhile."""
        context = ssl_context(self._ca_file) if self._server.startswith("https:") else None
        token = read_token(self._token_file) if self._token_file else ""
        answer = self._get(path, token, context)
        if answer.status == 401 and self._token_file and (renewed := read_token(self._token_file)) != token:
            answer = self._get(path, renewed, context)
        return answer

    def _get(self, path: str, token: str, context: Any) -> HttpAnswer:
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._retry_after.check(self._server)
        answer = http_get(f"{self._server}{path}", headers, context, clock=self._clock)
        self._retry_after.note(answer)
        return answer

    def _explain(self, answer: HttpAnswer) -> str:
        try:
            words = json.loads(answer.body)["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            words = answer.words() or "no words"
        step = _NEXT_STEPS.get(answer.status, "see the message of the API server")
        return f"{self._server} refused to list pods in {self._namespace}: status {answer.status}: {words}; {step}"

    def permissions(self) -> Iterable[Permission]:
        """Try to list one pod, which needs the verb ``list`` alone."""
        if self._token_file:
            try:
                read_token(self._token_file)
            except DiscoveryError as error:
                yield Permission(f"read {self._token_file}", False, str(error))
                return
            yield Permission(f"read {self._token_file}", True, "it holds a token")
        name = f"list pods in namespace {self._namespace}"
        query = urlencode({"labelSelector": self._selector, "limit": "1"})
        try:
            answer = self._ask(f"/api/v1/namespaces/{self._namespace}/pods?{query}")
        except DiscoveryError as error:
            yield Permission(name, None, str(error))
            return
        if answer.status == 200:
            yield Permission(name, True, f"{self._server} lists them")
        else:
            is_refusal = answer.status in (401, 403)
            yield Permission(name, False if is_refusal else None, self._explain(answer))


# --- pods: pure ---


def reason_to_leave_out(pod: Mapping[str, Any]) -> str:
    """The reason why a pod is no host now; empty if it is one. (Kubernetes API reference, PodStatus and ObjectMeta.)"""
    if "deletionTimestamp" in pod["metadata"]:
        return f"it is being deleted, and gone by {pod['metadata']['deletionTimestamp']}"
    phase = pod["status"]["phase"]
    if phase != "Running":
        return f"it is {phase}"
    ready = [one for one in pod["status"].get("conditions", ()) if one["type"] == "Ready"]
    if not ready or ready[0]["status"] != "True":
        why = ready[0].get("message") or ready[0].get("reason") if ready else ""
        return "it is not ready" + (f": {why}" if why else "")
    return ""


def count_resource(pod: Mapping[str, Any], resource: str) -> int:
    """The sum of the limits of an extended resource in a pod's containers; they are whole numbers.

    >>> containers = [{"resources": {"limits": {"nvidia.com/gpu": "4"}}}, {}]
    >>> count_resource({"spec": {"containers": containers}}, "nvidia.com/gpu")
    4
    """
    limits = (container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"])
    return sum(int(limit[resource]) for limit in limits if resource in limit)


def describe(pod: Mapping[str, Any]) -> HostDetails:
    """The details of a pod: its node as the zone, and the type of node if the pod asks for one."""
    started = pod["status"].get("startTime") or pod["metadata"].get("creationTimestamp")
    return HostDetails(
        kind=pod["spec"].get("nodeSelector", {}).get("node.kubernetes.io/instance-type", ""),
        zone=pod["spec"].get("nodeName", ""),
        since_s=seconds_since_epoch(started) if started else None,
    )


def _address(pod: Mapping[str, Any]) -> str:
    """The IPv4 address of a pod; empty if it has none."""
    addresses = [one.get("ip", "") for one in pod["status"].get("podIPs", ())] or [pod["status"].get("podIP", "")]
    return next((address for address in addresses if address and ":" not in address), "")


def _read_list(answer: HttpAnswer) -> Mapping[str, Any]:
    try:
        content = json.loads(answer.body)
        if isinstance(content["items"], list | None) and isinstance(content["metadata"], dict):
            return {**content, "items": content["items"] or []}
        found = f"items of type {type(content['items']).__name__}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
    raise DiscoveryError(f"the API server answered with something that is not a list of pods: {found}; check --server")


# --- from flags ---

FLAGS = ("selector", "namespace", "slots", "resource", "server", "token-file", "ca-file", "page-size", *REMOTE_FLAGS)
BARE_FLAG = "selector"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_kubernetes``."""
    flags.needed("selector", "label selector", "from_kubernetes app=trainer")
    server = flags.text("server", "")
    given = not server.startswith("https:") and bool(server)  # kubectl proxy adds the credentials
    source = Kubernetes(
        flags.text("selector", ""),
        server=server or _server_of_this_pod(process_environment()),
        namespace=flags.text("namespace", "") or _namespace_of_this_pod(),
        token_file=flags.text("token-file", "" if given else f"{ACCOUNT}/token") or None,
        ca_file=flags.text("ca-file", "" if given else f"{ACCOUNT}/ca.crt") or None,
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        resource=flags.text("resource", "nvidia.com/gpu"),
        page_size=flags.count("page-size", 500),
    )
    return remote_source(source, flags)


def _server_of_this_pod(environ: Mapping[str, str]) -> str:
    host, port = (environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port:
        raise UsageError(
            "no --server is given, and KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which every pod has, are "
            "not set; run this in a pod, or run 'kubectl proxy' and give --server http://127.0.0.1:8001"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _namespace_of_this_pod() -> str:
    try:
        with open(f"{ACCOUNT}/namespace", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"no --namespace is given, and {ACCOUNT}/namespace, which every pod has, cannot be read"
        ) from error
