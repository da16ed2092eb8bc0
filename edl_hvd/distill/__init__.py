"""Distillation: teachers answer for students in training, from processes and machines of their own.

    place.py          what a micro-batch is, wherever and whenever it is read
    window.py         micro-batches between reading and consuming; window_events.py is what happens to them; pure
    turns.py          which teacher gets which task, and when again; poison.py is whose fault a loss is; pure
    sharing.py        whom a teacher asks, and which tasks it computes together; pure
    conversation.py   the messages of both sides
    finding.py        where teachers are; address_book.py is when they are called
    holding.py        the student's micro-batches, with what is sent and answered
    calling.py        the student's connections; call.py is one of them
    requesting.py     its requests to servers of the Open Inference Protocol; inference_client.py is one connection
    same_host.py      Unix sockets beside them
    service.py        the connections of one loader, and waiting for an answer; stages.py is where the time goes
    asks.py           ``Teachers.ask``: inputs that are no part of a data set
    loader.py         ``DistillLoader``; passes.py is one pass of it, reading.py its micro-batches
    indices.py        indices instead of inputs, on both sides
    kept.py           answers on a storage; heap.py is memory that nobody counts
    serving.py        the teacher's connections; student.py is one of them
    computing.py      what a teacher computes; teacher.py is the user's model in it
    asking.py         how a teacher stands, for a command line
    outputs.py        what travels back; losses.py learns from it

Names load when first used, so that what a command line needs comes without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Teachers": "edl_hvd.distill.teachers",
    "DistillLoader": "edl_hvd.distill.loader",
    "Indices": "edl_hvd.distill.indices",
    "OnIndices": "edl_hvd.distill.indices",
    "TopK": "edl_hvd.distill.outputs",
    "average": "edl_hvd.distill.losses",
    "distillation_loss": "edl_hvd.distill.losses",
    "hidden_state_loss": "edl_hvd.distill.losses",
    "soft_cross_entropy": "edl_hvd.distill.losses",
    "top_k_divergence": "edl_hvd.distill.losses",
}

if TYPE_CHECKING:
    from edl_hvd.distill.indices import Indices as Indices
    from edl_hvd.distill.indices import OnIndices as OnIndices
    from edl_hvd.distill.loader import DistillLoader as DistillLoader
    from edl_hvd.distill.losses import average as average
    from edl_hvd.distill.losses import distillation_loss as distillation_loss
    from edl_hvd.distill.losses import hidden_state_loss as hidden_state_loss
    from edl_hvd.distill.losses import soft_cross_entropy as soft_cross_entropy
    from edl_hvd.distill.losses import top_k_divergence as top_k_divergence
    from edl_hvd.distill.outputs import TopK as TopK
    from edl_hvd.distill.teachers import Teachers as Teachers

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'edl_hvd.distill' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
