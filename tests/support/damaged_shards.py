"""Kinds of damage to a shard that the manifest agrees with: to its header, and to its data."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from corruption import (
    COUNTS,
    EMPTY,
    EXPLODED,
    OTHER_PIECE,
    OTHER_SHARD,
    PIECE,
    SHARD,
    SPLIT,
    WEIGHT,
    Bomb,
    Cases,
    JsonObject,
    Victim,
    json_bytes,
)

from edl_hvd.checkpoint.format import object_keys

CASES = Cases()
case = CASES.add


# Shards


def shard(name: str, words: str, edit: Callable[[bytes], bytes]) -> None:
    """Bytes that the manifest agrees with."""
    case(f"shard {name}", SHARD, words, lambda victim: victim.put_shard(edit(victim.bytes_of(SHARD))))


def unsigned(name: str, words: str, edit: Callable[[bytes], bytes]) -> None:
    case(f"unsigned shard {name}", SHARD, words, lambda victim: victim.put(SHARD, edit(victim.bytes_of(SHARD))))


unsigned("empty", "has 0 bytes instead of", lambda data: b"")
unsigned("cut short", "bytes instead of", lambda data: data[:-1])
unsigned("a byte longer", "more than the", lambda data: data + b"\0")
unsigned("a million times longer", "more than the", lambda data: data + bytes(30_000_000))
unsigned(
    "with one bit flipped in its header",
    r"checksum of its header \(bytes 0:\d+\) is not the manifest's",
    lambda data: data[:20] + b"?" + data[21:],
)
words = rf"checksum is not the manifest's for tensor '{SPLIT}' rows 13:20 \(bytes \d+:\d+\)$"
unsigned("with its last bit flipped", words, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
case("shard missing", SHARD, "is missing", lambda victim: victim.storage.delete(object_keys.folder(20) + SHARD))
case("shard of another step", SHARD, "checksum", lambda v: v.put(SHARD, v.storage.read(object_keys.folder(10) + SHARD)))
case("shard of another rank", SHARD, "lacks 'weight'", lambda v: v.put_header(*header_of(v.bytes_of(OTHER_SHARD))))


def header_of(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def length(number: int) -> Callable[[bytes], bytes]:
    return lambda data: number.to_bytes(8, "little") + data[8:]


for number in (2**64 - 1, 2**63, 2**63 - 1, 2**60, 2**40, 100_000_001):
    shard(f"with header length {number}", f"header of {number} bytes", length(number))
shard("with a header longer than itself by one byte", "header of", lambda data: length(len(data) - 7)(data))
shard("with a header that is all of it", "header is not JSON", lambda data: length(len(data) - 8)(data))
shard("with an empty header", "header is not JSON", length(0))
shard("with a header cut by a byte", "header is not JSON", lambda data: length(data[0] + 256 * data[1] - 20)(data))


# Headers of shards


def header(name: str, words: str, edit: Callable[[JsonObject], object]) -> None:
    def damage(victim: Victim) -> None:
        fields, data = victim.header()
        edit(fields)
        victim.put_header(fields, data)

    case(f"header {name}", SHARD, words, damage)


def header_text(name: str, words: str, text: bytes) -> None:
    case(f"header {name}", SHARD, words, lambda victim: victim.put_header(text, victim.header()[1]))


def start(of: str, by: int) -> Callable[[JsonObject], object]:
    def edit(fields: JsonObject) -> None:
        fields[of]["data_offsets"][0] += by

    return edit


def end(of: str, by: int) -> Callable[[JsonObject], object]:
    def edit(fields: JsonObject) -> None:
        fields[of]["data_offsets"][1] += by

    return edit


def shift(of: str, by: int) -> Callable[[JsonObject], object]:
    def edit(fields: JsonObject) -> None:
        fields[of]["data_offsets"] = [offset + by for offset in fields[of]["data_offsets"]]

    return edit


def swap(fields: JsonObject) -> None:
    first, second = fields[COUNTS]["data_offsets"], fields[WEIGHT]["data_offsets"]
    middle = second[1] - second[0]
    assert first == [0, 24]
    fields[WEIGHT]["data_offsets"], fields[COUNTS]["data_offsets"] = [0, middle], [middle, middle + 24]


for text in (b"null", b"1", b'"text"', b"[]", b"true"):
    header_text(f"is {text.decode()}", "header is .*expected an object", text)
for text in (b"\xff\xfe", b"x", b"{", b"NaN}", b"[" * 100_000, b"{" * 5_000, b'{"a":' * 50_000, bytes(50)):
    header_text(f"is {text[:8]!r}, {len(text)} bytes", "header is not JSON", text)
header_text("is {}", "bytes of data, its tensors need 0", b"{}")
header(
    "with a tensor more",
    "besides those listed: 'x'",
    lambda h: h.update(x={"dtype": "F32", "shape": [0], "data_offsets": [48, 48]}),
)
header("with data that no tensor needs", "bytes of data, its tensors need", lambda h: h.pop(PIECE))
header("with data in the middle that no tensor needs", "nor leave a gap", lambda h: h.pop(WEIGHT))
header("with the piece under its tensor's name", "lacks 'split.rows 5:20.'", lambda h: h.update(split=h.pop(PIECE)))
header("with the piece of the other shard", f"lacks '{SPLIT}", lambda h: h.update({OTHER_PIECE: h.pop(PIECE)}))
header("without the empty tensor", "lacks 'empty'", lambda h: h.pop(EMPTY))
header("with another name", "lacks 'weight'", lambda h: h.update(other=h.pop(WEIGHT)))
for name, wrong in {"null": None, "a list": [1], "a text": "x", "a number": 3, "nothing": {}}.items():
    header(
        f"entry {name}", "'weight' in the header (is .*expected an object|lacks)", lambda h, w=wrong: h.update(weight=w)
    )
for field in ("dtype", "shape", "data_offsets"):
    header(f"without {field}", f"'weight' in the header lacks '{field}'", lambda h, f=field: h[WEIGHT].pop(f))
header("entry with a field more", "'weight' in the header has 'hook' besides", lambda h: h[WEIGHT].update(hook="x"))
for wrong in (None, 5, "", "F31", "bfloat16", "BF16 ", "PICKLE", ["BF16"], {"BF16": 1}, "x" * 50_000):
    words = "'dtype' of 'weight' in the header is .*expected one of BF16, BOOL"
    header(f"dtype {str(wrong)[:20]!r} {type(wrong).__name__}", words, lambda h, w=wrong: h[WEIGHT].update(dtype=w))
header("dtype of the same size", "'weight'.*float16", lambda h: h[WEIGHT].update(dtype="F16"))
for name in ("F64", "U8", "F4", "F8_E8M0"):
    header(f"dtype {name}", "'weight'", lambda h, n=name: h[WEIGHT].update(dtype=n))
for wrong in (None, 3, "34", {}, [-3, -4], [3.0, 4], [True, 12], ["3", 4], [[3, 4]], [2**63], [2**64], [10**4000]):
    words = "'shape' of 'weight' in the header is .*expected"
    header(f"shape {str(wrong)[:20]!r} {type(wrong).__name__}", words, lambda h, w=wrong: h[WEIGHT].update(shape=w))
for wrong in ([2**40, 2**40], [2**62, 4], [0, 2**62, 2**62], [2] * 5000):
    words = "'weight' in the header would have more bytes than can be counted"
    header(f"shape {str(wrong)[:30]!r}", words, lambda h, w=wrong: h[WEIGHT].update(shape=w))
for wrong in ([], [3], [3, 5], [3, 4, 2], [12, 0], [2**40]):
    words = "'weight' in the header has 24 bytes, its type and shape need"
    header(f"shape {wrong}", words, lambda h, w=wrong: h[WEIGHT].update(shape=w))
header("shape of the same size", r"'weight'.*\[4, 3\]", lambda h: h[WEIGHT].update(shape=[4, 3]))
header("empty tensor of gigantic shape", "'empty'", lambda h: h[EMPTY].update(shape=[0, 2**60]))
header("empty tensor of overflowing shape", "'empty'", lambda h: h[EMPTY].update(shape=[0, 2**64 - 1]))
for wrong in (
    None,
    0,
    "0",
    [],
    [0],
    [0, 24, 48],
    [0.0, 24],
    [True, 24],
    ["0", "24"],
    [-24, 0],
    [0, 2**63],
    [0, 2**64],
    [24, 0],
):
    words = "'data_offsets' of 'weight' in the header is .*expected"
    header(f"offsets {wrong!r}", words, lambda h, w=wrong: h[WEIGHT].update(data_offsets=w))
header("offsets outside of the file", "(begins|ends|bytes)", shift(WEIGHT, 2**40))
header("offsets a byte outside of the file", "(begins|ends)", shift(WEIGHT, 1))
header("offsets that overlap", "(begins|overlap)", shift(WEIGHT, -8))
header("offsets that are another's", "begins", shift(WEIGHT, -24))
header("a tensor that is too short", "'weight' in the header has 22 bytes, its type and shape need 24", end(WEIGHT, -2))
header("a tensor that is too long", "'weight' in the header has 26 bytes, its type and shape need 24", end(WEIGHT, 2))
header("a tensor that starts too early", "'weight' in the header has 25 bytes", start(WEIGHT, -1))
header("a hole before the data", "begins", lambda h: [shift(name, 8)(h) for name in (WEIGHT, COUNTS, EMPTY)])
header("tensors in each other's place", "checksum", swap)
case(
    "shard with data that no tensor needs at its end",
    SHARD,
    "bytes of data, its tensors need",
    lambda victim: victim.put_header(victim.header()[0], victim.header()[1] + bytes(8)),
)
case(
    "shard with data missing at its end",
    SHARD,
    "bytes of data, its tensors need",
    lambda victim: victim.put_header(victim.header()[0], victim.header()[1][:-2]),
)
case(
    "header with a name twice",
    SHARD,
    "'weight' stands twice",
    lambda v: v.put_header(json_bytes(v.header()[0]).replace(b'"counts":', b'"weight":'), v.header()[1]),
)
header("metadata that is a list", "unexpected metadata", lambda h: h.update(__metadata__=[1]))
header("metadata that is no text", "unexpected metadata", lambda h: h.update(__metadata__={"a": {"b": 1}}))
header(
    "metadata bomb", "unexpected metadata", lambda h: h.update(__metadata__={str(n): "x" * 9 for n in range(30_000)})
)


# Small in itself, large in memory; and code in the place of data


header_text("of 300,000 objects", "'weight' .*expected", b'{"weight":[' + b"{}," * 300_000 + b"0]}")
header_text("a pickle", "not JSON", pickle.dumps(Bomb(EXPLODED)))
case("pickle for a shard", SHARD, "header of", lambda v: v.put_shard(pickle.dumps(Bomb(EXPLODED)) + bytes(300)))
