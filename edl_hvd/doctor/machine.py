"""Tools and network of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from edl_hvd.build import tools
from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult, CheckVerdict

_TOOLS = "Tools"
_NETWORK = "Network"
# Asks the kernel for an interface's IPv4 address (netdevice(7)).
_SIOCGIFADDR = 0x8915
# Interfaces that containers and virtual machines make for themselves; other hosts do not see them.
_INTERNAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "kube", "tun", "tap")


def check_tools(environ: Mapping[str, str], horovod_works: bool) -> list[CheckResult]:
    """What building Horovod needs, which is required only while there is no working Horovod, and ssh."""
    lack: CheckVerdict = ADVICE if horovod_works else MISSING
    found: tuple[tuple[str, tools.Tool | None, str, CheckVerdict], ...] = (
        ("C++ compiler", tools.find_compiler(environ), "apt-get install g++, or set CXX", lack),
        ("make", tools.find_tool(["make", "gmake"], environ), "apt-get install make", lack),
        ("CMake", tools.find_cmake(environ), "pip install 'edl-hvd[build-horovod]'", lack),
        ("MPI compiler", tools.find_tool(["mpicxx"], environ), "", OK),
        ("ccache", tools.find_tool(["ccache"], environ), "", OK),
    )
    findings = [
        CheckResult(_TOOLS, subject, OK, f"{tool.version} ({tool.path})")
        if tool
        else CheckResult(_TOOLS, subject, verdict, "none" if fix else "none; not needed", fix)
        for subject, tool, fix, verdict in found
    ]
    return [*findings, check_headers(lack), check_ssh(environ)]


def check_headers(lack: CheckVerdict) -> CheckResult:
    header = tools.python_header()
    if header.is_file():
        return CheckResult(_TOOLS, "Python.h", OK, str(header))
    return CheckResult(_TOOLS, "Python.h", lack, f"{header} does not exist", "apt-get install python3-dev")


def check_ssh(environ: Mapping[str, str]) -> CheckResult:
    # ssh has no --version, and prints its -V to the error output.
    ssh = tools.find_program("ssh", environ)
    if ssh:
        return CheckResult(_TOOLS, "ssh client", OK, ssh)
    fix = "apt-get install openssh-client (the launcher starts workers of other hosts through it)"
    return CheckResult(_TOOLS, "ssh client", ADVICE, "none", fix)


def addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def default_interface(routes: Path = Path("/proc/net/route")) -> str | None:
    """The interface that leads out of this machine, or ``None``."""
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return None
    # Columns: interface, destination, ...; the default route's destination is 0.
    return next((fields[0] for line in lines if (fields := line.split())[1] == "00000000"), None)


def judge_network(addresses: Mapping[str, str], default: str | None) -> list[CheckResult]:
    """The interfaces, and what to give to ``horovodrun --network-interfaces``."""
    listed = ", ".join(f"{name} {address}" for name, address in addresses.items())
    outward = choose_interface(addresses, default)
    loopback = next((name for name, address in addresses.items() if address.startswith("127.")), None)
    if loopback is None:
        missing = CheckResult(
            _NETWORK, "interfaces", MISSING, listed or "none has an IPv4 address", "ip link set lo up"
        )
        return [missing]
    advice = f"--network-interfaces {loopback} for jobs on this machine alone"
    if outward:
        advice += f"; {outward} for several hosts, if it has that name on all of them"
    return [CheckResult(_NETWORK, "interfaces", OK, listed), CheckResult(_NETWORK, "horovodrun", OK, advice)]


def choose_interface(addresses: Mapping[str, str], default: str | None) -> str | None:
    """The interface other hosts most likely reach: that of the default route, else the first real one."""
    outward: Sequence[str] = [
        name for name, address in addresses.items() if not address.startswith("127.") and not name.startswith(_INTERNAL)
    ]
    return default if default in outward else next(iter(outward), None)
