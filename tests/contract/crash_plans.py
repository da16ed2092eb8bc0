"""What one seed of the crash suite does. Pure, so that a seed that failed does the same again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from edl_hvd.checkpoint import Snapshot

Act: TypeAlias = Literal["write", "restore", "take"]
Survivors: TypeAlias = Literal["die", "go on", "stand still"]

KEEP = 2
CHECKPOINTS = 5  # that a job writes before it ends by itself; the last three remove an older one
MIB = 1024 * 1024
SHARE_OF_FAULTS = 0.1

_LARGE_EVERY = 25  # seeds: one whose shards are above 8 MiB, and travel in parts as they do outside of tests
_SMALL_ROWS, _LARGE_ROWS = 1200, 10_000  # of 1000 bytes each
_BYTES = {False: 1_500_000, True: 10_300_000}  # of a checkpoint, about
_MESSAGES = 50  # requests and answers of a checkpoint on S3, about
_CALLS = 30  # calls of one rank for a checkpoint in a folder that name a file, about


@dataclass(frozen=True)
class AtByte:
    """When N bytes have gone over the wire, in both directions and of all processes together."""

    number: int


@dataclass(frozen=True)
class AtMessage:
    """Before the first byte of a request or of an answer is passed on; both are counted."""

    number: int


@dataclass(frozen=True)
class AtRequest:
    """Before the so manyth request whose first line holds a word is passed on."""

    word: str
    number: int


@dataclass(frozen=True)
class AtCall:
    """Before a rank's so manyth call that opens, makes, links, renames, lists or removes what is called like that."""

    rank: int
    number: int
    word: str = ""


@dataclass(frozen=True)
class AtFileByte:
    """When a rank has written this share of the bytes of its so manyth file whose key holds a word."""

    rank: int
    word: str
    number: int
    share: float


@dataclass(frozen=True)
class AfterSeconds:
    """So long after the processes began."""

    duration_s: float


Moment = AtByte | AtMessage | AtRequest | AtCall | AtFileByte | AfterSeconds


@dataclass(frozen=True)
class Outage:
    """The storage's server is gone for a while: every connection is broken, no new one comes about."""

    at_byte: int
    duration_s: float


@dataclass(frozen=True)
class Plan:
    """One life of a job, its end, and the one after it.

    Attributes:
        seed: Gives all the rest, and says which requests are refused and which stall.
        act: What the processes do: write checkpoints as ranks of one world, restore the newest one, or take the URL.
        ranks: Processes.
        large: Whether shards are above 8 MiB.
        moment: When some are killed.
        victims: Which. None: then all stand still at that moment, and go on when another job has taken over.
        severed: The connection that was in use at that moment breaks too, so what was under way on it is lost.
        survivors: What becomes of the others: they are killed a little later, go on beside the next job, or stand
            still and go on after it.
        outage: Of the server, if there is one.
        take_over: The next job is another run, which takes the URL over; otherwise this run goes on.
        next_ranks: Ranks of the next job.
    """

    seed: int
    act: Act
    ranks: int
    large: bool
    moment: Moment
    victims: tuple[int, ...]
    severed: bool
    survivors: Survivors
    outage: Outage | None
    take_over: bool
    next_ranks: int


def plan_of(kind: str, seed: int) -> Plan:
    """What a seed does on this kind of storage, ``s3`` or ``file``."""
    numbers = random.Random(f"{kind}-{seed}")
    large = kind == "s3" and seed % _LARGE_EVERY == 3
    acts: tuple[Act, ...] = ("write", "restore", "take")
    act = numbers.choices(acts, (80, 10, 10))[0]
    ranks = numbers.randint(1, 1 if large else 3) if act == "write" else 1
    victims = tuple(sorted(numbers.sample(range(ranks), numbers.randint(1, ranks))))
    ends: tuple[Survivors, ...] = ("die", "go on", "stand still")
    survivors = numbers.choice(ends)
    if act == "write" and numbers.random() < 0.15:
        victims, survivors = (), "stand still"
    return Plan(
        seed=seed,
        act=act,
        ranks=ranks,
        large=large,
        moment=(_moment_on_s3 if kind == "s3" else _moment_in_a_folder)(numbers, act, large, victims),
        victims=victims,
        severed=numbers.random() < 0.5,
        survivors=survivors,
        outage=_outage(numbers, act, large) if kind == "s3" and numbers.random() < 0.25 else None,
        # Who goes on beside another is fenced out by it. A run that goes on has ended its other processes before.
        take_over=act == "take" or (ranks > len(victims) and survivors != "die") or numbers.random() < 0.5,
        next_ranks=numbers.randint(1, 3),
    )


