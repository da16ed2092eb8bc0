"""Every kind of source by its name: ``edlrun --discover KIND:...``, ``discovery_scripts/from_KIND``.

A kind's module in ``sources/`` has these names, of which the last one may be missing:

    FLAGS        the names of its flags
    BARE_FLAG    the one that a value without a name stands for; empty for none
    question     makes a ``Question`` of the ``Flags`` that were given
    VARIABLES    the variables of flags that do not follow from their names

It is imported when a source of its kind is asked for: a poll of a file pays for no cloud.
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
    "source": "combined",
}
REMOTE_FLAGS = ("refresh", "stale", "first")


@dataclass(frozen=True)
class PolledSource:
    """A source to ask, and how long its answers count.

    Attributes:
        refresh_s: Shortest time between two questions; 0 asks at every poll.
        stale_s: How long after a question its answer may stand in for a newer one.
        first_s: How long a poll may wait when nobody has asked for a while: Horovod ends a job whose
            first poll fails, and nothing trains yet.
        needs_packages: The source imports installed packages, which a poll itself runs without.
        is_damped: Hosts that come and go again and again are left out for a while, see ``damping.py``.
    """

    source: Source
    refresh_s: float
    stale_s: float
    first_s: float
    needs_packages: bool = False
    is_damped: bool = False


def local_source(source: Source, flags: Flags) -> PolledSource:
    """Of a source that is asked at every poll, because that costs next to nothing; it has the flag ``--stale``."""
    # A file that does not read now is a mistake to show, not an outage to bridge: nothing stands in
    # for it unless asked. Horovod keeps its hosts while a script fails. Nor is it damped: who writes hosts
    # into a file means it.
    return PolledSource(source, refresh_s=0, stale_s=flags.seconds("stale", 0), first_s=0)


def remote_source(source: Source, flags: Flags, needs_packages: bool = False) -> PolledSource:
    """Of a source behind a network, with the ``REMOTE_FLAGS``."""
    refresh_s = flags.seconds("refresh", 10)
    # New hosts take a minute or more to boot; ten seconds are lost in that, and a tenth of the polls ask.
    stale_s = flags.seconds("stale", 300)
    # Longer than a throttled account or a renewed token takes, shorter than a person's patience.
    first_s = flags.seconds("first", 20)
    # Loading boto3, a token and two calls take about 2 s; this is ten times that.
    return PolledSource(source, refresh_s, stale_s, first_s, needs_packages, is_damped=True)


class _Kind(Protocol):
    FLAGS: tuple[str, ...]
    BARE_FLAG: str

    def from_flags(self, flags: Flags) -> PolledSource: ...


def make_source(kind: str, given: Sequence[str], variables: Sequence[str]) -> PolledSource:
    """The question that the words of a command line describe, see ``Flags``.

    Raises:
        UsageError: Naming the flag, what it says and what is accepted.
    """
    module = _module(kind)
    return module.from_flags(Flags(given, variables, module.FLAGS, module.BARE_FLAG))


def read_variables(kind: str, environ: Mapping[str, str]) -> list[str]:
    """Words of flags from the variables of a discovery script, e.g. of ``EDL_HVD_DISCOVERY_TAG``."""
    module = _module(kind)
    variables = {flag: f"EDL_HVD_DISCOVERY_{flag.upper().replace('-', '_')}" for flag in module.FLAGS}
    variables |= getattr(module, "VARIABLES", {})
    return [f"--{flag}={environ[name]}" for flag, name in variables.items() if name in environ]


def _module(kind: str) -> _Kind:
    return cast(_Kind, import_module(f"edl_hvd.discovery.sources.{KINDS[kind]}"))
