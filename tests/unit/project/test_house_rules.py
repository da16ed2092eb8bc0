"""Rules of the package that no tool checks."""

from __future__ import annotations

import ast
import configparser
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from token import NAME

import pytest

import edl_hvd
from edl_hvd.driver.membership.state import LIVE

PACKAGE = Path(edl_hvd.__file__).parent
REPOSITORY = PACKAGE.parent
MARKDOWN = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}

# Who may touch the environment, and why.
ALLOWED = {
    "settings.py": "the one place that reads settings from it",
    "discovery/polling/poll.py": "keeps answers apart by the variables of flags, accounts, clusters and jobs",
    "preflight/exchange.py": "sets what Gloo reads when it connects",
    "simulator/cluster/blas.py": "sets what OpenBLAS reads when it is loaded",
    "worker/engine/horovod_runtime.py": "sets what Horovod's native core reads when it starts",
    "worker/joining/driver_rendezvous.py": "the same, for the network interface",
    "worker/process.py": "the same for NCCL, where workers share a GPU",
    "worker/joining/mpi_rendezvous.py": "the same, before Horovod starts over MPI",
    "worker/standby/replica.py": "leaves the C library's memory alone where somebody has tuned it",
}


def names_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ENVIRONMENT and isinstance(node.value, ast.Name) and node.value.id == "os"
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(name.name in ENVIRONMENT for name in node.names)
    return False


def touches_environment(source: str) -> bool:
    return any(names_environment(node) for node in ast.walk(ast.parse(source)))


def test_only_settings_and_named_exceptions_touch_the_environment() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if touches_environment(path.read_text())}
    assert found == set(ALLOWED), "read it in settings.py, or add the module to ALLOWED with its reason"


@pytest.mark.parametrize(
    ("source", "touches"),
    [
        ("import os\nos.environ['A']", True),
        ("import os\nos.getenv('A')", True),
        ("from os import environ", True),
        ("import os\nos.path.join('a')", False),
        ("environ = {}", False),
    ],
)
def test_the_rule_sees_every_way_to_the_environment(source: str, touches: bool) -> None:
    assert touches_environment(source) == touches


def test_every_module_says_what_it_is_for() -> None:
    modules = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert [str(path) for path, module in modules.items() if not ast.get_docstring(module)] == []


def unbounded_waits(source: str) -> list[int]:
    """Lines with ``.join()`` or ``.wait()`` without a bound; what a coroutine awaits can be bounded outside of it."""

    def look(node: ast.AST) -> Iterator[int]:
        if isinstance(node, ast.AsyncFunctionDef):
            return
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("join", "wait")
            and not node.args
            and not node.keywords
        ):
            yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from look(child)

    return sorted(look(ast.parse(source)))


def test_no_test_waits_without_a_bound() -> None:
    tests = PACKAGE.parent / "tests"
    found = {
        f"{path.relative_to(tests)}:{line}"
        for folder in ("unit", "support", "contract")
        for path in (tests / folder).rglob("*.py")
        for line in unbounded_waits(path.read_text())
    }
    assert found == set(), "it can only hang; write soon(…) of tests/support/waiting.py, or give a bound"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("thread.join()", [1]),
        ("x = 1\nassert process.wait() == 0", [2]),
        ("def a():\n    lambda: b.c[0].wait()", [2]),
        ("thread.join(60)\nevent.wait(timeout=60)\nsoon(thread)\n','.join(words)", []),
        ("async def a():\n    await process.wait()", []),
    ],
)
def test_the_rule_sees_waits_without_a_bound(source: str, lines: list[int]) -> None:
    assert unbounded_waits(source) == lines


def imported_packages(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"edl_hvd"}


def distribution(name: str) -> str:
    """A distribution's name in the one form that package indexes compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_declared() -> None:
    settings = configparser.ConfigParser()
    settings.read(PACKAGE.parent / "setup.cfg")
    lines = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    declared = {distribution(re.split(r"[\[<>=;~! ]", line)[0]) for text in lines for line in text.split()}
    imported = set().union(*(imported_packages(path.read_text()) for path in PACKAGE.rglob("*.py")))
    # Horovod is built, not installed by name; a package that is not here can only be judged by its import name.
    owners = {name: distribution(packages_distributions().get(name, [name])[0]) for name in imported - {"horovod"}}
    assert {name: owner for name, owner in owners.items() if owner not in declared} == {}


def test_everything_in_the_package_that_is_no_module_is_shipped() -> None:
    settings = configparser.ConfigParser()
    settings.read(PACKAGE.parent / "setup.cfg")
    shipped = {
        path
        for package, patterns in settings["options.package_data"].items()
        for pattern in patterns.split()
        for path in PACKAGE.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    files = [Path(folder, name) for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names]
    others = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert others == shipped


# What sentences of this project do without; docs/style.md says what to write instead.
RETIRED = {
    "in vain": re.compile(r"\bin vain\b", re.IGNORECASE),
    "an argument that is a pronoun": re.compile(r"^ *\w+: (?:It|They)\.$", re.MULTILINE),
    "so many, so long": re.compile(r"\bso (?:many|long)\b", re.IGNORECASE),
    "a docstring that begins with Of": re.compile(r'"""Of '),
}


