"""What ``edl-hvd doctor --kubernetes`` looks at: the cluster, what the operator needs in it, what this user may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone

from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult
from edl_hvd.errors import ObjectMissingError, PlatformError, UsageError
from edl_hvd.kubernetes.api import ApiServer
from edl_hvd.kubernetes.leadership import LEASE_NAME, LEASE_S
from edl_hvd.kubernetes.snapshot import EXTRA_CLASS, FLOOR_CLASS, GROUP, VERSION

_GROUP = "Kubernetes"
_MANIFESTS = "run: edl-hvd operator --manifests | kubectl apply -f -"
_RIGHTS = ("create", "list", "delete")


def check_cluster(namespace: str = "edl-hvd") -> Iterator[CheckResult]:
    """Each finding as soon as it is made.

    Args:
        namespace: Namespace of the operator's Lease.
    """
    try:
        api = ApiServer("ask who administers the cluster for it")
        version = api.get("/version").get("gitVersion", "of an unknown version")
    except UsageError as error:
        yield CheckResult(_GROUP, "cluster", MISSING, str(error), "set KUBECONFIG, as for kubectl")
        return
    except PlatformError as error:
        yield CheckResult(_GROUP, "cluster", MISSING, str(error), "compare with: kubectl version")
        return
    yield CheckResult(_GROUP, "cluster", OK, f"Kubernetes {version}")
    checks: Mapping[str, Callable[[ApiServer], CheckResult]] = {
        "TrainingJob": _resource, "priorities": _classes, "operator": lambda api: _operator(api, namespace),
        "rights": _rights,
    }  # fmt: skip
    for subject, check in checks.items():
        try:
            yield check(api)
        except PlatformError as error:  # as for a user who may not look at it
            yield CheckResult(_GROUP, subject, ADVICE, str(error), "ask who administers the cluster")
    api.close()


def _resource(api: ApiServer) -> CheckResult:
    try:
        served = [one["version"] for one in api.get(f"/apis/{GROUP}").get("versions") or []]
    except ObjectMissingError:
        return CheckResult(_GROUP, "TrainingJob", MISSING, f"the cluster has no {GROUP} resources", _MANIFESTS)
    if VERSION not in served:
        found = f"the cluster serves {GROUP}/{', '.join(served)}; this edl_hvd speaks {VERSION}"
        return CheckResult(
            _GROUP, "TrainingJob", MISSING, found, f"{_MANIFESTS}, or install the edl_hvd of the cluster"
        )
    return CheckResult(_GROUP, "TrainingJob", OK, f"{GROUP}/{VERSION} is served")


def _classes(api: ApiServer) -> CheckResult:
    there = {one["metadata"]["name"] for one in api.list("/apis/scheduling.k8s.io/v1/priorityclasses")}
    lacking = [name for name in (FLOOR_CLASS, EXTRA_CLASS) if name not in there]
    if lacking:
        found = f"there is no PriorityClass {' and no '.join(lacking)}"
        return CheckResult(_GROUP, "priorities", MISSING, found, _MANIFESTS)
    return CheckResult(_GROUP, "priorities", OK, f"{FLOOR_CLASS} and {EXTRA_CLASS}")


def _operator(api: ApiServer, namespace: str) -> CheckResult:
    try:
        spec = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE_NAME}").get("spec") or {}
    except ObjectMissingError:
        spec = {}
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        found = f"no operator holds the Lease {LEASE_NAME} of namespace {namespace}"
        return CheckResult(_GROUP, "operator", MISSING, found, f"kubectl -n {namespace} get pods; {_MANIFESTS}")
    age_s = (datetime.now(timezone.utc) - datetime.fromisoformat(renewed.replace("Z", "+00:00"))).total_seconds()
    if age_s > 2 * LEASE_S:
        found = f"{holder} has not renewed its Lease for {age_s:.0f} s"
        return CheckResult(_GROUP, "operator", MISSING, found, f"look at: kubectl -n {namespace} get pods")
    return CheckResult(_GROUP, "operator", OK, f"{holder} acts")


def _rights(api: ApiServer) -> CheckResult:
    lacking = []
    for verb in _RIGHTS:
        asked = {"namespace": api.namespace, "verb": verb, "group": GROUP, "resource": "trainingjobs"}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                  "spec": {"resourceAttributes": asked}}  # fmt: skip
        answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        if not (answer.get("status") or {}).get("allowed"):
            lacking.append(verb)
    where = f"trainingjobs in namespace {api.namespace}"
    if lacking:
        found = f"this user may not {' or '.join(lacking)} {where}"
        return CheckResult(_GROUP, "rights", MISSING, found, "ask for the role 'edit' of that namespace")
    return CheckResult(_GROUP, "rights", OK, f"this user may {', '.join(_RIGHTS)} {where}")
