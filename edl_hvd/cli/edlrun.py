"""The command ``edlrun``: its flags, which are those of ``horovodrun``'s elastic mode and some more, and its help."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import edl_hvd
from edl_hvd.driver.command_line.flags import PRESENT_NAMES, with_present_names
from edl_hvd.driver.command_line.options import Options, read_options
from edl_hvd.driver.command_line.resume import HOST_FLAGS
from edl_hvd.driver.command_line.tuning import TUNINGS, Tuning
from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.settings import process_environment

if TYPE_CHECKING:
    from edl_hvd.cli.job_screen import JobScreen
    from edl_hvd.status_server import StatusServer

_WORKERS, _HOSTS, _ELASTIC = "Workers", "Hosts (name them in one of four ways)", "Elasticity"
_REACH, _OUTPUT, _TUNING = (
    "Reaching the hosts",
    "Output and records",
    "Tuning Horovod (as with horovodrun, see its manual)",
)
_REST = "Other"
_GROUPS = (_WORKERS, _HOSTS, _ELASTIC, _REACH, _OUTPUT, _REST, _TUNING)

_OFF_NAMES = {"--no-stall-check": "--stall-check", "--log-with-timestamp": "--log-without-timestamp"}
# Of every other switch the negative is --no- and its name.
_METAVARS = {"count": "N", "number": "X", "text": "FILE"}

# Sections of horovodrun's configuration file, and the prefix of their keys on the command line.
_SECTIONS = {
    "params": "", "autotune": "autotune-", "timeline": "timeline-", "stall_check": "stall-check-",
    "library_options": "", "logging": "log-",
}  # fmt: skip

_TUNING_FLAGS = {tuning.flag for tuning in TUNINGS}
_SAME = {"--no-log-hide-timestamp": "--log-with-timestamp"}


class _Flag(click.Option):
    """An option under a heading of the help; messages call it by its first name."""

    def __init__(self, names: Sequence[str], group: str, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.group = group


class _Command(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in _GROUPS:
            options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
            flags = [option for option in options if getattr(option, "group", _REST) == group]
            rows = [row for row in (flag.get_help_record(ctx) for flag in flags) if row]
            with formatter.section(group):
                formatter.write_dl(rows, col_max=26)


def _value(group: str, names: str, metavar: str, help: str, **more: Any) -> _Flag:
    return _Flag(names.split(), group, metavar=metavar, help=help, type=click.UNPROCESSED, **more)


def _switch(group: str, names: str, help: str, **more: Any) -> _Flag:
    return _Flag(names.split(), group, is_flag=True, default=None, help=help, **more)


def _tune(tuning: Tuning) -> _Flag:
    if tuning.kind in _METAVARS:
        return _value(_TUNING, tuning.flag, "LEVEL" if tuning.among else _METAVARS[tuning.kind], tuning.meaning)
    off = "" if tuning.flag == "--tcp" else "/" + _OFF_NAMES.get(tuning.flag, f"--no-{tuning.flag[2:]}")
    return _switch(_TUNING, tuning.flag + off, tuning.meaning)


def _show_version(context: click.Context, _: click.Parameter, wanted: bool | None) -> None:
    if wanted:
        click.echo(f"edlrun {edl_hvd.__version__}")
        context.exit()


_FLAGS = (
    _value(_WORKERS, "-np --num-proc", "N", "Number of workers at the start."),
    _value(_WORKERS, "--min-np --min-num-proc", "N", "Fewest workers with which training goes on. [-np]"),
    _value(_WORKERS, "--max-np --max-num-proc", "N",
           "Most workers. [no limit; -np with listed hosts and no --min-np]"),
    _value(_WORKERS, "--spares", "N", "Started workers kept in reserve, to replace lost ones at once. [0]"),
    _value(_HOSTS, "--hosts -H", "HOST:SLOTS,...", "Hosts, each with its number of slots. [localhost:<np>]"),
    _value(_HOSTS, "--hostfile -hostfile", "FILE", "File of 'host slots=N' lines, read once at the start."),
    _value(_HOSTS, "--host-discovery-script", "COMMAND",
           "Command that is run every second and prints a 'host:slots' line for each present host."),
    _value(_HOSTS, "--discover", "SOURCE",
           "Source that edlrun polls itself: file:hosts.txt, kubernetes:selector=app=trainer, "
           "union(ec2:tag=job=7, file:spare.txt), limit(SOURCE, 8), prefer(SOURCE, 8). Flags are those of "
           "discovery_scripts/from_SOURCE, separated by commas."),
    _value(_HOSTS, "--agents-port", "PORT",
           "The hosts are those on which 'edl-hvd join' calls this port; no ssh. 0 takes a free one."),
    _value(_HOSTS, "--token-file", "FILE", "File with the token that agents have to prove."),
    _value(_HOSTS, "--slots-per-host", "N", "Slots of a host that names none. [1; a script has to name them]"),
    _value(_HOSTS, "--teachers", "SOURCE",
           "Where the teachers of a distillation are, written as for --discover, or models on servers as "
           "oip:http://host:8000/MODEL; the workers get it as EDL_HVD_TEACHERS."),
    _value(_ELASTIC, "--elastic-timeout", "S",
           "Seconds below --min-np after which the job ends. [HOROVOD_ELASTIC_TIMEOUT, else 600]"),
    _value(_ELASTIC, "--reset-limit", "N", "Number of resizes after which the job ends. [no limit]"),
    _value(_ELASTIC, "--last-call-timeout", "S",
           "Seconds for which a ready worker waits for others that start, to join together. [0.5]"),
    _value(_ELASTIC, "--drain-lead", "S",
           "Seconds before a host's announced end at which its workers leave. [10]"),
    _value(_ELASTIC, "--host-failures", "N",
           "Number of failed workers after which their host is set aside. [3]"),
    _value(_ELASTIC, "--failure-window", "S", "Seconds for which a failed worker counts. [600]"),
    _value(_ELASTIC, "--blacklist-cooldown-range", "MIN MAX",
           "Seconds until a host that was set aside may get workers: MIN counts. [60]", nargs=2),
    _switch(_ELASTIC, "--preflight",
            "Measure each new host before it gets workers, and set it aside if it is too slow."),
    _value(_ELASTIC, "--preflight-bound", "X",
           "Enable --preflight; a host may take X times as long as the others. [2]"),
    _value(_REACH, "--ssh-port -p", "PORT", "Port of ssh on the hosts. [ssh's own]"),
    _value(_REACH, "--ssh-identity-file -i", "FILE", "Private key for ssh. [ssh's own]"),
    _value(_REACH, "--network-interfaces --network-interface", "NAME,...",
           "Network interfaces for the traffic between workers. [found by edlrun]", multiple=True),
    _value(_REACH, "--start-timeout", "S",
           "Seconds within which a host has to start a worker. [HOROVOD_START_TIMEOUT, else 30]"),
    _value(_OUTPUT, "--output-filename", "DIR",
           "Write the workers' output to DIR/worker.HOST.SLOT/; a full disk ends that, not the job."),
    _switch(_OUTPUT, "--prefix-output-with-timestamp -prefix-timestamp",
            "Begin each line of the workers' output with the time."),
    _switch(_OUTPUT, "--verbose", "Show each decision of the membership."),
    _value(_OUTPUT, "--metrics-port", "[ADDRESS:]PORT",
           "Serve /metrics for Prometheus; on 127.0.0.1 unless told otherwise."),
    _value(_OUTPUT, "--status-port", "[ADDRESS:]PORT",
           "Serve state, speed, curve and time left as JSON at /status; on 127.0.0.1 unless told otherwise."),
    _value(_OUTPUT, "--record", "FILE", "Write the history of the membership to FILE, for 'edl-hvd replay FILE'."),
    _value(_OUTPUT, "--job-dir", "DIR",
           "Folder of the job: status, history and flags for --resume; and checkpoints, unless the script or "
           "EDL_HVD_CHECKPOINT names another place. [a folder removed at the end]"),
    _switch(_OUTPUT, "--resume",
            "Continue the job of --job-dir; COMMAND and flags that are left out are those it had."),
    _switch(_OUTPUT, "--take-over", "Take the checkpoint URL from another job that uses it, and so end that job."),
    _value(_REST, "--config-file", "FILE", "YAML file of tuning flags, as for horovodrun; flags beat it."),
    _switch(_REST, "--gloo --disable-cache", "Accepted, without effect.", expose_value=False),
    _switch(_REST, "--version -v", "Show the version.", is_eager=True, expose_value=False, callback=_show_version),
    *map(_tune, TUNINGS),
    # Flags that horovodrun accepts and edlrun refuses, and flags that neither shows, and former names.
    *(_switch(_REST, names, "", hidden=True) for names in ("--mpi", "--jsrun", "--check-build -cb")),
    *(_value(_REST, name, "TEXT", "", hidden=True) for name in ("--mpi-args", "--binding-args", *PRESENT_NAMES)),
    _switch(_TUNING, "--no-log-hide-timestamp/--log-hide-timestamp", "", hidden=True),
)  # fmt: skip
_NAMES = {name for flag in _FLAGS for name in (*flag.opts, *flag.secondary_opts)} | {"--help", "-h"}


def _complete(name: str) -> str:
    """Complete an abbreviated flag, as horovodrun does; any other word is returned unchanged."""
    if {f"-{name}", f"--{name}"} & _NAMES or len(name) == 1:
        return "np" if name == "n" else name  # mpirun has both, and horovodrun takes it for an abbreviation
    full = [other for other in _NAMES if other.startswith(f"--{name}")]
    return full[0][2:] if len(full) == 1 else name


_COMMAND = _Command(
    "edlrun",
    params=[*_FLAGS, click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")],
    help="""Train with workers that come and go.

    Runs -np copies of COMMAND, a script that uses edl_hvd, on the given hosts. The job goes on when workers or hosts
    are lost or added. The flags are those of horovodrun, and some more. N is a number, S are seconds, and a default
    stands in brackets. COMMAND begins at the first word that is no flag.

    \b
    Examples:
      edlrun -np 2 --min-np 1 python train.py
      edlrun -np 4 --min-np 2 -H node-1:2,node-2:2 python train.py
      edlrun -np 2 --max-np 8 --discover file:hosts.txt python train.py
      edlrun -np 2 --job-dir runs/7 python train.py
      edlrun --job-dir runs/7 --resume

    Exit codes: 0 when training is complete, 1 when the job failed, 2 when it was not started, 75 when it stopped with a
    checkpoint and wants to be run again. Documents: docs/edlrun.md and docs/settings.md.
    """,
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["--help", "-h"],
        "max_content_width": 80,
        "token_normalize_func": _complete,
    },
)


def read_command_line(words: Sequence[str]) -> Options:
    """Read the words after ``edlrun``.

    Exits with code 0 after ``--help`` and ``--version``, and with code 2 and one line per problem on standard error.
    """
    try:
        with _COMMAND.make_context("edlrun", list(words)) as context:
            flags = with_present_names(_collect(context.params))
            for note in flags.notes:
                click.echo(f"edlrun: {note}", err=True)
            given = dict(flags.given)
            problems = [*flags.problems, *_add_config_file(given, context.params["config_file"])]
            return read_options(context.params["command"], given, process_environment(), problems)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.UsageError as error:
        _refuse(f"{error.format_message()} See 'edlrun --help'")
    except UsageError as error:
        _refuse(str(error))


def check_added_flags(words: Sequence[str], own: Sequence[str], starter: str) -> None:
    """Check flags that another program adds to a command line of its own, before it starts ``edlrun``.

    Files that they name are looked up from the present folder. Variables that stand in for flags are not read.

    Args:
        words: The flags, without a command.
        own: Names of flags that the other program gives.
        starter: Name of that program.

    Raises:
        UsageError: One line per problem, each naming the flag.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), _COMMAND.make_context("edlrun", list(words)) as context:
            flags = with_present_names(_collect(context.params))
            rest = context.params["command"]
    except click.exceptions.Exit:
        raise UsageError("--help and --version start no job; leave them out") from None
    except click.UsageError as error:
        raise UsageError(f"{error.format_message()} See 'edlrun --help'") from None
    given, problems = dict(flags.given), list(flags.problems)
    for flag in (flag for flag in own if flag in given):
        what = f"the hosts itself; leave {flag} out" if flag in HOST_FLAGS else f"{flag} itself; leave it out"
        problems.append(f"{starter} gives {what}")
    if rest:
        problems.append(f"{rest[0]!r} is no flag; expected flags of edlrun alone")
    if problems:
        raise UsageError("\n".join(problems))
    problems = _add_config_file(given, context.params["config_file"])
    with tempfile.TemporaryDirectory(prefix="edl_hvd_flags") as folder:
        hosts = Path(folder) / "hosts"
        hosts.write_text("localhost:1\n")
        read_options(["true"], {**given, "-np": "1", "--discover": f'file:"{hosts}"'}, {}, problems)


