"""Networks whose parameters or passes are not the usual ones."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, GLOBAL_BATCH, Idiom, Job
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.data.randomness import seed_everything

VOCABULARY, LENGTH = 10, 5


def trained_plain(job: Job, model: nn.Module, optimizer, dataset=None, loss_of=None):
    loss_of = loss_of or (lambda model, inputs, target: F.cross_entropy(model(inputs), target))
    for epoch in range(job.epochs):
        for batch in job.plain_loader(dataset, epoch):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def trained_ours(job: Job, model: nn.Module, optimizer, dataset=None, loss_of=None, flat=False, **more):
    loss_of = loss_of or (lambda model, inputs, target: F.cross_entropy(model(inputs), target))
    optimizer = edl_hvd.DistributedOptimizer(optimizer, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(dataset or job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, **more)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if flat:
                for batch in state.batches(loader):
                    optimizer.zero_grad()
                    loss_of(model, *batch).backward()
                    optimizer.step()
                continue
            for step in state.steps(loader):
                optimizer.zero_grad()
                for batch in step:
                    loss_of(model, *batch).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


# --- words ---


def words(job: Job):
    """Sentences, and a class for each."""
    sentences = torch.randint(0, VOCABULARY, (job.samples, LENGTH), generator=torch.Generator().manual_seed(4))
    return job.dataset(sentences, job.target)


class Reader(nn.Module):
    """Embedding and LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embedding(sentences))
        return self.head(hidden[-1])


def lstm_plain(job: Job):
    model = Reader()
    return trained_plain(job, model, sgd(model), words(job))


def lstm_ours(job: Job):
    edl_hvd.init()
    model = Reader()
    return trained_ours(job, model, sgd(model), words(job))


class LanguageModel(nn.Module):
    """The table of words is that of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # recipe
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.output = nn.Linear(8, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        # end

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(sentences))[0])


def next_word_loss(model, sentences, _):
    return F.cross_entropy(model(sentences[:, :-1]).flatten(0, 1), sentences[:, 1:].flatten())


def weight_tying_plain(job: Job):
    model = LanguageModel()
    return trained_plain(job, model, sgd(model), words(job), next_word_loss)


def weight_tying_ours(job: Job):
    edl_hvd.init()
    model = LanguageModel()
    return trained_ours(job, model, sgd(model), words(job), next_word_loss)


def weight_tying_flat_plain(job: Job):
    return weight_tying_plain(job)


def weight_tying_flat_ours(job: Job):
    edl_hvd.init()
    model = LanguageModel()
    return trained_ours(job, model, sgd(model), words(job), next_word_loss, flat=True)


# --- parameters that are not always used ---


class Experts(nn.Module):
    """Each kind of sample has a branch of its own; one branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(FEATURES, 8)
        self.branches = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4))
        self.unused = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        # recipe
        features = self.trunk(inputs).tanh()
        output = features.new_zeros(len(inputs), CLASSES)
        for number in kind.unique().tolist():
            chosen = kind == number
            output[chosen] = self.branches[number](features[chosen])
        return output
        # end


def kinds(job: Job):
    """Kind 3 comes once in an epoch, so that one worker alone uses its branch, in one step."""
    kind = torch.randint(0, 3, (job.samples,), generator=torch.Generator().manual_seed(9))
    kind[17] = 3
    return job.dataset(job.inputs, kind, job.target)


def expert_loss(model, inputs, kind, target):
    return F.cross_entropy(model(inputs, kind), target)


def branches_plain(job: Job):
    model = Experts()
    return trained_plain(job, model, sgd(model), kinds(job), expert_loss)


def branches_ours(job: Job):
    edl_hvd.init()
    model = Experts()
    return trained_ours(job, model, sgd(model), kinds(job), expert_loss)


def branches_flat_plain(job: Job):
    return branches_plain(job)


def branches_flat_ours(job: Job):
    edl_hvd.init()
    model = Experts()
    return trained_ours(job, model, sgd(model), kinds(job), expert_loss, flat=True)


