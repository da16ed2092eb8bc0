"""A fleet as a page in a browser: slots over time, jobs, claims and reasons. No script, nothing from elsewhere.

It shows no command and no environment, in which secrets may be: every user of the machine can read the page.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from edl_hvd.cli.fleet_view import state_of, trouble_line
from edl_hvd.cli.formatting import count, duration
from edl_hvd.cli.metrics_text import fleet_metrics
from edl_hvd.fleet.messages import FleetView, JobRow
from edl_hvd.fleet.state import HeldClaim, shown_hosts, total
from edl_hvd.status_server import Document

_REFRESH_S = 2
_MOMENTS = 4096
_SHOWN_S = 1800.0
_COLOURS = ("#4c6ef5", "#12b886", "#f76707", "#ae3ec9", "#1098ad", "#e03131", "#74b816", "#868e96")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 220, 34, 22
_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 22%, transparent); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } p { margin: .3rem 0 1rem; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; } .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } td:not(:last-child) { white-space: nowrap; } td.n, th.n { text-align: right; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em; }
"""


@dataclass(frozen=True)
class _Moment:
    """Who had how many slots from a moment on."""

    at_s: float
    slots: Mapping[str, int]
    all_slots: int


class FleetPage:
    """Gets a view whenever there is a new one, and shows the last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moments: deque[_Moment] = deque(maxlen=_MOMENTS)
        self._view: FleetView | None = None

    def update(self, view: FleetView) -> None:
        """The fleet stands so now."""
        slots = {row.job.name: total(row.job.given) for row in view.jobs if row.job.given}
        slots |= {claim.name: total(claim.granted) for claim in view.claims if claim.granted}
        moment = _Moment(view.now_s, slots, sum(entry.slots for entry in view.hosts))
        with self._lock:
            self._view = view
            last = self._moments[-1] if self._moments else None
            if last is None or (last.slots, last.all_slots) != (moment.slots, moment.all_slots):
                self._moments.append(moment)

    def html(self) -> Document:
        """The page."""
        with self._lock:
            view, moments = self._view, tuple(self._moments)
        return Document(page("" if view is None else body(view, moments)))

    def metrics(self) -> Document:
        """The text for Prometheus."""
        with self._lock:
            view = self._view
        return fleet_metrics(view or FleetView(0.0, (), (), (), 0, 0))


def page(content: str) -> str:
    """A whole HTML page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{_REFRESH_S}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>edl_hvd fleet</title><style>{_STYLE}</style><h1>Fleet</h1>{content or '<p>It starts.</p>'}</html>"
    )


def body(view: FleetView, moments: Sequence[_Moment]) -> str:
    """What the page says. Pure."""
    names = list(dict.fromkeys(name for moment in moments for name in moment.slots))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    slots = sum(entry.slots for entry in view.hosts)
    summary = f"{count(slots, 'slot')} on {count(len(view.hosts), 'host')}, {view.free} free"
    if view.lacking:
        summary += f"; {view.lacking} more would be used"
    return "".join(
        [
            f"<p>{escape(summary)}</p>",
            "" if view.trouble is None else f"<p>{escape(trouble_line(view.trouble))}</p>",
            chart(view.now_s, moments, colours),
            _table(_JOB_HEAD, (_job_cells(row, colours) for row in view.jobs)),
            _table(_CLAIM_HEAD, (_claim_cells(claim, view.now_s, colours) for claim in view.claims)),
        ]
    )


_JOB_HEAD = ("job", "state", "slots", "of", "priority", "step", "samples/s", "left", "waited", "why")
_CLAIM_HEAD = ("claim", "state", "slots", "of", "priority", "waited", "on, or why not")
_NUMBERS = ("slots", "of", "priority", "step", "samples/s")


def _job_cells(row: JobRow, colours: Mapping[str, str]) -> list[str]:
    job, spec, progress = row.job, row.job.spec, row.progress
    why = f"{job.reason}: {job.why}" if job.reason else job.why
    return [
        _named(job.name, colours),
        escape(state_of(row)),
        str(total(job.given)),
        f"{spec.least}" if spec.least == spec.most else f"{spec.least} to {spec.most}",
        str(spec.priority),
        f"{progress.step:,}" if progress.step > 0 else "",
        "" if progress.samples_per_s is None else f"{progress.samples_per_s:,.0f}",
        "" if progress.left_s is None else duration(progress.left_s),
        duration(row.waited_s),
        escape(why),
    ]


def _claim_cells(claim: HeldClaim, now_s: float, colours: Mapping[str, str]) -> list[str]:
    waited_s = now_s - claim.asked_s if claim.whole_s is None else claim.whole_s
    return [
        _named(claim.name, colours),
        "waiting" if claim.whole_s is None else "has its slots",
        str(total(claim.granted)),
        str(claim.slots),
        str(claim.priority),
        duration(waited_s),
        escape(shown_hosts(claim.granted) or claim.why),
    ]


def _named(name: str, colours: Mapping[str, str]) -> str:
    colour = colours.get(name)
    return (f'<span class="key" style="background:{colour}"></span>' if colour else "") + escape(name)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    if not found:
        return ""
    kinds = [' class="n"' if name in _NUMBERS else "" for name in head]
    line = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, head, strict=True))
    lines = [f"<tr>{line}</tr>"]
    for row in found:
        lines.append(f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>")
    return f"<table>{''.join(lines)}</table>"


def chart(now_s: float, moments: Sequence[_Moment], colours: Mapping[str, str]) -> str:
    """Slots over time as bands one above the other, in SVG. Pure."""
    begin_s = max(now_s - _SHOWN_S, moments[0].at_s) if moments else now_s
    span_s = max(now_s - begin_s, 1.0)
    most = max((moment.all_slots for moment in moments), default=0) or 1
    width, height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM

    def across(at_s: float) -> float:
        return round(_LEFT + (at_s - begin_s) / span_s * width, 1)

    def up(slots: float) -> float:
        return round(height - slots / most * (height - 8), 1)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="slots over time">',
        *(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{up(at)}" y2="{up(at)}"/>'
            f'<text x="{_LEFT - 6}" y="{up(at) + 4}" text-anchor="end">{at}</text>'
            for at in sorted({0, most // 2, most})
        ),
    ]
    ends = [moment.at_s for moment in moments[1:]] + [now_s]
    for moment, end_s in zip(moments, ends, strict=True):
        if end_s <= begin_s:
            continue
        left, right, below = across(max(moment.at_s, begin_s)), across(end_s), 0
        for name, slots in moment.slots.items():
            parts.append(
                f'<rect x="{left}" y="{up(below + slots)}" width="{round(right - left, 1)}" '
                f'height="{round(up(below) - up(below + slots), 1)}" fill="{colours[name]}">'
                f"<title>{escape(name)}: {count(slots, 'slot')}</title></rect>"
            )
            below += slots
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{duration(span_s)} ago</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">now</text></svg>')
    return "".join(parts)