def _refuse(problems: str) -> NoReturn:
    for problem in problems.split("\n"):
        click.echo(f"edlrun: {problem}", err=True)
    sys.exit(2)


def _collect(values: Mapping[str, Any]) -> dict[str, str]:
    """Collect the given flags, as ``read_options`` takes them."""
    given: dict[str, str] = {}
    for flag in _FLAGS:
        value = values.get(str(flag.name))
        if value is None or value == ():
            continue
        name = _SAME.get(flag.opts[0], flag.opts[0])
        if isinstance(value, tuple):
            given[name] = ("," if flag.multiple else " ").join(value)
        else:
            given[name] = str(int(value)) if isinstance(value, bool) else value
    given.pop("--config-file", None)
    return given


def _add_config_file(given: dict[str, str], path: str | None) -> list[str]:
    """Add settings of horovodrun's configuration file that no flag gives; return the problems of the file."""
    if path is None:
        return []
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        return [f"--config-file {path!r} needs PyYAML, which is not installed; run 'pip install pyyaml'"]
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"--config-file {path!r} does not read: {error}; expected YAML in the form of horovodrun"]
    if not isinstance(content, dict) or not all(isinstance(content.get(name) or {}, dict) for name in _SECTIONS):
        return [f"--config-file {path!r} holds no sections; expected YAML in the form of horovodrun"]
    problems = []
    if str(content.get("controller", "gloo")).lower() != "gloo":
        given.setdefault(f"--{content['controller']}".lower(), "1")
    for section, prefix in _SECTIONS.items():
        for key, value in (content.get(section) or {}).items():
            if section == "stall_check" and key == "enabled":
                flag, value = "--no-stall-check", not value
            else:
                flag = "--" + (section if key == "enabled" else prefix + str(key).replace("_", "-"))
            if flag not in _TUNING_FLAGS:
                problems.append(f"--config-file {path!r}: {section}.{key} is not known; take it out")
            elif value is not None:
                given.setdefault(flag, str(int(value)) if isinstance(value, bool) else str(value))
    return problems