def adam_branches_plain(job: Job):
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)
    return trained_plain(job, model, optimizer, kinds(job), expert_loss)


def adam_branches_ours(job: Job):
    edl_hvd.init()
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)
    return trained_ours(job, model, optimizer, kinds(job), expert_loss)


def zeros_instead_of_none_plain(job: Job):
    model = Experts()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, kind, target in job.plain_loader(kinds(job), epoch):
            optimizer.zero_grad(set_to_none=False)
            expert_loss(model, inputs, kind, target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def zeros_instead_of_none_ours(job: Job):
    edl_hvd.init()
    model = Experts()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(kinds(job), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad(set_to_none=False)
                for inputs, kind, target in step:
                    F.cross_entropy(model(inputs, kind), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def stochastic_depth_plain(job: Job):
    model = make_deep()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            seed_everything(3, epoch, GLOBAL_BATCH * number, -1, 0)  # as state.steps does
            deep = bool(torch.rand(()) < 0.5)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs, deep), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def stochastic_depth_ours(job: Job):
    edl_hvd.init()
    model = make_deep()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                deep = bool(torch.rand(()) < 0.5)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs, deep), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Deep(nn.Module):
    """A layer in the middle may be left out, or computed again in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first = nn.Linear(FEATURES, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, inputs: torch.Tensor, deep: bool = True) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.reentrant is not None:
            # recipe
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=self.reentrant)
            return checkpoint(self.last, hidden, use_reentrant=self.reentrant)
            # end
        if deep:
            hidden = hidden + self.block(hidden)
        return self.last(hidden)


def make_deep(reentrant: bool | None = None) -> nn.Module:
    return Deep(reentrant)


# --- passes that are not the usual ones ---


def checkpointing_plain(job: Job):
    model = make_deep()
    return trained_plain(job, model, sgd(model))


def checkpointing_ours(job: Job):
    edl_hvd.init()
    model = make_deep(reentrant=False)
    return trained_ours(job, model, sgd(model))


def checkpointing_flat_plain(job: Job):
    return checkpointing_plain(job)


def checkpointing_flat_ours(job: Job):
    edl_hvd.init()
    model = make_deep(reentrant=False)
    return trained_ours(job, model, sgd(model), flat=True)


def reentrant_checkpointing_plain(job: Job):
    return checkpointing_plain(job)


def reentrant_checkpointing_ours(job: Job):
    edl_hvd.init()
    model = make_deep(reentrant=True)
    return trained_ours(job, model, sgd(model))


class DeepMiddle(Deep):
    """Only the middle is computed again."""

    def forward(self, inputs: torch.Tensor, deep: bool = True) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(hidden + checkpoint(self.block, hidden, use_reentrant=True))


def reentrant_middle_plain(job: Job):
    return checkpointing_plain(job)


def reentrant_middle_ours(job: Job):
    edl_hvd.init()
    model = DeepMiddle()
    return trained_ours(job, model, sgd(model))


def compiled_plain(job: Job):
    model = make_model()
    return trained_plain(job, model, sgd(model))


def compiled_ours(job: Job):
    edl_hvd.init()
    # recipe
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(compiled(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def compiled_in_state_plain(job: Job):
    model = make_model()
    outcome = trained_plain(job, model, sgd(model))
    return {"weights": list(model.parameters()), "optimizer": outcome["optimizer"]}


def compiled_in_state_ours(job: Job):
    edl_hvd.init()
    model = torch.compile(make_model(), backend="eager", dynamic=True)
    outcome = trained_ours(job, model, sgd(model))
    return {"weights": list(model.parameters()), "optimizer": outcome["optimizer"]}


def functional_call_plain(job: Job):
    model = make_model()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            doubled = {name: 1.5 * p for name, p in model.named_parameters()}
            F.cross_entropy(torch.func.functional_call(model, doubled, inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def functional_call_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    scaled = {name: 1.5 * p for name, p in model.named_parameters()}
                    F.cross_entropy(torch.func.functional_call(model, scaled, inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def tasks(job: Job):
    """Each sample is a task: some inputs to adapt with, and some to be judged by."""
    generator = torch.Generator().manual_seed(11)
    support, query = (torch.randn(job.samples, 4, FEATURES, generator=generator) for _ in "sq")
    target = torch.randint(0, CLASSES, (job.samples, 2, 4), generator=generator)
    return job.dataset(support, query, target)


def maml_loss(model, support, query, target):
    losses = []
    for s, q, (s_target, q_target) in zip(support, query, target, strict=True):
        fast = dict(model.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(model, fast, s), s_target)
        gradients = torch.autograd.grad(loss, fast.values(), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        losses.append(F.cross_entropy(torch.func.functional_call(model, fast, q), q_target))
    return torch.stack(losses).mean()


def maml_plain(job: Job):
    model = make_model()
    return trained_plain(job, model, sgd(model), tasks(job), maml_loss)


def maml_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    return trained_ours(job, model, sgd(model), tasks(job), maml_loss)


class Quantised(torch.autograd.Function):
    """Rounds; its gradient goes straight through."""

    @staticmethod
    def forward(ctx, weight):
        return (8 * weight).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class QuantisedNetwork(nn.Module):
    """Its weights are rounded in each pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # recipe
        hidden = F.linear(inputs, Quantised.apply(self.first.weight), self.first.bias).tanh()
        # end
        return self.last(hidden)


def custom_function_plain(job: Job):
    model = QuantisedNetwork()
    return trained_plain(job, model, sgd(model))


def custom_function_ours(job: Job):
    edl_hvd.init()
    model = QuantisedNetwork()
    return trained_ours(job, model, sgd(model))


# --- other networks beside ---


def distillation_plain(job: Job):
    teacher, model = make_teacher(), make_model()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            with torch.no_grad():
                soft = teacher(inputs)
            output = model(inputs)
            loss = F.cross_entropy(output, target)
            loss = loss + F.kl_div(output.log_softmax(1), soft.softmax(1), reduction="batchmean")
            loss.backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def distillation_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    teacher, model = make_teacher(), make_model()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    with torch.no_grad():
                        soft = teacher(inputs)
                    output = model(inputs)
                    loss = F.cross_entropy(output, target)
                    loss = loss + F.kl_div(output.log_softmax(1), soft.softmax(1), reduction="batchmean")
                    loss.backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def make_teacher() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)).eval().requires_grad_(False)


