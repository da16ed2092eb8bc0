"""The commands ``edl-hvd teach`` and ``edl-hvd teachers``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch
from fleet import Sums, fleet, free_port
from metadata_server import Ec2Metadata
from students import TOKEN, sampler
from torch.utils.data import DataLoader
from waiting import LONG_S, soon

from edl_hvd.distill import DistillLoader, Teachers

pytestmark = pytest.mark.distill


def test_teach_serves_a_file_and_teachers_shows_it(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef build():\n    torch.manual_seed(1)\n    return torch.nn.Linear(3, 2)\n"
    )
    (tmp_path / "token").write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "edl_hvd.cli.main"]
    port = free_port()
    words = [*command, "teach", f"{tmp_path}/model.py:build", "--port", str(port), "--devices", "cpu,cpu",
             "--listen", "127.0.0.1", "--token-file", str(tmp_path / "token"), "--threads", "1"]  # fmt: skip
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert teach.stdout is not None
        lines = {teach.stdout.readline(), teach.stdout.readline()}
        assert lines == {f"Linear answers at 127.0.0.1:{port}\n", f"Linear answers at 127.0.0.1:{port + 1}\n"}
        (tmp_path / "teachers.txt").write_text("localhost:3\n")
        show = [*command, "teachers", f"file:{tmp_path}/teachers.txt", "--port", str(port)]
        shown = subprocess.run(
            [*show, "--token-file", str(tmp_path / "token"), "--json"], capture_output=True, text=True
        )
        entries = json.loads(shown.stdout)["teachers"]
        assert shown.returncode == 0
        assert [entry.get("model") for entry in entries] == ["Linear", "Linear", None]
        assert entries[0]["fingerprint"] == entries[1]["fingerprint"]
        assert entries[2]["problem"] == "Connection refused"
        without = subprocess.run(show, capture_output=True, text=True)
        assert without.returncode == 1
        assert "the token is another one" in " ".join(without.stdout.split())
        data = [(torch.full((3,), float(number)), number) for number in range(8)]
        inner = DataLoader(data, batch_sampler=sampler(8))  # type: ignore[arg-type]
        wanted = Teachers(f"file:{tmp_path}/teachers.txt", port=port, token_file=tmp_path / "token")
        loader = DistillLoader(inner, wanted, send=lambda batch: batch[0])
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        for inputs, _, answer in loader:
            torch.testing.assert_close(answer, model(inputs).detach())
        loader.close()
    finally:
        teach.send_signal(signal.SIGTERM)
        assert soon(teach) == 0
        teach.stdout.close()


def test_teachers_are_watched_as_they_come_and_go(tmp_path):
    with fleet(tmp_path, Sums()) as teachers:
        words = [sys.executable, "-m", "edl_hvd.cli.main", "teachers", teachers.source, "--port", str(teachers.port)]
        watch = subprocess.Popen([*words, "--watch", "--json"], stdout=subprocess.PIPE, text=True)
        assert watch.stdout is not None

        def next_with(problems: list[bool]) -> list[dict[str, object]]:
            for line in islice(watch.stdout or (), int(LONG_S)):  # one a second
                entries = json.loads(line)["teachers"]
                if ["problem" in entry for entry in entries] == problems:
                    return entries
            raise AssertionError("it never became so")

        assert next_with([False])[0]["model"] == "Sums"
        teachers.start(Sums())
        assert [entry["address"] for entry in next_with([False, False])] == [
            f"localhost:{teachers.port}", f"localhost:{teachers.port + 1}",
        ]  # fmt: skip
        teachers.kill(0)
        assert next_with([True, False])[0]["problem"] == "Connection refused"
        watch.terminate()
        assert soon(watch) == -signal.SIGTERM
        watch.stdout.close()


def test_a_teacher_whose_host_will_go_leaves_and_another_one_answers(tmp_path):
    """EC2 tells that it will end the host: no answer is lost, and ``edl-hvd teach`` ends with exit code 0."""
    (tmp_path / "model.py").write_text(
        "import torch\n\ndef build():\n    torch.manual_seed(1)\n    return torch.nn.Linear(3, 2)\n"
    )
    with Ec2Metadata() as metadata:
        noticed = {"EDL_HVD_NOTICES": "ec2", "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
        fleet_of: list[subprocess.Popen[str]] = []
        port = free_port(2)
        try:
            for number, variables in enumerate((noticed, {"EDL_HVD_NOTICES": "off"})):
                words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--port",
                         str(port + number), "--devices", "cpu", "--listen", "127.0.0.1", "--threads", "1"]  # fmt: skip
                teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
                fleet_of.append(teach)
                assert teach.stdout is not None
                assert "answers at" in teach.stdout.readline()
            (tmp_path / "teachers.txt").write_text("localhost:2\n")
            data = [(torch.full((3,), float(number)), number) for number in range(64)]
            inner = DataLoader(data, batch_sampler=sampler(64))  # type: ignore[arg-type]
            loader = DistillLoader(
                inner, Teachers(f"file:{tmp_path}/teachers.txt", port=port), send=lambda batch: batch[0]
            )
            torch.manual_seed(1)
            model, seen = torch.nn.Linear(3, 2), []
            for place, (inputs, numbers, answer) in enumerate(loader):
                torch.testing.assert_close(answer, model(inputs).detach())
                seen += numbers.tolist()
                if place == 2:
                    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 100))
                    metadata.texts["spot/instance-action"] = json.dumps({"action": "terminate", "time": moment})
                    assert soon(fleet_of[0]) == 0
            loader.close()
            assert sorted(seen) == list(range(64))
            assert fleet_of[0].stdout is not None
            assert "leaving: EC2 will terminate this spot instance" in fleet_of[0].stdout.read()
            assert fleet_of[1].poll() is None
        finally:
            for teach in fleet_of:
                teach.terminate()
                assert soon(teach) == 0
                if teach.stdout is not None:
                    teach.stdout.close()


def test_a_teacher_that_is_told_to_leave_while_it_loads_ends_well(tmp_path):
    (tmp_path / "model.py").write_text(
        "import time\n\ndef build():\n    print('loads', flush=True)\n    time.sleep(600)\n"
    )
    words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--devices", "cpu,cpu"]
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert teach.stdout is not None
    assert [teach.stdout.readline(), teach.stdout.readline()] == ["loads\n", "loads\n"]
    teach.send_signal(signal.SIGTERM)
    assert soon(teach) == 0
    teach.stdout.close()


def test_teach_without_a_token_does_not_listen_to_the_network(tmp_path):
    (tmp_path / "model.py").write_text("def build():\n    return abs\n")
    words = [sys.executable, "-m", "edl_hvd.cli.main", "teach", f"{tmp_path}/model.py:build", "--listen", "0.0.0.0"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "would answer anybody" in ended.stderr


@pytest.mark.parametrize("build", ["nothing", "nowhere.py:build", "os:nothing"])
def test_teach_says_what_it_cannot_load(build):
    ended = subprocess.run([sys.executable, "-m", "edl_hvd.distill", build], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("edl-hvd teach: ")
    assert "Traceback" not in ended.stderr


def test_the_command_line_comes_without_torch():
    code = "import sys, edl_hvd.cli.main, edl_hvd.distill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
