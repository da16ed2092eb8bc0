"""Losses that have a student match a teacher's answer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from edl_hvd.distill.outputs import TopK, describe
from edl_hvd.errors import UsageError


def distillation_loss(
    logits: torch.Tensor,
    answer: torch.Tensor | TopK,
    target: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    weight: float = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of Hinton et al. 2015, a mean over the samples. Not collective.

    It is w · T² · KL(softmax(t / T) ‖ softmax(s / T)) + (1 − w) · CE(s, target), with the student's logits s and the
    teacher's t. T² keeps the gradient of the first part as large as that of the second. With w = 1 no target is needed.
    Each position of a sequence is a sample. The loss is computed in float32 at least, also under autocast.

    >>> student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    >>> float(distillation_loss(student, teacher, temperature=2.0))
    0.0

    Args:
        logits: Student's logits, of shape (samples, classes), or (samples, positions, classes).
        answer: Teacher's logits of the same shape, or its ``TopK`` at the same temperature.
        target: Classes, an integer tensor of the shape of the logits without the last dimension. Samples whose class is
            negative have no label: they count with the teacher's part alone, and the mean of the second part is over
            all samples, those without a label included.
        temperature: Number T greater than 0.
        weight: Weight w of the teacher's part, in [0, 1].
        mask: Which samples count, of the shape of the target, such as positions that are no padding; left out, all.

    Returns:
        A tensor of one element; 0 if no sample counts.

    Raises:
        UsageError: Shapes or temperatures differ, an argument is out of range, or a target is missing or no integer.
    """
    if not temperature > 0 or not 0 <= weight <= 1:
        raise UsageError(f"temperature={temperature!r}, weight={weight!r}; expected T greater than 0, and w in [0, 1]")
    if target is None and weight < 1:
        raise UsageError(f"weight={weight!r} leaves {1 - weight:g} to the labels; give target, or weight=1")
    logits = _precise(logits)
    if isinstance(answer, TopK):
        divergence = top_k_divergence(logits, answer, temperature=temperature, mask=mask)
    else:
        if not isinstance(answer, torch.Tensor):
            raise UsageError(
                f"the answer is {describe(answer)}; expected a tensor of logits, or a TopK: choose one by its name, "
                "or average(answer)"
            )
        if answer.shape != logits.shape:
            raise UsageError(
                f"the student's logits have shape {tuple(logits.shape)}, the teacher's answer {tuple(answer.shape)}; "
                "expected the same classes in the same order: serve a teacher of this vocabulary"
            )
        own = functional.log_softmax(logits / temperature, dim=-1)
        theirs = functional.log_softmax(answer.to(logits) / temperature, dim=-1)
        own, theirs = _without_masked(own, theirs)
        each = functional.kl_div(own, theirs, reduction="none", log_target=True).sum(-1)
        divergence = _mean(each, mask)
    loss = weight * temperature**2 * divergence
    if target is not None and weight < 1:
        if target.shape != logits.shape[:-1] or target.is_floating_point() or target.dtype == torch.bool:
            raise UsageError(
                f"target is a tensor of {str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}; "
                f"expected integer classes of shape {tuple(logits.shape[:-1])}: for probabilities of classes, add "
                "soft_cross_entropy to a loss with weight=1"
            )
        labels = functional.cross_entropy(
            logits.flatten(0, -2), target.to(logits.device, torch.int64).clamp(min=0).flatten(), reduction="none"
        )
        loss = loss + (1 - weight) * _mean(labels.view(target.shape) * (target >= 0).to(logits.device), mask)
    return loss