def retired_in(text: str, phrases: list[str]) -> list[str]:
    return [f"{phrase}: {found[0].strip()}" for phrase in phrases for found in RETIRED[phrase].finditer(text)]


def test_retired_phrases_do_not_come_back() -> None:
    scripts = [path for folder in ("benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    paths = [*PACKAGE.rglob("*.py"), *scripts, *MARKDOWN]
    found = {path.relative_to(REPOSITORY).as_posix(): retired_in(path.read_text(), list(RETIRED)) for path in paths}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}, "see docs/style.md"


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("It waits in vain.", "in vain"),
        ("Args:\n        handler: It.\n", "an argument that is a pronoun"),
        ("        optimizers: They.", "an argument that is a pronoun"),
        ("A host rests for so long.", "so many, so long"),
        ('    """Of one worker."""', "a docstring that begins with Of"),
    ],
)
def test_the_rule_sees_every_retired_phrase(text: str, phrase: str) -> None:
    assert [found.partition(":")[0] for found in retired_in(text, list(RETIRED))] == [phrase]


def overlong(document: str) -> list[str]:
    """Lines of Markdown with more than 120 characters, but for tables, blocks of code and the targets of links."""
    found, fence, is_code = [], "", False
    for line in document.splitlines():
        mark = re.match(r" *(```|~~~)", line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        is_code = bool(fence) or line.startswith("    ")
        shown = re.sub(r"\]\([^)\s]*\)", "]", line)
        is_link = re.fullmatch(r" *(?:[-*] )?!?\[[^]]*\][.,;:]?", shown)
        if len(shown) > 120 and not (is_code or is_link or line.lstrip().startswith("|")):
            found.append(line)
    return found


def test_lines_of_documents_are_short() -> None:
    found = {path.name: overlong(path.read_text()) for path in MARKDOWN}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("document", "count"),
    [
        ("a" * 120, 0),
        ("a" * 121, 1),
        ("- " + "a " * 60, 1),
        ("| " + "a" * 121 + " |", 0),
        ("```python\n" + "a" * 121 + "\n```\n" + "b" * 121, 1),
        ("    " + "a" * 121, 0),
        ("- [" + "a" * 121 + "](b.md)", 0),
        ("see [" + "a" * 121 + "](b.md)", 1),
    ],
)
def test_the_rule_sees_long_lines(document: str, count: int) -> None:
    assert len(overlong(document)) == count


