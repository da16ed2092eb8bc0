"""What an elastic function repeats when it runs again in the next world.

These are the options of optimizers that it sets, what it does before its loops over epochs, the top of the epoch that
is continued, and its local variables. What can be restored is restored; of the rest the user is warned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.worker.commits.epoch_top import EpochTop, TopChanges
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import numeric_options
from edl_hvd.worker.data_sets import DataSetValues
from edl_hvd.worker.loop_sums import BegunVariable, LoopSums
from edl_hvd.worker.script_locals import ScriptLocals
from edl_hvd.worker.script_objects import OptimizerNumbers, ScriptObjects
from edl_hvd.worker.weight_copies import weight_copies

_MOST_NAMES = 6  # of numbers in one warning


class FunctionReruns:
    """What the present run of an elastic function repeats of the run before.

    Args:
        store: State of the job.
        optimizers: Distributed optimizers of the state.
        warn_once: Called with what a warning is about, and its text.
    """

    def __init__(self, store: StateStore, optimizers: Sequence[Any], warn_once: Callable[[str, str], None]) -> None:
        self._store = store
        self._optimizers = optimizers
        self._warn_once = warn_once
        self._options: list[dict[str, Any]] | None = None  # before the function ran; None where nothing is compared
        self._options_set: list[dict[str, Any]] = []  # at its first loop over epochs
        self._is_first_epoch = False  # of this run
        self._top: EpochTop | None = None
        self._before_loop: EpochTop | None = None  # the state since which the function has begun, or a loop ended
        self._loop_count = 0  # loops over epochs that this run has come to
        self._copies: set[str] = set()  # variables of this run that are copies of weights, and are named
        self._locals: ScriptLocals | None = None
        self._objects: ScriptObjects | None = None
        self._counts = OptimizerNumbers(())
        self._is_continued = False  # the present epoch, in another world than before
        self._sums: dict[str, LoopSums] = {}  # of the loops under way, by "an epoch" and "an evaluation"
        # Of those that have ended in this epoch, in whichever way: what they have changed, as it was when they began.
        self._ended: dict[str, dict[str, BegunVariable]] = {}
        self._has_named: set[str] = set()  # local variables of the function that begin anew
        self._has_looked = False  # at these objects, when the first epoch was over
        self._data_sets = DataSetValues(store, warn_once)

    @property
    def is_continued(self) -> bool:
        """Whether the present epoch has begun in another world, and goes on."""
        return self._is_continued

    def begin_function(self) -> None:
        """The elastic function is about to run, for the first time or again."""
        self._options = numeric_options(self._optimizers) if self._store.step else None
        self._is_first_epoch = True
        self._locals = self._objects = None
        self._has_looked = False
        self._data_sets.begin_function()
        self._loop_count, self._copies = 0, set()
        self.leave_epochs()
        for optimizer in self._optimizers:
            optimizer.stepping.kept_groups = len(optimizer.param_groups) if self._store.step else 0

    def leave_epochs(self) -> None:
        """What comes now stands before a loop over epochs, if there is one more."""
        self._before_loop = EpochTop.of(self._store, is_continued=self._store.begun_loops > self._loop_count)

    def enter_epochs(self, count: int) -> None:
        """A loop over epochs is about to begin, to be continued, or to be left out.

        Where it has begun in a run before, what the function has done before it is restored.

        Args:
            count: The epoch that it ends before.
        """
        store, number, top = self._store, self._loop_count, self._before_loop
        self._before_loop = None
        self._loop_count += 1
        if not number:
            self._options_set = numeric_options(self._optimizers)
        if top is not None:
            # A loop that is entered again after its end is another one, such as one of a single epoch each time.
            is_last = number == store.begun_loops - 1
            has_run = number < store.begun_loops and (top.epoch >= count or (is_last and top.epoch < store.epochs_end))
            if has_run == top.is_continued:
                self._warn_of_writes(top.close(store, is_function=True, keeps_options=not number), is_first=not number)
                if has_run:
                    self._warn_of_copies(
                        "function.copies", "before its loop over epochs", "take it before that function is called"
                    )
        if store.epoch < count:
            store.begun_loops, store.epochs_end = self._loop_count, count

    def begin_epoch(self, is_begun: bool) -> None:
        """The body of the present epoch begins.

        Args:
            is_begun: Whether samples of this epoch have been trained on.
        """
        self._warn_of_options()
        self._warn_of_memories()
        self._mark_script()
        self._data_sets.begin_epoch()
        # A later epoch of the same run has not been interrupted: its top runs for the first time, or as the script
        # wants it.
        is_continued = self._is_continued = is_begun and self._is_first_epoch
        if not is_continued:
            self._ended.clear()
        self._top = EpochTop.of(self._store, is_continued)
        self._is_first_epoch = False
        if is_continued:
            self._store.rewind_generators()
        else:
            self._store.note_generators()

    def begin_batches(self, data_set: Any = None) -> None:
        """A loop over batches begins: what the top of an epoch that is continued has changed again is restored.

        Args:
            data_set: Data set of its loader; ``None`` where it has none.
        """
        self._mark_script()
        self._restore_top()
        self._data_sets.begin_batches(data_set, self._store.epoch, self._is_continued)

    def _restore_top(self) -> None:
        self._begin_sums("an epoch", self._is_continued, "at its top", "of the epoch")
        self._before_loop = None
        top, self._top = self._top, None
        if top is None:
            return
        options, epoch = numeric_options(self._optimizers), self._store.epoch
        lost = top.close(self._store).lost
        if top.is_continued:
            self._warn_of_copies("top.copies", f"at the top of epoch {epoch}, which is continued", "keep it in State")
        if options != numeric_options(self._optimizers):
            self._warn_once(
                "top.options",
                f"the top of epoch {epoch}, which is continued, has changed options of an optimizer once more, such as "
                "its rate; they are put back, as the top of an epoch counts once. What depends on the number of "
                "workers belongs into state.on_resize(…) or a batch policy",
            )
        if lost:
            tensor = min(lost).replace("/", ".")
            self._warn_once(
                "top.weights",
                f"the top of epoch {epoch}, which is continued, has changed {tensor}, which it had not when it ran "
                "before, so a job without interruption learns something else; do it behind a loop over batches instead",
            )

    def end_batches(self) -> None:
        """A loop over batches has come to its end, or the script has left it."""
        self._end_sums("an epoch")

    def begin_evaluation(self, is_begun: bool) -> None:
        """A loop over a validation set begins, or goes on where the last commit was.

        Args:
            is_begun: Whether it goes on.
        """
        self._begin_sums("an evaluation", is_begun, "before it", "of the validation set")

    def end_evaluation(self) -> None:
        """It has come to its end, or the script has left it."""
        self._sums.pop("an evaluation", None)

    def _begin_sums(self, loop: str, is_continued: bool, place: str, whole: str) -> None:
        """Note what the script holds as a loop begins; warn of what begins anew where the loop goes on.

        Args:
            loop: What it is.
            is_continued: Whether samples have been counted in another world.
            place: Where the script sets it.
            whole: What it would be a sum of.
        """
        before = self._ended.pop(loop, {})
        sums = self._sums[loop] = LoopSums()
        names = [name for name in sums.begun_anew(before) if name not in self._has_named] if is_continued else []
        if names:
            shown = ", ".join(names[:_MOST_NAMES])
            self._warn_once(
                f"sums.{loop}",
                f"the world has changed in {loop}, which goes on where it was, and {shown}, set {place}, begins anew, "
                f"so what it counts is a part {whole}; count with a metric of edl_hvd.metrics in State",
            )

    def _end_sums(self, loop: str) -> None:
        sums = self._sums.pop(loop, None)
        if sums is not None:
            self._ended[loop] = sums.end()

    def _mark_script(self) -> None:
        """The first loop of this run begins: note what the script holds by then."""
        if self._locals is None:
            self._locals, self._objects = ScriptLocals.now(), ScriptObjects.now(self._store)
            self._counts = OptimizerNumbers(self._optimizers)

    def end_function(self, is_over: bool) -> None:
        """The function has been left; warn of what the next run, or a worker that joins, has not.

        Args:
            is_over: Whether it is not going to run again.
        """
        self._before_loop = None
        before, self._locals = self._locals, None
        objects, self._objects = self._objects, None
        for loop in tuple(self._sums):
            self._end_sums(loop)
        if is_over or before is None or objects is None:
            return
        self._data_sets.end_function()
        names = before.lost()
        self._has_named.update(names)
        if names:
            self._warn_once(
                "function.locals",
                "local variables of the script begin anew, because the elastic function runs again in the next world, "
                f"as on each worker that joins: {', '.join(names)}; keep in State what its loop changes, as "
                f"state.{names[0]}",
            )
        numbers = objects.lost()
        if numbers:
            more = f" and {len(numbers) - _MOST_NAMES} more" if len(numbers) > _MOST_NAMES else ""
            self._warn_once(
                "function.objects",
                "numbers on objects of the script that are not in State begin anew on each worker that joins, and "
                f"count twice where a step is made again: {', '.join(numbers[:_MOST_NAMES])}{more}; keep in State what "
                f"the loop changes, as state.{numbers[0].rpartition('.')[2]}, or give the object state_dict() and "
                "load_state_dict() and give it to State",
            )

        names = objects.lost_variables()
        if names:
            self._warn_once(
                "function.shared",
                "variables that the loop changes through nonlocal or global, or writes into, begin anew on each worker "
                f"that joins, and count twice where a step is made again: {', '.join(names[:_MOST_NAMES])}; keep in "
                f"State what the loop changes, as state.{names[0]}",
            )

    def _warn_of_writes(self, changes: TopChanges, is_first: bool) -> None:
        """Warn of what the function has changed before a loop over epochs, where it had changed it in a run before.

        Args:
            changes: What it has changed.
            is_first: Whether no loop over epochs stands before that one; behind one nothing is wrong with it.
        """
        if changes.lost:
            self._warn_once(
                "function.lost",
                "the elastic function, which runs again in each world, has changed "
                f"{_name(min(changes.lost))} before a loop over epochs, after step {self._store.step}, which it had "
                "not when it ran before, so a job without interruption learns something else; do it before that "
                "function is called",
            )
        if changes.restored and is_first:
            self._warn_once(
                "function.writes",
                "the elastic function, which runs again in each world, has changed "
                f"{_name(changes.restored[0])} before its loop over epochs, after step {self._store.step}; it is put "
                "back, because the training goes on from there; do it before that function is called, and what depends "
                "on the number of workers in state.on_resize(…)",
            )

    def _warn_of_copies(self, about: str, place: str, way: str) -> None:
        """Warn of copies of weights that the function has taken again.

        Args:
            about: What the warning is about.
            place: Where it takes them.
            way: How to take them once.
        """
        names = weight_copies(self._store) - self._copies
        self._copies |= names
        if names:
            self._warn_once(
                about,
                f"{min(names)} is a copy of weights that the elastic function takes again in each world, {place}: "
                f"now it is of step {self._store.step}, and in a job without interruption of an earlier one; {way}",
            )

    def _warn_of_memories(self) -> None:
        """The first epoch is over: warn of what a module or an object outside State remembers of it."""
        if self._objects is None or self._has_looked:
            return
        self._has_looked = True
        names = self._objects.moved_memories()
        if names:
            self._warn_once(
                "function.memories",
                f"{', '.join(names[:_MOST_NAMES])} has changed in the training and is not in State: each worker has "
                "its own, and one that joins has the first values; change it behind the loop over a step, from what "
                f"all workers have, and give {names[0].partition('.')[0]} to State",
            )

        # A loop of one's own may draw what has to differ between workers, such as an exploration.
        names = self._objects.moved_generators() if any(True for _ in self._store.of_kind(ElasticBatchSampler)) else []
        if names:
            self._warn_once(
                "function.generators",
                f"{', '.join(names[:_MOST_NAMES])} has been drawn from in the training and is not in State: each "
                "worker has its own, so what is drawn may depend on how many workers there are, and one that joins "
                "begins anew; draw from torch, numpy or random themselves, which are seeded alike in every world, or, "
                "at the level of a step or an epoch, from a generator that State(…) was given",
            )

        names = self._counts.moved()
        if names:
            self._warn_once(
                "function.counts",
                f"{', '.join(names[:_MOST_NAMES])} is a number that the optimizer counts with beside its state_dict(): "
                "a worker that joins and a job that is resumed begin with the first value, and a worker without a "
                "micro-batch may not count; keep it in param_groups or in the optimizer's state",
            )

    def _warn_of_options(self) -> None:
        """Warn where the function has set options of optimizers before its first epoch, as it does in each world."""
        before, self._options = self._options, None
        now = self._options_set
        for was, group in zip(before or (), now, strict=False):
            changed = next((key for key, value in group.items() if key in was and was[key] != value), None)
            if changed is not None:
                self._warn_once(
                    "function.options",
                    f"the elastic function, which runs again in each world, has set {changed} of an optimizer before "
                    f"its loop over epochs, from {was[changed]:g} to {group[changed]:g} after step {self._store.step}, "
                    "so what the training had made of it is lost; set it before that function is called, and what "
                    "depends on the number of workers in state.on_resize(…)",
                )


def _name(tensor: str) -> str:
    """How the script names a tensor of the state."""
    return f"state.{tensor.removeprefix('buffer/').replace('/', '.').replace('..', '.')}"
