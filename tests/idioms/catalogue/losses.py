"""Losses that are means over something else than samples, or that look at other samples of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import CLASSES, SAMPLES, Idiom, Job
from script_parts import make_model, momentum_sgd, prepare
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import edl_hvd

WORDS = 9
PADDING = 0


def sequences() -> list[torch.Tensor]:
    """Of 2 to 9 tokens each."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 10, (SAMPLES,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def pad(texts):
    return pad_sequence(texts, batch_first=True, padding_value=PADDING)


def make_language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, WORDS))


def tokens_plain(job: Job):
    model = make_language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(job.epochs):
        order = job.plain_loader(epoch=epoch).batch_sampler
        loader = DataLoader(sequences(), batch_sampler=order, collate_fn=pad)
        # recipe
        for texts in loader:
            optimizer.zero_grad()
            scores, target = model(texts[:, :-1]), texts[:, 1:]
            loss = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PADDING)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # end
    return {"model": model, "losses": losses}


def tokens_ours(job: Job):
    edl_hvd.init()
    model = make_language_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(sequences(), batch_sampler=batches, collate_fn=pad)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for texts in step:
                    scores, target = model(texts[:, :-1]), texts[:, 1:]
                    loss = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PADDING)
                    step.weigh((target != PADDING).sum())
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def tokens_flat_plain(job: Job):
    outcome = tokens_plain(job)
    return {"model": outcome["model"]}


def tokens_flat_ours(job: Job):
    edl_hvd.init()
    model = make_language_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(sequences(), batch_sampler=batches, collate_fn=pad)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for texts in state.batches(loader):
                optimizer.zero_grad()
                scores, target = model(texts[:, :-1]), texts[:, 1:]
                loss = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PADDING)
                state.weigh((target != PADDING).sum())
                loss.backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model}


def partly_labelled() -> torch.Tensor:
    """Most samples have no label; of some micro-batches none has."""
    generator = torch.Generator().manual_seed(6)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    labels[torch.rand(SAMPLES, generator=generator) < 0.6] = -100
    return labels


def ignored_labels_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    dataset = job.dataset(job.inputs, partly_labelled())
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(dataset, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target, ignore_index=-100, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"model": model, "losses": losses}


