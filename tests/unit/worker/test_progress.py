"""What a worker says it is doing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from clocks import FakeClock
from fake_world import alone
from waiting import soon

import edl_hvd
from edl_hvd.worker.progress import Progress, StackPlace, current_frames, place_of, progress, recognise

MAIN = threading.main_thread().ident or 0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def lasting(progress: Progress, clock: FakeClock, phase: str, seconds: float) -> None:
    progress.enter(phase)
    clock.sleep(seconds)


def test_a_beat_tells_the_phase_and_how_long_it_has_lasted(clock):
    progress = Progress(clock)
    lasting(progress, clock, "input", 3.0)
    beat = progress.beat(7)
    assert (beat.generation, beat.pid, beat.phase, beat.phase_s) == (7, os.getpid(), "input", 3.0)


def test_computing_is_counted_and_nothing_else(clock):
    progress = Progress(clock)
    for _ in range(2):
        lasting(progress, clock, "input", 5.0)
        lasting(progress, clock, "compute", 2.0)
        with progress.waiting():
            clock.sleep(7.0)
        clock.sleep(1.0)
    progress.enter("script")
    assert progress.beat(1).compute_s == pytest.approx(6.0)
    assert progress.beat(1).waits == 2


def test_a_wait_tells_its_collective_and_where_the_script_stands(clock):
    progress = Progress(clock)
    assert progress.beat(1).collective == ""
    with progress.waiting():
        progress.collective = "edl_hvd.gather"
        assert progress.beat(1).collective == "edl_hvd.gather"
        stands = progress.where()
    line = stands.stack.splitlines()[1]
    number = int(re.search(r"line (\d+) in test_a_wait_tells", line)[1])
    assert f'File "{__file__}"' in line
    assert stands.place == f"test_progress.py:{number} in test_a_wait_tells_its_collective_and_where_the_script_stands"
    progress.enter("compute")
    assert progress.beat(1).collective == ""


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("somelib.engine", "/opt/other/lib/python3.11/site-packages/somelib/engine.py"),
        ("somelib.engine", "/usr/lib/python3/dist-packages/somelib/engine.py"),
        ("torch.autograd.graph", "/src/pytorch/torch/autograd/graph.py"),
        ("horovod.torch.mpi_ops", "/src/horovod/horovod/torch/mpi_ops.py"),
    ],
)
def test_a_frame_of_a_library_outside_of_the_environment_is_none_of_the_script(name, path):
    """As with --system-site-packages, where torch lies in another environment: the script's line is told."""
    found = []
    library = {"__name__": name, "place": lambda: found.append(place_of(sys._getframe(1)))}
    exec(compile("def call():\n    place()\n", path, "exec"), library)
    library["call"]()
    [place] = found
    assert re.fullmatch(r"test_progress\.py:\d+ in test_a_frame_of_a_library_outside_.*", place)


def test_a_file_of_the_script_beside_such_a_folder_is_its_own():
    found = []
    script = {"__name__": "augment", "place": lambda: found.append(place_of(sys._getframe(1)))}
    exec(compile("def call():\n    place()\n", "/home/ada/site-packages-mine/augment.py", "exec"), script)
    script["call"]()
    assert found == ["augment.py:2 in call"]


def test_of_a_wait_in_another_thread_the_main_one_tells_the_place(clock):
    """On a GPU backward() runs in a thread of torch's own, in which there is no line of the script."""
    progress, waits, looked = Progress(clock), threading.Event(), threading.Event()
    library = {"__name__": "torch.autograd", "progress": progress, "waits": waits, "looked": looked}
    code = "def run():\n    with progress.waiting():\n        waits.set()\n        looked.wait()\n"
    exec(compile(code, threading.__file__, "exec"), library)
    thread = threading.Thread(target=library["run"])
    thread.start()
    soon(waits)
    stands = progress.where()
    looked.set()
    soon(thread)
    assert stands.place.startswith("test_progress.py:")
    assert f'File "{threading.__file__}", line 4 in run' in stands.stack


def test_a_deep_stack_is_cut(clock):
    def deep(count: int) -> StackPlace:
        return deep(count - 1) if count else Progress(clock).where()

    stack = deep(500).stack
    assert len(stack.splitlines()) < 50
    assert re.search(r"… \d{3} more$", stack)


def test_a_garbage_collection_meanwhile_hangs_nothing():
    """Python before 3.12 hangs where it frees a thread's own variables while it looks at the threads."""
    script = """
import gc, threading
from edl_hvd.worker.progress import Progress

class Node:
    pass

gc.set_threshold(1)
for _ in range(500):
    node = Node()
    node.itself, node.local = node, threading.local()
    node.local.node = node
    del node
    Progress().where()
assert gc.isenabled()
"""
    assert soon(subprocess.Popen([sys.executable, "-c", script])) == 0


def test_a_phase_within_another_ends_with_its_block_whatever_happens(clock):
    progress = Progress(clock)
    progress.enter("compute")

    def fail() -> None:
        with progress.during("commit"), progress.waiting():
            assert progress.phase == "collective"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert progress.phase == "compute"
    assert progress.waits == 0, "a wait that failed is not through"