def soft_cross_entropy(
    logits: torch.Tensor, probabilities: torch.Tensor, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The cross entropy with probabilities instead of classes, −Σ p log softmax(s), a mean over the samples.

    Not collective.

    Args:
        logits: Student's logits s, of shape (samples, classes), or (samples, positions, classes).
        probabilities: Teacher's probabilities p, of the same shape.
        mask: Which samples count, of the shape of the logits without the last dimension; left out, all.

    Returns:
        A tensor of one element; 0 if no sample counts.

    Raises:
        UsageError: Shapes differ.
    """
    if logits.shape != probabilities.shape:
        raise UsageError(f"logits have shape {tuple(logits.shape)}, probabilities {tuple(probabilities.shape)}; "
                         "expected the same")  # fmt: skip
    logits = _precise(logits)
    return _mean(-(probabilities.to(logits) * functional.log_softmax(logits, dim=-1)).sum(-1), mask)


def top_k_divergence(
    logits: torch.Tensor, answer: TopK, *, temperature: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(t ‖ s) over the teacher's k likeliest classes and one class for all others, a mean over the samples.

    Without the mass of the others it would pull the student to a biased target. With k = number of classes it is the
    whole divergence. Not collective.

    Args:
        logits: Student's logits, of shape (samples, classes), or (samples, positions, classes).
        answer: Teacher's answer, taken at the same temperature.
        temperature: Number T greater than 0.
        mask: Which samples count, of the shape of the logits without the last dimension; left out, all.

    Returns:
        A tensor of one element; 0 if no sample counts.

    Raises:
        UsageError: Shapes differ, or the answer was taken at another temperature.
    """
    if answer.rest.shape != logits.shape[:-1]:
        raise UsageError(
            f"the student's logits have shape {tuple(logits.shape)}, the teacher's answer is for "
            f"{tuple(answer.rest.shape)} samples; expected the same samples and positions"
        )
    if answer.temperature is not None and not math.isclose(answer.temperature, temperature, rel_tol=1e-6):
        raise UsageError(
            f"the answer is a TopK at temperature {answer.temperature:g}, and the loss has {temperature:g}; expected "
            f"the same: Teachers(outputs='top_k={answer.values.shape[-1]},temperature={temperature:g}')"
        )
    logits = _precise(logits)
    own = functional.log_softmax(logits / temperature, dim=-1)
    indices = answer.indices.to(logits.device)
    values, rest = answer.values.to(own), answer.rest.to(own)
    chosen, values = _without_masked(own.gather(-1, indices), values)
    divergence = (values.exp() * (values - chosen)).sum(-1)
    has_others = rest > -torch.inf
    # A difference of two infinities is no number, and its gradient neither; nor is that of the sum of nothing.
    unchosen = own.scatter(-1, indices, -torch.inf)
    others = torch.logsumexp(unchosen.masked_fill(~has_others.unsqueeze(-1), 0.0), dim=-1)
    difference = torch.where(has_others, rest, torch.zeros_like(rest)) - torch.where(
        has_others, others, torch.zeros_like(others)
    )
    return _mean(divergence + torch.where(has_others, rest.exp() * difference, torch.zeros_like(rest)), mask)


def average(answers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the logits of several teachers: the answer of an ensemble, as a product of experts. Not collective.

    The softmax of it is the normalised geometric mean of the teachers' probabilities.

    Args:
        answers: Logits of each teacher, of equal shapes, as a loader with several teachers yields them.

    Returns:
        A tensor of that shape.

    Raises:
        UsageError: Shapes differ, an answer is no tensor, or there are no answers.
    """
    wrong = [name for name, one in answers.items() if not isinstance(one, torch.Tensor)]
    if wrong:
        raise UsageError(
            f"the answers {', '.join(wrong)} are no tensors, so they have no mean; expected outputs='logits' or "
            "'float16' of teachers that are averaged, since the likeliest classes of each may be others"
        )
    shapes = {name: tuple(one.shape) for name, one in answers.items()}
    if len(set(shapes.values())) != 1:
        raise UsageError(f"answers of shapes {shapes} have no mean; expected one shape: equal classes in equal order")
    return torch.stack(list(answers.values())).mean(0)


def hidden_state_loss(
    hidden: torch.Tensor, answer: torch.Tensor, *, mask: torch.Tensor | None = None, normalize: bool = False
) -> torch.Tensor:
    """The mean squared difference of a student's features from a teacher's. Not collective.

    With h of the student and t of the teacher it is the mean of (h − t)² over all samples, positions and features; with
    ``normalize`` both are divided by their length first, so that it is 2 (1 − cos(h, t)) / d for d features. A student
    of another width projects its features first, with a layer that is trained with it.

    >>> float(hidden_state_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 4.0]])))
    2.0

    Args:
        hidden: Student's features, of shape (samples, …, d).
        answer: Teacher's features, of the same shape.
        mask: Which positions count, of shape (samples, …), such as those of a sequence that are no padding.
        normalize: Whether only the direction counts.

    Returns:
        A tensor of one element; 0 if no position counts.

    Raises:
        UsageError: Shapes differ.
    """
    if hidden.shape != answer.shape:
        raise UsageError(
            f"the student's features have shape {tuple(hidden.shape)}, the teacher's {tuple(answer.shape)}; expected "
            "the same: project the student's with a linear layer"
        )
    if mask is not None and mask.shape != hidden.shape[:-1]:
        raise UsageError(f"mask has shape {tuple(mask.shape)}; expected {tuple(hidden.shape[:-1])}")
    hidden = _precise(hidden)
    there = answer.to(hidden)
    if normalize:
        hidden, there = functional.normalize(hidden, dim=-1), functional.normalize(there, dim=-1)
    difference = (hidden - there).square().mean(-1)
    if mask is None:
        return difference.mean()
    return (difference * mask).sum() / mask.sum().clamp(min=1)


def _without_masked(own: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of student and teacher, both 0 where the teacher's is -inf: such a class contributes 0."""
    is_masked = theirs == -torch.inf
    return own.masked_fill(is_masked, 0.0), theirs.masked_fill(is_masked, 0.0)


def _precise(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 at least: differences of probabilities are small beside the steps of half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _mean(each: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mean over the samples that count."""
    if mask is None:
        return each.mean()
    if mask.shape != each.shape:
        raise UsageError(f"mask has shape {tuple(mask.shape)}; expected {tuple(each.shape)}")
    there = mask.to(each)
    return (each * there).sum() / there.sum().clamp(min=1)
