"""Starting a worker with half of the computing.

The first optimizer of a process imports torch's compiler, only to tell it to keep out of the optimizer's methods. That
takes as long as importing torch itself, some hundred times in a run of the tests, none of which compiles anything. The
tests of the example and of the documented commands start as a user's workers do.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def skip_compiler() -> None:
    """Put an empty module in the compiler's place. Call it before the first optimizer is made."""
    compiler = types.ModuleType("torch._dynamo")
    compiler.graph_break = lambda: None  # type: ignore[attr-defined]
    compiler.disable = _unchanged  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = compiler
    torch._dynamo = compiler


def _unchanged(function: Any, *_: Any, **__: Any) -> Any:
    return function
