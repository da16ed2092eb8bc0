"""What scripts do with batches, teachers and answers: the same comes of it as in plain PyTorch, or one clear error."""

from __future__ import annotations

import pytest
import torch
from fleet import Images, Sums, fleet, sums
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.teacher import Teacher, device_of
from edl_hvd.errors import NoTeacherError, UsageError

pytestmark = pytest.mark.distill

SAMPLES = 24


def elastic() -> edl_hvd.ElasticBatchSampler:
    return edl_hvd.ElasticBatchSampler(SAMPLES, global_batch=8, micro_batch=4, seed=3)


def over(dataset: Dataset, teachers: Teachers, **words) -> DistillLoader:
    """A loader over a data set in the elastic order."""
    return DistillLoader(DataLoader(dataset, batch_sampler=elastic()), teachers, send=lambda batch: batch[0], **words)


def numbers(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.arange(count))


# --- a script may do with its tensors what it likes ---


@pytest.mark.parametrize("outputs", ["logits", "float16", "top_k=2"])
def test_an_answer_that_the_script_overwrites_comes_again_as_it_was(tmp_path, outputs):
    """After a rollback, which begins a new pass at an earlier place."""
    with fleet(tmp_path, Sums()) as teachers:
        loader = over(Images(SAMPLES), Teachers(teachers.source, port=teachers.port, outputs=outputs))
        first = []
        for number, (_, _, answer) in enumerate(loader):
            parts = [answer] if isinstance(answer, torch.Tensor) else list(answer)
            first.append([part.clone() for part in parts])
            for part in parts:
                part.zero_()
            if number == 3:
                break
        for (_, _, answer), before in zip(loader, first, strict=False):
            parts = [answer] if isinstance(answer, torch.Tensor) else list(answer)
            assert all(map(torch.equal, parts, before))
        loader.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_an_answer_that_the_script_overwrites_is_kept_as_it_was(tmp_path, is_local):
    with fleet(tmp_path, Sums(print_as="sums")) as teachers:
        where = None if is_local else teachers.source

        def build() -> Sums:
            return Sums(print_as="sums")

        for _ in range(2):
            wanted = Teachers(where, port=teachers.port, local=build if is_local else None)
            loader = over(Images(SAMPLES), wanted, keep=tmp_path / "kept", views=1)
            for images, _, answer in loader:
                assert torch.equal(answer, sums(images))
                answer.zero_()
                images.zero_()
            loader.close()


class InPlace(nn.Module):
    """It normalises what it is given where that lies."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sub_(1).mul_(2)


def test_a_local_teacher_that_changes_its_input_leaves_the_students_as_it_was():
    inputs = numbers().tensors[0]
    for batch, index, answer in over(numbers(), Teachers(local=InPlace)):
        assert torch.equal(batch, inputs[index])
        batch.zero_()
        assert torch.equal(answer, (inputs[index] - 1) * 2)


def test_a_batch_that_has_a_field_of_the_name_is_refused():
    dataset = [{"question": torch.ones(2), "answer": torch.tensor(1)} for _ in range(SAMPLES)]
    inner = DataLoader(dataset, batch_sampler=elastic())  # type: ignore[arg-type]
    loader = DistillLoader(inner, Teachers(local=nn.Identity), send=lambda batch: batch["question"])
    with pytest.raises(UsageError, match=r"has a field 'answer' of its own.*rename it in collate_fn"):
        next(iter(loader))


@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, lambda one: torch.nested.nested_tensor(list(one), layout=torch.jagged)]
)
def test_tensors_that_are_not_dense_are_refused(make):
    loader = DistillLoader(
        DataLoader(numbers(), batch_sampler=elastic()), Teachers(local=nn.Identity), send=lambda batch: make(batch[0])
    )
    with pytest.raises(UsageError, match="expected a dense tensor"):
        next(iter(loader))


# --- loaders of PyTorch alone ---


def seeded_order(wrap, **words) -> tuple[list[list[int]], float]:
    """The order of two epochs, and what torch's generator gives afterwards."""
    torch.manual_seed(5)
    loader = wrap(DataLoader(numbers(), batch_size=5, shuffle=True, **words))
    return [batch[1].tolist() for _ in range(2) for batch in loader], torch.rand(1).item()


@pytest.mark.parametrize("words", [{}, {"drop_last": True}, {"num_workers": 1}, {"generator": 7}])
def test_a_plain_loader_gives_the_same_samples_and_the_same_chance(tmp_path, words):
    def make(wrap):
        generator = {"generator": torch.Generator().manual_seed(7)} if "generator" in words else {}
        return seeded_order(wrap, **{**words, **generator})

    plain = make(lambda loader: loader)
    assert make(lambda loader: DistillLoader(loader, Teachers(local=Sums), send=lambda batch: batch[0])) == plain
    with fleet(tmp_path, Sums()) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port)
        assert make(lambda loader: DistillLoader(loader, wanted, send=lambda batch: batch[0])) == plain


