"""Answers that depend on earlier ones: damping, a part that fails, a choice that was made.

Any process may make the next request, so the memory is in the record and not in this process.
"""

from __future__ import annotations

import json

from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.polling.record import Record
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.hosts import format_hosts


def answer(polled: PolledSource, record: Record) -> Record:
    """The record after a request at ``record.asked_s``. Blocks until the source answers.

    Raises:
        DiscoveryError, UsageError: The source raises it.
    """
    source, now_s = polled.source, record.asked_s
    memory = _read(record.memory)
    source.recall(memory.get("source"), record.answered_s)
    found = source.answer()
    hosts = found.hosts
    if not hosts:
        return record.answered_empty()
    remarks = [found.warning] if found.warning else []
    kept: dict[str, object] = {}
    if polled.is_damped:
        damping = Damping().recalled(memory.get("damping"), record.answered_s).observed(hosts, now_s)
        hosts = damping.kept(hosts)
        remarks += [f"{host} is left out: {why}" for host, why in damping.left_out(now_s).items()]
        kept["damping"] = damping.to_memory(now_s)
    own = source.memory(now_s)
    if own is not None:
        kept["source"] = own
    return record.answered(format_hosts(hosts), found.age_s, "; ".join(remarks), json.dumps(kept))


def _read(text: str) -> dict[str, object]:
    """Read a memory; an empty one if there is none, or it is of another version."""
    try:
        memory = json.loads(text or "{}")
    except ValueError:
        return {}
    return memory if isinstance(memory, dict) else {}
