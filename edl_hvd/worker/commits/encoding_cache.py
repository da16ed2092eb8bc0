"""The encoded structure of the state, kept from one checkpoint to the next.

An optimizer's step moves the contents of the tensors, not the tensors. So how an object is encoded is kept from one
checkpoint to the next, but for the tensors themselves: to keep those would keep memory that a script wants freed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from edl_hvd.worker.codec import encode
from edl_hvd.worker.commits.handlers import Handler

_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
# Of others it is not known when two are the same memory.


class _Encoding(NamedTuple):
    places: list[Hashable]
    plain: Any
    names: list[str]


class EncodingCache:
    """Keeps the encoded structure of one handler's state.

    Args:
        name: Attribute of ``State`` that the handler captures.
        handler: Captures the attribute.
    """

    def __init__(self, name: str, handler: Handler) -> None:
        self._name, self._handler = name, handler
        self._known: _Encoding | None = None

    def encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """What ``encode`` makes of ``handler.capture()`` now, with live tensors; do not change it."""
        places, live = self._handler.held()
        if self._known is not None and self._known.places == places and _PLAIN_TENSORS.issuperset(map(type, live)):
            return self._known.plain, dict(zip(self._known.names, live, strict=True))
        plain, tensors = encode(self._handler.capture(), self._name)
        # Else there is more to it than the tensors, or others are made of them for each capture.
        is_told = bool(places) and _are_same(live, list(tensors.values()))
        self._known = _Encoding(places, plain, list(tensors)) if is_told else None
        return plain, tensors


def _are_same(live: list[torch.Tensor], captured: list[torch.Tensor]) -> bool:
    """The same memory, cut in the same way, in the same order."""
    return (
        len(live) == len(captured)
        and _PLAIN_TENSORS.issuperset(map(type, live))
        and all(map(torch.Tensor.is_set_to, live, captured))
    )