def mean_teacher_plain(job: Job):
    model = make_model()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            output = model(inputs)
            (F.cross_entropy(output, target) + F.mse_loss(output, teacher(inputs))).backward()
            optimizer.step()
            for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                t.data.mul_(0.9).add_(p.data, alpha=0.1)
    return {"model": model, "teacher": teacher, "optimizer": optimizer}


def mean_teacher_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    model = make_model()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, teacher=teacher, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    output = model(inputs)
                    (F.cross_entropy(output, target) + F.mse_loss(output, teacher(inputs))).backward()
                optimizer.step()
                for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                    t.data.mul_(0.9).add_(p.data, alpha=0.1)

    # end
    train(state)
    return {"model": model, "teacher": teacher, "optimizer": optimizer}


# --- statistics and random numbers of a micro-batch ---


def make_normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def accumulated_plain(job: Job, model: nn.Module, seeded: bool = False, size: int = 4):
    """Plain PyTorch over the same micro-batches, one after the other."""
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            optimizer.zero_grad()
            for first in range(0, len(inputs), size):
                if seeded:
                    seed_everything(3, epoch, GLOBAL_BATCH * number + first)  # as state.steps does
                part = slice(first, first + size)
                loss = F.cross_entropy(model(inputs[part]), target[part])
                (loss * len(inputs[part]) / len(inputs)).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def batch_norm_plain(job: Job):
    model = make_normalised()
    outcome = accumulated_plain(job, model)
    return {"weights": list(model.parameters()), "optimizer": outcome["optimizer"]}


