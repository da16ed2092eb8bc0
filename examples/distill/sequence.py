"""A small network learns to continue text, letter by letter, from the 8 letters that a larger one finds likeliest.

python examples/distill/sequence.py                                  # the teacher computes in this process
edl-hvd teach examples/distill/sequence.py:build --devices cpu,cpu   # two teachers, on ports 7010 and 7011
edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/sequence.py

The text is docstrings of Python's library, so nothing is downloaded. An answer has 8 letters and the mass of all others
for each of 63 positions, 2.6 kB instead of 32 kB of logits. Lines that end early are filled up with 0, which does not
count.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from texts import texts
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd import distill

LETTERS, LENGTH = 128, 64
TOP = "top_k=8,temperature=1"
TEMPERATURE, WEIGHT, LEARNING_RATE = 1.0, 0.5, 0.003
GLOBAL_BATCH, MICRO_BATCH = 64, 32
TEACHER, TEACHER_EPOCHS = Path("runs/distill/letters.pt"), 4


class Letters(torch.nn.Module):
    """A recurrent network that says which letter comes next.

    Args:
        width: Number of units.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(LETTERS, width)
        self.recurrent = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Logits of shape (samples, positions, letters), for letters of shape (samples, positions)."""
        return self.head(self.recurrent(self.embedding(letters.long()))[0])


def lines() -> tuple[torch.Tensor, torch.Tensor]:
    """Lines of 64 letters for training and for testing, as uint8; 0 where a line has ended."""
    return tuple(
        torch.where(part.letters < LETTERS, part.letters, ord("?"))[:, :LENGTH].contiguous() for part in texts()
    )  # type: ignore[return-value]


def loss_of(model: torch.nn.Module, part: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next letter, where there is one."""
    logits = model(part[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].long().flatten(), ignore_index=0)


def train_letters(model: torch.nn.Module, epochs: int, learning_rate: float = LEARNING_RATE) -> torch.nn.Module:
    """Train a model on all lines, without a teacher."""
    training, _ = lines()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for part in torch.randperm(len(training)).split(GLOBAL_BATCH):
            optimizer.zero_grad()
            loss_of(model, training[part]).backward()
            optimizer.step()
    return model


def build(path: Path = TEACHER, epochs: int = TEACHER_EPOCHS) -> torch.nn.Module:
    """The teacher, for ``edl-hvd teach``; trained by the first process that needs it."""
    torch.manual_seed(1)
    model = Letters(256)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    train_letters(model, epochs)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{torch.seed()}")
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(path)
    return model


def main() -> None:
    """Train the student and print the loss of each epoch, and its cross entropy on other lines at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--labels-only", action="store_true", help="learn from the text alone, for comparison")
    parser.add_argument("--port", type=int, default=7010, help="of the first teacher of each host")
    arguments = parser.parse_args()
    edl_hvd.init()
    torch.set_num_threads(1)  # several workers share this machine
    training, test = lines()
    torch.manual_seed(0)
    model = Letters(48)
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), model.named_parameters()
    )
    batches = edl_hvd.ElasticBatchSampler(len(training), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0)
    teachers = distill.Teachers(local=build, outputs=TOP, port=arguments.port)
    loader = distill.DistillLoader(
        DataLoader(TensorDataset(training), batch_sampler=batches), teachers, send=lambda batch: batch[0][:, :-1]
    )
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, loss=edl_hvd.metrics.Mean())

    @edl_hvd.elastic
    def train(state: edl_hvd.State) -> None:
        for epoch in state.epochs(arguments.epochs):
            for step in state.steps(loader):
                for line, answer in step:
                    following = line[:, 1:].long()
                    loss = distill.distillation_loss(
                        model(line[:, :-1]), answer, following, temperature=TEMPERATURE,
                        weight=0.0 if arguments.labels_only else WEIGHT, mask=following > 0,
                    )  # fmt: skip
                    loss.backward()
                    state.loss.update(loss, weight=len(line))
                optimizer.step()
                optimizer.zero_grad()
            mean_loss = state.loss.compute()
            if edl_hvd.rank() == 0:
                print(f"epoch {epoch + 1}: loss {mean_loss:.6f}, workers {edl_hvd.size()}", flush=True)
        if edl_hvd.rank() == 0:
            with torch.no_grad():
                print(f"nats per letter {loss_of(model, test):.4f}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
