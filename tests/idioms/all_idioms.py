"""All of them, in the order of the page."""

from __future__ import annotations

import importlib
import pkgutil

import catalogue
from idioms import Idiom

IDIOMS: list[Idiom] = [
    idiom
    for module in sorted(info.name for info in pkgutil.iter_modules(catalogue.__path__))
    for idiom in importlib.import_module(f"catalogue.{module}").IDIOMS
]
