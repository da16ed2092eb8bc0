"""The words after a discovery script's name, as a source and the times that go with it.

Written by hand instead of with ``argparse``: this runs at every poll of a local source, and a variable's
value has to be replaced, not added to, by the flag of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edl_hvd.discovery.source import Source
from edl_hvd.errors import UsageError
from edl_hvd.interval import Interval


@dataclass(frozen=True)
class Job:
    """A source to ask, and how long its answers count.

    Attributes:
        refresh_s: Shortest time between two questions; 0 asks at every poll.
        stale_s: How long after a question its answer may stand in for a newer one.
        first_s: How long a poll may wait when nobody has asked for a while: Horovod ends a job whose
            first poll fails, and nothing trains yet.
        needs_packages: The source imports installed packages, which a poll itself runs without.
    """

    source: Source
    refresh_s: float
    stale_s: float
    first_s: float
    needs_packages: bool = False


class Flags:
    """The words of one command line, taken by name.

    Args:
        given: Words the user typed: ``--name value``, ``--name=value``, or at most one bare value,
            which stands for ``--<bare>``.
        variables: Words made from environment variables, always ``--name=value``; empty values and
            flags that the user typed as well do not count.
        known: Names that are accepted.
        bare: Name of the flag that a bare value stands for; empty for none.
    """

    def __init__(self, given: Sequence[str], variables: Sequence[str], known: Sequence[str], bare: str = "") -> None:
        self._known = known
        self._values: dict[str, list[str]] = {}
        for word in variables:
            name, _, value = word.removeprefix("--").partition("=")
            if value:
                self._values[name] = [value]
        typed: dict[str, list[str]] = {}
        words = list(given)
        while words:
            name, value = self._take(words, bare)
            typed.setdefault(name, []).append(value)
        self._values.update(typed)

    def _take(self, words: list[str], bare: str) -> tuple[str, str]:
        word = words.pop(0)
        if not word.startswith("--"):
            if not bare:
                raise UsageError(f"unexpected word {word!r}; {self._accepted()}")
            return bare, word
        name, equals, value = word[2:].partition("=")
        if name not in self._known:
            raise UsageError(f"unknown flag {word!r}; {self._accepted()}")
        if not equals:
            if not words:
                raise UsageError(f"--{name} has no value; expected one after it")
            value = words.pop(0)
        return name, value

    def _accepted(self) -> str:
        return "accepted: " + ", ".join(f"--{name}" for name in self._known)

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def text(self, name: str, default: str) -> str:
        values = self.all(name)
        if len(values) > 1:
            raise UsageError(f"--{name} is given {len(values)} times ({', '.join(values)}); expected once")
        return values[0] if values else default

    def needed(self, name: str, what: str, example: str) -> list[str]:
        values = [value for value in self.all(name) if value]
        if not values:
            raise UsageError(f"no {what} is given; expected e.g. '{example}'")
        return values

    def count(self, name: str, default: int) -> int:
        text = self.text(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--{name} {text!r} is not usable; expected a whole number, at least 1")
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name, "")
        if text in ("", "0"):
            return 0.0 if text else default
        interval = Interval.parse(text)
        if interval.unit != "seconds":
            raise UsageError(f"--{name} {text!r} is not a time; expected e.g. '30' or '5min'")
        return interval.count


def read_job(source: str, given: Sequence[str], variables: Sequence[str]) -> Job:
    """The job that a script's words describe.

    Raises:
        UsageError: Naming the flag, what it says and what is accepted.
    """
    return _READERS[source](given, variables)


def _file(given: Sequence[str], variables: Sequence[str]) -> Job:
    from edl_hvd.discovery.static_file import StaticFile

    flags = Flags(given, variables, ("file", "slots", "stale"), bare="file")
    flags.needed("file", "hosts file", "from_file hosts.txt")
    source = StaticFile(flags.text("file", ""), flags.count("slots", 1))
    return _local(source, flags)


def _schedule(given: Sequence[str], variables: Sequence[str]) -> Job:
    from edl_hvd.discovery.schedule import Schedule

    flags = Flags(given, variables, ("plan", "start", "start-file", "stale"), bare="plan")
    flags.needed("plan", "plan", "from_schedule plan.txt")
    plan = flags.text("plan", "")
    start = flags.seconds("start", 0.0) or None
    return _local(Schedule(plan, flags.text("start-file", f"{plan}.started"), start), flags)


def _ec2(given: Sequence[str], variables: Sequence[str]) -> Job:
    from edl_hvd.discovery.ec2 import Ec2ByTag, read_tag

    known = ("tag", "region", "slots", "address", "page-size", "refresh", "stale", "first")
    flags = Flags(given, variables, known)
    source = Ec2ByTag(
        tags=tuple(read_tag(tag) for tag in flags.needed("tag", "tag", "from_ec2 --tag job=resnet50")),
        region=flags.text("region", "") or None,
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        address=flags.text("address", "private-ip"),
        page_size=flags.count("page-size", 1000),
    )
    refresh_s = flags.seconds("refresh", 10)
    # New hosts take a minute or more to boot; ten seconds are lost in that, and a tenth of the polls ask.
    stale_s = flags.seconds("stale", 300)
    # Longer than a throttled account or a renewed token takes, shorter than a person's patience.
    first_s = flags.seconds("first", 20)
    # Loading boto3, a token and two calls take about 2 s; this is ten times that.
    return Job(source, refresh_s, stale_s, first_s, needs_packages=True)


def _local(source: Source, flags: Flags) -> Job:
    # A file that does not read now is a mistake to show, not an outage to bridge: nothing stands in
    # for it unless asked. Horovod keeps its hosts while a script fails.
    return Job(source, refresh_s=0, stale_s=flags.seconds("stale", 0), first_s=0)


_READERS: dict[str, Callable[[Sequence[str], Sequence[str]], Job]] = {
    "file": _file,
    "schedule": _schedule,
    "ec2": _ec2,
}