def main() -> None:
    """Read the command line and run the job; the exit code is the job's, or 2 when it was not started."""
    options = read_command_line(sys.argv[1:])
    from edl_hvd.cli.job_screen import JobScreen
    from edl_hvd.driver.run import run_job

    screen = JobScreen(options.verbose, options.prefix_output_with_timestamp)
    try:
        with contextlib.ExitStack() as open_here:
            open_here.callback(screen.close)
            if options.metrics_port is not None:
                open_here.enter_context(_serve_metrics(options.metrics_port, screen))
            if options.status_port is not None:
                open_here.enter_context(_serve_status(options.status_port, screen))
            code = run_job(options, screen)
    except UsageError as error:
        _refuse(str(error))
    except EdlHvdError as error:
        click.echo(f"edlrun: {error}", err=True)
        code = 1
    sys.exit(code)


def _serve_metrics(where: str, screen: JobScreen) -> StatusServer:
    """Prometheus reads the job there.

    Raises:
        UsageError: Nothing can be served there.
        PlatformError: A package is missing.
    """
    from edl_hvd.cli.metrics_text import check_prometheus, job_metrics
    from edl_hvd.status_server import StatusServer

    check_prometheus()
    server = StatusServer(where, {"/metrics": lambda: job_metrics(screen.latest)})
    screen.note(f"metrics are at {server.url}metrics")
    return server


def _serve_status(where: str, screen: JobScreen) -> StatusServer:
    """Who shares slots out among jobs, such as the operator, reads there how this one stands.

    Raises:
        UsageError: Nothing can be served there.
    """
    from edl_hvd.driver.status import report_of
    from edl_hvd.job_report import PATH
    from edl_hvd.status_server import Document, StatusServer

    server = StatusServer(where, {PATH: lambda: Document(report_of(screen.latest).to_json(), "application/json")})
    screen.note(f"the job's report is at {server.url.rstrip('/')}{PATH}")
    return server


if __name__ == "__main__":
    main()
