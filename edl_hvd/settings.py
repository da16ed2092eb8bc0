"""Settings. This module alone reads the environment.

Argument beats ``EDL_HVD_*`` variable beats default. A set of settings is validated as a whole: one
error names everything that is wrong with it. Settings that were renamed are read under their former names, too, with
one line in the log.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edl_hvd.errors import SettingsError, UsageError
from edl_hvd.json_values import former_names, formerly
from edl_hvd.timings import Timing, read_timings
from edl_hvd.values import Best, Interval

logger = logging.getLogger(__name__)

_DRIVER = "EDL_HVD_DRIVER_"
FAMILY_TIMINGS = "EDL_HVD_FAMILY_TIMINGS"
NOTICES = ("off", "auto", "ec2", "google", "azure", "kubernetes")
_AUTO = Interval(0, "auto")
_LEAST = {"keep_newest": 1, "checkpoint_memory_mb": 1, "commit_every": 1, "join_timeout_s": 0.1, "elastic_timeout_s": 1,
          "termination_grace_s": 0, "collective_timeout_s": 1}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a user may set, by argument of ``edl_hvd.elastic`` or by environment.

    Attributes:
        checkpoint: URL of the folder that holds the checkpoints (``EDL_HVD_CHECKPOINT``).
        checkpoint_every: How often one is written (``EDL_HVD_CHECKPOINT_EVERY``).
        keep_newest: Newest checkpoints kept, at least 1 (``EDL_HVD_KEEP_NEWEST``).
        keep_every: The first checkpoint after each multiple of this interval is kept for good (``EDL_HVD_KEEP_EVERY``).
        keep_best: The best checkpoint by this metric is kept (``EDL_HVD_KEEP_BEST``).
        commit_every: Optimizer steps between commits (``EDL_HVD_COMMIT_EVERY``).
        events: File that events are appended to (``EDL_HVD_EVENTS``).
        join_timeout_s: Longest wait for a member of a new world that may have died unseen (``EDL_HVD_JOIN_TIMEOUT``).
        elastic_timeout_s: Longest wait for a world (``HOROVOD_ELASTIC_TIMEOUT``).
        checkpoint_memory_mb: Memory in megabytes that a transfer of a checkpoint may take beside the data itself
            (``EDL_HVD_CHECKPOINT_MEMORY_MB``).
        checkpoint_cpu_fraction: Fraction of this host's processors that writing may take beside the training, above 0
            and at most 1 (``EDL_HVD_CHECKPOINT_CPU_FRACTION``).
        take_over: Take the checkpoint URL from another job that lives, and so end that job (``EDL_HVD_TAKE_OVER``).
        on_checkpoint_failure: What a checkpoint that cannot be written does to the job, "warn" or "stop"
            (``EDL_HVD_ON_CHECKPOINT_FAILURE``).
        termination_grace_s: Between SIGTERM and SIGKILL, where nothing else is known (``EDL_HVD_TERMINATION_GRACE``).
        collective_timeout_s: How long all workers may wait for each other, none of them in a collective that all have
            started (``EDL_HVD_COLLECTIVE_TIMEOUT``).
        notices: Whom to ask whether this host is about to go: "auto", "off", "ec2", "google", "azure" or "kubernetes"
            (``EDL_HVD_NOTICES``).
        restart_lost_progress: Start over when all progress is lost, instead of ending in an error
            (``EDL_HVD_RESTART_LOST_PROGRESS``).
    """

    checkpoint: str | None = None
    # No default place is right for everyone; without one a job keeps its state in memory only.
    checkpoint_every: Interval = _AUTO
    # A fixed one is too rare where all hosts may go at once, and elsewhere more than is needed (docs/simulate.md).
    keep_newest: int = 3
    # The newest, the one before in case the newest is damaged, and one to compare with.
    keep_every: Interval | None = None
    # Off: storage for checkpoints that stay is paid for as long as they stay.
    keep_best: Best | None = None
    # Only the script knows which number tells.
    checkpoint_memory_mb: int = 64
    # Sixteen connections to S3 at once: on two cores more of them are not faster.
    checkpoint_cpu_fraction: float = 0.01
    # Where every processor computes, steps took 1.08 times as long with 0.02, and 1.01 times with this.
    take_over: bool = False
    # It ends another job.
    on_checkpoint_failure: str = "warn"
    # The next one may succeed, and so may the training.
    commit_every: int = 1
    # A commit costs half a millisecond; above 1 it costs a copy of the state, and a lost world this many steps.
    events: str | None = None
    # Nothing is written that was not asked for.
    join_timeout_s: float = 5.0
    # Stock driver only: it tells nobody that a starting worker died, so the others ask again after this.
    elastic_timeout_s: float = 600.0
    # Horovod's own default.
    termination_grace_s: float = 30.0
    # That of Kubernetes; Slurm gives as much.
    collective_timeout_s: float = 60.0
    # Such a wait never ends, so this only has to outlast what looks like one for a moment: a worker that is about to
    # start its part. Four beats tell that; a minute is what Horovod takes before it speaks of a stalled collective.
    notices: str = "auto"
    # What the machine's firmware says costs nothing to read, and a platform is asked every few seconds.
    restart_lost_progress: bool = False
    # Silently training from random weights again is the worst outcome; it has to be asked for.

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} is too small; expected at least {least}"
            for name, least in _LEAST.items()
            if getattr(self, name) < least
        ]
        if self.checkpoint is not None and not self.checkpoint.strip():
            problems.append("checkpoint='' is empty; expected a folder or a URL such as 's3://bucket/run'")
        if not 0 < self.checkpoint_cpu_fraction <= 1:
            problems.append(
                f"checkpoint_cpu_fraction={self.checkpoint_cpu_fraction!r}; expected above 0 and at most 1, e.g. 0.01"
            )
        if self.on_checkpoint_failure not in ("warn", "stop"):
            problems.append(f"on_checkpoint_failure={self.on_checkpoint_failure!r}; expected 'warn' or 'stop'")
        if self.notices not in NOTICES:
            problems.append(f"notices={self.notices!r}; expected one of {', '.join(NOTICES)}")
        _raise_all(problems)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Settings:
        """Defaults, then the environment, then every argument that is not ``None``.

        Raises:
            SettingsError: With one line per problem.
        """
        values: dict[str, Any] = {}
        arguments, problems = _with_present_names(arguments, FORMER_ARGUMENTS)
        environ, twice = _with_present_names(environ, FORMER_VARIABLES)
        problems += twice
        for variable, (name, read) in _VARIABLES.items():
            if arguments.get(name) is None and environ.get(variable, "") != "":
                try:
                    values[name] = read(environ[variable])
                except ValueError as error:
                    problems.append(f"{variable}={environ[variable]!r}: {error}")
        for name, value in arguments.items():
            if name not in {setting.name for setting in fields(cls)}:
                problems.append(f"{name!r} is not a setting")
            elif value is not None:
                try:
                    values[name] = _WORDS[name](value) if name in _WORDS else value
                except SettingsError as error:
                    problems.append(f"{name}: {error}")
        _raise_all(problems)
        return replace(cls(), **values)


