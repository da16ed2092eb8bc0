"""The present state of a training: the objects given to ``State`` and the counters of the run, captured and loaded."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import StateError
from edl_hvd.metrics.metric import Metric
from edl_hvd.rescale.learning import Learning
from edl_hvd.rescale.policy import Ramp
from edl_hvd.worker.codec import Encoded, EncodingCache, decode, encode, placed
from edl_hvd.worker.commits.dirty import DirtyTracker, fingerprint
from edl_hvd.worker.commits.handlers import GENERATORS, Handler, ModuleHandler, copy_tensors, handler_for
from edl_hvd.worker.commits.module_changes import ModuleChanges
from edl_hvd.worker.commits.parameter_changes import ParameterChanges, has_carried, is_gradient
from edl_hvd.worker.commits.same_objects import SameObjects
from edl_hvd.worker.training.optimizer import is_distributed, join

METRICS = "_metrics"
# The attribute with the last value of each metric; it goes where the others go, into commits and to newcomers.

_DEALT = (ElasticBatchSampler, EvaluationSampler)
_OF_EACH_RANK = (Metric, *_DEALT)


class LiveState:
    """The attributes and counters of a ``State`` as they are now.

    Args:
        attributes: Everything given to ``State``, by name.

    Attributes:
        attributes: Plain attributes by name; the live values.
        handlers: Handlers of all other attributes, by name.
        step: Optimizer steps of the whole run.
        epoch: Epochs finished.
        samples: Samples consumed by the whole run.
        ramp: Learning-rate factor.
        learning: What the run has found out about the learning rate.
        commit: Number of the last commit; -1 before this process has held any state.
        top_writes: Names of tensors that commits may leave out, and that the script has written by itself at the top of
            an epoch, or before a loop over epochs.
        step_writes: Names of tensors that the present state has from behind the top of the next step, which has been
            made before and is made again.
        is_behind_step_top: Whether the script has made the top of a step, and is in its first loop over that step.
        top_generators: States of random generators when the present epoch began, packed in JSON, by attribute.
        begun_loops: Number of the elastic function's loops over epochs that have begun.
        epochs_end: The epoch that the last of them ends before.
        kept_change: What the script had changed by itself, and the last :meth:`StateStore.restore` left so; empty for
            nothing.
        same_objects: Lists, dictionaries and tensors of plain attributes that stay the same objects.
        tracker: Tells which tensors have changed since the last commit.
        reduction: Sums the gradients of all distributed optimizers; ``None`` where there is none.
        exact: Whether the result must not depend on the world by a single bit.
        can_skip_parameters: Whether a commit may leave out what the optimizers step.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.handlers: dict[str, Handler] = {}
        self._kinds: dict[Any, tuple[Any, ...]] = {}  # what of_kind has found: the objects stay the same
        self.attributes: dict[str, Any] = {}
        distributed = {name: value for name, value in attributes.items() if is_distributed(value)}
        models = {name: value for name, value in attributes.items() if isinstance(value, torch.nn.Module)}
        self._optimizers = list(distributed.values())
        self.reduction = join(self._optimizers, models, list(distributed))
        self.tracker = DirtyTracker(self._optimizers)
        self._changes = ParameterChanges(models, distributed, self.reduction)
        self._module_changes = ModuleChanges(models)
        for name, value in attributes.items():
            handler = handler_for(name, value, self.tracker.stepped.parameters, self.tracker.frozen)
            if handler is None:
                self.attributes[name] = value
            else:
                self.handlers[name] = handler
        kept = [
            tensor
            for name, handler in self.handlers.items()
            for tensor in encode(handler.capture(), name).tensors.values()
        ]
        stepped = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        self.same_objects = SameObjects({n: v for n, v in self.attributes.items() if n != METRICS}, [*kept, *stepped])
        self._encodings = {name: EncodingCache(name, handler) for name, handler in self.handlers.items()}
        # What is computed again after a commit that left parameters out may be computed with parameters ahead of it,
        # buffers for one.
        self.exact = any(optimizer.stepping.exact for optimizer in self._optimizers)
        self.can_skip_parameters = self._finds_stepped_parameters()
        self.step = self.epoch = self.samples = 0
        self.ramp = Ramp()
        self.learning = Learning()
        self.commit = -1
        self.top_writes: frozenset[str] = frozenset()
        self.step_writes: frozenset[str] = frozenset()
        self.is_behind_step_top = False
        self.kept_change = ""
        self.top_generators: dict[str, Any] = {}
        self.begun_loops = self.epochs_end = 0

    def of_kind(self, kind: type | Callable[[object], bool]) -> Iterable[Any]:
        """Return the handled objects of a class, or those for which a predicate holds, in the order given."""
        found = self._kinds.get(kind)
        if found is None:
            matches = (lambda value: isinstance(value, kind)) if isinstance(kind, type) else kind
            found = self._kinds[kind] = tuple(h.value for h in self.handlers.values() if matches(h.value))
        return found

    def generator_states(self) -> dict[str, Encoded]:
        """Return the states of random generators, by attribute; their tensors are copies."""
        return {n: encode(h.capture(), n) for n, h in self.handlers.items() if isinstance(h, GENERATORS)}

    def note_generators(self) -> None:
        """An epoch begins: its top draws from generators in these states."""
        self.top_generators = {name: _packed(state) for name, state in self.generator_states().items()}

    def rewind_generators(self) -> None:
        """The top of the present epoch is about to run again: have it draw the same numbers."""
        for name, state in self.top_generators.items():
            self.handlers[name].load(_unpacked(state))

    def module_numbers(self) -> dict[str, int | float]:
        """Return the numbers of modules that differ from what they were when the state was made, by name."""
        return self._module_changes.numbers()

    # --- capturing ---

    def live(self, number: int) -> Encoded:
        """Return the present state as commit ``number``; its tensors are live."""
        return self._captured(number, lambda handler: handler.capture())

    def delta(self, number: int) -> Encoded:
        """Return the same without what only optimizer steps change, and without what nothing changes."""
        return self._captured(number, lambda handler: handler.capture_delta())

    def merged(self, delta: Encoded, ahead: Sequence[int]) -> Encoded:
        """Return a whole state: a delta, and what it left out as it is now.

        Args:
            delta: State that :meth:`delta` returned.
            ahead: Number of steps of each optimizer that what was left out has, and the delta lacks.
        """
        plain, tensors = dict(delta.plain["attributes"]), dict(delta.tensors)
        for name, handler in self.handlers.items():
            if handler.has_delta:
                live, parts = self._encodings[name].encoded()
                plain[name] = handler.merge_delta(live, plain[name])
                tensors = {**parts, **tensors}
        counters = {**delta.plain["counters"], "ahead": list(ahead), "ahead_samples": self._samples_of(ahead)}
        return Encoded({"counters": counters, "attributes": plain}, tensors)

    def names_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Return the names that these live tensors have in a whole state."""
        places = {tensor.data_ptr() for tensor in tensors if tensor.nbytes}
        live = self.merged(self.delta(self.commit), self.to_skip).tensors
        return frozenset(name for name, tensor in live.items() if tensor.data_ptr() in places)

    @property
    def to_skip(self) -> list[int]:
        """Number of steps of each optimizer that have been made already, and are not made again."""
        return [optimizer.stepping.skip for optimizer in self._optimizers]

    @property
    def repeated_samples(self) -> int:
        """The samples of the next step, if some optimizers have already made it, in a world of any size; else 0."""
        return self._samples_of(self.to_skip)

    def fingerprint(self) -> int:
        """Return a digest of some bytes of every live tensor, in 32 bits: equal for equal states, whatever their size.

        A different state shows with certainty where every element of a tensor differs, as after an optimizer's
        step, and by chance where few do.
        """
        return fingerprint(self.live(self.commit).tensors)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in self.live(self.commit).tensors.values())

    def _captured(self, number: int, capture: Callable[[Handler], Any]) -> Encoded:
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        same: list[str] = []
        for name, handler in self.handlers.items():
            plain[name], parts = encode(capture(handler), name)
            tensors.update(parts)
        for name, value in self.attributes.items():
            try:
                plain[name], parts = encode(value, name)
            except StateError as error:
                raise StateError(f"state.{name} was set to something that cannot be kept: {error}") from None
            tensors.update(parts)
            same += self.same_objects.names(name, value, parts)
        counters = {"step": self.step, "epoch": self.epoch, "samples": self.samples, "commit": number,
                    "ramp": self.ramp.as_dict(), "learning": self.learning.as_dict(),
                    "ahead": self.to_skip, "ahead_samples": self._samples_of(self.to_skip),
                    "modules": self._module_changes.capture(), "top_writes": sorted(self.top_writes),
                    "step_writes": sorted(self.step_writes), "same_objects": same,
                    "top_generators": self.top_generators,
                    "begun_loops": self.begun_loops, "epochs_end": self.epochs_end,
                    "optimizers": self._optimizer_classes(), **self._changes.capture()}  # fmt: skip
        tensors.update(self._changes.carried_gradients())
        tensors.update(self._module_changes.buffers())
        return Encoded({"counters": counters, "attributes": plain}, tensors)

    def _samples_of(self, ahead: Sequence[int]) -> int:
        stepping = [optimizer.stepping for optimizer in self._optimizers]
        return max((made.samples for made, steps in zip(stepping, ahead, strict=True) if steps), default=0)

    # --- loading ---

    def load_live(self, state: Encoded) -> None:
        """Make a whole state the present one.

        Raises:
            StateError: The names of the attributes differ, or an object does not accept its saved state.
        """
        saved, tensors = state.plain["attributes"], state.tensors
        self._check_names(saved)
        self._check_optimizers(state.plain["counters"].get("optimizers", {}))
        self._restore_groups(state.plain["counters"])
        self._restore_layouts(state.plain["counters"])
        for name, handler in self.handlers.items():
            try:
                handler.load(decode(saved[name], tensors))
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateError(f"the saved {name} does not fit the one given to State: {error}") from error
        self._load_attributes(state)
        self._load_counters(state.plain["counters"], tensors)

    def load_delta(self, delta: Encoded, ahead: Sequence[int]) -> None:
        """Make the present state that of a delta, where what it left out is ``ahead`` of it by some steps.

        The script makes these steps again, and they change nothing (``Stepping.skip``).
        """
        saved = delta.plain["attributes"]
        self._restore_groups(delta.plain["counters"])
        self._restore_layouts(delta.plain["counters"])
        for name, handler in self.handlers.items():
            handler.load_delta(decode(saved[name], delta.tensors))
        self._load_attributes(delta)
        self._load_counters({**delta.plain["counters"], "ahead": ahead}, delta.tensors)

    def load_moved(self, plain: Any, moved: dict[str, torch.Tensor]) -> None:
        """Make the present state that of ``plain``, where the live tensors have its values but for ``moved``."""
        self._check_names(plain["attributes"])
        self._restore_groups(plain["counters"])
        self._restore_layouts(plain["counters"])
        self._load_differing(plain, moved, moved, ())
        self._load_counters(plain["counters"], moved)

    def load_changed(self, state: Encoded, names: Set[str], keeps_options: bool = False) -> list[str]:
        """Undo what the script has done since a state of the same step, but for samplers and counters.

        Args:
            state: That state.
            names: Its tensors that live ones differ from, or take the place of.
            keeps_options: Whether optimizers keep the options that they have now.

        Returns:
            Names of what had another value; without metrics, gradients and modes.
        """
        plain, tensors = state
        moved, counters = {name: tensors[name] for name in names}, plain["counters"]
        changed = self._restore_layouts(counters)
        changed += [n for n in self._load_differing(plain, moved, tensors, _DEALT, keeps_options) if n not in changed]
        buffers = self._module_changes.buffers()
        changed += [name for name in names & buffers.keys() if not _is_same(buffers[name], moved[name])]
        changed += _differing_numbers(self._module_changes.capture(), counters["modules"])
        if self._module_changes.capture() != counters["modules"] or names & buffers.keys():
            self._module_changes.restore(counters["modules"], {**buffers, **moved})
        if any(map(is_gradient, names)):
            self._changes.restore_gradients({**self._changes.carried_gradients(), **moved}, counters["present"])
        return sorted(changed)

    def load_position(self, counters: dict[str, Any]) -> list[str]:
        """Restore step, epoch, samples, and what requires a gradient; returns the names of what had another value."""
        changed = [name for name in ("step", "epoch", "samples") if getattr(self, name) != counters[name]]
        self.step, self.epoch, self.samples = counters["step"], counters["epoch"], counters["samples"]
        required, before = self._changes.capture()["requires_grad"], counters["requires_grad"]
        if required != before:
            self._changes.restore_requires_grad(before)
        return changed + sorted(f"{name}.requires_grad" for name in required.keys() ^ before.keys())

    def _load_differing(
        self,
        state: Any,
        moved: dict[str, torch.Tensor],
        more: dict[str, torch.Tensor],
        but: tuple[type, ...],
        keeps_options: bool = False,
    ) -> list[str]:
        """Load what differs from a state.

        Args:
            state: The state, without its tensors.
            moved: Tensors of the state that live ones differ from.
            more: Tensors of the state that may have other names than the live ones.
            but: Classes whose objects are not loaded.
            keeps_options: Whether optimizers keep the options that they have now.

        Returns:
            Names of what had another value, without metrics.
        """
        changed, saved = [], state["attributes"]
        same = state["counters"].get("same_objects", ())
        for name, handler in self.handlers.items():
            if isinstance(handler.value, but):
                continue
            live, tensors = encode(handler.capture(), name)
            arrived, plain = moved.keys() & tensors.keys(), saved[name]
            if keeps_options and isinstance(handler.value, torch.optim.Optimizer):
                plain = {**plain, "param_groups": live["param_groups"]}
            if not isinstance(handler.value, Metric):
                changed += _differing(name, Encoded(live, tensors), plain, moved)
            if isinstance(handler.value, (torch.nn.Module, torch.optim.Optimizer)):
                copy_tensors({key: tensors[key] for key in arrived}, moved)
                if live != plain:
                    handler.load_plain(decode(plain, {**more, **tensors}))
            elif arrived or live != plain:
                handler.load(decode(plain, {**tensors, **placed(plain, moved, tensors)}))
        for name, value in self.attributes.items():
            live, tensors = encode(value, name)
            if live != saved[name] or moved.keys() & tensors.keys():
                changed += [] if name == METRICS else _differing(name, Encoded(live, tensors), saved[name], moved)
                here = {**tensors, **placed(saved[name], moved, tensors)}
                self.attributes[name] = self.same_objects.load(name, saved[name], here, same)
        return changed

    def between(self) -> Encoded:
        """Return the present state, somewhere between two commits, for :meth:`take_over`; its tensors are live."""
        plain, tensors = self.live(self.commit)
        carried = [has_carried(optimizer) for optimizer in self._optimizers]
        stepped = self.tracker.stepped
        between = {**plain, "steps": stepped.steps, "was_dirty": stepped.was_dirty, "carried": carried}
        return Encoded(between, {**tensors, **self._changes.all_gradients()})

    def take_over(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Be where another member is between two commits, but for what each has of its own: share and counts."""
        state = Encoded(plain, self._placed(plain["attributes"], tensors))
        self._restore_layouts(plain["counters"])
        for name, handler in self.handlers.items():
            if not isinstance(handler.value, _OF_EACH_RANK):
                handler.load(decode(plain["attributes"][name], state.tensors))
        self._load_attributes(state)
        for optimizer, steps in zip(self._optimizers, plain["counters"]["ahead"], strict=True):
            optimizer.stepping.skip = steps
        self._changes.restore_gradients(tensors)
        self._module_changes.restore(plain["counters"]["modules"], tensors)
        for optimizer in self._optimizers:
            optimizer._opt_called = True
        for optimizer, is_carried in zip(self._optimizers, plain["carried"], strict=True):
            optimizer.stepping.round_number = optimizer.reduction.round_number - is_carried
        self.tracker.stepped.steps, self.tracker.stepped.was_dirty = list(plain["steps"]), plain["was_dirty"]
        self.tracker.accept_changes()

    def notice_new_parameters(self) -> None:
        """Have the tracker and the handlers know what parameters optimizers have been given since."""
        if self.reduction is None or len(self.reduction.names) == len(self.tracker.stepped.parameters):
            return
        self.tracker.adopt(self.reduction.names)
        self._update_stepped()
        self.tracker.stepped.accept_changes()
        self.tracker.stepped.mark_dirty()

    def _restore_groups(self, counters: dict[str, Any]) -> None:
        """Have the optimizers the groups of a commit: they may have got some since, or lack some."""
        added = counters.get("added_groups", {})
        dropped = self._changes.drop_groups(added)
        if dropped:
            self.tracker.stepped.parameters.difference_update(dropped)
            self._update_stepped()
            self.tracker.stepped.accept_changes()
        self._changes.add_groups(added)

    def _restore_layouts(self, counters: Mapping[str, Any]) -> list[str]:
        """Give buffers the shapes of a commit; returns the names of those that had another."""
        return self._module_changes.restore_layouts(counters.get("modules", {}))

    def _update_stepped(self) -> None:
        for handler in self.handlers.values():
            if isinstance(handler, ModuleHandler):
                handler.set_stepped(self.tracker.stepped.parameters)
        self.can_skip_parameters = self._finds_stepped_parameters()

    def _finds_stepped_parameters(self) -> bool:
        """Whether all that the optimizers step is found again in the models, by name."""
        models = [handler for handler in self.handlers.values() if isinstance(handler, ModuleHandler)]
        return not self.exact and self.tracker.stepped.parameters == set().union(*(model.stepped for model in models))

    def _load_attributes(self, state: Encoded) -> None:
        saved, same = state.plain["attributes"], state.plain["counters"].get("same_objects", ())
        for name in self.attributes:
            self.attributes[name] = self.same_objects.load(name, saved[name], state.tensors, same)

    def _load_counters(self, counters: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore the counters, the gradients, and what else a script changes about parameters."""
        self.step, self.epoch, self.samples = counters["step"], counters["epoch"], counters["samples"]
        self.ramp = Ramp(**counters["ramp"])
        if "learning" in counters:  # a checkpoint may be older than this
            self.learning = Learning.from_dict(counters["learning"])
        self.commit = counters["commit"]
        self.top_writes = frozenset(counters.get("top_writes", ()))
        self.step_writes = frozenset(counters.get("step_writes", ()))
        self.is_behind_step_top = False
        self.top_generators = counters.get("top_generators", {})
        self.begun_loops, self.epochs_end = counters.get("begun_loops", 0), counters.get("epochs_end", 0)
        for optimizer, steps in zip(self._optimizers, counters.get("ahead", self.to_skip), strict=True):
            optimizer.stepping.skip = steps
            if steps and counters.get("ahead_samples"):
                optimizer.stepping.samples = counters["ahead_samples"]
        if self.step > 0:
            for optimizer in self._optimizers:
                optimizer._opt_called = True  # else torch warns that a scheduler moves first
        if "requires_grad" in counters:
            self._changes.restore_requires_grad(counters["requires_grad"])
        self._changes.restore_gradients(tensors, counters.get("present", ()))
        if "modules" in counters:
            self._module_changes.restore(counters["modules"], tensors)
        self.tracker.accept_changes()

    def _check_names(self, saved: dict[str, Any]) -> None:
        known = self.handlers.keys() | self.attributes.keys()
        if saved.keys() != known:
            raise StateError(
                f"the saved state has {_names(saved.keys() - known)} that State(…) lacks, and State(…) has "
                f"{_names(known - saved.keys())} that the saved state lacks; give State the same names as when it was "
                "saved"
            )

    def _optimizer_classes(self) -> dict[str, str]:
        return {
            name: type(handler.value).__name__
            for name, handler in self.handlers.items()
            if isinstance(handler.value, torch.optim.Optimizer)
        }

    def _check_optimizers(self, saved: Mapping[str, str]) -> None:
        """What one kind of optimizer keeps means something else, or nothing, to another; torch takes it all the same.

        Args:
            saved: Names of the classes, by attribute; none where the state is of a version that did not keep them.
        """
        for name, here in self._optimizer_classes().items():
            if saved.get(name, here) != here:
                raise StateError(
                    f"the saved {name} is one of class {saved[name]}, and State(…) was given one of class {here}; give "
                    "it the class with which the state was saved, or begin anew from the saved weights with "
                    "state.load_weights(url)"
                )

    def _placed(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors from elsewhere, on the devices of those that they take the place of."""
        here = dict(tensors)
        for name, value in self._loose():
            if name in saved:
                here.update(placed(saved[name], tensors, encode(value, name).tensors))
        return here

    def _loose(self) -> Iterable[tuple[str, Any]]:
        """Yield what does not itself bring its tensors to where it has them, as modules and optimizers do."""
        for name, handler in self.handlers.items():
            if not isinstance(handler.value, (torch.nn.Module, torch.optim.Optimizer)):
                yield name, handler.capture()
        yield from self.attributes.items()


def _packed(state: Encoded) -> list[Any]:
    """Return the state of a generator in JSON: few bytes, which change once per epoch."""
    return [state.plain, {name: base64.b85encode(t.numpy().tobytes()).decode() for name, t in state.tensors.items()}]


def _unpacked(packed: Sequence[Any]) -> Any:
    plain, texts = packed
    tensors = {
        name: torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8) for name, text in texts.items()
    }
    return decode(plain, tensors)


def _differing(name: str, live: Encoded, saved: Any, moved: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ from those of a state, or the name of the whole."""
    found = [key for key in moved.keys() & live.tensors.keys() if not _is_same(live.tensors[key], moved[key])]
    if found or live.plain == saved:
        return found
    return [key for key in moved if key.startswith(f"{name}/") and key not in live.tensors] or [name]


def _differing_numbers(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Return the names of the numbers of modules that differ."""
    here, there = now["values"], saved["values"]
    return [
        f"{path.rstrip('.')}.{key}"
        for path in here.keys() | there.keys()
        for key in here.get(path, {}).keys() | there.get(path, {}).keys()
        if here.get(path, {}).get(key) != there.get(path, {}).get(key)
    ]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, wherever they are."""
    if first.shape != second.shape:
        return False
    here, there = first.detach(), second.detach().to(first.device, first.dtype)
    return torch.equal(*(tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (here, there)))


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
