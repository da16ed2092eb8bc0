"""The platforms of this machine, and their addresses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from edl_hvd.errors import UsageError
from edl_hvd.notices.azure import ADDRESS as AZURE
from edl_hvd.notices.azure import AzureNotices
from edl_hvd.notices.ec2 import ADDRESS as EC2
from edl_hvd.notices.ec2 import Ec2Notices
from edl_hvd.notices.google import ADDRESS as GOOGLE
from edl_hvd.notices.google import GoogleNotices
from edl_hvd.notices.kubernetes import ADDRESS as KUBERNETES
from edl_hvd.notices.kubernetes import SERVICE_ACCOUNT, KubernetesNotices
from edl_hvd.notices.notice import Provider

PLATFORMS = ("ec2", "google", "azure", "kubernetes")
SETTINGS = ("off", "auto", *PLATFORMS)
DMI = "/sys/class/dmi/id"
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
# Asset tag of each chassis of Azure; other machines of Microsoft's Hyper-V have others.


@dataclass(frozen=True)
class Addresses:
    """Addresses of the platforms' services; the defaults hold on each machine of the platform."""

    ec2: str = EC2
    google: str = GOOGLE
    azure: str = AZURE
    kubernetes: str = KUBERNETES
    service_account: str = SERVICE_ACCOUNT


STANDARD = Addresses()


def find_providers(setting: str, addresses: Addresses, dmi: str = DMI) -> tuple[Provider, ...]:
    """Find the providers: the one that ``setting`` names, none for "off", those of this machine for "auto".

    Reads some small files, and makes no request.

    Raises:
        UsageError: The setting is not known.
    """
    if setting not in SETTINGS:
        raise UsageError(f"notices of {setting!r} are not known; accepted: {', '.join(SETTINGS)}")
    if setting == "off":
        return ()
    makers: dict[str, Callable[[], Provider]] = {
        "ec2": lambda: Ec2Notices(addresses.ec2),
        "google": lambda: GoogleNotices(addresses.google),
        "azure": lambda: AzureNotices(addresses.azure),
        "kubernetes": lambda: KubernetesNotices(addresses.kubernetes, addresses.service_account),
    }
    names = detect(dmi, addresses.service_account) if setting == "auto" else (setting,)
    return tuple(makers[name]() for name in names)


def detect(dmi: str = DMI, service_account: str = SERVICE_ACCOUNT) -> tuple[str, ...]:
    """Detect the platforms of this machine from its firmware; a pod has two: Kubernetes and that of its node."""
    told = {name: _read(dmi, name) for name in ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")}
    found = []
    # Older machines, on Xen, have it in the BIOS version.
    if told["sys_vendor"] == "Amazon EC2" or "amazon" in told["bios_version"]:
        found.append("ec2")
    if told["product_name"].startswith("Google"):
        found.append("google")
    if told["chassis_asset_tag"] == _AZURE_CHASSIS:
        found.append("azure")
    if os.path.isfile(os.path.join(service_account, "token")):
        found.append("kubernetes")
    return tuple(found)


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # no such file, as in some containers
