"""The Open Inference Protocol (version 2 of KServe) over HTTP: addresses of models, requests and answers as bytes.

Arrays travel as JSON numbers, or, with the extension "binary tensor data", as raw bytes behind the JSON. Here are no
connections: this is what both ends of one have to agree on.
"""

from __future__ import annotations

import array
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frames import Array, ArrayType
from edl_hvd.json_values import show

PREFIX = "oip:"
HEADER_LENGTH = "Inference-Header-Content-Length"
# Bytes of the JSON, where raw bytes follow it.
DEFAULT_REQUESTS = 4
_MOST_REQUESTS = 256
_MOST_OUTPUTS = 64
_MOST_DEPTH = 16
NUMBER_BYTES = 32
# Most characters of a number in JSON, with its comma.
_DATATYPES = {
    "float64": "FP64", "float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32",
    "int16": "INT16", "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}
_CODES = {
    "float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "?",
}  # fmt: skip
# Of the types that JSON has numbers for, as ``memoryview`` calls them.


@dataclass(frozen=True)
class ModelUrl:
    """A model on a server.

    Attributes:
        scheme: "http" or "https".
        host, port: Where the server listens.
        path: Path of the model, such as "/v2/models/resnet" or "/v2/models/resnet/versions/3".
        root: Path of the server's own answers, such as "/v2".
        name: Name of the model, for people.
        requests: Number of requests that a student has at the server at a time.
    """

    scheme: str
    host: str
    port: int
    path: str
    root: str
    name: str
    requests: int = DEFAULT_REQUESTS

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def is_inference_source(source: str) -> bool:
    """Whether a text names models of servers, rather than a source of hosts."""
    return source.startswith(PREFIX)


def read_models(source: str) -> tuple[ModelUrl, ...]:
    """The models of a source, which serve the same weights.

    >>> [str(one) for one in read_models("oip:http://a:8000/resnet,https://b/v2/models/resnet/versions/3?requests=8")]
    ['http://a:8000/v2/models/resnet', 'https://b:443/v2/models/resnet/versions/3']

    Raises:
        UsageError: The text is not understood.
    """
    models = tuple(_read_model(text.strip()) for text in source.removeprefix(PREFIX).split(","))
    places = [(one.host, one.port) for one in models]
    if len(set(places)) != len(places):
        raise UsageError(f"{source!r} names the same server twice; expected each once")
    return models


def _read_model(text: str) -> ModelUrl:
    url = urlsplit(text)
    root, found, rest = url.path.rstrip("/").rpartition("/v2/models/")
    words = rest.split("/") if found else url.path.strip("/").split("/")
    is_model = words[0] and (len(words) == 1 or (found and len(words) == 3 and words[1] == "versions" and words[2]))
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=True)) if url.query else {}
        requests = int(options.pop("requests", DEFAULT_REQUESTS))
    except ValueError:
        port, requests, options = 0, 0, {}
    is_url = url.scheme in ("http", "https") and url.hostname and not url.username and not url.fragment
    if not (is_model and is_url and port and 0 < requests <= _MOST_REQUESTS and not options):
        raise UsageError(
            f"{text!r} names no model of a server; expected http://host:8000/MODEL, or "
            "https://host/v2/models/MODEL/versions/VERSION, and after it at most '?requests=4', the number of "
            f"requests at a time (1 to {_MOST_REQUESTS})"
        )
    path = f"{root}/v2/models/{'/'.join(quote(unquote(word), safe='') for word in words)}"
    return ModelUrl(url.scheme, url.hostname or "", port, path, f"{root}/v2", unquote(words[0]), requests)


# --- what a server says of a model ---


