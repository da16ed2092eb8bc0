"""The flags with which ``horovodrun`` tunes Horovod, as the variables that Horovod's core reads in each worker.

The names and values are those of Horovod 0.28.1, ``horovod/runner/common/util/config_parser.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edl_hvd.driver.command_line.flags import FlagReader

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Tuning:
    """One flag.

    Attributes:
        flag: Its name.
        variable: What the workers get.
        kind: "count", "number", "text" or "switch" (1 or 0); "opposite" is a switch that is 0 when on, "on" one that
            is nothing when off.
        meaning: For people.
        needs: The flag counts only where this one is given, and on.
        factor: What a count is multiplied by.
        most: Largest number accepted.
        among: The texts accepted, if not any.
    """

    flag: str
    variable: str
    kind: str
    meaning: str
    needs: str = ""
    factor: int = 1
    most: float = math.inf
    among: tuple[str, ...] = ()

    def read(self, flags: FlagReader) -> str | None:
        """The variable's value; ``None`` leaves it alone."""
        if self.kind == "count":
            count = flags.count(self.flag)
            return None if count is None else str(count * self.factor)
        if self.kind == "number":
            number = flags.number(self.flag, self.most)
            return None if number is None else str(number)
        text = flags.given.get(self.flag)
        if text is None:
            return None
        if self.kind == "opposite":
            return "0" if flags.is_on(self.flag) else "1"
        if self.kind == "on":
            return "1" if flags.is_on(self.flag) else None
        if self.among and text not in self.among:
            flags.add_error(f"{self.flag} {text!r} is not known; accepted: {', '.join(self.among)}")
        return text


TUNINGS = (
    Tuning("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", "count",
           "Most data in one fused allreduce, in MiB; 0: no fusion. [128]", factor=1 << 20),
    Tuning("--cycle-time-ms", "HOROVOD_CYCLE_TIME", "number",
           "Milliseconds between two rounds of fusion. [1]"),
    Tuning("--cache-capacity", "HOROVOD_CACHE_CAPACITY", "count",
           "Tensor names remembered between rounds. [1024]"),
    Tuning("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "switch",
           "Reduce within hosts first, then between them."),
    Tuning("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "switch",
           "Gather within hosts first, then between them."),
    Tuning("--torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", "switch",
           "Hierarchical, with NCCL between hosts."),
    Tuning("--autotune", "HOROVOD_AUTOTUNE", "on",
           "Search for good values of the flags above."),
    Tuning("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "text",
           "The trials of the search, as CSV.", "--autotune"),
    Tuning("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "count",
           "Samples left out at first. [3]", "--autotune"),
    Tuning("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "count",
           "Steps of a sample. [10]", "--autotune"),
    Tuning("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "count",
           "Most samples of one search. [20]", "--autotune"),
    Tuning("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "number",
           "Noise of a sample, 0 to 1. [0.8]", "--autotune", most=1),
    Tuning("--timeline-filename", "HOROVOD_TIMELINE", "text",
           "Record Horovod's timeline in this file."),
    Tuning("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "switch",
           "Mark the rounds in the timeline.", "--timeline-filename"),
    Tuning("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "switch",
           "No warning when ranks wait for others."),
    Tuning("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", "count",
           "Seconds until that warning. [60]"),
    Tuning("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "count",
           "Seconds until Horovod stops; 0: never. [0]"),
    Tuning("--mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "switch",
           "No effect without MPI."),
    Tuning("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", "count",
           "Streams of NCCL. [1]"),
    Tuning("--tcp", "NCCL_IB_DISABLE", "on",
           "NCCL without InfiniBand."),
    Tuning("--thread-affinity", "HOROVOD_THREAD_AFFINITY", "count",
           "Processor core of Horovod's own thread. [0]"),
    Tuning("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", "count",
           "Longest time that a collective may take. [30]"),
    Tuning("--log-level", "HOROVOD_LOG_LEVEL", "text",
           "Least that Horovod logs: TRACE, DEBUG, INFO, WARNING, ERROR or FATAL. [WARNING]", among=_LEVELS),
    Tuning("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "opposite",
           "Horovod's log lines with or without the time."),
)  # fmt: skip


def read_tunings(flags: FlagReader) -> dict[str, str]:
    """The variables that the flags of ``flags`` ask for."""
    values = [(tuning, tuning.read(flags)) for tuning in TUNINGS]
    return {
        tuning.variable: value
        for tuning, value in values
        if value is not None and (not tuning.needs or flags.is_on(tuning.needs))
    }
