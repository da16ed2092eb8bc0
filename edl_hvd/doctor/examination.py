"""All checks in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edl_hvd.build.tools import with_own_programs_first
from edl_hvd.doctor import engine, machine, outside
from edl_hvd.doctor.findings import MISSING, CheckResult


def examine(
    environ: Mapping[str, str], checkpoint: str | None, discovery_script: str | None, discover: str | None = None
) -> Iterator[CheckResult]:
    """Every finding, as soon as it is made; importing torch takes the first seconds.

    Args:
        checkpoint: URL to try, or ``None`` to leave storage out.
        discovery_script: Command to try, or ``None`` to leave discovery out.
        discover: A source, as for ``edlrun --discover``, to ask and to look for permissions that it lacks; or ``None``.
    """
    environ = with_own_programs_first(environ)
    yield engine.check_python()
    found = engine.check_engine(environ)
    yield from found
    yield from machine.check_tools(environ, horovod_works=all(finding.verdict != MISSING for finding in found))
    yield from machine.judge_network(machine.addresses(), machine.default_interface())
    if checkpoint is not None:
        yield outside.check_storage(checkpoint)
    if discovery_script is not None:
        yield outside.check_discovery(discovery_script, environ)
    if discover is not None:
        yield from outside.check_source(discover)
