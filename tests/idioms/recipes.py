"""Makes ``docs/recipes.md`` from the idioms: ``python tests/idioms/recipes.py`` writes it.

What stands between ``# recipe`` and ``# end`` of an idiom is shown, as a user would write it: what the tests put in,
such as the number of epochs, goes by the name that it has in a script. What edl_hvd refuses is run, for its exact
sentence.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import catalogue
import torch
from idioms import Idiom, Job
from simulation import Simulation

from edl_hvd.errors import EdlHvdError, EdlHvdWarning

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
_WIDTH = 120

HEAD = """\
# Recipes

Training code as it stands in tutorials, and what becomes of it with edl_hvd.

There are two forms of the loop.
In `for step in state.steps(loader):` the body runs once per optimizer step, on every worker, and `for batch in step:` \
goes over this worker's micro-batches in it: none, one or several.
Behind that inner loop `.grad` is the gradient of the whole global batch, so clipping, schedulers, averages and \
logging stand there as in plain PyTorch.
`for batch in state.batches(loader):` is the flat form, the smallest change of a script: its body runs once per \
micro-batch, and what belongs to a step, such as `optimizer.step()`, acts in the last one.
Take the flat form for one `backward()` and one `step()`, and the form over steps for everything beyond; the flat form \
refuses what it can tell that it would get wrong.

Seven rules, for both forms:

- **Every worker runs the same script.** What trains (`step()`, schedulers, averages, what is kept in `state`) must \
not stand under `if edl_hvd.rank() == 0:`; printing and writing files belong there, and behind the loop over a step.
- **A loss that is a mean over samples needs nothing**, and must not be divided by the number of micro-batches or \
workers: gradients are weighted by samples.
  For a mean over anything else, such as tokens, labels or pixels, say the number with `step.weigh(n)`, or \
`state.weigh(n)` in the flat form, before `backward()`; nobody else can know it.
- **A number of one micro-batch, such as `loss.item()`, is of one worker.** For that of the global batch use \
`step.record(loss=loss)` and `step.mean("loss")`, and keep only that in `state`.
- **Random numbers are seeded by place.** What a script draws in the loop does not depend on the number of workers, \
and is not what plain PyTorch draws; what has to be the same there belongs into the data set.
  A generator of your own, such as `numpy.random.default_rng(0)`, is not: a warning names it.
  Give it to `State` and draw from it at the level of a step, or draw from `torch`, `numpy` or `random` themselves.
- **What the loop changes belongs into `State`.** The elastic function runs again in each world, so a local variable, \
such as the best accuracy so far or a copy of the best weights, begins anew; a warning names it when that happens.
  So does a number on an object of your own, such as `trainer.global_step`, on a worker that joins, and a step that is \
made again counts twice: keep it in `State`, too, or give the object `state_dict()` and `load_state_dict()` and give \
it to `State`.
  A sum from the top of an epoch, such as `running_loss = 0.0`, `AverageMeter()` or `losses.reset()`, is one of the \
epoch's rest where that is continued: a warning names it, and a metric of `edl_hvd.metrics` in `State` counts the whole.
  So a counter of the loop, as in `for i, step in enumerate(state.steps(loader)):`, begins at 0 again there, which a \
warning says as well: count with `step.number`.
  A variable that the loop changes through `nonlocal` or `global`, or writes into, as by `options["beta"] *= 0.9`, has \
its first value on a worker that joins, and is named in a warning, too.
  What goes from one body of the flat form into the next and into the loss, such as the hidden state of a recurrent \
network, goes through the micro-batches of one worker: a warning names it.
  A module that is not in `State`, such as a criterion whose smoothing falls, is named in a warning as well.
  A tensor, list or dictionary that you give to `State` stays the same object, on workers that join, too, until you \
set the attribute to another.
- **What comes before the loop over epochs belongs before the function**, such as weights that are initialised or read \
from a file.
  Where the function runs again, what it changes there of the objects in `State` is put back, and a warning names it; \
options of optimizers are only warned of.
  A copy of the weights that it takes there (`ref = [p.clone() for p in model.parameters()]`), or at the top of an \
epoch (`old = copy.deepcopy(model)`), is taken again from weights in mid-training, and a warning names it.
  What else it computes from weights there is computed again, too: compute it before the function, or keep it in \
`State`.
  Nothing is said of that, unless it is set on the data set of a loader, such as pseudo-labels.
- **What the training sets on a data set belongs into `State`,** such as the samples that a curriculum keeps: a worker \
that joins has made its data set itself.
  A warning names values of a loader's data set that are set behind the loop over batches, or at the top of one epoch
  only: write `if epoch >= 3:` instead of `if epoch == 3:`.
  What stands between two loops over epochs is put back, too, without a warning, unless it commits or evaluates.

