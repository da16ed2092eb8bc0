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
from importlib import import_module
from typing import Protocol, cast

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.question import Question

KINDS = {
    "file": "static_file",
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


class _Kind(Protocol):
    FLAGS: tuple[str, ...]
    BARE_FLAG: str

    def question(self, flags: Flags) -> Question: ...


def read_question(kind: str, given: Sequence[str], variables: Sequence[str]) -> Question:
    """The question that the words of a command line describe, see ``Flags``.

    Raises:
        UsageError: Naming the flag, what it says and what is accepted.
    """
    module = _module(kind)
    return module.question(Flags(given, variables, module.FLAGS, module.BARE_FLAG))


def read_variables(kind: str, environ: Mapping[str, str]) -> list[str]:
    """Words of flags from the variables of a discovery script, e.g. of ``EDL_HVD_DISCOVERY_TAG``."""
    module = _module(kind)
    variables = {flag: f"EDL_HVD_DISCOVERY_{flag.upper().replace('-', '_')}" for flag in module.FLAGS}
    variables |= getattr(module, "VARIABLES", {})
    return [f"--{flag}={environ[name]}" for flag, name in variables.items() if name in environ]


def _module(kind: str) -> _Kind:
    return cast(_Kind, import_module(f"edl_hvd.discovery.sources.{KINDS[kind]}"))
