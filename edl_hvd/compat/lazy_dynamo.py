"""Torch's compiler is imported when somebody compiles, and not for the first optimizer.

Optimizers of torch ask it to keep out of their methods, and import it for that (``torch/_compile.py``,
``torch/optim/optimizer.py``). That takes nearly as long as importing torch, in every worker that starts, and most
of them never compile anything. As long as it is not imported it is in nobody's way. So until then its place in
``sys.modules`` is taken by a module that only remembers who asked; for whatever else is wanted of it, the compiler is
imported, and told of those who have asked. An older torch asks in another way, and imports it as ever; so does
torchvision, when it is imported itself.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from edl_hvd.compat.patching import is_made

_NAME = "torch._dynamo"
_WRAPPER_NAME = "__dynamo_disable"
# Where ``torch._compile`` keeps what the compiler's ``disable`` has made of a function.


def import_dynamo_lazily() -> None:
    """Let torch's compiler be imported when it is needed. Does nothing where it is there already, or is left out."""
    if _NAME not in sys.modules and is_made("lazy_dynamo"):
        lazy = _LazyDynamo()
        sys.modules[_NAME] = lazy
        torch._dynamo = lazy


class _LazyDynamo(ModuleType):
    """What optimizers want of ``torch._dynamo``; for anything else, that itself."""

    def __init__(self) -> None:
        super().__init__(_NAME, "Stands in for torch's compiler until that is needed.")
        self._asked: list[tuple[Callable[..., Any], bool]] = []
        self._importing = threading.RLock()

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being compiled."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **others: Any) -> Any:
        """The function as it is; when the compiler comes, it is told to keep out of it."""
        if fn is None or others != {"wrapping": False}:  # not as ``torch._compile`` asks
            return self._compiler().disable(fn, recursive, **others)
        self._asked.append((fn, recursive))
        return fn

    def __getattr__(self, name: str) -> Any:
        # Whoever looks at all modules, as inspect does, wants nothing of this one. ``__path__`` is for its submodules.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._compiler(), name)

    def _compiler(self) -> ModuleType:
        """The compiler, in its place from now on."""
        with self._importing:
            if sys.modules.get(_NAME) is not self:
                return importlib.import_module(_NAME)
            del sys.modules[_NAME]
            compiler = importlib.import_module(_NAME)  # which also sets ``torch._dynamo``
            for fn, recursive in self._asked:
                setattr(fn, _WRAPPER_NAME, compiler.disable(fn, recursive, wrapping=False))
            return compiler
