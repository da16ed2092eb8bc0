"""Several faults of different kinds, one after the other, chosen by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

# The hosts of such a job, with the slots they may have. The first keeps one slot that no fault takes away for good.
START = ("localhost:2", "127.0.0.1:1")
_HOSTS = {"localhost": (1, 2), "127.0.0.1": (1, 2), "127.1": (1,)}
KINDS = ("kill", "stop", "add", "remove", "drain", "blip")
_MOST_WORKERS = 4

# What a discovery script may do for some seconds without any host being gone.
_BLIPS = {
    "fails": "echo 'the cloud does not answer' >&2; exit 1",
    "rambles": "echo hello; exit 1",
    "is half done": "head -c 9 '{hosts}'; exit 1",
    "is slow": "sleep 2; exec cat '{hosts}'",
    "hangs": "sleep 1000",
}


@dataclass(frozen=True)
class SeededFault:
    """One of them; its moment is told as that of a ``HostChange``.

    Attributes:
        kind: One of ``KINDS``; "kill one", of two or more; or "calm", which takes back what was done to the hosts.
        seed: Chooses the victim, or the way.
    """

    kind: str
    seed: int
    step: int = 0
    size: int | None = None
    after: int | None = None
    delay_s: float = 0.0


def seeded_faults(seed: int, count: int = 5) -> tuple[SeededFault, ...]:
    """Choose ``count`` faults within some seconds of each other, and the calm after them."""
    chance = random.Random(seed)
    kinds = [chance.choice(KINDS) for _ in range(count)]
    while kinds.count("drain") > 1:  # what is drained stays away
        kinds[kinds.index("drain")] = chance.choice(("kill", "remove"))
    times = [chance.uniform(0.2, 3.0) for _ in kinds]
    first = SeededFault(kinds[0], chance.getrandbits(30), step=3, delay_s=times[0])
    rest = [
        SeededFault(kind, chance.getrandbits(30), after=number, delay_s=time)
        for number, (kind, time) in enumerate(zip(kinds[1:], times[1:], strict=True))
    ]
    return (first, *rest, SeededFault("calm", 0, after=count - 1, delay_s=2.0))


def inject(
    fault: SeededFault, folder: Path, training: Collection[tuple[str, int]], signal: Callable[[int, str], None]
) -> str:
    """Let it happen; returns what did.

    Args:
        fault: Which.
        folder: Of the job, with its list of hosts.
        training: Worker and process number of each member of the world that trains.
        signal: Sends a process the signal of a name.
    """
    chance = random.Random(fault.seed)
    if fault.kind == "kill one":
        if len(training) < 2:
            return "nothing"
        worker, pid = chance.choice(sorted(training))
        signal(pid, "SIGKILL")
        return f"killed {worker} {pid}"
    hosts = dict(line.split(":") for line in (folder / "hosts").read_text().split())
    kind = fault.kind
    others = sorted(member for member in training if member[0] != "localhost:0")
    if kind in ("kill", "stop", "drain") and (len(training) < 2 or not others):
        kind = "add"  # the last one that holds the state is left alone: this is not about checkpoints
    if kind in ("kill", "stop"):
        worker, pid = chance.choice(sorted(training))
        signal(pid, "SIGKILL" if kind == "kill" else "SIGSTOP")
        return f"{kind} {worker}"
    if kind == "drain":
        worker, pid = chance.choice(others)
        signal(pid, "SIGTERM")
        return f"drain {worker}"
    if kind == "blip":
        way = chance.choice(sorted(_BLIPS))
        _write(folder / "discover.sh", "#!/bin/sh\n" + _BLIPS[way].format(hosts=folder / "hosts") + "\n", 0o755)
        return f"discovery {way}"
    _write(folder / "discover.sh", f"#!/bin/sh\nexec cat '{folder}/hosts'\n", 0o755)
    if kind == "calm":
        hosts = dict(entry.split(":") for entry in START)
    elif kind == "remove" and len(hosts) > 1:
        del hosts[chance.choice(sorted(hosts.keys() - {"localhost"}))]
    else:
        host = chance.choice(sorted(_HOSTS))
        hosts[host] = str(chance.choice(_HOSTS[host]))
        while sum(map(int, hosts.values())) > _MOST_WORKERS:
            hosts[max(hosts, key=lambda name: int(hosts[name]))] = "1"
            if all(count == "1" for count in hosts.values()):
                break
    _write(folder / "hosts", "".join(f"{host}:{slots}\n" for host, slots in hosts.items()), 0o644)
    return f"{kind}: hosts {hosts}"


def _write(path: Path, text: str, mode: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.chmod(mode)
    part.replace(path)