class Stream(IterableDataset):
    def __iter__(self):
        return iter(numbers(18).tensors[0])


@pytest.mark.parametrize("is_local", [True, False])
def test_a_data_set_without_indices_is_read_to_its_end(tmp_path, is_local):
    with fleet(tmp_path, Sums()) as teachers:
        wanted = Teachers(local=Sums) if is_local else Teachers(teachers.source, port=teachers.port)
        loader = DistillLoader(DataLoader(Stream(), batch_size=4), wanted, send=lambda batch: batch)
        batches = list(loader)
        loader.close()
    assert [len(batch) for batch, _ in batches] == [4, 4, 4, 4, 2]
    assert all(torch.equal(answer, sums(batch)) for batch, answer in batches)


# --- teachers that are no function of a sample ---


class Chance(nn.Module):
    """Dropout that evaluation does not switch off."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(inputs.float(), 0.5, training=True)


class Neighbours(nn.Module):
    """BatchNorm with the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs.float())


def training() -> object:
    """A model in training, in a function, so that it is not set to evaluation."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    return lambda inputs: model(inputs.float())


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(
    ("build", "words"), [(Chance, "in two ways"), (Neighbours, "other samples of its batch"), (training, "other samp")]
)
def test_a_teacher_that_is_no_function_of_a_sample_is_refused(tmp_path, build, words, dtype, is_local):
    dataset = TensorDataset((numbers().tensors[0] * 50).to(dtype), torch.arange(SAMPLES))
    if is_local:
        with pytest.raises(UsageError, match=words):
            next(iter(over(dataset, Teachers(local=build))))
        return
    model = build() if build is not training else Training()
    with fleet(tmp_path, model) as teachers:
        loader = over(dataset, Teachers(teachers.source, port=teachers.port, patience="6s"))
        with pytest.raises(NoTeacherError, match=words):
            next(iter(loader))
        loader.close()


class Training:
    """``training`` as something that travels to a process."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs.float())


class Masked(nn.Module):
    """Attention over tokens, of which some are padding; with a mask of zeros it is not a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embedding(inputs["tokens"])
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill((inputs["mask"] == 0)[:, None], -torch.inf)
        return self.out(scores.softmax(-1) @ hidden)


class Packed(nn.Module):
    """A recurrent network over sequences with their lengths, of which none may be 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.network = nn.Embedding(20, 8), nn.GRU(8, 4, batch_first=True)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(inputs["tokens"]), inputs["mask"].sum(1), batch_first=True, enforce_sorted=False
        )
        return self.network(packed)[1][0]


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("build", [Masked, Packed])
def test_a_teacher_whose_mask_may_not_be_all_zeros_answers(tmp_path, build, exact, is_local):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 20, (SAMPLES, 6), generator=generator)
    mask = (torch.arange(6) < torch.randint(1, 7, (SAMPLES, 1), generator=generator)).long()
    with fleet(tmp_path, build()) as teachers:
        words = {"local": build} if is_local else {"source": teachers.source, "port": teachers.port}
        inner = DataLoader(TensorDataset(tokens, mask), batch_sampler=elastic())
        loader = DistillLoader(
            inner,
            Teachers(exact=exact, patience="6s", **words),
            send=lambda batch: dict(zip(("tokens", "mask"), batch, strict=True)),
        )
        model, count = build().eval(), 0
        for one, kept, answer in loader:
            torch.testing.assert_close(answer, model({"tokens": one, "mask": kept}).detach())
            count += 1
        assert count == SAMPLES // 4
        loader.close()


def test_a_local_teacher_computes_where_its_parameters_are():
    """No GPU is needed for that: a teacher was moved to the CPU, whatever device its function had chosen."""
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(1, affine=False, device="meta")) == torch.device("meta")
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert Teacher.of(nn.Linear(1, 1)).device == torch.device("cpu")


def test_sequences_of_several_lengths_may_be_asked_for_at_once(tmp_path):
    """Each length begins the conversation anew; what was asked for before is answered before that."""
    with fleet(tmp_path, Sums(0.05)) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, patience="1min")
        sequences = [torch.randn(2, length) for length in (3, 5, 5, 3)]
        asked = [wanted.ask(one) for one in sequences]
        for one, pending in zip(sequences, asked, strict=True):
            assert torch.equal(pending.result(), sums(one))
        wanted.close()
