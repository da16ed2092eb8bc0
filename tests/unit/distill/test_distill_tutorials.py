"""Scripts as tutorials have them learn with a service what they learn in plain PyTorch with the teacher inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fleet import Fleet, fleet
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from edl_hvd import distill
from edl_hvd.distill import DistillLoader, Teachers

pytestmark = pytest.mark.distill

WORDS, LENGTH, SAMPLES = 12, 5, 50
LIMIT = 2e-6
# Losses are about 1; merged batches and other formulas round otherwise.


class Vision(nn.Module):
    """A classifier with BatchNorm and dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 4)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Language(nn.Module):
    """A model of the next token, which takes a batch of ``transformers``."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, width, padding_idx=0)
        self.network = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.network(self.embedding(batch["input_ids"]))[0])


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
    )


def from_fleet(teachers: Fleet, **words: Any) -> Teachers:
    return Teachers(teachers.source, port=teachers.port, patience="5min", **words)


def learn_vision(
    loader: Iterable[Any], answer_to: Callable[[Any], torch.Tensor], *, is_mixed: bool = False, accumulate: int = 1,
    evaluate: Iterable[Any] = (),
) -> list[float]:  # fmt: skip
    """The losses of two epochs."""
    model, losses = Vision(9), []
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(2)
    for _ in range(2):
        for number, batch in enumerate(loader):
            answer = answer_to(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                loss = distill.distillation_loss(model(batch[0]), answer, batch[1], temperature=2.0, weight=0.7)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                model.eval()
                for other in evaluate:
                    losses.append(functional.cross_entropy(model(other[0]), other[1]).item())
                model.train()
    return losses


@pytest.mark.parametrize(
    ("loader_words", "loop_words"),
    [({"shuffle": True}, {}), ({"shuffle": True, "drop_last": True}, {"is_mixed": True}),
     ({"shuffle": True, "num_workers": 2}, {"accumulate": 3}), ({}, {"evaluate": True})],
    ids=["shuffle", "mixed precision", "accumulated", "evaluated inside"],
)  # fmt: skip
def test_a_loop_of_vision_has_the_losses_of_the_teacher_inside(tmp_path, loader_words, loop_words):
    def loader() -> DataLoader[Any]:
        return DataLoader(images(), batch_size=8, **loader_words)

    validation = DataLoader(images(), batch_size=25)
    teacher = Vision(3).eval()
    is_evaluated = loop_words.pop("evaluate", False)
    inside: dict[str, Any] = {"evaluate": validation} if is_evaluated else {}
    wanted = learn_vision(loader(), lambda batch: teacher(batch[0]).detach(), **loop_words, **inside)
    with fleet(tmp_path, Vision(3), Vision(3)) as teachers:
        shared = from_fleet(teachers)
        other = DistillLoader(validation, shared, send=lambda batch: batch[0])
        inside = {"evaluate": other} if is_evaluated else {}
        own = DistillLoader(loader(), shared, send=lambda batch: batch[0])
        losses = learn_vision(own, lambda batch: batch[2], **loop_words, **inside)
        own.close()
        other.close()
    assert losses == pytest.approx(wanted, abs=LIMIT)


@pytest.mark.parametrize("is_routed", [False, True])
def test_two_teachers_are_averaged_or_routed_as_they_would_be_inside(tmp_path, is_routed):
    first, second = Vision(3).eval(), Vision(4).eval()

    def inside(batch: Any) -> torch.Tensor:
        one, other = first(batch[0]).detach(), second(batch[0]).detach()
        return torch.where((batch[1] % 2 == 0)[:, None], one, other) if is_routed else (one + other) / 2

    wanted = learn_vision(DataLoader(images(), batch_size=8), inside)
    folders = [tmp_path / name for name in ("0", "1")]
    for folder in folders:
        folder.mkdir()
    with fleet(folders[0], Vision(3)) as one, fleet(folders[1], Vision(4)) as other:
        loader = DistillLoader(
            DataLoader(images(), batch_size=8),
            {"0": from_fleet(one), "1": from_fleet(other)},
            send=lambda batch: batch[0],
            route=(lambda batch: batch[1] % 2) if is_routed else None,
        )
        losses = learn_vision(loader, lambda batch: batch[2] if is_routed else distill.average(batch[2]))
        loader.close()
    assert losses == pytest.approx(wanted, abs=LIMIT)


class Texts(Dataset[Any]):
    """Tokens, padding, and labels as a collator of ``transformers`` makes them: -100 where there is none."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)).long()
        self.tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator) * self.mask

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].where(self.mask[index].bool(), -100)
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index], "labels": labels}


def learn_language(loader: Iterable[Any], loss_of: Callable[[torch.Tensor, Any], torch.Tensor]) -> list[float]:
    model, losses = Language(8, 16), []
    optimizer = torch.optim.Adam(model.parameters())
    for batch in loader:
        loss = loss_of(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("likeliest", [0, 4])
def test_a_loop_of_language_has_the_losses_of_the_teacher_inside(tmp_path, likeliest):
    """Means over the tokens that are no padding, of all classes or of the likeliest and the rest."""
    teacher = Language(5, 24).eval()

    def by_formula(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        counts = batch["attention_mask"].bool()
        theirs = (teacher(batch).detach() / 2).softmax(-1)
        own = (logits / 2).softmax(-1)
        if likeliest:
            top = theirs.topk(likeliest, -1)
            chosen = own.gather(-1, top.indices)
            theirs = torch.cat([top.values, 1 - top.values.sum(-1, keepdim=True)], -1)
            own = torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1)
        soft = (theirs * (theirs / own).log()).sum(-1)[counts].mean()
        hard = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        return 0.5 * 4 * soft + 0.5 * hard

    def by_answer(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return distill.distillation_loss(
            logits, batch["answer"], batch["labels"], temperature=2.0, weight=0.5, mask=batch["attention_mask"]
        )

    wanted = learn_language(DataLoader(Texts(), batch_size=8), by_formula)
    with fleet(tmp_path, Language(5, 24), Language(5, 24)) as teachers:
        outputs = f"top_k={likeliest},temperature=2" if likeliest else "logits"
        loader = DistillLoader(
            DataLoader(Texts(), batch_size=8),
            from_fleet(teachers, outputs=outputs),
            send=lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")},
        )
        losses = learn_language(loader, by_answer)
        loader.close()
    assert losses == pytest.approx(wanted, abs=LIMIT)
