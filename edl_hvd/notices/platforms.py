"""Which platforms this machine belongs to, and where they are asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from edl_hvd.errors import UsageError
from edl_hvd.notices.azure import ADDRESS as AZURE
from edl_hvd.notices.azure import Azure
from edl_hvd.notices.ec2 import ADDRESS as EC2
from edl_hvd.notices.ec2 import Ec2
from edl_hvd.notices.google import ADDRESS as GOOGLE
from edl_hvd.notices.google import Google
from edl_hvd.notices.kubernetes import ADDRESS as KUBERNETES
from edl_hvd.notices.kubernetes import SERVICE_ACCOUNT, Kubernetes
from edl_hvd.notices.notice import Provider

PLACES = ("ec2", "google", "azure", "kubernetes")
SETTINGS = ("off", "auto", *PLACES)
DMI = "/sys/class/dmi/id"
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
# The asset tag of every chassis of Azure; other machines of Microsoft's Hyper-V have others.


@dataclass(frozen=True)
class Addresses:
    """Where to ask; the defaults are what every machine of the platform has."""

    ec2: str = EC2
    google: str = GOOGLE
    azure: str = AZURE
    kubernetes: str = KUBERNETES
    service_account: str = SERVICE_ACCOUNT


STANDARD = Addresses()


def find_providers(setting: str, addresses: Addresses, dmi: str = DMI) -> tuple[Provider, ...]:
    """What to ask: the one that ``setting`` names, none for "off", those of this machine for "auto".

    Reads some small files; asks nobody.

    Raises:
        UsageError: There is no such setting.
    """
    if setting not in SETTINGS:
        raise UsageError(f"notices of {setting!r} are not known; accepted: {', '.join(SETTINGS)}")
    if setting == "off":
        return ()
    makers: dict[str, Callable[[], Provider]] = {
        "ec2": lambda: Ec2(addresses.ec2),
        "google": lambda: Google(addresses.google),
        "azure": lambda: Azure(addresses.azure),
        "kubernetes": lambda: Kubernetes(addresses.kubernetes, addresses.service_account),
    }
    names = detect(dmi, addresses.service_account) if setting == "auto" else (setting,)
    return tuple(makers[name]() for name in names)


def detect(dmi: str = DMI, service_account: str = SERVICE_ACCOUNT) -> tuple[str, ...]:
    """The platforms of this machine, by what its firmware says; a pod belongs to two: its own and its node's."""
    told = {name: _read(dmi, name) for name in ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")}
    found = []
    # Machines of the older kind, on Xen, say it in the BIOS.
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
        return ""  # no firmware that speaks, as in some containers