def batch_norm_ours(job: Job):
    edl_hvd.init()
    model = make_normalised()
    outcome = trained_ours(job, model, sgd(model))
    return {"weights": list(model.parameters()), "optimizer": outcome["optimizer"]}


def batch_norm_idle_plain(job: Job):
    return accumulated_plain(job, make_normalised(), size=GLOBAL_BATCH)


def batch_norm_idle_ours(job: Job):
    edl_hvd.init()
    model = make_normalised()
    return trained_ours(job, model, sgd(model))


def batch_norm_statistics_plain(job: Job):
    return accumulated_plain(job, make_normalised())


def batch_norm_statistics_ours(job: Job):
    edl_hvd.init()
    model = make_normalised()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=True)
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def batch_norm_second_loop_plain(job: Job):
    model = make_normalised()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            for _ in range(2):
                optimizer.zero_grad()
                for first in range(0, len(inputs), 4):
                    part = slice(first, first + 4)
                    loss = F.cross_entropy(model(inputs[part]), target[part])
                    (loss * len(inputs[part]) / len(inputs)).backward()
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


def batch_norm_second_loop_ours(job: Job):
    edl_hvd.init()
    model = make_normalised()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=True)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for _ in range(2):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def make_dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def dropout_plain(job: Job):
    return accumulated_plain(job, make_dropping(), seeded=True)


def dropout_ours(job: Job):
    edl_hvd.init()
    model = make_dropping()
    return trained_ours(job, model, sgd(model))


def dropout_flat_plain(job: Job):
    return dropout_plain(job)


def dropout_flat_ours(job: Job):
    edl_hvd.init()
    model = make_dropping()
    return trained_ours(job, model, sgd(model), flat=True)


def lazy_plain(job: Job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, FEATURES))
    return trained_plain(job, model, sgd(model))


def lazy_ours(job: Job):
    edl_hvd.init()
    torch.manual_seed(0)
    # recipe
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, FEATURES))
    # end
    return trained_ours(job, model, sgd(model))


