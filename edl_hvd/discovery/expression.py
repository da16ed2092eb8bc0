"""Read sources and their combinations from text: ``edlrun --discover TEXT``, ``from_source TEXT``. Pure.

    source    KIND:VALUE,FLAG=VALUE,...      the flags of discovery_scripts/from_KIND
    union     union(SOURCE, SOURCE, ...)     the hosts of all
    limit     limit(SOURCE, 8)               at most 8 of its slots; '8 hosts': at most 8 hosts
    prefer    prefer(SOURCE, 8)              at most 8 of its slots, the cheapest first

A comma between the parentheses begins the next argument, unless ``FLAG=`` or a value follows, which belongs to the
source before it: ``union(ec2:tag=job=7,slots=4, file:spare.txt)`` has two parts. A value with a comma, a
parenthesis or a quote stands in double quotes, ``\\`` before a quote or another ``\\`` in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edl_hvd.errors import UsageError

_SHOWN_CHARACTERS = 80  # of a text on either side of the mark
DEEPEST = 20
# Combinations inside of combinations: the reader is recursive, and more are a mistake.

FORM = (
    "expected e.g. file:hosts.txt, schedule:plan.txt or ec2:tag=job=resnet50, alone or in union(SOURCE, SOURCE), "
    "limit(SOURCE, 8) or prefer(SOURCE, 8)"
)
_FLAG = re.compile(r"([a-z][a-z-]*)=")
_KIND = re.compile(r"\s*([a-z][a-z0-9_]*):")
_CALL = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*\(")
_COUNT = re.compile(r"\s*([0-9]{1,9})(?:\s*(slots?|hosts?))?\s*")
_UNQUOTED = re.compile(r"[^\s,()\"\\]([^,()\"\\]*[^\s,()\"\\])?")


def _begins_argument(text: str, at: int) -> bool:
    """Whether text after a comma is an argument of the combination, not another flag of the source."""
    if _KIND.match(text, at) or _CALL.match(text, at):
        return True
    count = _COUNT.match(text, at)
    return count is not None and text[count.end() : count.end() + 1] in ("", ")")


@dataclass(frozen=True)
class Word:
    """A flag and its value; the name is empty for a value without a flag."""

    name: str
    value: str

    def __str__(self) -> str:
        return self._text(bool(_UNQUOTED.fullmatch(self.value)) and (bool(self.name) or not _FLAG.match(self.value)))

    def after_another(self) -> str:
        """The text after a comma, where a bare value could count as the next argument of a combination."""
        return self._text(False) if not self.name and _begins_argument(self.value, 0) else str(self)

    def _text(self, plain: bool) -> str:
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
        return f"{self.name}=" * bool(self.name) + (self.value if plain else f'"{escaped}"')


@dataclass(frozen=True)
class Leaf:
    """One source, of a kind of ``registry.py``."""

    kind: str
    words: tuple[Word, ...]

    def __str__(self) -> str:
        first, *others = self.words
        return f"{self.kind}:{','.join([str(first), *(word.after_another() for word in others)])}"


@dataclass(frozen=True)
class UnionOf:
    """The hosts of all ``parts``."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"union({', '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class Count:
    """A number of slots or of hosts."""

    number: int
    unit: Literal["slots", "hosts"] = "slots"

    def __str__(self) -> str:
        return f"{self.number}" + f" {self.unit}" * (self.unit != "slots")


@dataclass(frozen=True)
class Limit:
    """At most ``most`` of the hosts of ``part``."""

    part: Expression
    most: Count

    def __str__(self) -> str:
        return f"limit({self.part}, {self.most})"


@dataclass(frozen=True)
class Prefer:
    """At most ``most`` of the hosts of ``part``, the cheapest first."""

    part: Expression
    most: Count

    def __str__(self) -> str:
        return f"prefer({self.part}, {self.most})"


Expression: TypeAlias = Leaf | UnionOf | Limit | Prefer


def parse_expression(text: str, kinds: frozenset[str]) -> Expression:
    """Read an expression; its ``str`` is a text of the same meaning.

    >>> parse_expression("limit(file:hosts.txt, 8)", frozenset({"file"}))
    Limit(part=Leaf(kind='file', words=(Word(name='', value='hosts.txt'),)), most=Count(number=8, unit='slots'))

    Args:
        kinds: Names of the kinds of sources.

    Raises:
        UsageError: The text is not understood; ``>>>`` stands before the place in the message.
    """
    reader = _Reader(text, kinds)
    expression = reader.expression(0)
    reader.skip_space()
    if not reader.at_end():
        raise reader.refuse("it goes on where it should end")
    return expression


class _Reader:
    def __init__(self, text: str, kinds: frozenset[str]) -> None:
        self._text = text
        self._kinds = kinds
        self._at = 0

    def at_end(self) -> bool:
        return self._at >= len(self._text)

    def skip_space(self) -> None:
        while not self.at_end() and self._text[self._at].isspace():
            self._at += 1

    def refuse(self, reason: str) -> UsageError:
        """An error with the place in the text; for a text that is not a source, also with the accepted form."""
        form = f"; {FORM};" if not self._text[: self._at].strip() else ""
        before, after = self._text[: self._at], self._text[self._at :]
        if len(before) > _SHOWN_CHARACTERS:
            before = f"...{before[-_SHOWN_CHARACTERS:]}"
        if len(after) > _SHOWN_CHARACTERS:
            after = f"{after[:_SHOWN_CHARACTERS]}..."
        marked = f"'{before}>>>{after}'"
        return UsageError(f"it is not understood{form} at the mark in {marked}: {reason}")

    def expression(self, depth: int) -> Expression:
        self.skip_space()
        if depth > DEEPEST:
            raise self.refuse(f"more than {DEEPEST} combinations in each other")
        call = _CALL.match(self._text, self._at)
        return self._call(call, depth) if call else self._leaf(inside=depth > 0)

    def _call(self, call: re.Match[str], depth: int) -> Expression:
        name = call[1]
        if name not in ("union", "limit", "prefer"):
            raise self.refuse(f"there is no combination {name!r}")
        self._at = call.end()
        parts = [self.expression(depth + 1)]
        while name == "union" and self._takes(","):
            parts.append(self.expression(depth + 1))
        if name == "union":
            self._need(")", "expected ',' and another source, or ')'")
            return UnionOf(tuple(parts))
        self._need(",", f"{name} has no number; expected e.g. {name}(SOURCE, 8), with nine digits at most")
        most = self._count(name)
        self._need(")", "expected ')'")
        return Limit(parts[0], most) if name == "limit" else Prefer(parts[0], most)

    def _count(self, name: str) -> Count:
        found = _COUNT.match(self._text, self._at)
        if not found or int(found[1]) < 1:
            self.skip_space()
            raise self.refuse(f"{name} needs a whole number of at least 1, of slots, or of hosts as in '8 hosts'")
        self._at = found.end()
        return Count(int(found[1]), "hosts" if (found[2] or "").startswith("host") else "slots")

    def _takes(self, character: str) -> bool:
        self.skip_space()
        taken = self._text.startswith(character, self._at)
        self._at += taken
        return taken

    def _need(self, character: str, otherwise: str) -> None:
        if not self._takes(character):
            raise self.refuse(otherwise)

    # --- one source ---

    def _leaf(self, inside: bool) -> Leaf:
        kind = _KIND.match(self._text, self._at)
        if not kind:
            raise self.refuse("expected a source, KIND:VALUE, or a combination")
        if kind[1] not in self._kinds:
            raise self.refuse(f"there is no kind {kind[1]!r}; the kinds are {', '.join(sorted(self._kinds))}")
        start, self._at = self._at, kind.end()
        words = [self._word(inside)]
        while self._text.startswith(",", self._at) and not (inside and _begins_argument(self._text, self._at + 1)):
            self._at += 1
            words.append(self._word(inside))
        if words == [Word("", "")]:
            self._at = start
            raise self.refuse(f"nothing follows '{kind[1]}:'")
        return Leaf(kind[1], tuple(words))

    def _word(self, inside: bool) -> Word:
        self.skip_space()
        flag = _FLAG.match(self._text, self._at)
        if flag:
            self._at = flag.end()
        return Word(flag[1] if flag else "", self._value(inside))

    def _value(self, inside: bool) -> str:
        """Read a value up to a comma; in parentheses also up to the closing one."""
        if self._text.startswith('"', self._at):
            return self._quoted()
        start, open_ones = self._at, 0
        while not self.at_end():
            character = self._text[self._at]
            if character == "," or (inside and character == ")" and not open_ones):
                break
            open_ones += {"(": 1, ")": -1}.get(character, 0)
            self._at += 1
        return self._text[start : self._at].rstrip()

    def _quoted(self) -> str:
        start, value = self._at, ""
        self._at += 1
        while not self.at_end():
            character = self._text[self._at]
            self._at += 1
            if character == '"':
                self.skip_space()
                return value
            if character == "\\" and self._text[self._at : self._at + 1] in ("\\", '"'):
                character = self._text[self._at]
                self._at += 1
            value += character
        self._at = start
        raise self.refuse("this quote is not closed")
