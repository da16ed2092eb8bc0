"""Losses and outputs against their formulas."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch.nn import functional

from edl_hvd.distill import (
    TopK,
    average,
    distillation_loss,
    hidden_state_loss,
    soft_cross_entropy,
    top_k_divergence,
)
from edl_hvd.distill.outputs import Outputs, named, to_arrays, to_tensors, top_k
from edl_hvd.errors import UsageError

STUDENT = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.0, 0.0, 3.0, 1.0]])
TEACHER = torch.tensor([[0.5, 2.5, 0.0, -2.0], [1.0, -1.0, 2.0, 2.0]])


def by_hand(temperature: float) -> float:
    total = 0.0
    for student, teacher in zip(STUDENT.tolist(), TEACHER.tolist(), strict=True):
        s = [math.exp(value / temperature) for value in student]
        t = [math.exp(value / temperature) for value in teacher]
        total += sum(b / sum(t) * (math.log(b / sum(t)) - math.log(a / sum(s))) for a, b in zip(s, t, strict=True))
    return total / 2


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_the_divergence_is_that_of_the_formula_times_the_square_of_the_temperature(temperature):
    loss = distillation_loss(STUDENT, TEACHER, temperature=temperature)
    assert float(loss) == pytest.approx(temperature**2 * by_hand(temperature), rel=1e-5)


def test_the_labels_get_the_rest_and_samples_without_a_label_none():
    target = torch.tensor([1, -1])
    labels = float(functional.cross_entropy(STUDENT[:1], target[:1])) / 2
    loss = distillation_loss(STUDENT, TEACHER, target, temperature=2.0, weight=0.75)
    assert float(loss) == pytest.approx(0.75 * 4 * by_hand(2.0) + 0.25 * labels, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_with_all_classes_the_top_k_is_the_whole_divergence(temperature):
    answer = top_k(TEACHER, 4, temperature)
    assert torch.equal(answer.rest, torch.full((2,), -torch.inf))
    student = STUDENT.clone().requires_grad_()
    loss = top_k_divergence(student, answer, temperature=temperature)
    assert loss.item() == pytest.approx(by_hand(temperature), rel=1e-5)
    loss.backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_the_mass_of_the_other_classes_counts():
    """KL over {class 1, class 2, all others}, by hand."""
    answer = top_k(TEACHER, 2)
    total = 0.0
    for student, teacher in zip(STUDENT.softmax(-1).tolist(), TEACHER.softmax(-1).tolist(), strict=True):
        best = sorted(range(4), key=lambda index: (-teacher[index], index))[:2]
        pairs = [(teacher[index], student[index]) for index in best]
        pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        total += sum(a * math.log(a / b) for a, b in pairs)
    assert float(top_k_divergence(STUDENT, answer)) == pytest.approx(total / 2, rel=1e-4)
    exact = STUDENT.log_softmax(-1)
    same = top_k(exact, 2)
    assert float(top_k_divergence(STUDENT, same)) == pytest.approx(0.0, abs=1e-6), "a student that is right stays"


def test_soft_cross_entropy_is_that_of_the_formula():
    probabilities = TEACHER.softmax(-1)
    expected = -(probabilities * STUDENT.log_softmax(-1)).sum(-1).mean()
    assert float(soft_cross_entropy(STUDENT, probabilities)) == pytest.approx(float(expected))


def test_other_vocabularies_and_missing_labels_are_refused():
    with pytest.raises(UsageError, match="this vocabulary"):
        distillation_loss(STUDENT, TEACHER[:, :3])
    with pytest.raises(UsageError, match="give target"):
        distillation_loss(STUDENT, TEACHER, weight=0.5)
    with pytest.raises(UsageError, match="greater than 0"):
        distillation_loss(STUDENT, TEACHER, temperature=0.0)
    with pytest.raises(UsageError, match="the same"):
        soft_cross_entropy(STUDENT, TEACHER[:1])


def test_outputs_are_reduced_at_the_teacher_and_restored_at_the_student():
    outputs = Outputs.parse("top_k=2,temperature=2")
    restored = outputs.restore(to_tensors(to_arrays(outputs.reduce({"logits": TEACHER}))))
    assert isinstance(restored, TopK)
    assert restored.indices.dtype == torch.int64
    assert torch.equal(restored.values, top_k(TEACHER, 2, 2.0).values)
    assert torch.equal(Outputs.parse("logits").restore({"logits": TEACHER}), TEACHER)
    assert set(Outputs.parse("logits").restore({"a": TEACHER, "b": STUDENT})) == {"a", "b"}
    half = Outputs.parse("float16")
    travels = half.reduce({"logits": TEACHER, "classes": torch.tensor([1, 2])})
    assert travels["logits"].dtype == torch.float16
    assert torch.equal(half.restore(travels)["logits"], TEACHER.half().float())
    assert torch.equal(half.restore(travels)["classes"], torch.tensor([1, 2]))
    with pytest.raises(UsageError, match=r"'logits' holds 70000, more than float16 does"):
        half.reduce({"logits": torch.tensor([[1.0, 70000.0, -torch.inf]])})
    with pytest.raises(UsageError, match="at least 9 classes"):
        Outputs.parse("top_k=9").reduce({"logits": TEACHER})
    with pytest.raises(UsageError, match="one tensor of logits"):
        Outputs.parse("top_k=2").reduce({"hidden": TEACHER})


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_of_every_type_travel_bit_for_bit(dtype):
    tensor = (torch.randn(3, 4) * 10).to(dtype).t()
    empty = torch.empty(0, 4, dtype=dtype)
    back = to_tensors(to_arrays({"a": tensor, "b": empty}))
    assert torch.equal(back["a"], tensor)
    assert back["b"].shape == (0, 4)
    assert back["b"].dtype == dtype


def test_only_tensors_travel():
    for value in (None, [1], {"a": 1}, {}, {1: STUDENT}):
        with pytest.raises(UsageError):
            named(value)


def test_hidden_states_by_hand():
    hidden = torch.tensor([[[1.0, 0.0], [3.0, 4.0]], [[0.0, 2.0], [1.0, 1.0]]], requires_grad=True)
    answer = torch.tensor([[[0.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [9.0, 9.0]]])
    expected = (0.5 + 8.0 + 0.5 + 64.0) / 4
    torch.testing.assert_close(hidden_state_loss(hidden, answer), torch.tensor(expected))
    mask = torch.tensor([[True, True], [True, False]])
    torch.testing.assert_close(hidden_state_loss(hidden, answer, mask=mask), torch.tensor(9.0 / 3))
    none = hidden_state_loss(hidden, answer, mask=torch.zeros(2, 2))
    assert none.item() == 0.0
    none.backward()
    assert hidden.grad is not None
    assert bool((hidden.grad == 0).all())
    one, other = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0, 0.0]])
    torch.testing.assert_close(hidden_state_loss(one, other, normalize=True), torch.tensor(2 * (1 - 0.6) / 2))


def test_hidden_states_of_other_widths_are_refused():
    with pytest.raises(UsageError, match="project the student's"):
        hidden_state_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(UsageError, match="mask has shape"):
        hidden_state_loss(torch.zeros(2, 3), torch.zeros(2, 3), mask=torch.ones(2, 3))


def test_the_mean_of_logits_is_the_geometric_mean_of_probabilities():
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    geometric = (one.softmax(-1) * other.softmax(-1)).sqrt()
    torch.testing.assert_close(average({"a": one, "b": other}).softmax(-1), geometric / geometric.sum(-1, keepdim=True))
    with pytest.raises(UsageError, match="have no mean"):
        average({"a": one, "b": other[:, :3]})


# --- sequences, half precision, targets of other kinds ---


def sequences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a student and a teacher, classes of which some have no label, and which positions are no padding."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    target = torch.tensor([[1, 2, -100], [3, -100, 0]])
    return student.requires_grad_(), teacher, target, torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("is_masked", [False, True])
def test_each_position_of_a_sequence_is_a_sample(is_masked):
    """The loss of a tutorial, over the positions that count; also where only the likeliest classes travel."""
    student, teacher, target, mask = sequences()
    counts = mask.bool() if is_masked else torch.ones(2, 3, dtype=torch.bool)
    own, theirs, labels = student[counts], teacher[counts], target[counts]
    soft = functional.kl_div((own / 2).log_softmax(-1), (theirs / 2).softmax(-1), reduction="batchmean") * 4
    hard = functional.cross_entropy(own, labels, reduction="sum", ignore_index=-100) / len(own)
    expected = 0.75 * soft + 0.25 * hard
    given = mask if is_masked else None
    for answer in (teacher, top_k(teacher, 4, 2.0), top_k(teacher, 3, 2.0)):
        loss = distillation_loss(student, answer, target, temperature=2.0, weight=0.75, mask=given)
        torch.testing.assert_close(loss, expected)
    probabilities = teacher.softmax(-1)
    torch.testing.assert_close(
        soft_cross_entropy(student, probabilities, mask=given), functional.cross_entropy(own, probabilities[counts])
    )


def test_a_batch_of_which_nothing_counts_has_a_loss_of_0():
    student, teacher, target, _ = sequences()
    loss = distillation_loss(student, teacher, target, weight=0.5, mask=torch.zeros(2, 3))
    assert loss.item() == 0.0
    assert bool((torch.autograd.grad(loss, student)[0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_the_student_does_not_round_the_loss(dtype):
    student = STUDENT.to(dtype)
    wanted = distillation_loss(student.float(), TEACHER, torch.tensor([1, 2]), temperature=2.0, weight=0.5)
    loss = distillation_loss(student, TEACHER, torch.tensor([1, 2]), temperature=2.0, weight=0.5)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wanted)


def test_targets_and_answers_of_other_kinds_are_refused():
    square = torch.zeros(4, 4)
    with pytest.raises(UsageError, match=r"target is a tensor of float32 of shape \(4, 4\).*add soft_cross_entropy"):
        distillation_loss(square, square, square, weight=0.5)
    with pytest.raises(UsageError, match=r"of shape \(4, 1\); expected integer classes of shape \(4,\)"):
        distillation_loss(square, square, torch.zeros(4, 1, dtype=torch.int64), weight=0.5)
    with pytest.raises(UsageError, match=r"the answer is a dict of Tensor; expected a tensor of logits"):
        distillation_loss(square, {"a": square})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"mask has shape \(2,\); expected \(4,\)"):
        distillation_loss(square, square, mask=torch.ones(2))
    with pytest.raises(UsageError, match=r"the teacher's answer is for \(2,\) samples"):
        top_k_divergence(square, top_k(TEACHER, 2))
    with pytest.raises(UsageError, match="the answers a, b are no tensors"):
        average({"a": top_k(TEACHER, 2), "b": top_k(TEACHER, 2)})  # type: ignore[dict-item]


def test_a_top_k_of_another_temperature_than_the_loss_is_refused():
    outputs = Outputs.parse("top_k=2")
    answer = outputs.restore(outputs.reduce({"logits": TEACHER}))
    assert answer.temperature == 1.0
    for loss in (distillation_loss, top_k_divergence):
        loss(STUDENT, answer)
        with pytest.raises(UsageError, match=r"TopK at temperature 1, and the loss has 2.*top_k=2,temperature=2"):
            loss(STUDENT, answer, temperature=2.0)
    values, indices, rest = answer
    unknown = TopK(values, indices, rest)
    assert unknown.temperature is None
    top_k_divergence(STUDENT, unknown, temperature=2.0)
    assert pickle.loads(pickle.dumps(answer)).temperature == 1.0


@pytest.mark.parametrize("k", [0, 3, 4])
def test_classes_that_a_teacher_masks_count_nothing(k):
    teacher = torch.tensor([[0.5, -torch.inf, 0.0, -torch.inf], [1.0, -1.0, -torch.inf, -torch.inf]])
    target = teacher.softmax(-1)
    for values in (STUDENT, teacher + torch.tensor([1.0, 0.0, 2.0, 0.0])):
        student = values.clone().requires_grad_()
        log_probabilities = values.log_softmax(-1)
        expected = torch.where(target > 0, target * (target.log() - log_probabilities), 0.0).sum(-1).mean()
        loss = distillation_loss(student, top_k(teacher, k) if k else teacher)
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss, student)
        assert torch.isfinite(gradient).all()


def test_half_precision_does_not_round_the_loss_of_hidden_states():
    hidden, answer = torch.randn(4, 64).bfloat16(), torch.randn(4, 64)
    for normalize in (False, True):
        loss = hidden_state_loss(hidden, answer, normalize=normalize)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, hidden_state_loss(hidden.float(), answer, normalize=normalize))
