"""What a job keeps: the things given to ``State``, the counters of the run, and the last commit of both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import StateError
from edl_hvd.metrics.metric import Metric
from edl_hvd.rescale.learning import Learning
from edl_hvd.rescale.policy import Ramp
from edl_hvd.worker.codec import decode, encode, placed
from edl_hvd.worker.commits.checkpoint_copy import CheckpointCopies
from edl_hvd.worker.commits.dirty import DirtyTracker, FrozenParameters, TensorVersion, fingerprint, versions_of
from edl_hvd.worker.commits.encoding_cache import EncodingCache
from edl_hvd.worker.commits.handlers import Handler, ModuleHandler, handler_for
from edl_hvd.worker.commits.snapshot import SnapshotBuffers
from edl_hvd.worker.training.optimizer import is_distributed, join

logger = logging.getLogger(__name__)

_QUALITIES = 1 << 16
_GRADIENT = "gradient/"  # in the names of tensors
_OF_EACH_RANK = (Metric, ElasticBatchSampler, EvaluationSampler)


class StateStore:
    """The attributes and counters of a ``State`` and the snapshot of their last commit.

    Attributes:
        attributes: Plain attributes by name; the live values.
        handlers: Everything else by name.
        step: Optimizer steps of the whole run.
        epoch: Epochs finished.
        samples: Samples consumed by the whole run.
        ramp: The learning-rate factor.
        learning: What the run has found out about it.
        commit: Number of the last commit; -1 before this process has held any state.
        watch: Sees what else moves the parameters.
        reduction: Sums the gradients of all distributed optimizers; ``None`` where there is none.
        exact: The result is not to depend on the world by a single bit.
        followed: The state was taken over from a world that trained on meanwhile, and nobody has compared it yet.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.handlers: dict[str, Handler] = {}
        self._kinds: dict[Any, tuple[Any, ...]] = {}  # what of_kind has found: the objects stay the same
        self.attributes: dict[str, Any] = {}
        distributed = {name: value for name, value in attributes.items() if is_distributed(value)}
        self._optimizers = list(distributed.values())
        models = {name: value for name, value in attributes.items() if isinstance(value, torch.nn.Module)}
        self.reduction = join(self._optimizers, models, list(distributed))
        self._frozen_parameters = FrozenParameters()
        self._stepped = set(self.reduction.names) if self.reduction is not None else set()
        # Whether each parameter requires a gradient; a script may freeze and unfreeze them later.
        self._parameters = {f"{name}.{key}": p for name, model in models.items() for key, p in model.named_parameters()}
        self._required = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        self._groups = {name: len(optimizer.param_groups) for name, optimizer in distributed.items()}
        for name, value in attributes.items():
            handler = handler_for(name, value, self._stepped, self._frozen_parameters)
            if handler is None:
                self.attributes[name] = value
            else:
                self.handlers[name] = handler
        self._encodings = {name: EncodingCache(name, handler) for name, handler in self.handlers.items()}
        # What is computed again after a light commit, buffers for one, may be computed with weights ahead of it.
        self.exact = any(optimizer.stepping.exact for optimizer in self._optimizers)
        self._can_skip_parameters = self._moves_by_steps()
        self._host = CheckpointCopies()
        self.tracker = DirtyTracker(self._optimizers, self._before_move)
        self.step = self.epoch = self.samples = 0
        self.ramp = Ramp()
        self.learning = Learning()
        self.commit = -1
        self._snapshot = SnapshotBuffers()
        self._is_pinned = False  # somebody still reads the snapshot: the next one takes other memory
        self._delta = SnapshotBuffers()  # of a light commit
        self._is_delta = False
        self._ahead = [0] * len(self._optimizers)  # steps of the optimizers that the last commit has and its rest lacks
        self._dirty = False  # the script has moved parameters since, too
        self.is_unverified = False
        self._versions: dict[str, TensorVersion] = {}  # of the live tensors at the last take

    def _moves_by_steps(self) -> bool:
        """What optimizers move is found again in the models, by name."""
        models = [handler for handler in self.handlers.values() if isinstance(handler, ModuleHandler)]
        return not self.exact and self._stepped == set().union(*(model.stepped for model in models))

    def _notice_new_parameters(self) -> None:
        """An optimizer may have been given more parameters since."""
        if self.reduction is None or len(self.reduction.names) == len(self._stepped):
            return
        self._stepped.update(self.reduction.names)
        self._frozen_parameters.drop(self._stepped)
        for handler in self.handlers.values():
            if isinstance(handler, ModuleHandler):
                handler.move_by_steps(self._stepped)
        self._can_skip_parameters = self._moves_by_steps()
        self.tracker.note()
        self.tracker.mark_dirty()

    def of_kind(self, kind: type | Callable[[object], bool]) -> Iterable[Any]:
        """The handled objects of a class, or those for which a predicate holds, in the order given."""
        found = self._kinds.get(kind)
        if found is None:
            matches = (lambda value: isinstance(value, kind)) if isinstance(kind, type) else kind
            found = self._kinds[kind] = tuple(h.value for h in self.handlers.values() if matches(h.value))
        return found

    @property
    def held(self) -> int:
        """The commit number that this worker could give to others; -1 if none."""
        return self.commit if self._last.whole else -1

    @property
    def held_step(self) -> int:
        """The optimizer step of that commit; -1 if none."""
        return int(self._last.plain["counters"]["step"]) if self._last.whole else -1

    @property
    def _last(self) -> SnapshotBuffers:
        return self._delta if self._is_delta else self._snapshot

    @property
    def ahead(self) -> list[int]:
        """By how many steps each distributed optimizer has moved on from the commit that this worker holds."""
        since = self.tracker.steps if self._is_delta else [0] * len(self._ahead)
        return [steps + more for steps, more in zip(self._ahead, since, strict=True)]

    @property
    def freshness(self) -> int:
        """How good a state this worker could give to others, -1 for none: the larger, the better.

        A later commit is better than an earlier one. Of one commit, the best is the state at it, then that of whose
        optimizers the most have moved on, and the last one that the script has moved besides.
        """
        if self.held < 0:
            return -1
        ahead = sum(self.ahead)
        place = 0 if self._dirty else _QUALITIES - 1 if ahead == 0 else min(ahead, _QUALITIES - 2)
        return self.held * _QUALITIES + place

    def save(self, number: int, light: bool = False) -> None:
        """Keep the present state as commit ``number``. All or nothing.

        Args:
            number: Of the commit.
            light: Copy only what optimizer steps do not move, where that will do: the rest stands as it is until the
                next step. A worker that then loses its world goes on from there (see ``ahead``).
        """
        self._look()
        if light and self._can_skip_parameters and self.tracker.is_clean:
            plain, tensors = self._delta_of(number)
            self._delta.fill(tensors, plain)
            self._is_delta = True
            self._snapshot, self._is_pinned = SnapshotBuffers(), False
        else:
            plain, tensors = self.live(number)
            snapshot = SnapshotBuffers() if self._is_pinned else self._snapshot
            snapshot.fill(tensors, plain)
            self._snapshot, self._is_pinned, self._is_delta = snapshot, False, False
        self._versions = versions_of(tensors)
        self._begin_commit(number)

    def skip(self, number: int) -> None:
        """Commit ``number`` is one that nobody can come back to: keep nothing, until the next :meth:`save`."""
        self._look()
        for buffers in (self._snapshot, self._delta):
            buffers.invalidate()
        self._begin_commit(number)

    def _look(self) -> None:
        """What has the script done since the last commit?"""
        self._host.finish()
        self._notice_new_parameters()
        if self.reduction is not None:
            if self.reduction.is_interleaved:
                # A round after a step may be made of what was computed before it: it cannot be made again after it
                # alone.
                self.tracker.never_clean()
            self.reduction.has_stepped = False
        self.tracker.check()
        self._frozen_parameters.commit()

    def _begin_commit(self, number: int) -> None:
        self.commit, self._ahead, self._dirty = number, self._to_skip, False
        self.tracker.commit()

    def resave(self) -> None:
        """Take the last commit once more; copies only what has been written since."""
        if self._is_delta and not self.tracker.is_clean:
            self.save(self.commit)
            return
        plain, tensors = self._delta_of(self.commit) if self._is_delta else self.live(self.commit)
        written = {name: tensor for name, tensor in tensors.items() if not self._is_unwritten(name, tensor)}
        if tensors.keys() == self._versions.keys() and not self._is_pinned and self._last.refill(written, plain):
            self._versions.update(versions_of(written))
            self._ahead = self._to_skip
        else:
            self.save(self.commit, light=self._is_delta)

    @property
    def _to_skip(self) -> list[int]:
        return [optimizer.stepping.skip for optimizer in self._optimizers]

    @property
    def repeated_samples(self) -> int:
        """The samples of the next step, if some optimizers have already made it, in a world of any size; else 0."""
        return self._samples_of(self._to_skip)

    def _samples_of(self, ahead: list[int]) -> int:
        stepping = [optimizer.stepping for optimizer in self._optimizers]
        return max((made.samples for made, steps in zip(stepping, ahead, strict=True) if steps), default=0)

    def _is_unwritten(self, name: str, tensor: torch.Tensor) -> bool:
        return name in self._versions and self._versions[name].matches(tensor)

    def live(self, number: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """The present state as commit ``number``: plain, and its tensors by name, not copied."""
        return self._captured(number, lambda handler: handler.capture())

    def _delta_of(self, number: int) -> tuple[Any, dict[str, torch.Tensor]]:
        return self._captured(number, lambda handler: handler.capture_delta())

    def _captured(self, number: int, capture: Callable[[Handler], Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        for name, handler in self.handlers.items():
            plain[name], parts = encode(capture(handler), name)
            tensors.update(parts)
        for name, value in self.attributes.items():
            try:
                plain[name], parts = encode(value, name)
            except StateError as error:
                raise StateError(f"state.{name} was set to something that cannot be kept: {error}") from None
            tensors.update(parts)
        counters = {"step": self.step, "epoch": self.epoch, "samples": self.samples, "commit": number,
                    "ramp": self.ramp.as_dict(), "learning": self.learning.as_dict(),
                    "ahead": self._to_skip, "ahead_samples": self._samples_of(self._to_skip),
                    "requires_grad": self._requires_grad(), "added_groups": self._added_groups(),
                    "present": self._present()}  # fmt: skip
        tensors.update(self._carried())
        return {"counters": counters, "attributes": plain}, tensors

    def _requires_grad(self) -> dict[str, bool]:
        """The parameters for which it is not what it was when the state was made."""
        required = self._required
        return {
            name: parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter.requires_grad is not required[name]
        }

    def _added_groups(self) -> dict[str, list[list[str]]]:
        """Names of the parameters of the groups that optimizers have got since the state was made."""
        names = self.reduction.names if self.reduction is not None else {}
        return {
            attribute: [
                [names[parameter] for parameter in group["params"]] for group in groups[self._groups[attribute] :]
            ]
            for attribute, groups in self._param_groups().items()
            if len(groups) > self._groups[attribute]
        }

    def _param_groups(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: handler.value.param_groups for name, handler in self.handlers.items() if is_distributed(handler.value)
        }

    def _add_groups(self, added: dict[str, list[list[str]]]) -> None:
        """Have the optimizers of this worker the groups that those of another had."""
        if self.reduction is None:
            return
        self._drop_groups(added)
        if not added:
            return
        parameters = {name: parameter for parameter, name in (self.reduction.catalogue | self.reduction.names).items()}
        for attribute, groups in self._param_groups().items():
            for group in added.get(attribute, [])[len(groups) - self._groups[attribute] :]:
                self.handlers[attribute].value.add_param_group({"params": [parameters[name] for name in group]})

    def _drop_groups(self, added: dict[str, list[list[str]]]) -> None:
        """An optimizer may have got groups since the commit that is put back."""
        for attribute, groups in self._param_groups().items():
            kept = self._groups[attribute] + len(added.get(attribute, []))
            dropped = [parameter for group in groups[kept:] for parameter in group["params"]]
            if dropped and self.reduction is not None:
                del groups[kept:]
                for parameter in dropped:
                    self.handlers[attribute].value.state.pop(parameter, None)
                self.reduction.release(dropped)
                self._stepped.difference_update(dropped)
                for handler in self.handlers.values():
                    if isinstance(handler, ModuleHandler):
                        handler.move_by_steps(self._stepped)
                self._can_skip_parameters = self._moves_by_steps()
                self.tracker.note()

    def _present(self) -> list[str]:
        """Parameters that have a gradient, whatever it is: a script may clear them to zeros, which is not ``None``."""
        names = self.reduction.names if self.reduction is not None else {}
        return [name for parameter, name in names.items() if parameter.grad is not None]

    def _carried(self) -> dict[str, torch.Tensor]:
        """Gradients that no step has been made with yet: a script accumulates them over several steps."""
        return {
            f"{_GRADIENT}{optimizer.reduction.names[parameter]}": parameter.grad
            for optimizer in self._optimizers
            if optimizer.reduction.round_number > optimizer.stepping.round_number
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    @torch.no_grad()
    def _put_gradients(self, tensors: Mapping[str, torch.Tensor], present: Sequence[str] = ()) -> None:
        """Have the gradients that were carried, zeros where another was there, and no others."""
        others = set(present)
        for optimizer in self._optimizers:
            optimizer.stepping.round_number = optimizer.reduction.round_number
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = optimizer.reduction.names[parameter]
                gradient = tensors.get(f"{_GRADIENT}{name}")
                if gradient is None:
                    parameter.grad = torch.zeros_like(parameter) if name in others else None
                else:
                    parameter.grad = torch.empty_like(parameter).copy_(gradient)
                    optimizer.stepping.round_number = optimizer.reduction.round_number - 1

    def export(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The last commit's plain state and tensors, for the others; some may be live and stand until the next step."""
        if not self._is_delta:
            return self._snapshot.plain, self._snapshot.tensors
        rest, tensors = self._delta.plain, dict(self._delta.tensors)
        plain = dict(rest["attributes"])
        for name, handler in self.handlers.items():
            if handler.has_delta:
                live, parts = self._encodings[name].encoded()
                plain[name] = handler.merge_delta(live, rest["attributes"][name])
                tensors = {**parts, **tensors}
        ahead = {"ahead": self.ahead, "ahead_samples": self._samples_of(self.ahead)}
        return {"counters": {**rest["counters"], **ahead}, "attributes": plain}, tensors

    def pin(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The last commit's plain state and tensors, which stay as they are: the next one takes other memory."""
        if self._is_delta:
            self.save(self.commit)
        self._is_pinned = True
        return self._snapshot.plain, self._snapshot.tensors

    def clear(self) -> None:
        """Hold no state any more: what the objects hold is that of no commit."""
        self._snapshot, self._is_pinned, self._delta, self._is_delta = (
            SnapshotBuffers(),
            False,
            SnapshotBuffers(),
            False,
        )
        self.commit, self.is_unverified = -1, False

    def restore(self) -> None:
        """Make the last commit the present state again; does nothing where there is none.

        What a light commit left uncopied stays as it is: at the commit, or some steps ahead of it. The script goes
        through those steps again, and they move nothing (``Stepping.skip``).
        """
        self._host.finish()
        if not self._last.whole:
            return
        if self._is_delta:
            self._restore_delta()
        else:
            self._load(self._snapshot.plain, self._snapshot.tensors)
            self._versions = versions_of(self.live(self.commit)[1])  # they are equal now

    def _restore_delta(self) -> None:
        self._notice_new_parameters()
        if self._is_dirty():
            logger.warning(
                "the script has moved parameters besides its optimizers since the last commit; they are kept"
            )
            self._dirty = True
            self.tracker.mark_dirty()
            self._frozen_parameters.commit()
        ahead, plain, tensors = self.ahead, self._delta.plain, self._delta.tensors
        self._add_groups(plain["counters"].get("added_groups", {}))
        for name, handler in self.handlers.items():
            handler.load_delta(decode(plain["attributes"][name], tensors))
        for name in self.attributes:
            self.attributes[name] = _copy(decode(plain["attributes"][name], tensors))
        self._count({**plain["counters"], "ahead": ahead})
        self._put_gradients(tensors, plain["counters"].get("present", ()))
        self._ahead, self.tracker.steps = ahead, [0] * len(ahead)
        self._versions = versions_of(self._delta_of(self.commit)[1])  # they are equal now
        self.tracker.note()
        self._frozen_parameters.note()

    def _before_move(self, is_dirty: bool) -> None:
        self._host.finish(is_whole=not is_dirty and not self._frozen_parameters.is_dirty())

    def _is_dirty(self) -> bool:
        return self.tracker.is_dirty() or self._frozen_parameters.is_dirty()

    def fingerprint(self) -> int:
        """A digest of some bytes of every live tensor, in 32 bits: equal for equal states, whatever their size.

        A different state shows with certainty where every element of a tensor differs, as after an optimizer's
        step, and by chance where few do.
        """
        return fingerprint(self.live(self.commit)[1])

    def load(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a snapshot from another member or from storage, as the present state and as the commit."""
        self._load(plain, self._placed(plain["attributes"], tensors))
        self.save(self.commit)

    def _placed(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors from elsewhere, on the devices of those that they take the place of."""
        here = dict(tensors)
        for name, value in self._loose():
            if name in saved:
                here.update(placed(saved[name], tensors, encode(value, name)[1]))
        return here

    def between(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The present state, somewhere between two commits, for :meth:`take_over` of others; tensors are live."""
        plain, tensors = self.live(self.commit)
        gradients = {
            f"{_GRADIENT}{name}": parameter.grad
            for parameter, name in (self.reduction.names.items() if self.reduction is not None else ())
            if parameter.grad is not None
        }
        carried = [o.reduction.round_number > o.stepping.round_number for o in self._optimizers]
        return {**plain, "steps": self.tracker.steps, "carried": carried}, {**tensors, **gradients}

    def take_over(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Be where another member is between two commits, but for what each has of its own: share and counts."""
        saved = plain["attributes"]
        here = self._placed(saved, tensors)
        for name, handler in self.handlers.items():
            if not isinstance(handler.value, _OF_EACH_RANK):
                handler.load(decode(saved[name], here))
        for name in self.attributes:
            self.attributes[name] = _copy(decode(saved[name], here))
        for optimizer, steps in zip(self._optimizers, plain["counters"]["ahead"], strict=True):
            optimizer.stepping.skip = steps
        self._put_gradients(tensors)
        for optimizer in self._optimizers:
            optimizer._opt_called = True
        for optimizer, is_carried in zip(self._optimizers, plain["carried"], strict=True):
            optimizer.stepping.round_number = optimizer.reduction.round_number - is_carried
        self.tracker.steps = list(plain["steps"])
        self.tracker.note()
        self._frozen_parameters.note()

    def _loose(self) -> Iterable[tuple[str, Any]]:
        """What does not itself bring its tensors to where it has them, as modules and optimizers do."""
        for name, handler in self.handlers.items():
            if not isinstance(handler.value, (torch.nn.Module, torch.optim.Optimizer)):
                yield name, handler.capture()
        yield from self.attributes.items()

    def apply_delta(self, plain: Any, moved: dict[str, torch.Tensor]) -> None:
        """Become the commit that ``plain`` is of, where the live tensors are those of it but for ``moved``."""
        self._host.finish()
        saved = plain["attributes"]
        self._check_names(saved)
        self._add_groups(plain["counters"].get("added_groups", {}))
        for name, handler in self.handlers.items():
            live, tensors = encode(handler.capture(), name)
            arrived = moved.keys() & tensors.keys()
            if isinstance(handler.value, (torch.nn.Module, torch.optim.Optimizer)):
                with torch.no_grad():
                    for tensor_name in arrived:
                        tensors[tensor_name].copy_(moved[tensor_name])
                if live != saved[name]:
                    handler.load_plain(decode(saved[name], {**moved, **tensors}))
            elif arrived or live != saved[name]:
                handler.load(decode(saved[name], {**tensors, **placed(saved[name], moved, tensors)}))
        for name, value in self.attributes.items():
            live, tensors = encode(value, name)
            if live != saved[name] or moved.keys() & tensors.keys():
                self.attributes[name] = _copy(decode(saved[name], {**tensors, **placed(saved[name], moved, tensors)}))
        self._count(plain["counters"])
        self._put_gradients(moved, plain["counters"].get("present", ()))
        self.tracker.note()
        self._frozen_parameters.note()
        self.resave()
        self.is_unverified = True

    def _load(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        self._host.finish()
        saved = plain["attributes"]
        self._check_names(saved)
        self._add_groups(plain["counters"].get("added_groups", {}))
        for name, handler in self.handlers.items():
            try:
                handler.load(decode(saved[name], tensors))
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateError(f"the saved {name} does not fit the one given to State: {error}") from error
        for name in self.attributes:
            # Through the codec once more: what the script does to its lists must not reach the snapshot.
            self.attributes[name] = _copy(decode(saved[name], tensors))
        self._count(plain["counters"])
        self._put_gradients(tensors, plain["counters"].get("present", ()))
        self.tracker.note()
        self._frozen_parameters.note()

    def _check_names(self, saved: dict[str, Any]) -> None:
        known = self.handlers.keys() | self.attributes.keys()
        if saved.keys() != known:
            raise StateError(
                f"the saved state has {_names(saved.keys() - known)} that State(…) lacks, and State(…) has "
                f"{_names(known - saved.keys())} that the saved state lacks; give State the same names as when it was "
                "saved"
            )

    def _count(self, counters: dict[str, Any]) -> None:
        self.step, self.epoch, self.samples = counters["step"], counters["epoch"], counters["samples"]
        self.ramp = Ramp(**counters["ramp"])
        if "learning" in counters:  # a checkpoint may be older than this
            self.learning = Learning.from_dict(counters["learning"])
        self.commit = counters["commit"]
        for optimizer, steps in zip(self._optimizers, counters.get("ahead", self._to_skip), strict=True):
            optimizer.stepping.skip = steps
            if steps and counters.get("ahead_samples"):
                optimizer.stepping.samples = counters["ahead_samples"]
        if self.step > 0:
            for optimizer in self._optimizers:
                optimizer._opt_called = True  # else torch warns that a scheduler moves first
        if "requires_grad" in counters:
            required = self._required | counters["requires_grad"]
            for name, parameter in self._parameters.items():
                if parameter.requires_grad != required[name]:
                    parameter.requires_grad_(required[name])

    def checkpoint(self) -> Snapshot:
        """The last commit as a value whose tensors stay as they are until the next call."""
        return self._host.make(*self.export())

    def deferred_checkpoint(self) -> tuple[Snapshot, Callable[[], None]]:
        """The same, but its tensors hold the commit only when the second value was called, from any thread.

        That raises StateError where the script has moved parameters itself meanwhile.
        """
        plain, tensors = self.export()
        if not self._is_delta or not all(tensor.is_cpu for tensor in tensors.values()):
            return self._host.make(plain, tensors), _nothing
        return self._host.defer(plain, tensors, self._is_dirty)

    def last_checkpoint(self) -> tuple[Snapshot, None]:
        """The present state, which is no commit: nobody goes on from the end of the training."""
        return self._host.make(*self.live(self.commit + 1)), None

    def drop_copy(self) -> None:
        """The checkpoint that was begun last is given up."""
        self._host.drop()

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in self.live(self.commit)[1].values())


def commit_of(freshness: int) -> int:
    """The commit of ``StateStore.freshness``; -1 for none."""
    return max(-1, freshness // _QUALITIES)


def is_dirty(freshness: int) -> bool:
    """Whether ``StateStore.freshness`` is that of a worker whose script has moved parameters besides its optimizers."""
    return freshness >= 0 and freshness % _QUALITIES == 0


def _nothing() -> None:
    pass


def _copy(value: Any) -> Any:
    plain, tensors = encode(value, "")
    return decode(plain, {name: tensor.clone() for name, tensor in tensors.items()})


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
