"""Imports torch with half of the computing: import it before torch.

The first optimizer of a process imports torch's compiler, only to tell it to keep out of the optimizer's methods. That
takes as long as importing torch itself, some hundred times in a run of the tests, none of which compiles anything. And
a fifth of the rest is Python looking for garbage among what has just been imported, and once more at the end. The
tests of the example and of the documented commands start as a user's workers do.
"""

from __future__ import annotations

import gc
import sys
import types

gc.disable()

import torch  # noqa: E402

_compiler = types.ModuleType("torch._dynamo")
_compiler.graph_break = lambda: None  # type: ignore[attr-defined]
_compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = torch._dynamo = _compiler

gc.freeze()
gc.enable()
