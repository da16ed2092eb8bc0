"""Kinds of damage to a manifest: to its bytes, and to what it says under a right checksum."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable

from corruption import (
    EMPTY,
    EXPLODED,
    MANIFEST,
    OTHER_SHARD,
    SHARD,
    SPLIT,
    WEIGHT,
    Bomb,
    Cases,
    JsonObject,
    Victim,
    checksum,
)

CASES = Cases()
case = CASES.add


# The manifest's bytes


def manifest(name: str, words: str, edit: Callable[[bytes], bytes]) -> None:
    case(f"manifest {name}", MANIFEST, words, lambda victim: victim.put(MANIFEST, edit(victim.bytes_of(MANIFEST))))


for place in (b'"format"', b"3", b'"checksum"', b'"content"', b'"attempt"', b'"plain"', b'"files"', b'"tensors"', b"["):
    manifest(f"cut before {place.decode()}", "not JSON", lambda data, place=place: data[: data.index(place)])
manifest("empty", "not JSON", lambda data: b"")
manifest("without its last brace", "not JSON", lambda data: data.rstrip()[:-1])
manifest("cut in the middle", "not JSON", lambda data: data[: len(data) // 2])
manifest("with something after it", "not JSON", lambda data: data + b"{}")
manifest("twice", "not JSON", lambda data: data + data)
manifest("of zeros", "not JSON", lambda data: bytes(len(data)))
manifest("not UTF-8", "not JSON", lambda data: b"\xff\xfe\xfa")
manifest("in UTF-16", "not JSON", lambda data: data.decode().encode("utf-16"))
manifest("with a byte order mark", "not JSON", lambda data: b"\xef\xbb\xbf" + data)
manifest("a hundred thousand lists deep", "not JSON", lambda data: b"[" * 100_000)
manifest("with a number of 5,000 digits", "not JSON", lambda data: data.replace(b'"step":20', b'"step":' + b"2" * 5000))
for value in ("null", "true", "1", "1.5", '"text"', "[]", "NaN", "1e999"):
    manifest(f"is {value}", "document is .*expected an object", lambda data, value=value: value.encode())
manifest("is {}", "document lacks 'format'", lambda data: b"{}")
manifest("changed after it was signed", "checksum does not match", lambda data: data.replace(b":640,", b":641,"))
manifest("with a key twice", "'format' stands twice", lambda data: data.replace(b"{", b'{"format":3,', 1))
manifest("with a tensor twice", f"'{WEIGHT}' stands twice", lambda data: data.replace(b'"counts":{', b'"weight":{'))


# What a signed manifest says


def signed(name: str, words: str, edit: Callable[[JsonObject], object], blamed: str = MANIFEST) -> None:
    def damage(victim: Victim) -> None:
        content = victim.content()
        edit(content)
        victim.sign(content)

    case(f"signed {name}", blamed, words, damage)


def document(name: str, words: str, **fields: object) -> None:
    case(f"document with {name}", MANIFEST, words, lambda victim: victim.sign(victim.content(), **fields))


for wrong in (None, True, 1.0, "1", [1], {}, -1):
    document(f"format {wrong!r}", "'format' of the document is .*expected a whole number", format=wrong)
for wrong in (None, 7, "", "xxh3-128:", ["xxh3-128"], "md5:0123"):
    document(f"checksum {wrong!r}", "'checksum' of the document is .*expected", checksum=wrong)
document("a wrong checksum", "checksum does not match its content", checksum="xxh3-128:" + "0" * 32)
document("a field more", "document has 'signature' besides", signature="x")
for wrong in (None, 3, "content", [], [{}]):
    case(
        f"document whose content is {wrong!r}",
        MANIFEST,
        "content is .*expected an object",
        lambda v, w=wrong: v.sign(w),
    )

signed("of another step", "belongs to step 21, not to 20", lambda content: content.update(step=21))
FIELDS = (
    "attempt", "step", "epoch", "samples", "metrics", "world_size", "created", "versions", "plain", "files", "tensors"
)  # fmt: skip
for field in FIELDS:
    signed(f"without {field}", f"content lacks '{field}'", lambda content, field=field: content.pop(field))
signed("with a field more", "content has 'code' besides", lambda content: content.update(code="import os"))
for field in ("step", "epoch", "samples", "world_size"):
    for wrong in (-1, 20.5, 20.0, True, None, "20", [20], float("nan"), float("inf"), 2**63, 10**4000):
        shown = str(wrong) if len(str(wrong)) < 20 else "huge"
        words = f"'{field}' of its content is .*expected a whole number"
        signed(f"{field} {type(wrong).__name__} {shown}", words, lambda c, f=field, w=wrong: c.update({f: w}))
signed(
    "world_size 0", "'world_size' of its content is 0; expected .* from 1", lambda content: content.update(world_size=0)
)
for field, wrongs in {
    "attempt": (None, 1, "", "../x", "a\0b", "a" * 101),
    "created": (None, 1.5, ["now"], "x" * 101),
    "versions": (None, "2.0", ["torch"], {"torch": 2}),
    "metrics": (None, 0.5, "loss", ["loss", 0.5], {"loss": None}, {"loss": 1}, {"loss": True}, {"loss": [0.5]}),
    "plain": (None, 1, "plain", [1]),
    "files": (None, 1, "files", [SHARD], {SHARD: None}, {SHARD: [1, 2]}, {}),
    "tensors": (None, 1, "tensors", [WEIGHT], {WEIGHT: None}, {WEIGHT: [SHARD]}),
}.items():
    for wrong in wrongs:
        signed(
            f"{field} {type(wrong).__name__} {json.dumps(wrong)[-30:]}",
            f"{field[:-1]}.* is .*expected",
            lambda c, f=field, w=wrong: c.update({f: w}),
        )

for number, name in enumerate(
    (
        "../../../etc/passwd",
        "/etc/passwd",
        f"../000000000010/{SHARD}",
        f"./{SHARD}",
        f"parts/{SHARD}",
        f"{SHARD}/..",
        f"{SHARD}\0.txt",
        f"{SHARD}\n",
        f"file:///tmp/{SHARD}",
        MANIFEST,
        "",
        "tensors-1-of-2.safetensors",
        "tensors-00001-of-00002-../x.safetensors",
        "tensors-\u0660\u0660\u0660\u0660\u0660-of-00002.safetensors",
        "tensors-00001-of-00002-" + "a" * 5000 + ".safetensors",
        "x" * 100_000,
    )
):

    def rename(content: JsonObject, name: str = name) -> None:
        content["files"][name] = content["files"].pop(SHARD)
        for entry in content["tensors"].values():
            for piece in entry["pieces"]:
                piece["file"] = name if piece["file"] == SHARD else piece["file"]

    signed(f"file {number} named {name[:40]!r}", "unexpected files: .* is no shard's name", rename)


def entry(of: str, what: str, field: str, words: str, *wrongs: object) -> None:
    for wrong in wrongs:
        shown = f"{type(wrong).__name__} {str(wrong)[:40]}"
        signed(f"{what} {field} {shown}", words, lambda c, w=wrong: c[of][what].update({field: w}))


NO_NUMBER = (None, "12", [12], True, -1, 0.5, 12.0, float("nan"), float("-inf"), 2**63, 10**4000)
entry("files", SHARD, "size_bytes", f"'size_bytes' of file '{SHARD}' is .*expected a whole number", *NO_NUMBER)
NO_CHECKSUM = (None, 5, "", "x", "xxh3-128:" + "g" * 32, "xxh3-128:" + "0" * 33, {"xxh3-128": "0" * 32})
entry("files", SHARD, "header_bytes", f"'header_bytes' of file '{SHARD}' is .*expected a whole number", *NO_NUMBER)
entry("files", SHARD, "chunk_bytes", f"'chunk_bytes' of file '{SHARD}' is .*expected a whole number", 0, *NO_NUMBER)
entry("files", SHARD, "header_checksum", f"'header_checksum' of file '{SHARD}' is .*expected", *NO_CHECKSUM)
entry("files", SHARD, "header_bytes", "its header and its tensors need", 0, 7, 2**62)
entry("files", SHARD, "chunk_bytes", "checksums; expected", 1, 50, 180, 2**62)
entry("files", SHARD, "mode", f"file '{SHARD}' has 'mode' besides", 0o777)
entry("tensors", WEIGHT, "loader", "tensor 'weight' has 'loader' besides", "os.system")
NO_FILE = (None, 0, [SHARD], "", "../x", "tensors-00009-of-00010.safetensors", MANIFEST)


def piece(field: str, words: str, *wrongs: object, of: str = WEIGHT, number: int = 0) -> None:
    for wrong in wrongs:
        shown = f"{type(wrong).__name__} {str(wrong)[:40]}"

        def edit(content: JsonObject, wrong: object = wrong) -> None:
            content["tensors"][of]["pieces"][number].update({field: wrong})

        signed(f"piece {number} of {of} with {field} {shown}", words, edit)


FIRST = "piece 1 of tensor 'weight'"
piece("file", f"'file' of {FIRST} is .*expected one of the manifest's files", *NO_FILE)
piece("first_row", f"'first_row' of {FIRST} is .*expected a whole number", *NO_NUMBER)
piece("rows", f"'rows' of {FIRST} is .*expected a whole number", *NO_NUMBER)
piece("checksums", f"'checksums' of {FIRST} is .*expected a list", None, 5, "", checksum(b""), {"0": checksum(b"")})
piece("checksums", f"one of the 'checksums' of {FIRST} is .*expected", *([wrong] for wrong in NO_CHECKSUM))
piece("checksums", f"{FIRST} has . checksums; expected 1", [], [checksum(b"")] * 2)
piece("checksums", "piece 2 of tensor 'split' has 1 checksums; expected 2", [checksum(b"")], of=SPLIT, number=1)
piece("loader", f"{FIRST} has 'loader' besides", "os.system")
piece("first_row", "a piece of tensor 'weight' begins at row .*; expected row 0", 1, 2, 2**62)
piece("first_row", "a piece of tensor 'split' begins at row .; expected row 5", 4, 6, of=SPLIT, number=1)
piece("rows", "the pieces of tensor 'weight' end at row", 1, 2, 4, 2**62)
piece("rows", "a piece of tensor 'weight' has no rows", 0)
piece("rows", "a piece of tensor 'split' has no rows", 0, of=SPLIT)
piece("rows", "a piece of tensor 'split' begins at row 5; expected row [46]", 4, 6, of=SPLIT)
piece("file", "its header and its tensors need", OTHER_SHARD)
for wrong in (None, 3, "pieces", {}, {"file": SHARD}):
    words = "'pieces' of tensor 'weight' is .*expected a list"
    signed(f"pieces {json.dumps(wrong)}", words, lambda c, w=wrong: c["tensors"][WEIGHT].update(pieces=w))
for wrong in (None, 3, "piece", []):
    words = "piece 1 of tensor 'weight' is .*expected an object"
    signed(f"piece {json.dumps(wrong)}", words, lambda c, w=wrong: c["tensors"][WEIGHT].update(pieces=[w]))
for field in ("file", "first_row", "rows", "checksums"):
    words = f"{FIRST} lacks '{field}'"
    signed(f"piece without {field}", words, lambda c, f=field: c["tensors"][WEIGHT]["pieces"][0].pop(f))
split = "the pieces of tensor 'split' end at row"
signed("no pieces", "the pieces of tensor 'weight' end at row 0", lambda c: c["tensors"][WEIGHT].update(pieces=[]))
signed("a piece fewer", f"{split} 5; expected the 20", lambda c: c["tensors"][SPLIT]["pieces"].pop())
signed("a piece twice", "begins at row 5; expected row 20", lambda c: (p := c["tensors"][SPLIT]["pieces"]).append(p[1]))
signed("pieces in another order", "begins at row 5; expected row 0", lambda c: c["tensors"][SPLIT]["pieces"].reverse())
NO_DTYPE = (
    None,
    4,
    "",
    "float31",
    "torch.float32",
    "BF16",
    "complex128",
    "object",
    ["bfloat16"],
    {"a": 1},
    "x" * 10_000,
)
entry("tensors", WEIGHT, "dtype", "'dtype' of tensor 'weight' is .*expected one of bfloat16, bool", *NO_DTYPE)
entry("tensors", WEIGHT, "shape", "'shape' of tensor 'weight' is .*expected a list", None, 12, "34", {"0": 3})
NO_LENGTHS = ([-3, -4], [3, -4], [3.0, 4.0], [1.5, 8], [True, 12], ["3", 4], [None], [[3, 4]], [2**63], [float("nan")])
entry("tensors", WEIGHT, "shape", "'shape' of tensor 'weight' is .*expected whole numbers", *NO_LENGTHS)
TOO_LARGE = ([2**40, 2**40], [2**62, 2], [0, 2**62, 2**62], [2**20] * 50, [2] * 5000)
entry("tensors", WEIGHT, "shape", "tensor 'weight' would have more bytes than can be counted", *TOO_LARGE)
entry("tensors", WEIGHT, "shape", f"file '{SHARD}' has .* bytes, its header and its tensors need", [3, 5], [3])
entry("tensors", WEIGHT, "shape", "has 1 checksums; expected", [3, 4, 100_000])
entry("tensors", WEIGHT, "shape", "the pieces of tensor 'weight' end at row 3; expected", [2**30], [], [2, 6])
for field in ("dtype", "shape", "pieces"):
    signed(
        f"tensor without {field}", f"tensor 'weight' lacks '{field}'", lambda c, f=field: c["tensors"][WEIGHT].pop(f)
    )
for field in ("size_bytes", "header_bytes", "header_checksum", "chunk_bytes"):
    signed(f"file without {field}", f"file '{SHARD}' lacks '{field}'", lambda c, f=field: c["files"][SHARD].pop(f))
signed(
    "tensor called __metadata__",
    "tensor '__metadata__'",
    lambda content: content["tensors"].update(__metadata__=content["tensors"][WEIGHT]),
)


def shard_blamed(name: str, words: str, edit: Callable[[JsonObject], object]) -> None:
    signed(name, words, edit, blamed=SHARD)


shard_blamed(
    "another type of the same size",
    "'weight'.*bfloat16.*float16",
    lambda c: c["tensors"][WEIGHT].update(dtype="float16"),
)
shard_blamed(
    "another shape of the same size",
    r"'weight'.*\[3, 4\].*\[3, 2, 2\]",
    lambda c: c["tensors"][WEIGHT].update(shape=[3, 2, 2]),
)
shard_blamed("an empty tensor fewer", "besides those listed: 'empty'", lambda c: c["tensors"].pop(EMPTY))
signed("a tensor fewer", "its header and its tensors need", lambda c: c["tensors"].pop(WEIGHT))
shard_blamed("a tensor more", "lacks 'phantom'", lambda c: c["tensors"].update(phantom=c["tensors"][EMPTY]))
shard_blamed(
    "another checksum of a tensor",
    r"checksum is not the manifest's for tensor 'weight' rows 0:3 \(bytes",
    lambda c: c["tensors"][WEIGHT]["pieces"][0].update(checksums=[checksum(b"")]),
)


def swap_checksums(content: JsonObject) -> None:
    content["tensors"][SPLIT]["pieces"][1]["checksums"].reverse()


shard_blamed(
    "checksums of chunks in another order",
    r"checksum is not the manifest's for tensor 'split' rows 5:14 \(bytes .*\); tensor 'split' rows 13:20 \(bytes",
    swap_checksums,
)
shard_blamed(
    "chunks of another length",
    r"checksum is not the manifest's for tensor 'split' rows 5:14 \(bytes",
    lambda c: c["files"][SHARD].update(chunk_bytes=99),
)
shard_blamed(
    "another checksum of a header",
    "checksum of its header",
    lambda c: c["files"][SHARD].update(header_checksum=checksum(b"")),
)
entry("files", SHARD, "size_bytes", "its header and its tensors need", 2**62, 100)


def longer(content: JsonObject, by: int) -> None:
    """The header is what the rest of the file is not, so a longer file has a longer header."""
    file = content["files"][SHARD]
    file.update(size_bytes=file["size_bytes"] + by, header_bytes=file["header_bytes"] + by)


shard_blamed("a file longer than there", "instead of", lambda c: longer(c, 2**62))
shard_blamed("a file a byte longer than there", "instead of", lambda c: longer(c, 1))
shard_blamed("a file a byte shorter than there", "more than the", lambda c: longer(c, -1))


def enlarge(content: JsonObject) -> None:
    """Two shards together are to have a tensor of a terabyte, one of them has its piece."""
    tensor, file = content["tensors"][SPLIT], content["files"][SHARD]
    rows = 2**40 // 12
    piece = tensor["pieces"][1]
    file["size_bytes"] += 12 * (rows - piece["rows"])
    file["chunk_bytes"] = 2**62
    piece["rows"], piece["checksums"] = rows, piece["checksums"][:1]
    tensor["shape"][0] = 5 + rows


shard_blamed("a terabyte in one of two pieces", "instead of", enlarge)


# Small in itself, large in memory; and code in the place of data


def with_text(victim: Victim, text: bytes) -> bytes:
    return victim.bytes_of(MANIFEST).replace(b'"rate":0.5', b'"rate":' + text)


def plain(name: str, words: str, text: bytes) -> None:
    case(f"plain state with {name}", MANIFEST, words, lambda victim: victim.put(MANIFEST, with_text(victim, text)))


plain("300,000 lists", "checksum", b"[" + b"[]," * 300_000 + b"0]")
plain("a pickle", "not JSON", pickle.dumps(Bomb(EXPLODED)))
case("pickle for a manifest", MANIFEST, "not JSON", lambda victim: victim.put(MANIFEST, pickle.dumps(Bomb(EXPLODED))))
