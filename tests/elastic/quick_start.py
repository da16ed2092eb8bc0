"""Imports torch with a third of the computing: import it before torch.

The first optimizer of a process imports torch's compiler, only to tell it to keep out of the optimizer's methods. That
takes as long as importing torch itself, some hundred times in a run of the tests, none of which compiles anything. A
quarter of the rest registers kernels for tensors without data, which only a compiler asks for; a fifth is Python
looking for garbage among what has just been imported, and once more at the end. The tests of the example and of the
documented commands start as a user's workers do.
"""

from __future__ import annotations

import gc
import sys
import types

gc.disable()
sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

import torch  # noqa: E402

_compiler = types.ModuleType("torch._dynamo")
_compiler.graph_break = lambda: None  # type: ignore[attr-defined]
_compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = torch._dynamo = _compiler

if hasattr(torch._C, "_set_generator_metaclass"):  # what is left out does this in passing, and no generator without
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)

gc.freeze()
gc.enable()
