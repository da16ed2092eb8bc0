"""Teachers that are somebody else's servers of the Open Inference Protocol."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import CLASSES, Images, free_port, sums
from inference_server import InferenceServer, ServerKind, inference_servers
from torch.utils.data import DataLoader
from waiting import soon, until

import edl_hvd
from edl_hvd import distill
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.errors import NoTeacherError, ProtocolError, UsageError
from edl_hvd.events import read_events
from edl_hvd.frames import Array, ArrayType
from edl_hvd.open_inference import TensorNote, make_request, named_inputs, read_answer, read_models

pytestmark = pytest.mark.distill


def sampler(length: int) -> edl_hvd.ElasticBatchSampler:
    return edl_hvd.ElasticBatchSampler(length, global_batch=8, micro_batch=4, seed=3)


def make_loader(
    source: str, length: int = 64, workers: int = 0, send: Any = lambda batch: batch[0], **wanted: Any
) -> DistillLoader:
    inner = DataLoader(Images(length), batch_sampler=sampler(length), num_workers=workers)
    return DistillLoader(inner, Teachers(source, **wanted), send=send)


def check(loader: DistillLoader, length: int = 64, struck=lambda number: None) -> None:
    """Go through an epoch: each sample once, in the sampler's order, each answer the right one."""
    seen = []
    for number, (images, index, answer) in enumerate(loader):
        torch.testing.assert_close(answer, sums(images), rtol=1e-5, atol=1e-5)
        seen += index.tolist()
        struck(number)
    assert seen == [index for indices in sampler(length) for index in indices]


@pytest.mark.parametrize("model", ["sums", "quiet"])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [(ServerKind(), 2), (ServerKind(binary=False), 0), (ServerKind(keeps=False), 0)],
    ids=["binary", "json", "closing"],
)
def test_answers_of_a_server_come_in_order_and_are_those_of_its_model(model, kind, workers):
    with inference_servers(kind) as (server,):
        loader = make_loader(server.source(model), workers=workers)
        check(loader)
        check(loader)
        assert loader._open.service is not None
        window = loader._open.service.calling.outlook().window
        assert len(window.teachers) == 2
        assert window.given - window.hedges == window.next_number
        loader.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("edl_hvd request")]


def test_a_server_is_asked_for_several_answers_at_a_time():
    with inference_servers(ServerKind(together=4)) as (server,):
        loader = make_loader(server.source(requests=8))
        check(loader)
        loader.close()


