"""The little training both engines run: a ledger of samples beside a small network.

The ledger is one parameter per sample. Its loss is linear, its learning rate such that each time a sample counts
in a global batch its entry falls by exactly one, so the final weights themselves say how often each sample counted.
The network, under momentum or AdamW and with weight decay, shows whether replicas stay identical.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_MOST_LISTED_WEIGHTS = 1_000_000


@dataclass(frozen=True)
class Training:
    """What to train.

    Attributes:
        samples: Size of the data set.
        epochs: Epochs to train at least. The job goes on to the end of the first epoch by which every fault has struck
        linger_s: (the last one that many seconds ago)
        until_size: and the world has this size
        leavers_gone: and no process remains of the workers that left, which horovodrun would end with the job.
        global_batch: Samples per optimizer step over the whole world.
        micro_batch: Samples per forward; ``None`` splits the global batch evenly.
        worker_batch: Samples per worker instead of a global batch.
        most: With ``worker_batch``: the batch is chosen while the job runs, from that to this.
        rule: With ``worker_batch``: how the learning rate follows.
        optimizer: "sgd" (momentum 0.9, weight decay 0.1), "plain" (no momentum, no decay) or "adamw".
        commit_every: Steps between commits.
        pause_s: Sleep in each step, so that there is time for something to happen.
        checkpoint: URL for checkpoints, or ``None``.
        checkpoint_every: Their interval.
        loader_workers: Processes of the data loader.
        hidden: Width of the network. Above some 100,000 a gradient no longer fits into the sockets' buffers, and a
            worker waits in the middle of sending it.
        layers: Hidden ones. With many, a worker is most of the time about to hand a gradient over.
        ballast_mb: Size of a table that belongs to the state and that no step moves.
        device: "cpu" or "cuda", whose GPUs several workers may share.
        extra: Switches of single tests: "shards" (the samples come from tar files), "scheduler" (halves the learning
            rate each epoch), "clip" (the script moves weights besides the optimizer), "metric" (a collective
            of the script's own after each optimizer step), "pinned" (batches come through the
            loader's pinning thread), "long" (torch is imported whole, see ``quick_start.py``, and no
            list of all steps grows in the state), "statistics" (BatchNorm's running ones), "check" (stock
            Horovod: look for host updates in every step), "distill" (each batch comes with a teacher's
            answer, which is checked), "table" (a tensor of 100 MB beside the model counts the steps).
    """

    samples: int = 48
    epochs: int = 3
    linger_s: float = 0.0
    until_size: int | None = None
    leavers_gone: bool = False
    global_batch: int = 8
    micro_batch: int | None = 2
    worker_batch: int | None = None
    most: int | None = None
    rule: str = "linear"
    optimizer: str = "sgd"
    commit_every: int = 1
    pause_s: float = 0.02
    checkpoint: str | None = None
    checkpoint_every: str = "600s"
    loader_workers: int = 0
    hidden: int = 16
    layers: int = 1
    ballast_mb: int = 0
    device: str = "cpu"
    extra: tuple[str, ...] = field(default=())

    @property
    def keeps_ledger(self) -> bool:
        """AdamW and a changing learning rate do not take one off per sample."""
        return self.optimizer != "adamw" and "scheduler" not in self.extra and self.rule == "linear"

    def save(self, folder: Path) -> None:
        (folder / "training.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Training:
        fields = json.loads((folder / "training.json").read_text())
        return cls(**{**fields, "extra": tuple(fields["extra"])})


def build(training: Training, ledger_rate: float) -> tuple[Any, Any, Any]:
    """The model, its optimizer and the data set, the same on every call."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(7)

    class Trainee(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = training.hidden
            between = [layer for _ in range(training.layers - 1) for layer in (nn.Linear(width, width), nn.Tanh())]
            self.network = nn.Sequential(nn.Linear(8, width), nn.Tanh(), *between, nn.Linear(width, 1))
            self.ledger = nn.Parameter(torch.zeros(training.samples), requires_grad=training.optimizer != "adamw")
            if "statistics" in training.extra:
                self.statistics = nn.BatchNorm1d(8, affine=False)

    class Numbered(torch.utils.data.Dataset):
        features = torch.randn(training.samples, 8)
        target = features.sum(dim=1, keepdim=True).sin()

        def __len__(self) -> int:
            return training.samples

        def __getitem__(self, index: int) -> tuple[int, Any, Any]:
            return index, self.features[index], self.target[index]

    model = Trainee()
    network = {"params": list(model.network.parameters())}
    ledger = {"params": [model.ledger], "lr": ledger_rate, "momentum": 0.0, "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer
    if training.optimizer == "adamw":
        optimizer = torch.optim.AdamW([network], lr=0.01, weight_decay=0.1)
    else:
        momentum, decay = (0.9, 0.1) if training.optimizer == "sgd" else (0.0, 0.0)
        optimizer = torch.optim.SGD([network, ledger], lr=0.01, momentum=momentum, weight_decay=decay)
    return model, optimizer, Numbered()


def loss_of(model: Any, batch: tuple[Any, Any, Any], ledger_scale: float = 1.0) -> Any:
    """Mean squared error, plus the mean of the batch's ledger entries."""
    index, features, target = (part.to(model.ledger.device) for part in batch)
    if hasattr(model, "statistics"):
        model.statistics(features)  # what comes out is not needed: its statistics move, other ones on each rank
    return ((model.network(features) - target) ** 2).mean() + ledger_scale * model.ledger[index].mean()


def weights_of(model: Any) -> dict[str, list[float]]:
    """The network's weights as plain numbers; nothing of a large network, whose numbers would take gigabytes."""
    state = model.network.state_dict()
    if sum(value.numel() for value in state.values()) > _MOST_LISTED_WEIGHTS:
        return {}
    return {name: value.detach().flatten().tolist() for name, value in state.items()}


def write_report(folder: Path, worker: str, model: Any, **fields: Any) -> None:
    """What one worker holds at the end of the job."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if name.startswith("statistics."):
            continue  # each rank has its own
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    report = {
        "worker": worker,
        "pid": os.getpid(),
        "ledger": model.ledger.detach().tolist(),
        "weights": weights_of(model),
        "sha256": digest.hexdigest(),
        **fields,
    }
    (folder / "reports").mkdir(exist_ok=True)
    path = folder / "reports" / f"{worker.replace(':', '.')}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").replace(path)
