"""``edl-hvd replay``: repeat the decisions of a recorded history, as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import takewhile

import click
from rich.console import Console
from rich.table import Table

from edl_hvd.cli.formatting import clean
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.events import Action, MembershipEvent
from edl_hvd.driver.membership.history import Decision, read_history, replay
from edl_hvd.driver.membership.state import Membership, begin

_INDENT = " " * 14
# The width of a time: the seconds of the longest jobs have six digits.


@click.command("replay")
@click.argument("file", metavar="FILE")
@click.option("--until", metavar="SECONDS", type=click.FloatRange(min=0), help="Stop at this time of the job.")
@click.option("--json", "as_json", is_flag=True, help="Print the decisions and the membership after them as JSON.")
def replay_command(file: str, until: float | None, as_json: bool) -> None:
    """Repeat the decisions of a job from its recorded history.

    FILE is what 'edlrun --record FILE' wrote, or history.jsonl of a job folder. No process is started. Shows each
    event, the decisions that follow from it, and the members at the end.

    \b
    Examples:
      edl-hvd replay runs/7/history.jsonl
      edl-hvd replay history.jsonl --until 120 --json

    Exit code 1 when a decision differs from the recorded one: the version that wrote the file decided otherwise.
    Documents: docs/edlrun.md.
    """
    history = read_history(file)
    decisions: Iterable[Decision] = replay(history)
    if until is not None:
        last_s = until
        decisions = takewhile(lambda decision: decision.at_s <= last_s, decisions)
    before = begin(history.rules, 0.0)
    shown = _show_json(decisions, before, history.note) if as_json else _show_text(decisions, before, history.note)
    sys.exit(shown)


def _show_json(decisions: Iterable[Decision], membership: Membership, note: str) -> int:
    lines, difference = [], None
    for decision in decisions:
        membership, now = decision.membership, _plain(decision.actions)
        lines.append({"at_s": decision.at_s, **events.to_json(decision.event), "actions": now})
        if decision.differs:
            difference = {"at_s": decision.at_s, "recorded": _plain(decision.recorded or ()), "now": now}
            break
    world = {**asdict(membership.world), "formed": sorted(membership.world.formed)}
    slots = {worker: asdict(slot) for worker, slot in membership.slots.items()}
    end = None if membership.end is None else asdict(membership.end)
    shown = {"decisions": lines, "difference": difference, "slots": slots, "world": world, "end": end, "note": note}
    click.echo(json.dumps(shown, indent=2))
    return int(difference is not None)


def _plain(actions: Iterable[Action]) -> list[dict[str, object]]:
    return [events.to_json(action) for action in actions]


def _show_text(decisions: Iterable[Decision], membership: Membership, note: str) -> int:
    console = Console(highlight=False, soft_wrap=True)
    difference: Decision | None = None
    for decision in decisions:
        membership = decision.membership
        console.print(f"[cyan]{decision.at_s:>10.3f} s[/]  {clean(_describe_event(decision.event))}")
        if decision.differs:
            difference = decision
            break
        _print_actions(console, decision.actions)
    if difference is not None:
        for when, actions in (("recorded", difference.recorded or ()), ("now", difference.actions)):
            console.print(f"{_INDENT}[bold red]{when}:[/]{'' if actions else ' nothing'}")
            _print_actions(console, actions, indent=_INDENT + "  ")
    console.print()
    console.print(_table(membership), soft_wrap=False)
    console.print(f"\n{clean(_describe_world(membership))}\n{clean(_describe_end(membership))}")
    if note:
        console.print(f"[yellow]note:[/] {clean(note)}")
    if difference is not None:
        console.print(
            f"[bold red]At {difference.at_s:.3f} s another decision was recorded;[/] "
            "records after it follow from that decision and were not replayed"
        )
    return int(difference is not None)


def _print_actions(console: Console, actions: Iterable[Action], indent: str = _INDENT) -> None:
    for action in actions:
        console.print(f"{indent}→ {clean(_describe_action(action))}")


def _table(membership: Membership) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("slot", "state", "rank", "incarnation", "step", "since"):
        table.add_column(name, justify="left" if name in ("slot", "state") else "right")
    members = membership.world.members
    for worker, slot in membership.slots.items():
        rank = str(members.index(worker)) if slot.state == "member" else ""
        step = str(slot.step) if slot.step >= 0 else ""
        table.add_row(clean(worker), slot.state, rank, str(slot.incarnation), step, f"{slot.since_s:.3f} s")
    return table


def _name(worker: str, incarnation: int) -> str:
    return worker if incarnation == 1 else f"{worker} (incarnation {incarnation})"


def _describe_event(event: MembershipEvent) -> str:
    match event:
        case events.HostsFound(hosts, failed_preflight):
            named = f"the hosts are {', '.join(map(str, hosts))}" if hosts else "there are no hosts"
            return f"{named}; not good enough: {', '.join(failed_preflight)}" if failed_preflight else named
        case events.Ready(worker, incarnation, step):
            return f"{_name(worker, incarnation)} is ready and holds {f'step {step}' if step >= 0 else 'nothing'}"
        case events.CaughtUp(worker, incarnation, generation):
            return f"{_name(worker, incarnation)} has caught up with world {generation}"
        case events.Formed(worker, incarnation, generation):
            return f"{_name(worker, incarnation)} has formed world {generation}"
        case events.Raised(worker, incarnation, step, error):
            return f"{_name(worker, incarnation)} raised at step {step}: {error}"
        case events.Done(worker, incarnation):
            return f"{_name(worker, incarnation)} has completed the training"
        case events.Exiting(worker, incarnation):
            return f"the process of {_name(worker, incarnation)} begins to end"
        case events.Exited(worker, incarnation, clean, how):
            return f"{_name(worker, incarnation)} has {'ended well' if clean else 'failed'}: {how}"
        case events.Lost(worker, incarnation, reason):
            return f"{_name(worker, incarnation)} is lost: {reason}"
        case events.DrainRequested(target, notice_s, deferred):
            return f"{target} {'will be gone in' if deferred else 'has to be left within'} {notice_s:g} s"
        case events.Deadlocked(generation, reason):
            return f"world {generation} is deadlocked: {reason}"
        case events.Tick():
            return "time has passed"


def _describe_action(action: Action) -> str:
    match action:
        case events.Spawn(worker, incarnation):
            return f"start {_name(worker, incarnation)}"
        case events.ReceiveState(worker, generation, donor):
            return f"let {worker} receive the state from {donor}, while world {generation} trains"
        case events.Publish(generation, members):
            return f"publish world {generation}: {', '.join(members)}"
        case events.RequestResize(generation):
            return f"ask the members of world {generation} to leave it at the next commit"
        case events.NotifyPeerLost(generation, worker):
            return f"tell the members of world {generation} that {worker} is gone"
        case events.ShutDownWorker(worker, incarnation, save):
            return f"ask {_name(worker, incarnation)} to exit{', with a checkpoint before' if save else ''}"
        case events.Kill(worker, incarnation, reason):
            return f"end {_name(worker, incarnation)}: {reason}"
        case events.QuarantineHost(host, cooldown_s):
            return f"give host {host} no workers for {cooldown_s:g} s"
        case events.End(code, reason):
            return f"end the job with exit code {code}{f': {reason}' if reason else ''}"


def _describe_world(membership: Membership) -> str:
    world = membership.world
    if not world.generation:
        return "There was no world yet"
    return f"The last world is {world.generation}, {world.phase}: {', '.join(world.members)}"


def _describe_end(membership: Membership) -> str:
    end = membership.end
    if end is None:
        return "The job had not ended"
    return f"The job ended with exit code {end.code}{f': {end.reason}' if end.reason else ''}"