# Names of before, and the field's terms that took their places.
RETIRED_NAMES = {
    "Happening": "MembershipEvent", "happening": "event", "happenings": "events", "happen": "handle",
    "Dismissed": "GracefulExit", "Joined": "RendezvousInfo", "ResizeAgreed": "HostsUpdatedInterrupt",
    "RUN_AGAIN": "EX_TEMPFAIL", "Interruption": "Downtime", "barren": "resets_without_commit",
    "Memory": "StateStore", "put_back": "restore", "retake": "resave", "ParameterWatch": "DirtyTracker",
    "StillParameters": "FrozenParameters", "is_disturbed": "is_dirty", "distrust": "mark_dirty",
    "LateCopy": "DeferredCopy", "Standing": "EncodingCache", "Mark": "TensorVersion", "sample_of": "fingerprint",
    "commit_of": "Freshness.commit", "deferred_checkpoint": "deferred_snapshot", "host_copy": "none",
    "drop_copy": "drop_snapshot", "move_by_steps": "set_stepped",
    "capture_rest": "capture_delta", "load_rest": "load_delta", "leaves_out": "has_delta",
    "encoding_cache": "codec", "Fit": "LoadReport",
    "without_strays": "drop_diverged", "level_buffers": "sync_buffers", "Found": "HostFeed",
    "Keep": "RetentionPolicy or CacheEntry", "Looker": "Inspector",
    "hungry_s": "below_min_since_s", "false_starts": "startup_failures", "Loans": "none",
    "ExactReduction": "ExactGradientSum", "Counting": "MetricSync", "enter_pass": "begin_loop",
    "leave_pass": "leave_loop", "end_training_pass": "end_training_loop", "absorb": "merge",
    "refuse_other_arithmetic": "check_same_numerics", "DealtIndices": "BatchIndices", "Division": "BatchPlan",
    "division_of": "batch_plan",
    "Owner": "LeaseHolder", "Sign": "LeaseRenewal", "breathe": "throttle", "hurry": "expedite",
    "import_compiler_late": "import_dynamo_lazily", "_StandIn": "_LazyDynamo",
    "_look_over": "_checksum", "_tidy": "_apply_retention",
    "AskChange": "RequestResize", "TellGone": "NotifyPeerLost", "SetAside": "QuarantineHost",
    "DrainAsked": "DrainRequested", "unfit": "failed_preflight", "settle_s": "last_call_timeout_s",
    "leave_s": "drain_lead_s", "farewell_s": "shutdown_timeout_s", "steady_s": "backoff_reset_s", "born_s": "started_s",
    "advance_together": "transition_together", "Pulse": "HeartbeatMonitor", "felt": "on_heartbeat",
    "ProgressWatch": "HangDetector", "Examination": "Preflight", "REFEREES": "REFERENCE_HOSTS",
    "MeetingPlace": "RendezvousEndpoint", "hang_up": "disconnect", "Figures": "TrainingProgress",
    "Remaining": "Countdown", "Heard": "LastHeartbeat", "mark_of": "start_token", "process_mark": "process_identity",
    "meet_timeout_s": "join_timeout_s",
    "rebirth": "none", "Foresighted": "Answer", "Remembering": "Source.memory", "Bridging": "Answer.warning",
    "Following": "StandbyReplica", "Handover": "StateTransfer", "invite": "serve",
    "Checkpoints": "CheckpointManager", "take_url": "CheckpointLease.acquire", "speaks": "renews",
    "keep_from_children": "close_on_fork", "host_going": "on_preemption_notice", "DriverLine": "DriverConnection",
    "AtOnce": "Urgent", "hellos": "requests", "Ending": "WorldFailure",
    "Theatre": "DriverSimulation", "Puppet": "SimulatedWorker", "Agenda": "EventQueue", "Course": "Timeline",
    "fell_back": "restarted", "StaticFile": "HostsFile", "read_question": "make_source", "ask_web": "http_get",
    "ask_locally": "local_source", "ask_remotely": "remote_source", "start_asking": "start_refresher",
    "Warm": "CaughtUp", "warm": "caught_up_generation", "Guide": "ServeState", "guide": "donor",
    "Guiding": "ServingState", "Follow": "ReceiveState", "follower": "standby", "follows": "learning_generation",
    "Dismiss": "ShutDown", "dismiss": "shut_down", "dismissed": "terminating", "Change": "ResizeRequested",
    "Gone": "PeerLost", "Findings": "HostFindings or HangReport", "Starter": "ProcessStarter",
    "read_wishes": "read_options", "numbering": "pid_namespace", "begin_life": "begin_attempt",
}  # fmt: skip


def test_a_worker_imports_upward_for_the_type_checker_neither() -> None:
    """The import contracts leave such imports out, because the package's own table of names needs one."""
    top = {"elastic.py", "state.py"}  # nothing of the worker is above them
    found = {path.name for path in (PACKAGE / "worker").rglob("*.py") if "TYPE_CHECKING" in path.read_text()}
    assert found <= top


# Classes of one name that mean the same: the bases, first messages and answers of two protocols; what a worker says,
# and the event that it becomes.
SAME_MEANING = {
    "Answer", "CaughtUp", "Done", "Formed", "Hello", "Message", "Raised", "Ready", "ReceiveState",
}  # fmt: skip


def classes_of(path: Path) -> set[str]:
    """Public classes that a module defines."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def test_the_name_of_a_class_is_its_own() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in classes_of(path):
            found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_MEANING} == {}
    assert twice.keys() == SAME_MEANING, "SAME_MEANING lists names that are unique"


def test_states_of_workers_have_present_names() -> None:
    assert set(LIVE) & RETIRED_NAMES.keys() == set()


def names_in(source: str) -> set[str]:
    return {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == NAME}


def test_retired_names_do_not_come_back() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in names_in(path.read_text()) & RETIRED_NAMES.keys()
    }
    assert found == set(), f"write instead: {RETIRED_NAMES}"