def ignored_labels_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, partly_labelled()), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    step.weigh((target != -100).sum())
                    loss = F.cross_entropy(model(inputs), target, ignore_index=-100, label_smoothing=0.1)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def class_weights_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    weights = torch.tensor([0.2, 1.0, 3.0])
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target, weight=weights).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def class_weights_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            weights = torch.tensor([0.2, 1.0, 3.0])
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    step.weigh(weights[target].sum())
                    F.cross_entropy(model(inputs), target, weight=weights).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def summed_loss_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target, reduction="sum").backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def summed_loss_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), exact=job.exact
    )
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
                    loss = F.cross_entropy(model(inputs), target, reduction="sum")
                    (loss * step.samples / len(inputs)).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Tagger(nn.Module):
    """A score for each token, and one for the text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.token_head, self.text_head = nn.Linear(8, WORDS), nn.Linear(8, CLASSES)

    def forward(self, texts):
        hidden = torch.tanh(self.embedding(texts))
        used = (texts != PADDING)[..., None]
        return self.token_head(hidden), self.text_head((hidden * used).sum(1) / used.sum(1))


def pad_labelled(samples):
    texts, labels = zip(*samples, strict=True)
    return pad(texts), torch.stack(labels)


def two_means_plain(job: Job):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    samples = list(zip(sequences(), job.target, strict=True))
    losses = []
    for epoch in range(job.epochs):
        order = job.plain_loader(epoch=epoch).batch_sampler
        loader = DataLoader(samples, batch_sampler=order, collate_fn=pad_labelled)
        # recipe
        for texts, labels in loader:
            optimizer.zero_grad()
            token_scores, text_scores = model(texts)
            token_loss = F.cross_entropy(token_scores.flatten(0, 1), texts.flatten(), ignore_index=PADDING)
            loss = F.cross_entropy(text_scores, labels) + 0.5 * token_loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # end
    return {"model": model, "losses": losses}


def two_means_ours(job: Job):
    edl_hvd.init()
    model = Tagger()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    samples = list(zip(sequences(), job.target, strict=True))
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=pad_labelled)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for texts, labels in step:
                    step.record(tokens=(texts != PADDING).sum() / len(texts))
                tokens = step.mean("tokens")  # of a text, in the global batch
                for texts, labels in step:
                    token_scores, text_scores = model(texts)
                    token_loss = F.cross_entropy(
                        token_scores.flatten(0, 1), texts.flatten(), ignore_index=PADDING, reduction="sum"
                    )
                    loss = F.cross_entropy(text_scores, labels) + 0.5 * token_loss / (len(texts) * tokens)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def two_terms_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    log = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            scores = model(inputs)
            loss, penalty = F.cross_entropy(scores, target), scores.square().mean()
            loss.backward(retain_graph=True)
            (0.1 * penalty).backward()
            optimizer.step()
            log.append((loss.item(), penalty.item(), (scores.argmax(1) == target).float().mean().item()))
    return {"model": model, "log": log}


def two_terms_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, log=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    scores = model(inputs)
                    loss, penalty = F.cross_entropy(scores, target), scores.square().mean()
                    loss.backward(retain_graph=True)
                    (0.1 * penalty).backward()
                    right = (scores.argmax(1) == target).float().mean()
                    step.record(loss=loss, penalty=penalty, accuracy=right)
                optimizer.step()
                state.log.append((step.mean("loss"), step.mean("penalty"), step.mean("accuracy")))
            # end

    train(state)
    return {"model": model, "log": state.log}


def weight_penalty_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            penalty = sum(parameter.abs().sum() for parameter in model.parameters())
            (F.cross_entropy(model(inputs), target) + 0.001 * penalty).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def weight_penalty_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                penalty = sum(parameter.abs().sum() for parameter in model.parameters())
                (F.cross_entropy(model(inputs), target) + 0.001 * penalty).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def penalty_at_step_level_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            (0.001 * sum(parameter.abs().sum() for parameter in model.parameters())).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def penalty_at_step_level_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
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
                    F.cross_entropy(model(inputs), target).backward()
                (0.001 * sum(parameter.abs().sum() for parameter in model.parameters())).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def hard_samples_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(inputs), target, reduction="none")
            mean = losses.detach().mean()
            losses[losses > mean].mean().backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def hard_samples_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                with torch.no_grad():
                    for inputs, target in step:
                        step.record(loss=F.cross_entropy(model(inputs), target))
                mean = step.mean("loss")
                for inputs, target in step:
                    losses = F.cross_entropy(model(inputs), target, reduction="none")
                    hard = losses[losses > mean]
                    step.weigh(len(hard))
                    if len(hard):
                        hard.mean().backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def focal_losses(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    losses = F.binary_cross_entropy_with_logits(scores, positive, reduction="none")
    return losses * (1 - torch.where(positive > 0, scores.sigmoid(), 1 - scores.sigmoid())) ** 2


def rarely_positive() -> torch.Tensor:
    """One sample of seven; in many micro-batches none is."""
    return (torch.arange(SAMPLES) % 7 == 0).float()


def positives_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    dataset = job.dataset(job.inputs, rarely_positive())
    for epoch in range(job.epochs):
        for inputs, positive in job.plain_loader(dataset, epoch):
            # recipe
            optimizer.zero_grad()
            losses = focal_losses(model(inputs)[:, 0], positive)
            (losses.sum() / max(positive.sum(), 1)).backward()
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer}


def positives_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, rarely_positive()), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, positive in step:
                    step.record(positives=positive.mean())
                    focal_losses(model(inputs)[:, 0], positive).mean().backward()
                share = max(step.mean("positives"), 1 / step.samples)
                for parameter in model.parameters():
                    parameter.grad /= share
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def contrastive(pairs: torch.Tensor) -> torch.Tensor:
    """InfoNCE: each sample against all others of the batch."""
    one, other = F.normalize(pairs[:, 0]), F.normalize(pairs[:, 1])
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(pairs)))


def gradient_cache_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, _ in job.plain_loader(epoch=epoch):
            # recipe
            optimizer.zero_grad()
            contrastive(torch.stack([model(inputs), model(inputs.flip(1))], 1)).backward()
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer}


def gradient_cache_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    def pairs_of(inputs):
        return torch.stack([model(inputs), model(inputs.flip(1))], 1)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                mine = [torch.empty(0, 2, CLASSES)]  # a worker may have no micro-batch
                with torch.no_grad():
                    mine += [pairs_of(inputs) for inputs, _ in step]
                counts = edl_hvd.allgather(torch.tensor([sum(map(len, mine))]))
                pairs = edl_hvd.allgather(torch.cat(mine)).requires_grad_()
                (gradient,) = torch.autograd.grad(contrastive(pairs), pairs)  # as of the whole batch in one process

                place = int(counts[: edl_hvd.rank()].sum())
                for inputs, _ in step:
                    part = gradient[place : place + len(inputs)]
                    place += len(inputs)
                    # Gradients are weighted by samples, and this one is a sum.
                    ((pairs_of(inputs) * part).sum() * step.samples / len(inputs)).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "A mean over tokens",
        "A gradient counts as much as its micro-batch has samples; where the loss is a mean over something else, "
        "`step.weigh` says how many of that there are. Texts are padded per micro-batch, less than in a whole batch.",
        tokens_plain,
        tokens_ours,
    ),
    Idiom(
        "A mean over tokens in the flat loop",
        "There it is `state.weigh`. Without it the mean of a global batch is a mean of means, which nobody can see.",
        tokens_flat_plain,
        tokens_flat_ours,
    ),
    Idiom(
        "Ignored labels, label smoothing",
        "The mean is over the labels that are not ignored. "
        "A micro-batch without any has a loss that is not a number; with a weight of 0 it is left out.",
        ignored_labels_plain,
        ignored_labels_ours,
        # The labels that are ignored are most of all, so a global batch has always one that is not.
    ),
    Idiom(
        "Weights of classes",
        "`cross_entropy(weight=…)` divides by the sum of the weights of the labels in the batch, so that is what a "
        "micro-batch weighs. With `exact=True` weights have to be whole numbers.",
        class_weights_plain,
        class_weights_ours,
        exact=False,  # sums of fractions depend on their order, so exact=True takes whole numbers only
    ),
    Idiom(
        "A sum instead of a mean",
        "Gradients are averaged over samples. For the gradient of a sum, give each micro-batch the mean of its samples "
        "times `step.samples`, the number of samples in the global batch.",
        summed_loss_plain,
        summed_loss_ours,
    ),
    Idiom(
        "Two means over different things",
        "A micro-batch has one weight. A loop over the step without `backward()` finds out, for the global batch, what "
        "the second loss has to be divided by; the second loop goes over the same micro-batches.",
        two_means_plain,
        two_means_ours,
    ),
    Idiom(
        "A sum over all, divided by the number of some",
        "Focal losses and losses of boxes are divided by the number of positives in the batch, of which a micro-batch "
        "may have none; a weight of 0 would drop its negatives, too. "
        "Take the mean over the samples, and divide the gradient by the share of the positives.",
        positives_plain,
        positives_ours,
    ),
    Idiom(
        "Two losses, two backward passes, several logged numbers",
        "The loop over a step takes any number of `backward()`.",
        two_terms_plain,
        two_terms_ours,
    ),
    Idiom(
        "A penalty on weights in the flat loop",
        "A term that does not depend on samples is the same in each micro-batch, and so is its mean.",
        weight_penalty_plain,
        weight_penalty_ours,
    ),
    Idiom(
        "A penalty on weights at step level",
        "At step level `backward()` adds to `.grad`, on every worker alike.",
        penalty_at_step_level_plain,
        penalty_at_step_level_ours,
    ),
    Idiom(
        "A loss that compares all samples of the batch (InfoNCE, SimCLR, CLIP)",
        "Within a micro-batch there are fewer samples to compare. A first loop over the step computes the outputs of "
        "all workers, and the gradient of the loss with respect to these; the second one goes on from it (a gradient "
        "cache). It is the same for losses of statistics of the batch (VICReg, Barlow Twins). A model with dropout "
        "draws other masks in the second loop.",
        gradient_cache_plain,
        gradient_cache_ours,
    ),
    Idiom(
        "The samples that are harder than the mean",
        "What depends on the whole batch, such as a threshold, is found in a first loop over the step.",
        hard_samples_plain,
        hard_samples_ours,
    ),
]
