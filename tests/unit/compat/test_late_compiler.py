"""Torch's compiler: not imported for optimizers, and as ever for whoever compiles.

Each test has a process of its own, forked from one that has imported torch and nothing of this package.
"""

from __future__ import annotations

import prepared
import pytest

BEGIN = """
import sys
import torch
import edl_hvd

edl_hvd.init()
is_there = lambda: "torch._dynamo.eval_frame" in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
inputs = torch.ones(2, 4)


def train(kind, model=model, **options):
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer

"""
COMPILE = """
frames = []
def backend(graph, example):
    frames.append(graph)
    return graph.forward
"""


def run(*parts: str) -> None:
    code, output = prepared.run_code("import warnings\nwarnings.simplefilter('error')\n" + "".join(parts), "torch")
    assert code == 0, output


def test_no_optimizer_imports_it():
    run(BEGIN, """
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
             torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop,
             torch.optim.ASGD):
    train(kind)
    assert not is_there(), kind
torch.optim.lr_scheduler.StepLR(optimizer := train(torch.optim.SGD), 1)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = edl_hvd.State(model=model, optimizer=optimizer)
assert not is_there()
""")  # fmt: skip


def test_without_us_every_one_does():
    """Otherwise there would be nothing to do."""
    run(BEGIN.replace("edl_hvd.init()", ""), "train(torch.optim.SGD)\nassert is_there()\n")


def test_whoever_compiles_has_it_and_optimizers_are_as_if_it_had_been_there_from_the_first():
    run(BEGIN, COMPILE, """
optimizer = train(torch.optim.SGD)
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
before = getattr(zero_grad, "__dynamo_disable")
expected = model(inputs)
compiled = torch.compile(model, backend=backend)
assert torch.equal(compiled(inputs), expected)
assert frames and is_there()
assert sys.modules["torch._dynamo"] is torch._dynamo
assert type(torch._dynamo) is type(sys)
assert getattr(zero_grad, "__dynamo_disable") is not before is zero_grad

def step(inputs):
    optimizer.zero_grad()
    return model(inputs).sum()

del frames[:]
assert torch.equal(torch.compile(step, backend=backend)(inputs), expected.sum())
assert frames
assert not any("grad" in str(graph.graph) for graph in frames), "zero_grad was compiled"
assert len(train(torch.optim.Adam).state) == 4
""")  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [
        "torch._dynamo.reset()",
        "import torch._dynamo.config as config; config.suppress_errors",
        "from torch._dynamo import config; config.suppress_errors",
        "import torch._dynamo.testing; torch._dynamo.testing.CompileCounter",
        "torch.compiler.disable(lambda: 1)()",
        "torch._dynamo.disable(lambda: 1)()",
        "torch.compiler.reset()",
    ],
)
def test_every_way_to_ask_for_it_gets_it(way):
    run(BEGIN, "train(torch.optim.SGD)\n", way, "\nassert is_there(), 'it is not there'\ntrain(torch.optim.SGD)\n")


def test_who_looks_at_all_modules_does_not_import_it():
    run(
        BEGIN,
        """
import inspect
inspect.getmodule(train), inspect.getsourcefile(torch.nn.Linear)
for module in list(sys.modules.values()):
    hasattr(module, "__file__"), hasattr(module, "__warningregistry__")
assert not is_there()
""",
    )


def test_one_that_is_there_stays():
    run("import torch._dynamo\nthere = torch._dynamo\n", BEGIN, "assert sys.modules['torch._dynamo'] is there\n")
