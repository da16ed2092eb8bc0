"""A module that a test imports when it runs, for what takes a second to import and few tests use."""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """Stands for a module, and imports it where one of its names is first used.

    Args:
        name: Name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