def test_a_server_killed_in_mid_epoch_costs_no_answer_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    kind = ServerKind(delay_s=0.02)
    with inference_servers(kind, kind) as servers:
        source = f"oip:{servers[0].url()},{servers[1].url()}"
        loader = make_loader(source, 320)
        again: list[InferenceServer] = []

        def strike(number: int) -> None:
            if number == 20:
                servers[0].close()
            if number == 40:
                again.append(InferenceServer(ServerKind(delay_s=0.02, port=servers[0].port)))
                assert loader._open.service is not None
                calling = loader._open.service.calling
                until(lambda: len(calling.outlook().window.teachers) > 4)

        check(loader, 320, strike)
        loader.close()
        again[0].close()
    kinds = [event["event"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds.count("teacher_joined") == 3
    assert kinds.count("teacher_lost") == 1


def test_a_server_that_is_stopped_does_not_stop_the_training():
    kind = ServerKind(delay_s=0.02)
    with inference_servers(kind, kind) as servers:
        loader = make_loader(f"oip:{servers[0].url()},{servers[1].url()}", 160)
        check(loader, 160, lambda number: servers[1].signal(signal.SIGSTOP) if number == 8 else None)
        assert loader._open.service is not None
        assert loader._open.service.calling.outlook().window.hedges >= 1
        loader.close()


def test_a_server_that_still_loads_is_waited_for():
    with inference_servers(ServerKind(loads_s=6)) as (server,):
        loader = make_loader(server.source())
        check(loader)
        loader.close()


def test_several_inputs_are_found_by_name_and_several_outputs_are_a_dict():
    with inference_servers(ServerKind()) as (server,):
        data = [{"image": torch.full((2,), float(index)), "other": torch.tensor(index)} for index in range(8)]
        inner = DataLoader(data, batch_sampler=sampler(8))  # type: ignore[arg-type]
        wanted = Teachers(server.source("two"))
        loader = DistillLoader(inner, wanted, send=lambda batch: {"b": batch["other"], "a": batch["image"]})
        for batch in loader:
            assert torch.equal(batch["answer"]["plus"], batch["image"].sum(1) + batch["other"])
            assert torch.equal(batch["answer"]["minus"], batch["image"].sum(1) - batch["other"])
        loader.close()


@pytest.mark.parametrize("outputs", ["float16", "top_k=2,temperature=2"])
def test_outputs_are_reduced_at_the_student(outputs):
    with inference_servers(ServerKind()) as (server,):
        loader = make_loader(server.source(), outputs=outputs)
        for images, _, answer in loader:
            if outputs == "float16":
                assert torch.equal(answer, sums(images).half().float())
            else:
                expected = torch.log_softmax(sums(images) / 2, dim=-1).topk(2, dim=-1)
                torch.testing.assert_close(answer.values, expected.values)
                assert torch.equal(answer.indices, expected.indices)
        loader.close()


def test_half_precision_travels_as_raw_bytes():
    with inference_servers(ServerKind()) as (server,):
        loader = make_loader(server.source("quiet"), send=lambda batch: batch[0].half())
        for images, _, answer in loader:
            torch.testing.assert_close(answer, sums(images.half()), rtol=1e-5, atol=1e-5)
        loader.close()


def test_a_server_is_asked_for_inputs_of_the_scripts_own():
    with inference_servers(ServerKind()) as (server,):
        wanted = Teachers(server.source("quiet"))
        inputs = [torch.randn(count, 1, 4, 4) for count in (1, 3, 2)]
        for one, answer in zip(inputs, [wanted.ask(one) for one in inputs], strict=True):
            torch.testing.assert_close(answer.result(), sums(one), rtol=1e-5, atol=1e-5)
        wanted.close()


def test_answers_of_a_server_are_kept_under_the_fingerprint_that_the_script_vouches_for(tmp_path):
    with inference_servers(ServerKind()) as (server,):
        for _ in range(2):
            inner = DataLoader(Images(16), batch_sampler=sampler(16))
            wanted = Teachers(server.source(), fingerprint="resnet-7")
            loader = DistillLoader(inner, wanted, send=lambda batch: batch[0], keep=tmp_path / "kept", views=1)
            check(loader, 16)
            assert loader._open.service is not None
            given = loader._open.service.calling.outlook().window.given
            loader.close()
        assert given == 0
        loader = DistillLoader(
            DataLoader(Images(16), batch_sampler=sampler(16)), Teachers(server.source()),
            send=lambda batch: batch[0], keep=tmp_path / "kept", views=1,
        )  # fmt: skip
        with pytest.raises(UsageError, match="does not tell which model it is"):
            next(iter(loader))
        loader.close()


# --- a server that others have written ---

MLSERVER_PYTHON = Path(os.environ.get("MLSERVER_PYTHON", Path(__file__).parents[3] / ".venv/mlserver/bin/python"))
# Its packages do not go together with those of this environment.
MODEL = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Sums(MLModel):
    async def predict(self, payload):
        images = NumpyCodec.decode_input(payload.inputs[0])
        flat = images.reshape(len(images), -1).astype(np.float64)
        weights = np.arange(flat.shape[1], dtype=np.float64)[:, None] * np.arange(1.0, 6.0)
        answer = (flat @ np.cos(weights)).astype(np.float32)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", answer)])
"""


@pytest.mark.skipif(
    not MLSERVER_PYTHON.exists(),
    reason="MLServer is not installed: make a venv in .venv/mlserver, or one that MLSERVER_PYTHON names, and pip "
    "install mlserver there",
)
def test_mlserver_answers_and_says_what_it_does_not_serve(tmp_path):
    port = free_port(3)
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums_model.py").write_text(MODEL)
    inputs = [{"name": "images", "datatype": "FP32", "shape": [-1, 1, 4, 4]}]
    (folder / "model-settings.json").write_text(
        json.dumps({"name": "sums", "implementation": "sums_model.Sums", "inputs": inputs})
    )
    ports = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    (tmp_path / "settings.json").write_text(json.dumps({**ports, "parallel_workers": 0, "host": "127.0.0.1"}))
    words = [str(MLSERVER_PYTHON), "-c", "from mlserver.cli.main import main; main()", "start", str(tmp_path)]
    server = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        loader = make_loader(f"oip:http://127.0.0.1:{port}/v2/models/sums")  # while the server starts
        check(loader)
        check(loader)
        loader.close()
        loader = make_loader(f"oip:http://127.0.0.1:{port}/nobody")
        with pytest.raises(NoTeacherError, match="HTTP 404: Model nobody not found"):
            next(iter(loader))
        loader.close()
        loader = make_loader(f"oip:http://127.0.0.1:{port}/sums", send=lambda batch: batch[1])
        with pytest.raises(NoTeacherError, match=r"its model takes images FP32.* have send= return float32"):
            next(iter(loader))
        loader.close()
    finally:
        server.kill()
        soon(server)


# --- bad input ---


def first(batch):
    return batch[0]


WRONG: dict[str, tuple[str, Any, str, str]] = {
    "model": ("nobody", first, "logits", "does not serve the model 'nobody' .HTTP 404: model nobody is not"),
    "datatype": ("sums", lambda batch: batch[0].double(), "logits", "takes images FP32.* have send= return float32"),
    "shape": (
        "sums",
        lambda batch: batch[0][:, :, :2],
        "logits",
        r"takes images FP32\[-1, 1, 4, 4\].* shape \[4, 1, 2, 4\]",
    ),
    "names": (
        "two",
        lambda batch: {"a": batch[0][:, 0, 0, :2], "c": batch[1]},
        "logits",
        "a FP32.*a dict with these names",
    ),
    "top_k": ("sums", first, "top_k=9", "top_k=9 needs at least 9 classes"),
    "failing": ("broken", first, "logits", "its model fails on a micro-batch of .* HTTP 400: RuntimeError: no memory"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_server_that_cannot_be_used_is_one_clear_error(wrong):
    model, send, outputs, words = WRONG[wrong]
    with inference_servers(ServerKind()) as (server,):
        loader = make_loader(server.source(model), send=send, outputs=outputs)
        with pytest.raises(NoTeacherError, match=words) as caught:
            next(iter(loader))
        assert "start the servers" in str(caught.value)
        loader.close()


def test_servers_that_answer_otherwise_than_the_first_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EDL_HVD_EVENTS", str(tmp_path / "events.jsonl"))
    with inference_servers(ServerKind(), ServerKind(loads_s=2)) as servers:
        loader = make_loader(f"oip:{servers[0].url('quiet')},{servers[1].url('wide')}", 320)

        def strike(number: int) -> None:
            if number == 8:
                refused = lambda: any(  # noqa: E731
                    event["event"] == "teacher_refused" for event in read_events(tmp_path / "events.jsonl")
                )
                until(refused)

        check(loader, 320, strike)
        loader.close()
    refused = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "teacher_refused"]
    assert "serve the same model everywhere" in refused[0]["reason"]


@pytest.mark.parametrize(
    ("model", "words"), [("fails", "not for me"), ("nan", "holds NaN"), ("odd", "expected logits")]
)
def test_an_input_that_a_server_fails_on_ends_the_training(model, words):
    with inference_servers(ServerKind(), ServerKind()) as servers:
        loader = make_loader(f"oip:{servers[0].url(model)},{servers[1].url(model)}")
        with pytest.raises(UsageError, match=f"(?s)samples .*{words}"):
            next(iter(loader))
        loader.close()


def test_a_server_that_is_away_is_named():
    port = free_port(1)
    loader = make_loader(f"oip:http://127.0.0.1:{port}/sums", patience=1)
    with pytest.raises(NoTeacherError, match=f"127.0.0.1:{port}: Connection refused"):
        next(iter(loader))
    loader.close()


def test_what_is_no_server_of_the_protocol_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        thread = threading.Thread(target=talk)
        thread.start()
        loader = make_loader(f"oip:http://127.0.0.1:{listener.getsockname()[1]}/sums")
        with pytest.raises(NoTeacherError, match="none of the Open Inference Protocol"):
            next(iter(loader))
        loader.close()
        listener.shutdown(socket.SHUT_RDWR)
    soon(thread)


@pytest.mark.parametrize(
    "source",
    ["oip:", "oip:host:8000/model", "oip:http://host:8000", "oip:http://host/a/b", "oip:http://host/m?requests=0",
     "oip:http://host/m?of=4", "oip:http://host:99999/m", "oip:http://u:p@host/m", "oip:http://host/m,http://host/n"],
)  # fmt: skip
def test_a_source_that_names_no_model_is_refused(source):
    with pytest.raises(UsageError, match=r"names no model of a server|names the same server twice"):
        Teachers(source)


def test_a_server_behind_a_path_of_a_gateway():
    (model,) = read_models("oip:https://gateway/team/v2/models/resnet%2050/versions/3?requests=9")
    assert (model.path, model.root, model.name) == ("/team/v2/models/resnet%2050/versions/3", "/team/v2", "resnet 50")
    assert (model.port, model.requests) == (443, 9)


def test_exact_answers_need_teachers_of_this_package():
    with pytest.raises(UsageError, match="may compute several requests together"):
        Teachers("oip:http://host:8000/model", exact=True)


def test_inputs_of_a_type_that_no_tensor_has_are_named():
    with pytest.raises(UsageError, match="there is no tensor of that type"):
        named_inputs([TensorNote("text", "BYTES", (-1,))], [ArrayType("text", "uint8", ())], 4)


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_arrays_of_every_type_come_back_bit_for_bit(dtype, is_binary):
    tensor = (torch.randn(3, 2) * 50).to(getattr(torch, dtype))
    one = Array(ArrayType("x", dtype, (3, 2)), bytes(tensor.view(-1).view(torch.uint8).tolist()))
    request = make_request(["x"], [one], is_binary)
    whole = b"".join(bytes(part) for part in request.parts)
    assert len(whole) == int(request.headers["Content-Length"])
    length = request.headers.get("Inference-Header-Content-Length")
    # A request's inputs and an answer's outputs are written alike.
    answered = whole.replace(b'"inputs"', b'"outputs"')
    (back,) = read_answer(answered, None if length is None else str(int(length) + 1))
    assert back.type == one.type
    assert bytes(back.content) == bytes(one.content)


def test_ten_thousand_malformed_answers_are_refused():
    chance = random.Random(7)
    good = json.dumps(
        {"outputs": [{"name": "a", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
                     {"name": "b", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}
    ).encode()  # fmt: skip
    whole = good + bytes(16)
    assert [one.type.name for one in read_answer(whole, str(len(good)))] == ["a", "b"]
    refused = 0
    for _ in range(10_000):
        body = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            body[chance.randrange(len(body))] = chance.choice(b'0189-.,:[]{}"naeE\xff\x00')
        del body[len(body) - chance.choice([0, 0, 0, 1, 8, 20]) :]
        try:
            read_answer(body, chance.choice([str(len(good)), None, "-1", "x", "99999999999"]))
        except ProtocolError:
            refused += 1
    assert refused > 5_000


# --- the command line ---


def test_teachers_shows_what_servers_say():
    with inference_servers(ServerKind()) as (server,):
        words = [sys.executable, "-m", "edl_hvd.cli.main", "teachers", f"oip:{server.url()}"]
        shown = subprocess.run([*words, "--json"], capture_output=True, text=True)
        assert shown.returncode == 0
        (entry,) = json.loads(shown.stdout)["teachers"]
        assert entry == {
            "address": f"127.0.0.1:{server.port}", "model": "sums (version 1; takes images FP32[-1, 1, 4, 4])",
        }  # fmt: skip
        table = subprocess.run(words, capture_output=True, text=True)
        assert "1 of 1 teacher" in table.stdout
        words[-1] = f"oip:{server.url('nobody')}"
        wrong = subprocess.run([*words, "--json"], capture_output=True, text=True)
        assert wrong.returncode == 1
        assert "does not serve the model 'nobody'" in json.loads(wrong.stdout)["teachers"][0]["problem"]
    away = subprocess.run([*words, "--json"], capture_output=True, text=True)
    assert json.loads(away.stdout)["teachers"][0]["problem"] == "Connection refused"
    words[-1] = "oip:nothing"
    assert subprocess.run(words, capture_output=True, text=True).returncode == 2


SCRIPT = """
import torch
import edl_hvd
from edl_hvd import distill

edl_hvd.init()


@edl_hvd.elastic
def train(state):
    teachers = distill.Teachers()
    print("answered", tuple(teachers.ask(torch.ones(2, 1, 4, 4)).result().shape))
    teachers.close()


train(edl_hvd.State(seen=[]))
"""


def test_edlrun_tells_its_workers_of_servers_and_refuses_what_names_none(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    edlrun = [str(Path(sys.executable).with_name("edlrun")), "-np", "2", "--teachers"]
    with inference_servers(ServerKind(), ServerKind()) as servers:
        source = f"oip:{servers[0].url()},{servers[1].url()}?requests=8"
        words = [*edlrun, source, sys.executable, "train.py"]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("answered (2, 5)") == 2
    wrong = subprocess.run([*edlrun, "oip:nothing", "true"], capture_output=True, text=True, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'nothing' names no model of a server" in " ".join(wrong.stderr.split())


def test_a_distilled_student_learns_from_a_server():
    """The loss of a student falls, with the answers of a server alone."""
    torch.manual_seed(1)
    with inference_servers(ServerKind()) as (server,):
        student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, CLASSES))
        optimizer = torch.optim.Adam(student.parameters(), 0.05)
        loader = make_loader(server.source())
        losses = []
        for _ in range(4):
            for images, index, answer in loader:
                target = torch.full_like(index, -1)
                loss = distill.distillation_loss(student(images), answer, target, temperature=2.0, weight=1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        loader.close()
    assert sum(losses[-8:]) < sum(losses[:8]) / 2