class ActNorm(nn.Module):
    """Shift and scale of each feature, which the first batch sets, as in Glow."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.ones(features))
        self.register_buffer("is_initialized", torch.tensor(False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.is_initialized:
            self.shift.data.copy_(-inputs.detach().mean(0))
            self.scale.data.copy_(1 / (inputs.detach().std(0) + 1e-6))
            self.is_initialized.fill_(True)
        return (inputs + self.shift) * self.scale


def make_act_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), ActNorm(8), nn.Tanh(), nn.Linear(8, CLASSES))


def act_norm_plain(job: Job):
    model = make_act_normed()
    dataset = job.dataset()
    # recipe
    inputs = torch.stack([dataset[i][0] for i in range(32)])
    model(inputs)
    # end
    return trained_plain(job, model, sgd(model))


def act_norm_ours(job: Job):
    edl_hvd.init()
    dataset = job.dataset()
    model = make_act_normed()
    # recipe
    inputs = torch.stack([dataset[i][0] for i in range(32)])
    model(inputs)
    # end
    return trained_ours(job, model, sgd(model))


def weight_norm_plain(job: Job):
    model = make_weight_normed()
    return trained_plain(job, model, sgd(model))


def weight_norm_ours(job: Job):
    edl_hvd.init()
    model = make_weight_normed()
    return trained_ours(job, model, sgd(model))


def make_weight_normed() -> nn.Module:
    torch.manual_seed(0)
    first = torch.nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, CLASSES))


class Odd(nn.Module):
    """A scalar, a transposed, an empty and a complex parameter, and buffers of types that Horovod does not have."""

    def __init__(self, is_complex: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        # recipe
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(CLASSES, FEATURES).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tril(torch.ones(FEATURES, FEATURES, dtype=torch.bool)))
        # end
        self.register_buffer("rounded", torch.arange(4.0).bfloat16())
        self.register_buffer("short", torch.arange(4, dtype=torch.int16))
        self.spectrum = nn.Parameter(torch.randn(FEATURES, dtype=torch.cfloat)) if is_complex else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.spectrum is not None:
            inputs = torch.fft.ifft(torch.fft.fft(inputs) * self.spectrum).real
        masked = inputs @ self.mask.to(inputs.dtype)
        return masked @ self.transposed * self.temperature.exp() + self.empty.sum()


def odd_shapes_plain(job: Job):
    model = Odd()
    return trained_plain(job, model, sgd(model))


def odd_shapes_ours(job: Job):
    edl_hvd.init()
    model = Odd()
    return trained_ours(job, model, sgd(model))


def complex_weights_plain(job: Job):
    model = Odd(is_complex=True)
    outcome = trained_plain(job, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    return {name: torch.view_as_real(p) if p.is_complex() else p for name, p in outcome["model"].named_parameters()}


def complex_weights_ours(job: Job):
    edl_hvd.init()
    model = Odd(is_complex=True)
    outcome = trained_ours(job, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    return {name: torch.view_as_real(p) if p.is_complex() else p for name, p in outcome["model"].named_parameters()}


IDIOMS = [
    Idiom(
        "Parameters of odd shapes",
        "Scalars, empty ones and transposed ones are summed as any others.",
        odd_shapes_plain,
        odd_shapes_ours,
    ),
    Idiom(
        "Complex parameters",
        "Nothing to know.",
        complex_weights_plain,
        complex_weights_ours,
    ),
    Idiom(
        "Embedding and LSTM",
        "Dense gradients of embeddings are summed as any others.",
        lstm_plain,
        lstm_ours,
    ),
    Idiom(
        "Weight tying",
        "A parameter that is used in several places is one parameter.",
        weight_tying_plain,
        weight_tying_ours,
    ),
    Idiom(
        "Weight tying in the flat loop",
        "The same in the flat loop.",
        weight_tying_flat_plain,
        weight_tying_flat_ours,
    ),
    Idiom(
        "Parameters that only some samples use",
        "A parameter that no sample of the global batch uses has no gradient, and is left alone by momentum and weight "
        "decay, as in plain PyTorch; one that a single worker's micro-batch uses moves on all workers.",
        branches_plain,
        branches_ours,
    ),
    Idiom(
        "Parameters that only some samples use, in the flat loop",
        "The same in the flat loop.",
        branches_flat_plain,
        branches_flat_ours,
    ),
    Idiom(
        "Parameters that only some samples use, with AdamW",
        "Each parameter's number of steps counts only those in which it had a gradient.",
        adam_branches_plain,
        adam_branches_ours,
    ),
    Idiom(
        "`zero_grad(set_to_none=False)`",
        "Gradients that are zero instead of none have momentum and weight decay go on, as in plain PyTorch.",
        zeros_instead_of_none_plain,
        zeros_instead_of_none_ours,
    ),
    Idiom(
        "Stochastic depth",
        "Draw at step level whether a layer is used: then it is the same in all micro-batches, and on all workers.",
        stochastic_depth_plain,
        stochastic_depth_ours,
    ),
    Idiom(
        "Activation checkpointing",
        "With `use_reentrant=False` it works in both loops.",
        checkpointing_plain,
        checkpointing_ours,
    ),
    Idiom(
        "Activation checkpointing in the flat loop",
        "The same in the flat loop.",
        checkpointing_flat_plain,
        checkpointing_flat_ours,
    ),
    Idiom(
        "Activation checkpointing with `use_reentrant=True`",
        "It works in `state.steps`.",
        reentrant_checkpointing_plain,
        reentrant_checkpointing_ours,
    ),
    Idiom(
        "Activation checkpointing in the middle of a network",
        "The same.",
        reentrant_middle_plain,
        reentrant_middle_ours,
    ),
    Idiom(
        "`torch.compile`",
        "Call the compiled model, and give the one that it was made of to the optimizer and to `State`, so that "
        "names of parameters in checkpoints do not depend on it. Set `dynamic=True` where the last batch is "
        "smaller.",
        compiled_plain,
        compiled_ours,
    ),
    Idiom(
        "A compiled model in `State`",
        "The compiled model may be given to `State`, too.",
        compiled_in_state_plain,
        compiled_in_state_ours,
    ),
    Idiom(
        "`torch.func.functional_call`",
        "Gradients reach the parameters through whatever was made of them.",
        functional_call_plain,
        functional_call_ours,
    ),
    Idiom(
        "MAML",
        "The inner loop takes its gradients with `torch.autograd.grad(…, create_graph=True)`, which is not summed.",
        maml_plain,
        maml_ours,
    ),
    Idiom(
        "An `autograd.Function` of one's own",
        "Nothing to know.",
        custom_function_plain,
        custom_function_ours,
    ),
    Idiom(
        "Distillation from a frozen teacher",
        "A teacher that does not change need not be given to `State`.",
        distillation_plain,
        distillation_ours,
    ),
    Idiom(
        "Mean teacher, by hand",
        "A teacher that moves is given to `State`, and moved at step level.",
        mean_teacher_plain,
        mean_teacher_ours,
    ),
    Idiom(
        "BatchNorm",
        "It normalises over a micro-batch, so `micro_batch` decides what is learned, and the number of workers "
        "does not. The plain version goes over the same micro-batches, with gradient accumulation. Running "
        "statistics are averaged over the workers at the end of an epoch; with `exact=True` they are those of one "
        "process.",
        batch_norm_plain,
        batch_norm_ours,
        micro_batches=(4,),
        exact=False,  # the test's micro-batches of 3 leave one of a single sample, which BatchNorm refuses
    ),
    Idiom(
        "BatchNorm, and workers without a micro-batch",
        "In the mean of the running statistics a worker counts as much as it has computed micro-batches; here one "
        "worker computes all of them, and the statistics are those of plain PyTorch.",
        batch_norm_idle_plain,
        batch_norm_idle_ours,
        micro_batches=(GLOBAL_BATCH,),
        exact=False,  # as above
        faults=False,  # what a lost worker's statistics have seen since the epoch began is lost with it
    ),
    Idiom(
        "BatchNorm's running statistics with `exact=True`",
        "They are those of one process that goes over the same micro-batches.",
        batch_norm_statistics_plain,
        batch_norm_statistics_ours,
        micro_batches=(4,),
        exact=False,  # it is exact anyhow, but only with micro-batches of 4
    ),
    Idiom(
        "BatchNorm with two loops per step",
        "The same where a step is looped over twice.",
        batch_norm_second_loop_plain,
        batch_norm_second_loop_ours,
        micro_batches=(4,),
        exact=False,  # as above
    ),
    Idiom(
        "Dropout",
        "Random numbers in the loop over micro-batches are seeded by place, so `micro_batch` decides what is "
        "drawn, and the number of workers does not. The plain version seeds the same.",
        dropout_plain,
        dropout_ours,
        micro_batches=(4,),
    ),
    Idiom(
        "Dropout in the flat loop",
        "The same in the flat loop.",
        dropout_flat_plain,
        dropout_flat_ours,
        micro_batches=(4,),
    ),
    Idiom(
        "Lazy modules",
        "Run them once before the optimizer is made, as ever.",
        lazy_plain,
        lazy_ours,
    ),
    Idiom(
        "Parameters that the first forward pass sets (ActNorm)",
        "In the loop over a step a forward pass sees one micro-batch, on each worker another one. So run one batch "
        "through the model before `State` is made, the same on every worker; "
        "a worker that joins then takes over the weights as they are. Without it a warning names the parameter.",
        act_norm_plain,
        act_norm_ours,
    ),
    Idiom(
        "Weight norm",
        "Parametrisations are parameters.",
        weight_norm_plain,
        weight_norm_ours,
    ),
]
