"""Both loops, and all kinds of data, learn from teachers elsewhere what they learn from one in the same process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import alone
from fleet import Images, fleet
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd import distill

pytestmark = pytest.mark.distill

LENGTH, EPOCHS = 40, 2


class Noisy(torch.utils.data.Dataset[Any]):
    """Images with noise, as an augmentation makes them."""

    def __init__(self) -> None:
        self.images = Images(LENGTH)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.images[index]
        return image + torch.randn_like(image), label


def read_shard(path: str) -> list[tuple[torch.Tensor, int]]:
    return [(torch.tensor(values).view(1, 4, 4), index) for index, values in json.loads(Path(path).read_text())]


def make(data: str, folder: Path, workers: int) -> tuple[Any, Any]:
    """A loader without teachers, and its sampler."""
    if data == "shards":
        paths = []
        for number in range(4):
            numbers = range(number * LENGTH // 4, (number + 1) * LENGTH // 4)
            content = [(index, Images(LENGTH)[index][0].flatten().tolist()) for index in numbers]
            paths.append(str(folder / f"{number}.json"))
            Path(paths[-1]).write_text(json.dumps(content))
        shards = edl_hvd.ElasticShards(paths, [LENGTH // 4] * 4, read=read_shard)
        batches = shards.sampler(global_batch=12, micro_batch=4, seed=1)
        return DataLoader(shards, batch_sampler=batches, num_workers=workers), batches
    dataset = edl_hvd.SeededDataset(Noisy()) if data == "seeded" else Images(LENGTH)
    batches = edl_hvd.ElasticBatchSampler(LENGTH, global_batch=12, micro_batch=4, seed=1)
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers), batches


def learn(loop: str, loader: Any, batches: Any) -> tuple[list[torch.Tensor], list[int]]:
    """The weights after some epochs, and the samples in their order. There is dropout, so the generators matter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner, model.named_parameters(), exact=True)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    seen: list[int] = []

    def backward(batch: Any) -> None:
        images, index, answer = batch
        seen.extend(index.tolist())
        distill.distillation_loss(model(images), answer, temperature=2.0).backward()

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for _ in state.epochs(EPOCHS):
            if loop == "steps":
                for step in state.steps(loader):
                    for batch in step:
                        backward(batch)
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                for batch in state.batches(loader):
                    backward(batch)
                    optimizer.step()
                    optimizer.zero_grad()

    with alone():
        train(state)
    return [value.clone() for value in model.state_dict().values()], seen


@pytest.mark.parametrize("loop", ["steps", "batches"])
@pytest.mark.parametrize(("data", "workers"), [("plain", 0), ("seeded", 0), ("seeded", 2), ("shards", 1)])
def test_what_is_learned_does_not_depend_on_where_teachers_are(tmp_path, loop, data, workers):
    torch.set_num_threads(1)
    torch.manual_seed(4)
    teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    results = []
    with fleet(tmp_path, copy.deepcopy(teacher), copy.deepcopy(teacher)) as teachers:
        for source in (None, teachers.source):
            inner, batches = make(data, tmp_path, workers)
            wanted = distill.Teachers(source, port=teachers.port, local=lambda: copy.deepcopy(teacher), exact=True)
            loader = distill.DistillLoader(inner, wanted, send=lambda batch: batch[0])
            results.append(learn(loop, loader, batches))
            loader.close()
    (weights, samples), (other_weights, other_samples) = results
    assert samples == other_samples
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))
    for epoch in range(EPOCHS):
        assert sorted(samples[epoch * LENGTH : (epoch + 1) * LENGTH]) == list(range(LENGTH))


def test_the_next_training_of_a_process_learns_from_another_model(tmp_path):
    batches = edl_hvd.ElasticBatchSampler(LENGTH, global_batch=12, micro_batch=4, seed=1)
    inner = DataLoader(Images(LENGTH), batch_sampler=batches)
    met = set()
    with fleet(tmp_path) as teachers:
        for seed in range(2):
            torch.manual_seed(seed)
            teachers.start(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), 0)
            wanted = distill.Teachers(teachers.source, port=teachers.port)
            loader = distill.DistillLoader(inner, wanted, send=lambda batch: batch[0])
            learn("steps", loader, batches)
            met.add(wanted.fingerprint)
            loader.close()
            teachers.kill(0)
    assert len(met) == 2
