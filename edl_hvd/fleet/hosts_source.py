"""Where a fleet's hosts come from: a list, or a source as ``edlrun --discover`` takes it."""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.combined import read_source, sources_in, start_now
from edl_hvd.discovery.sources.hostfile import FixedHosts, HostsFile, parse_host_list
from edl_hvd.discovery.sources.schedule import Schedule
from edl_hvd.discovery.sources.trace import TraceReplay
from edl_hvd.errors import DiscoveryError, UsageError

_FIXED_EVERY_S = 60.0


def read_hosts(hosts: str | None, discover: str | None) -> PolledSource:
    """The source that one of these flags names. What only a file says is read once, to find mistakes.

    Args:
        hosts: Value of ``-H``, e.g. "node-1:8,node-2:8"; ``None`` if it was not given.
        discover: Value of ``--discover``, e.g. "file:hosts.txt"; ``None`` if it was not given.

    Raises:
        UsageError: Neither or both are given; or it is not understood, or a file of it lists no host.
    """
    if (hosts is None) == (discover is None):
        found = "are missing" if hosts is None else "both say where the hosts are"
        raise UsageError(f"-H and --discover {found}; expected one of them, e.g. --discover file:hosts.txt")
    if hosts is not None:
        try:
            return PolledSource(FixedHosts(parse_host_list(hosts)), _FIXED_EVERY_S, stale_s=0, first_s=0)
        except UsageError as error:
            raise UsageError(f"-H {hosts!r}: {error}") from error
    assert discover is not None
    try:
        asked = read_source(discover, start_now)
        for source in sources_in(asked.source):
            if isinstance(source, HostsFile):
                source.answer()
            if isinstance(source, Schedule | TraceReplay):
                replace(source, start_s=0.0).answer()
    except (UsageError, DiscoveryError) as error:
        raise UsageError(f"--discover {discover!r}: {error}") from error
    return asked