def _moment_on_s3(numbers: random.Random, act: str, large: bool, victims: tuple[int, ...]) -> Moment:
    size_bytes = {"write": CHECKPOINTS * _BYTES[large], "restore": _BYTES[large], "take": 10_000}[act]
    messages = {"write": CHECKPOINTS * _MESSAGES, "restore": 40, "take": 16}[act]
    if act == "write" and numbers.random() < 0.1:
        return AfterSeconds(numbers.uniform(0, 1.5))
    if act == "write" and numbers.random() < 0.4:
        return AtRequest(*_at_something_named(numbers))
    if numbers.random() < 0.5:
        return AtByte(numbers.randrange(size_bytes))
    return AtMessage(numbers.randint(1, messages))


def _moment_in_a_folder(numbers: random.Random, act: str, large: bool, victims: tuple[int, ...]) -> Moment:
    if not victims or (act == "write" and numbers.random() < 0.2):
        return AfterSeconds(numbers.uniform(0, 0.3))
    rank = numbers.choice(victims)
    if act == "take" and numbers.random() < 0.4:
        return AtFileByte(0, "owners", 1, _share(numbers))
    if act == "write" and numbers.random() < 0.3:
        small = "manifest" if rank == 0 else "parts"
        word = small if numbers.random() < 0.7 else "tensors"
        return AtFileByte(rank, word, numbers.randint(1, CHECKPOINTS), _share(numbers))
    if act == "write" and 0 in victims and numbers.random() < 0.7:
        word, number = _at_something_named(numbers)
        return AtCall(0, number, word)
    return AtCall(rank, numbers.randint(1, {"write": CHECKPOINTS * _CALLS, "restore": 14, "take": 35}[act]))


def _share(numbers: random.Random) -> float:
    """Of a file's bytes: often none, when there is a file already and nothing in it, and never all."""
    return 0.0 if numbers.random() < 0.2 else numbers.random()


def _at_something_named(numbers: random.Random) -> tuple[str, int]:
    """Around what makes a checkpoint, and what removes one."""
    return numbers.choice(("manifest", "tensors")), numbers.randint(1, 3 * CHECKPOINTS)


def _outage(numbers: random.Random, act: str, large: bool) -> Outage:
    size_bytes = {"write": CHECKPOINTS * _BYTES[large], "restore": _BYTES[large], "take": 10_000}[act]
    return Outage(numbers.randrange(size_bytes), numbers.uniform(0.05, 0.6))


_numbers = torch.Generator().manual_seed(1)
_BASE = torch.randint(-(2**62), 2**62, (_LARGE_ROWS, 125), generator=_numbers)


def snapshot_of(step: int, variant: int, large: bool) -> Snapshot:
    """A state whose every element is another one for another step or variant."""
    mask = random.Random(f"{step}-{variant}").getrandbits(62)
    rows = _BASE[: _LARGE_ROWS if large else _SMALL_ROWS] ^ mask
    few = _BASE[:100] ^ (mask >> 1)
    tensors = {
        "embedding.weight": rows.view(torch.float32),
        "layer.weight": few.view(torch.bfloat16).clone(),
        "layer.bias": few[0].view(torch.float16).clone(),
        "moments": (few[:50] ^ mask).view(torch.float64),
        "large moments": (_BASE[:100] ^ (mask >> 2)).view(torch.float32),
        "mask": (few[1] & 1).bool(),
        "count": torch.tensor(step),
        "none": torch.empty(0, 3, dtype=torch.int8),
    }
    plain = {"variant": variant, "losses": [0.5, float("inf"), step], "name": "ünï"}
    return Snapshot(tensors, plain, step, step // 10, 32 * step)


def assert_is_what_was_written(found: Snapshot | None, large: bool) -> None:
    """Bit for bit the state of its step, all of it of one variant."""
    assert found is not None
    expected = snapshot_of(found.step, found.plain["variant"], large)
    fields = ("plain", "step", "epoch", "samples")
    assert [getattr(found, field) for field in fields] == [getattr(expected, field) for field in fields]
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        one = found.tensors[name]
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(one.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