@dataclass(frozen=True)
class TensorNote:
    """An input or output, as a server describes it.

    Attributes:
        name: Name of it.
        datatype: Element type as the protocol calls it, such as "FP32".
        shape: Number of elements in each dimension, the batch included; -1 for any.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.datatype}{list(self.shape)}"


def read_inputs(metadata: bytes) -> tuple[TensorNote, ...]:
    """The inputs of a model; none where the server does not describe them.

    Raises:
        ProtocolError: This is no description of a model.
    """
    try:
        document = json.loads(metadata)
        if not isinstance(document["name"], str):
            raise ValueError("it has no name")
        return tuple(
            TensorNote(str(one["name"]), str(one["datatype"]), tuple(int(count) for count in one["shape"]))
            for one in document.get("inputs") or ()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"it describes its model as {show(metadata[:80])}, which is none of the Open Inference Protocol: "
            f"{str(error)[:100]}"
        ) from None


def named_inputs(notes: Sequence[TensorNote], send: Sequence[ArrayType], micro_batch: int) -> tuple[str, ...]:
    """The names under which the server expects what is sent.

    A single tensor is the model's single input, whatever its name; several are found by name.

    Args:
        notes: Inputs that the server describes; none if it does not.
        send: Types of one sample.
        micro_batch: Largest number of samples.

    Raises:
        UsageError: The model takes other inputs.
    """
    if not notes:
        return ("input-0",) if len(send) == 1 else tuple(one.name for one in send)
    by_name = {one.name: one for one in notes}
    names = (notes[0].name,) if len(send) == len(notes) == 1 else tuple(one.name for one in send)
    if set(names) != set(by_name):
        raise UsageError(
            f"its model takes the inputs {', '.join(map(str, notes))}, and send= returns {', '.join(map(str, send))}; "
            "expected a dict with these names"
        )
    for name, one in zip(names, send, strict=True):
        note, shape = by_name[name], (micro_batch, *one.shape)
        if note.datatype != _DATATYPES[one.dtype]:
            wanted = _DTYPES.get(note.datatype)
            how = f"have send= return {wanted}" if wanted else "there is no tensor of that type: choose another model"
            raise UsageError(f"its model takes {note}, and send= returns elements of {one.dtype}; {how}")
        fits = [count in (-1, there) for count, there in zip(note.shape, shape, strict=False)]
        if len(note.shape) != len(shape) or not all(fits):
            raise UsageError(
                f"its model takes {note}, the batch first, and a micro-batch of send= has shape {list(shape)}; have "
                "send= return that shape, or change the micro-batch"
            )
    return names


# --- requests and answers ---


@dataclass(frozen=True)
class InferenceRequest:
    """A request: its headers and the parts of its body, in their order.

    Attributes:
        headers: Headers of HTTP.
        parts: Buffers; those of arrays are the arrays' own.
    """

    headers: Mapping[str, str]
    parts: tuple[bytes | bytearray | memoryview, ...]


def has_json_numbers(types: Sequence[ArrayType]) -> bool:
    """Whether arrays of these types can travel in JSON; 16-bit floating point cannot."""
    return all(one.dtype in _CODES for one in types)


def make_request(names: Sequence[str], arrays: Sequence[Array], is_binary: bool) -> InferenceRequest:
    """The request for the answer to some inputs; raw bytes are asked for in any case.

    Args:
        names: Names of the inputs, in the order of the arrays.
        arrays: Inputs, the batch first.
        is_binary: Whether the inputs travel as raw bytes.
    """
    inputs: list[dict[str, Any]] = []
    for name, one in zip(names, arrays, strict=True):
        entry: dict[str, Any] = {
            "name": name, "datatype": _DATATYPES[one.type.dtype], "shape": list(one.type.shape)
        }  # fmt: skip
        if is_binary:
            entry["parameters"] = {"binary_data_size": one.type.size_bytes}
        else:
            code: Any = _CODES[one.type.dtype]
            entry["data"] = memoryview(one.content).cast("B").cast(code).tolist()
        inputs.append(entry)
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": inputs}).encode()
    if not is_binary:
        return InferenceRequest({"Content-Type": "application/json", "Content-Length": str(len(head))}, (head,))
    bodies = (memoryview(one.content).cast("B") for one in arrays if len(one.content))
    parts: tuple[bytes | memoryview, ...] = (head, *bodies)
    headers = {
        "Content-Type": "application/octet-stream",
        HEADER_LENGTH: str(len(head)),
        "Content-Length": str(sum(len(part) for part in parts)),
    }
    return InferenceRequest(headers, parts)


def read_answer(body: bytes | bytearray, header_length: str | None) -> tuple[Array, ...]:
    """The outputs of an answer, by name.

    Args:
        body: Body of the answer.
        header_length: Value of the header ``HEADER_LENGTH``; ``None`` if there was none.

    Raises:
        ProtocolError: It is no answer.
    """
    try:
        length = len(body) if header_length is None else int(header_length)
        if not 0 <= length <= len(body):
            raise ValueError(f"its JSON is said to have {length} of {len(body)} bytes")
        document, offset, arrays = json.loads(body[:length]), length, {}
        outputs = document["outputs"]
        if not isinstance(outputs, list) or not 0 < len(outputs) <= _MOST_OUTPUTS:
            raise ValueError(f"it has no list of 1 to {_MOST_OUTPUTS} outputs")
        for entry in outputs:
            one, size_bytes = _output_type(entry), (entry.get("parameters") or {}).get("binary_data_size")
            if size_bytes is None:
                content = _from_numbers(one, entry["data"])
            elif type(size_bytes) is not int or size_bytes != one.size_bytes or offset + size_bytes > len(body):
                raise ValueError(f"{one} comes with {show(size_bytes)} bytes; expected {one.size_bytes}")
            else:
                content = bytearray(memoryview(body)[offset : offset + size_bytes])
                offset += size_bytes
            arrays[one.name] = Array(one, content)
        if offset != len(body) or len(arrays) != len(outputs):
            raise ValueError("bytes are left over, or two outputs have one name")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(
            f"it answers what is none of the Open Inference Protocol, {show(bytes(body[:80]))}: {str(error)[:200]}"
        ) from None
    return tuple(arrays[name] for name in sorted(arrays))


def _output_type(entry: Any) -> ArrayType:
    datatype = str(entry["datatype"])
    if datatype not in _DTYPES:
        raise ValueError(f"an output has elements of {show(datatype)}; expected one of {', '.join(_DTYPES)}")
    return ArrayType(str(entry["name"]), _DTYPES[datatype], tuple(int(count) for count in entry["shape"]))


def _from_numbers(one: ArrayType, data: Any) -> bytearray:
    if one.dtype not in _CODES:
        raise ValueError(f"{one} comes as numbers in JSON, which has none of that type")
    code, numbers = _CODES[one.dtype], list(_flat(data, 0))
    values = array.array("B", map(bool, numbers)) if code == "?" else array.array(code, numbers)
    if len(values) * values.itemsize != one.size_bytes:
        raise ValueError(f"{one} comes with {len(values)} numbers")
    return bytearray(values.tobytes())


def _flat(data: Any, depth: int) -> Iterator[Any]:
    """The numbers of a list, which may be nested."""
    if depth > _MOST_DEPTH or not isinstance(data, list):
        raise ValueError("an output has no list of numbers")
    for one in data:
        if isinstance(one, list):
            yield from _flat(one, depth + 1)
        else:
            yield one


def reason_of(body: bytes | bytearray, status: int) -> str:
    """Why a server gave no answer, from the body of its error."""
    try:
        document = json.loads(body)
        words = document.get("error") or document.get("detail") or document
    except (ValueError, AttributeError, RecursionError):
        words = body.decode(errors="replace")
    return " ".join(f"HTTP {status}: {words if isinstance(words, str) else json.dumps(words)}".split())[:300]
