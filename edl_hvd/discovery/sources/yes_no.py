"""Flags that say yes or no: every flag of a source has a value, because every one has a variable, too."""

from __future__ import annotations

from edl_hvd.discovery.flags import Flags
from edl_hvd.errors import UsageError


def read_yes_no(flags: Flags, name: str) -> bool:
    """What the flag says; no, when it is not given.

    Raises:
        UsageError: It says something else.
    """
    text = flags.text(name, "no")
    if text not in ("yes", "no"):
        raise UsageError(f"--{name} {text!r} is not understood; expected yes or no")
    return text == "yes"
