"""One line of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

CheckVerdict: TypeAlias = Literal["ok", "missing", "advice"]
OK: Final = "ok"
MISSING: Final = "missing"
ADVICE: Final = "advice"


@dataclass(frozen=True)
class CheckResult:
    """What was found about one thing.

    Attributes:
        group: Heading it stands under.
        subject: The thing, one or two words.
        verdict: ``OK``; ``MISSING`` when training on this machine needs it; ``ADVICE`` when it can do without.
        found: What is there, or what went wrong.
        fix: What to do about it; empty when ``OK``.
    """

    group: str
    subject: str
    verdict: CheckVerdict
    found: str
    fix: str = ""