def test_a_function_may_be_a_phase(clock):
    progress = Progress(clock)

    @progress.during("checkpoint")
    def write() -> str:
        return progress.phase

    assert [write(), write(), progress.phase] == ["checkpoint", "checkpoint", "start"]


def test_the_slowest_phase_is_remembered_and_fades(clock):
    progress = Progress(clock)
    lasting(progress, clock, "compute", 8.0)
    for _ in range(350):
        lasting(progress, clock, "script", 100.0)
        lasting(progress, clock, "compute", 0.1)
    progress.enter("script")
    assert 3.5 < progress.beat(1).slowest_s < 4.5


# --- what is recognised from outside ---


def test_a_model_in_evaluation_mode_is_validated(clock):
    progress = Progress(clock)
    validating = True
    progress.is_validating = lambda: validating
    lasting(progress, clock, "compute", 0.9)
    assert progress.beat(1).phase == "compute", "so short a time is not worth a look"
    clock.sleep(60.0)
    assert progress.beat(1).phase == "validation"

    validating = False
    clock.sleep(2.0)
    beat = progress.beat(1)
    assert (beat.phase, beat.phase_s) == ("compute", 2.0), "counted from the end of the validation"
    lasting(progress, clock, "compute", 0.5)
    progress.enter("script")
    assert progress.beat(1).slowest_s == 0.5, "a validation says nothing about batches"
    assert progress.beat(1).compute_s == 0.5


def test_phases_other_than_computing_are_what_they_are(clock):
    progress = Progress(clock)
    progress.is_validating = lambda: True
    lasting(progress, clock, "input", 60.0)
    assert progress.beat(1).phase == "input"


def what_is_recognised_during(work) -> str | None:
    """In the main thread, seen from another, while ``work(pause)`` is inside ``pause``."""
    seen = []

    def pause() -> None:
        look = threading.Thread(target=lambda: seen.append(recognise(current_frames(), MAIN)))
        look.start()
        soon(look)

    work(pause)
    [phase] = seen
    return phase


def test_compiling_is_recognised_and_running_what_was_compiled_is_not():
    compiled = []

    def compile_slowly(graph, inputs):
        if not compiled:
            compiled.append(graph)
            pauses[0]()
        return graph.forward

    pauses = []

    def work(pause) -> None:
        pauses.append(pause)
        torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.ones(2))

    assert what_is_recognised_during(work) == "compile"
    torch._dynamo.reset()

    def run(pause) -> None:
        @torch._dynamo.disable
        def outside() -> None:
            pause()

        def function(x):
            outside()
            return x + 1

        torch.compile(function, backend="eager")(torch.ones(2))

    assert what_is_recognised_during(run) is None
    torch._dynamo.reset()


class Slow:
    def __init__(self, pause) -> None:
        self.pause = pause

    def __reduce__(self):
        self.pause()
        return (int, ())


def test_writing_a_file_of_the_scripts_own_is_recognised(tmp_path):
    assert what_is_recognised_during(lambda pause: torch.save(Slow(pause), tmp_path / "a.pt")) == "checkpoint"


def test_anything_else_is_not():
    assert what_is_recognised_during(lambda pause: pause()) is None


# --- in the loop ---


class Watched(torch.utils.data.Dataset):
    """Notes in which phase it is read."""

    def __init__(self, seen: list[tuple[str, str]]) -> None:
        self.seen = seen

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(("loader", progress.phase))
        return torch.ones(1)


@pytest.mark.filterwarnings("ignore:the loop of state.batches")
def test_the_loop_tells_its_phases(tmp_path):
    seen: list[tuple[str, str]] = []
    model = torch.nn.Linear(1, 1)
    with alone():
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        batches = edl_hvd.ElasticBatchSampler(4, global_batch=4, micro_batch=2, seed=0)
        loader = torch.utils.data.DataLoader(Watched(seen), batch_sampler=batches)
        teacher = torch.nn.Linear(1, 1).eval()
        state = edl_hvd.State(model=model, teacher=teacher, optimizer=optimizer, batches=batches)
        before = progress.steps, progress.batches

        @edl_hvd.elastic(checkpoint=str(tmp_path))
        def train(state) -> None:
            for epoch in state.epochs(2):
                seen.append(("before the loop", progress.phase))
                if epoch == 1:
                    for _ in state.batches(loader):
                        break
                    seen.append(("after a loop that was left early", progress.phase))
                    return
                for batch in state.batches(loader):
                    seen.append(("body", progress.phase))
                    assert not progress.is_validating(), "the teacher does not count"
                    model.eval()
                    assert progress.is_validating()
                    model.train()
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
                seen.append(("after the loop", progress.phase))

        train(state)
    assert seen == [
        ("before the loop", "script"),
        ("loader", "input"), ("loader", "input"), ("body", "compute"),
        ("loader", "input"), ("loader", "input"), ("body", "compute"),
        ("after the loop", "script"),
        ("before the loop", "script"),
        ("loader", "input"), ("loader", "input"),
        ("after a loop that was left early", "script"),
    ]  # fmt: skip
    assert (progress.steps - before[0], progress.batches - before[1]) == (1, 3)
    assert progress.phase == "end"