def platform_addresses(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Where platforms are asked for notices, by their names, as far as the environment moves them elsewhere."""
    found = {"ec2": environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/")}
    if environ.get("GCE_METADATA_HOST"):
        found["google"] = f"http://{environ['GCE_METADATA_HOST']}"
    return {name: address for name, address in found.items() if address}


@dataclass(frozen=True)
class TeacherSettings:
    """Where teachers are, and the secret that they and their students share.

    Attributes:
        source: Host source (``EDL_HVD_TEACHERS``); empty for none.
        token: The secret (``EDL_HVD_TEACHERS_TOKEN``); empty for none.
        token_file: File that holds the secret (``EDL_HVD_TEACHERS_TOKEN_FILE``); empty for none.
        tls_ca: File of the CAs that teachers are verified by, or "system" (``EDL_HVD_TEACHERS_TLS_CA``); empty for
            connections without TLS.
    """

    source: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls_ca: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TeacherSettings:
        """The values of the four variables."""
        words = ("", "_TOKEN", "_TOKEN_FILE", "_TLS_CA")
        names = [f"EDL_HVD_TEACHERS{word}" for word in words]
        return cls(*(environ.get(name, "").strip() for name in names))


@dataclass(frozen=True)
class Driver:
    """Where this worker's driver is, and who the worker is for it: what ``edlrun`` puts into its environment.

    Attributes:
        address: Of its control port.
        port: Its control port.
        token: The job's secret.
        worker: This worker as ``host:slot``.
        incarnation: Which process of its slot this is.
        rank, size, local_size: Its place in the job as far as the driver knows when it starts the worker.
        seed: Of the job, for what the script does not seed, in [1, 2**32); 0 for none.
    """

    address: str
    port: int
    token: str
    worker: str
    incarnation: int = field(metadata=formerly("life"))
    rank: int = 0
    size: int = 1
    local_size: int = 1
    seed: int = 0

    def as_environment(self) -> dict[str, str]:
        """The variables that :meth:`from_environment` reads."""
        return {f"{_DRIVER}{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Driver | None:
        """``None`` if no driver started this process."""
        if f"{_DRIVER}ADDRESS" not in environ:
            return None
        try:
            given = {
                name.removeprefix(_DRIVER).lower(): word for name, word in environ.items() if name.startswith(_DRIVER)
            }
            given |= {new: given[old] for old, new in former_names(cls).items() if old in given}
            words = {one.name: given[one.name] for one in fields(cls)}
            texts = {name: words.pop(name) for name in ("address", "token", "worker")}
            return cls(**texts, **{name: int(word) for name, word in words.items()})  # type: ignore[arg-type]
        except (KeyError, ValueError) as error:
            raise SettingsError(f"EDL_HVD_DRIVER_* are set by edlrun, do not set them; found {error}") from error


@dataclass(frozen=True)
class Launch:
    """How this process was started: what ``horovodrun`` puts into a worker's environment.

    Attributes:
        address: Host of the launcher's rendezvous server; ``None`` when no launcher started us.
        port: Its port.
        mpi: An MPI launcher started us, as one of several.
        elastic: The launcher may change the world.
        host: This worker's host as the launcher names it.
        interface: Network interface to use, or ``None`` for any.
        rank, size, local_rank, local_size: The assignment at start. Under ``edlrun`` it is what the driver expects;
            only the local rank is certain.
        run: Names this run of the job: the same on all its workers, and on no other's.
        driver: Our own driver, when ``edlrun`` started us; else ``None``.
    """

    address: str | None = None
    port: int = 0
    mpi: bool = False
    elastic: bool = False
    host: str = "localhost"
    interface: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    run: str = "alone"
    driver: Driver | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            if not (text.isascii() and text.removeprefix("-").isdecimal()):
                raise SettingsError(f"{name}={text!r} is not a whole number; it is set by the launcher, do not set it")
            return int(text)

        # srun tells a PMIx process its rank, and the number of its step's tasks in a variable of Slurm's own.
        pmix_size = number("SLURM_STEP_NUM_TASKS", 1) if "PMIX_RANK" in environ else 1
        driver = Driver.from_environment(environ)
        if driver is not None:
            host, _, slot = driver.worker.rpartition(":")
            return cls(
                elastic=True,
                host=host,
                interface=environ.get("HOROVOD_GLOO_IFACE") or None,
                rank=driver.rank,
                size=driver.size,
                local_rank=int(slot),
                local_size=driver.local_size,
                run=_name_of_run(environ),
                driver=driver,
            )
        return cls(
            address=environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or None,
            port=number("HOROVOD_GLOO_RENDEZVOUS_PORT", 0),
            mpi=max(number("OMPI_COMM_WORLD_SIZE", 1), number("PMI_SIZE", 1), pmix_size) > 1,
            elastic=environ.get("HOROVOD_ELASTIC") == "1",
            host=environ.get("HOROVOD_HOSTNAME", "localhost"),
            interface=environ.get("HOROVOD_GLOO_IFACE") or None,
            rank=number("HOROVOD_RANK", number("OMPI_COMM_WORLD_RANK", number("PMI_RANK", number("PMIX_RANK", 0)))),
            size=number("HOROVOD_SIZE", number("OMPI_COMM_WORLD_SIZE", number("PMI_SIZE", pmix_size))),
            local_rank=number("HOROVOD_LOCAL_RANK", number("OMPI_COMM_WORLD_LOCAL_RANK", number("SLURM_LOCALID", 0))),
            local_size=number("HOROVOD_LOCAL_SIZE", number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)),
            run=_name_of_run(environ),
        )


def _name_of_run(environ: Mapping[str, str]) -> str:
    """From what only the workers of one run share; shows nothing of it, for it may be the job's secret."""
    shared = environ.get("EDL_HVD_DRIVER_TOKEN")
    if not shared and environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        # As long as horovodrun lives nobody else has this port.
        shared = ":".join(environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT"))
    return hashlib.sha256((shared or secrets.token_hex()).encode()).hexdigest()[:16]


_OF_ONE_WORKER = (_DRIVER, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_",
                  "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_", "HOROVOD_WORLD_KEY")  # fmt: skip


def own_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What workers inherit from their driver: everything but the variables that say who a worker is.

    Variables have their present names: the driver has said what became of the former ones, its workers need not.
    """
    names = {name: new for name, new in FORMER_VARIABLES.items() if new not in environ}
    return {names.get(name, name): value for name, value in environ.items() if not name.startswith(_OF_ONE_WORKER)}


def family_timings(environ: Mapping[str, str] = os.environ) -> tuple[Timing, ...]:
    """What earlier jobs of this job's family have measured: ``EDL_HVD_FAMILY_TIMINGS``, set by whoever runs many jobs.

    Raises:
        SettingsError: The variable does not read.
    """
    try:
        return read_timings(environ.get(FAMILY_TIMINGS, ""))
    except UsageError as error:
        raise SettingsError(
            f"{FAMILY_TIMINGS} is set by a fleet or an operator, do not set it; found that {error}"
        ) from None


def left_out_patches(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Names of the changes of other libraries that are not to be made: ``EDL_HVD_WITHOUT_PATCHES``, commas between."""
    return frozenset(name.strip() for name in environ.get("EDL_HVD_WITHOUT_PATCHES", "").split(",") if name.strip())


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where built wheels and logs are kept: ``EDL_HVD_CACHE``, else the user's cache folder."""
    if environ.get("EDL_HVD_CACHE"):
        return Path(environ["EDL_HVD_CACHE"])
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edl_hvd"


def runtime_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where this user's running jobs may be found; new ones go to the first.

    ``XDG_RUNTIME_DIR`` counts only when it is this user's: ``sudo`` may leave that of somebody else in place.
    """
    everywhere = Path(f"/tmp/edl_hvd-{os.getuid()}")
    named = environ.get("XDG_RUNTIME_DIR")
    try:
        if named and os.stat(named).st_uid == os.getuid() and os.path.isdir(named):
            return (Path(named) / "edl_hvd", everywhere)
    except OSError:
        pass  # a login's folder ends with the login
    return (everywhere,)


def process_environment() -> dict[str, str]:
    """A copy of the environment, for code that looks programs up in it or starts them with it."""
    return dict(os.environ)


def _with_present_names(given: Mapping[str, Any], present: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """What is given, under present names, and a problem for each setting that is given under both of its names."""
    renamed, problems = dict(given), []
    for former, name in present.items():
        value = renamed.pop(former, None)
        if value is None or value == "":
            continue
        if renamed.get(name) not in (None, ""):
            problems.append(f"{former} and {name} are one setting; expected {name} alone")
            continue
        _warn_of_former_name(former, name)
        renamed[name] = value
    return renamed, problems


@functools.cache
def _warn_of_former_name(former: str, name: str) -> None:
    """Once in a process. A logger that nobody has configured writes this line, and nothing else, to standard error."""
    logger.warning("%s is now called %s; the former name is accepted in this version only", former, name)


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise SettingsError("invalid settings:\n" + "\n".join(f"  {problem}" for problem in problems))


def _whole(text: str) -> int:
    if not (text.isascii() and text.strip().isdecimal()):
        raise ValueError("expected a whole number")
    return int(text)


def _seconds(text: str) -> float:
    interval = Interval.parse(text)
    if interval.unit != "seconds":
        raise ValueError("expected a time such as '30s' or '10min'")
    return interval.count


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


_WORDS: dict[str, Callable[[Any], Any]] = {
    "checkpoint_every": Interval.parse_or_auto,
    "keep_every": Interval.parse_counted,
    "keep_best": Best.parse,
}
# Arguments that are written as in the environment.

_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "EDL_HVD_CHECKPOINT": ("checkpoint", str),
    "EDL_HVD_CHECKPOINT_EVERY": ("checkpoint_every", Interval.parse_or_auto),
    "EDL_HVD_KEEP_NEWEST": ("keep_newest", _whole),
    "EDL_HVD_KEEP_EVERY": ("keep_every", Interval.parse_counted),
    "EDL_HVD_KEEP_BEST": ("keep_best", Best.parse),
    "EDL_HVD_CHECKPOINT_MEMORY_MB": ("checkpoint_memory_mb", _whole),
    "EDL_HVD_CHECKPOINT_CPU_FRACTION": ("checkpoint_cpu_fraction", float),
    "EDL_HVD_TAKE_OVER": ("take_over", _flag),
    "EDL_HVD_ON_CHECKPOINT_FAILURE": ("on_checkpoint_failure", str),
    "EDL_HVD_COMMIT_EVERY": ("commit_every", _whole),
    "EDL_HVD_EVENTS": ("events", str),
    "EDL_HVD_JOIN_TIMEOUT": ("join_timeout_s", _seconds),
    "HOROVOD_ELASTIC_TIMEOUT": ("elastic_timeout_s", _seconds),
    "EDL_HVD_TERMINATION_GRACE": ("termination_grace_s", _seconds),
    "EDL_HVD_COLLECTIVE_TIMEOUT": ("collective_timeout_s", _seconds),
    "EDL_HVD_NOTICES": ("notices", str),
    "EDL_HVD_RESTART_LOST_PROGRESS": ("restart_lost_progress", _flag),
}
FORMER_VARIABLES = {
    "EDL_HVD_KEEP": "EDL_HVD_KEEP_NEWEST",
    "EDL_HVD_CHECKPOINT_SHARE": "EDL_HVD_CHECKPOINT_CPU_FRACTION",
    "EDL_HVD_MEET_TIMEOUT": "EDL_HVD_JOIN_TIMEOUT",
    "EDL_HVD_GRACE": "EDL_HVD_TERMINATION_GRACE",
}
FORMER_ARGUMENTS = {"keep": "keep_newest", "checkpoint_share": "checkpoint_cpu_fraction"}
