"""Methods that are called at an event for as long as their objects live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakCallbacks:
    """Methods to call, of objects that are not kept alive for it.

    An optimizer outlives the states that it was given to. One of them may hold a copy of all weights, and what watched
    the steps for it watches nothing once nobody else holds it.

    >>> class Counter:
    ...     count = 0
    ...     def add(self, number):
    ...         self.count += number
    >>> callbacks, counter = WeakCallbacks(), Counter()
    >>> callbacks.add(counter.add)
    >>> callbacks.call(2)
    >>> counter.count
    2
    """

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., object]]] = []

    def add(self, method: Callable[..., object]) -> None:
        """Call a bound method from now on, after those that were added before."""
        self._methods.append(weakref.WeakMethod(method, self._methods.remove))

    def call(self, *arguments: Any) -> None:
        """Call those whose objects are alive, in the order in which they were added."""
        for reference in tuple(self._methods):
            method = reference()
            if method is not None:
                method(*arguments)
