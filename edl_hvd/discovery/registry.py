"""Registry of the kinds of sources: ``edlrun --discover KIND:...``, ``discovery_scripts/from_KIND``.

The module of a kind in ``sources/`` has these names, of which the last one is optional:

    FLAGS        names of its flags
    BARE_FLAG    flag that a value without a name stands for; empty for none
    from_flags   makes a ``PolledSource`` of the given ``Flags``
    VARIABLES    variables of flags that do not follow from the names

A module is imported when a source of its kind is needed: a poll of a file does not import the clouds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.source import Source

KINDS = {
    "file": "hostfile",
    "schedule": "schedule",
    "trace": "trace",
    "ec2": "ec2",
    "auto_scaling": "auto_scaling",
    "google": "google",
    "kubernetes": "kubernetes",
    "mpijob": "mpijob",
    "slurm": "slurm",
    "url": "url",
    "leases": "leases",
    "source": "combined",
}
LOCAL_FLAGS = ("stale", "first")
REMOTE_FLAGS = ("refresh", "stale", "first")

FIRST_S = 20.0
# Loading boto3, a token and two calls take about 2 s; this is ten times as long. A file of 100,000 hosts takes as long
# on a machine that runs ten programs on each core.


@dataclass(frozen=True)
class PolledSource:
    """A source, how often it is asked, and how long its answers count.

    Attributes:
        source: Source to ask.
        refresh_s: Fewest seconds between two requests to the source; 0 asks at every poll.
        stale_s: Seconds after a request for which its answer may replace a newer one that fails.
        first_s: Seconds for which the first poll of a job may wait: Horovod ends a job whose first poll fails.
        needs_packages: Whether the source imports installed packages, without which a poll itself runs.
        is_damped: Whether flapping hosts are left out, see ``damping.py``.
    """

    source: Source
    refresh_s: float
    stale_s: float
    first_s: float
    needs_packages: bool = False
    is_damped: bool = False


def local_source(source: Source, flags: Flags) -> PolledSource:
    """A source that is asked at every poll, because that costs almost nothing, with the ``LOCAL_FLAGS``."""
    # A file that cannot be read is a mistake to show, not an outage to bridge: without --stale no older answer
    # replaces it. Horovod keeps its hosts while a script fails. It is not damped: hosts in a file are intended.
    return PolledSource(source, refresh_s=0, stale_s=flags.seconds("stale", 0), first_s=flags.seconds("first", FIRST_S))


def remote_source(source: Source, flags: Flags, needs_packages: bool = False) -> PolledSource:
    """A source behind a network, with the ``REMOTE_FLAGS``."""
    refresh_s = flags.seconds("refresh", 10)
    # A new host boots for a minute or more, so ten seconds do not matter; one poll in ten asks the source.
    stale_s = flags.seconds("stale", 300)
    # Longer than a throttled account or a renewed token takes, and short enough to notice an outage.
    first_s = flags.seconds("first", FIRST_S)
    return PolledSource(source, refresh_s, stale_s, first_s, needs_packages, is_damped=True)


class _Kind(Protocol):
    FLAGS: tuple[str, ...]
    BARE_FLAG: str

    def from_flags(self, flags: Flags) -> PolledSource: ...


def make_source(kind: str, given: Sequence[str], variables: Sequence[str]) -> PolledSource:
    """Make the source that the words of a command line describe, see ``Flags``.

    Raises:
        UsageError: A flag is wrong; the message says which, its value and what is accepted.
    """
    module = _module(kind)
    return module.from_flags(Flags(given, variables, module.FLAGS, module.BARE_FLAG))


def read_variables(kind: str, environ: Mapping[str, str]) -> list[str]:
    """Read flags from the variables of a discovery script, e.g. ``EDL_HVD_DISCOVERY_TAG``."""
    module = _module(kind)
    variables = {flag: f"EDL_HVD_DISCOVERY_{flag.upper().replace('-', '_')}" for flag in module.FLAGS}
    variables |= getattr(module, "VARIABLES", {})
    return [f"--{flag}={environ[name]}" for flag, name in variables.items() if name in environ]


def _module(kind: str) -> _Kind:
    return cast(_Kind, import_module(f"edl_hvd.discovery.sources.{KINDS[kind]}"))
