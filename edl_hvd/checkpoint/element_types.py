"""What a tensor's elements may be, where torch may be missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """A type of element: its name in safetensors files, and its size."""

    name: str
    size_bytes: int


# By torch's name, as manifests have it.
ELEMENT_TYPES = {
    "bool": ElementType("BOOL", 1),
    "uint8": ElementType("U8", 1),
    "uint16": ElementType("U16", 2),
    "uint32": ElementType("U32", 4),
    "uint64": ElementType("U64", 8),
    "int8": ElementType("I8", 1),
    "int16": ElementType("I16", 2),
    "int32": ElementType("I32", 4),
    "int64": ElementType("I64", 8),
    "float8_e4m3fn": ElementType("F8_E4M3", 1),
    "float8_e4m3fnuz": ElementType("F8_E4M3FNUZ", 1),
    "float8_e5m2": ElementType("F8_E5M2", 1),
    "float8_e5m2fnuz": ElementType("F8_E5M2FNUZ", 1),
    "float16": ElementType("F16", 2),
    "bfloat16": ElementType("BF16", 2),
    "float32": ElementType("F32", 4),
    "float64": ElementType("F64", 8),
    "complex64": ElementType("C64", 8),
}