Each of these is [tested](testing.md) against plain PyTorch with the whole batch in one process.
The tests have worlds of one to four workers, with one and several micro-batches and with none, and workers that die \
and join; most run with `exact=True`, too, where every world has to end with the same bits.
This page is made from the tests by `tests/idioms/recipes.py`; do not edit it.
"""

# What the tests need, and what a script has in its place.
_AS_IN_A_SCRIPT = [
    (r"\(\n\s+(torch\.optim[^\n]*), exact=job\.exact\n\s*\)", r"(\1)"),
    (r", exact=job\.exact", ""),
    (r"job\.epochs( \+ \d)?", "epochs"),
    (r"job\.batches\(\)", "edl_hvd.ElasticBatchSampler(len(dataset), global_batch=1024, micro_batch=64)"),
    (r"job\.dataset\(\)", "dataset"),
    (r"job\.plain_loader\((?:[^()]|\([^()]*\))*\)", "loader"),
    (r"job\.micro_batch", "64"),
    (r"GLOBAL_BATCH", "1024"),
    (r"(\w)\(job\)", r"\1()"),
]


def modules() -> Iterator[tuple[str, list[Idiom]]]:
    """Of the catalogue: what each is about, and its idioms."""
    for name in sorted(info.name for info in pkgutil.iter_modules(catalogue.__path__)):
        module = importlib.import_module(f"catalogue.{name}")
        yield (module.__doc__ or "").strip(), module.IDIOMS


def recipe(script: Callable[..., Any] | None) -> str:
    """What is shown of a script; empty if it has no marks."""
    if script is None:
        return ""
    shown: list[str] = []
    is_shown = False
    for line in inspect.getsource(script).splitlines():
        if line.strip() == "# recipe":
            is_shown = True
        elif line.strip() == "# end":
            is_shown = False
        elif is_shown:
            shown.append(line)
    code = textwrap.dedent("\n".join(shown)).strip()
    for pattern, text in _AS_IN_A_SCRIPT:
        code = re.sub(pattern, text, code)
    return code


def sentences(text: str) -> str:
    """One per line."""
    return re.sub(r"(?<=[.!?])(?<!al\.) (?=\S)", "\n", text)


def wrapped(text: str) -> str:
    """The same page, its lines of prose wrapped at a clause; code and the table of contents stay."""
    lines: list[str] = []
    is_code = False
    for line in text.split("\n"):
        is_code ^= line.startswith("```")
        if is_code or re.fullmatch(r" *- \[.*\]\(#.*\)", line):
            lines.append(line)
            continue
        start = re.match(r" *(?:[->] )?", line)[0]
        indent = start if start == "> " else " " * len(start)
        while len(line) > _WIDTH:
            # A word in code type is one word.
            ends = [gap.start() for gap in re.finditer(r" (?=(?:[^`]*`[^`]*`)*[^`]*$)", line) if gap.start() <= _WIDTH]
            clauses = [end for end in ends if end > _WIDTH // 2 and line[end - 1] in ",;:"]
            end = (clauses or ends)[-1]
            lines.append(line[:end])
            line = indent + line[end + 1 :]
        lines.append(line)
    return "\n".join(lines)


def sentence_of_refusal(idiom: Idiom) -> str:
    """What the error says, in a world of two workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EdlHvdWarning)
            Simulation(2).run(lambda: idiom.ours(Job(idiom.micro_batches[0])))
    except EdlHvdError as error:
        return " ".join(str(error).split())
    finally:
        torch.set_num_threads(threads)
    return ""


def anchors(titles: list[str]) -> list[str]:
    """Of the headings of a page, as GitHub makes them."""
    known: Counter[str] = Counter()
    found = []
    for title in titles:
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.append(f"{name}-{known[name]}" if known[name] else name)
        known[name] += 1
    return found


def code_block(code: str) -> str:
    return f"```python\n{code}\n```\n"


def entry(idiom: Idiom) -> str:
    """An idiom that works."""
    parts = [f"### {idiom.title}\n", f"{sentences(idiom.text)}\n"]
    plain = recipe(idiom.plain)
    if plain:
        parts += ["In plain PyTorch:\n", code_block(plain), "With edl_hvd:\n"]
    return "\n".join([*parts, code_block(recipe(idiom.ours))])


def refused_entry(idiom: Idiom) -> str:
    parts = [f"### {idiom.title}\n", f"{sentences(idiom.text)}\n"]
    code = recipe(idiom.ours)
    if code:
        parts.append(code_block(code))
    return "\n".join([*parts, f"> {sentence_of_refusal(idiom) or 'It is not refused yet.'}\n"])


def section(about: str, idioms: list[Idiom]) -> str:
    """The idioms of a module that work; those without code to show in a list at its end."""
    shown = [idiom for idiom in idioms if recipe(idiom.ours)]
    others = [idiom for idiom in idioms if not recipe(idiom.ours)]
    parts = [f"## {heading(about)}\n", *map(entry, shown)]
    if others:
        items = [f"- {idiom.title}" + (f": {sentences(idiom.text)}" if idiom.text else "") for idiom in others]
        lines = "\n".join(item.replace("\n", "\n  ") for item in items)
        parts.append(f"Tested as well:\n\n{lines}\n")
    return "\n".join(parts)


def heading(about: str) -> str:
    return about.splitlines()[0].rstrip(".")


def contents(parts: list[tuple[str, list[str]]]) -> str:
    """A table of the headings and those below each."""
    names = iter(anchors(["Recipes", *(title for heading, below in parts for title in (heading, *below))]))
    next(names)
    lines = []
    for heading, below in parts:
        lines.append(f"- [{heading}](#{next(names)})")
        lines += [f"  - [{title}](#{next(names)})" for title in below]
    return "\n".join(lines) + "\n"


def page() -> str:
    """All of it."""
    found = [(about, [idiom for idiom in idioms if not idiom.refused]) for about, idioms in modules()]
    found = [(about, idioms) for about, idioms in found if idioms]
    refused = [idiom for _, idioms in modules() for idiom in idioms if idiom.refused]
    parts = [(heading(about), [i.title for i in idioms if recipe(i.ours)]) for about, idioms in found]
    last = [
        "## What is refused\n",
        "What cannot learn the same in every world ends in one error, which says what to write instead.\n",
        *map(refused_entry, refused),
    ]
    table = contents([*parts, ("What is refused", [idiom.title for idiom in refused])])
    return wrapped("\n".join([HEAD, table, *(section(about, idioms) for about, idioms in found), *last]))


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
