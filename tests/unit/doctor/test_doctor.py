from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from edl_hvd.build.edits.release import REVISION
from edl_hvd.build.torch_facts import TorchFacts
from edl_hvd.build.verify import HorovodFacts
from edl_hvd.cli import doctor as doctor_cli
from edl_hvd.doctor import engine, machine, outside
from edl_hvd.doctor.findings import ADVICE, MISSING, OK, CheckResult, CheckVerdict

HOROVOD = HorovodFacts("0.28.1", gloo=True, mpi=False, nccl=False, cuda=False, revision=REVISION)


def verdicts(findings: list[CheckResult]) -> dict[str, str]:
    return {finding.subject: finding.verdict for finding in findings}


def test_python_older_than_3_10_is_missing() -> None:
    assert engine.check_python((3, 9, 18)).verdict == MISSING
    assert engine.check_python((3, 10, 0)).verdict == OK


@pytest.mark.parametrize(
    ("torch", "verdict", "words"),
    [
        (TorchFacts("2.13.0+cpu"), OK, "CPU build"),
        (TorchFacts("2.13.0+cu130", cuda="13.0"), OK, "CUDA 13.0, no GPU in sight"),
        (TorchFacts("2.13.0+cu130", cuda="13.0", gpus=("90",)), OK, "CUDA 13.0, 1 GPU"),
        (TorchFacts("2.0.1"), MISSING, "too old"),
    ],
)
def test_torch_is_described_by_version_and_kind(torch: TorchFacts, verdict: str, words: str) -> None:
    finding = engine.judge_torch(torch)
    assert finding.verdict == verdict
    assert words in finding.found


def test_without_torch_the_diagnosis_goes_on_and_names_the_fix(tmp_path: Path) -> None:
    # A torch that cannot be imported stands in for one that is not there.
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    torch, horovod = engine.check_engine({"PYTHONPATH": str(tmp_path)})
    assert (torch.subject, torch.verdict) == ("torch", MISSING)
    assert "no torch here" in torch.found
    assert torch.fix == "pip install 'edl-hvd[torch]'"
    assert (horovod.subject, horovod.verdict, horovod.fix) == ("Horovod", MISSING, "edl-hvd build-horovod")


def test_horovod_without_gloo_is_missing_the_part_that_elastic_jobs_need() -> None:
    found = engine.judge_horovod(HorovodFacts("0.28.1", False, True, False, False), TorchFacts("2.13.0"))
    assert verdicts(found)["Gloo"] == MISSING


def test_nccl_is_missed_only_where_there_is_a_gpu() -> None:
    assert verdicts(engine.judge_horovod(HOROVOD, TorchFacts("2.13.0")))["NCCL"] == OK
    with_gpu = TorchFacts("2.13.0+cu130", cuda="13.0", gpus=("90",))
    assert verdicts(engine.judge_horovod(HOROVOD, with_gpu))["NCCL"] == ADVICE


def test_a_missing_compiler_matters_only_while_horovod_does_not_work(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert verdicts(machine.check_tools(nothing, horovod_works=False))["C++ compiler"] == MISSING
    found = verdicts(machine.check_tools(nothing, horovod_works=True))
    assert found["C++ compiler"] == ADVICE
    assert found["ssh client"] == ADVICE
    assert found["MPI compiler"] == OK


@pytest.mark.parametrize(
    ("addresses", "default", "chosen"),
    [
        ({"lo": "127.0.0.1", "eth0": "10.0.0.5"}, "eth0", "eth0"),
        ({"lo": "127.0.0.1", "docker0": "172.17.0.1", "ens5": "10.0.0.5"}, None, "ens5"),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}, "ib0", "ib0"),
        ({"lo": "127.0.0.1", "docker0": "172.17.0.1"}, None, None),
    ],
)
def test_the_interface_other_hosts_reach_is_proposed(addresses: dict, default: str | None, chosen: str | None) -> None:
    assert machine.choose_interface(addresses, default) == chosen


def test_this_machine_has_a_loopback_address() -> None:
    assert "127.0.0.1" in machine.addresses().values()


def test_the_default_route_names_its_interface(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text("Iface\tDestination\tGateway\nens5\t0000FEA9\t00\nens6\t00000000\t0101A8C0\n")
    assert machine.default_interface(routes) == "ens6"
    assert machine.default_interface(tmp_path / "none") is None


def test_storage_is_tried_by_writing_reading_and_deleting(tmp_path: Path) -> None:
    finding = outside.check_storage(f"file://{tmp_path}/run")
    assert finding.verdict == OK
    assert [path for path in (tmp_path / "run").rglob("doctor-*") if path.is_file()] == []


def test_storage_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert outside.check_storage(f"file://{tmp_path}/file/run").verdict == MISSING
    assert outside.check_storage("s3:/bucket/run").verdict == MISSING


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without credentials, at which nothing but this machine is asked."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")


def test_s3_without_credentials_says_how_to_give_them(nobody: None) -> None:
    finding = outside.check_storage("s3://some-bucket/run")
    assert finding.verdict == MISSING
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in finding.found
    assert finding.fix.startswith("give this host credentials")
    assert "grant" not in finding.fix


def test_s3_with_half_of_the_credentials_or_an_unknown_profile_says_so(
    nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    assert outside.check_storage("s3://some-bucket/run").fix.startswith("give this host credentials")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert outside.check_storage("s3://some-bucket/run").fix.startswith("give this host credentials")


def test_s3_that_does_not_answer_is_a_matter_of_the_network(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "AWS_ENDPOINT_URL" in outside.check_storage("s3://some-bucket/run").fix


def test_azure_without_an_account_names_the_variable(nobody: None) -> None:
    finding = outside.check_storage("az://container/run")
    assert "set AZURE_STORAGE_ACCOUNT_NAME" in finding.found
    assert finding.fix == "correct --checkpoint, or set what is missing"


@pytest.mark.parametrize(
    ("returncode", "stdout", "seconds", "verdict", "words"),
    [
        (0, "a:4\nb:4\n", 0.1, OK, "2 hosts, 8 slots"),
        (0, "b:4\na:4\n", 0.1, ADVICE, "unsorted"),
        (0, "a:4\n", 1.5, ADVICE, "1.50 s"),
        (0, "", 0.1, MISSING, "no host"),
        (0, "\n\n", 0.1, MISSING, "no host"),
        (1, "", 0.1, MISSING, "no credentials"),
        (0, "a:4\na:2\n", 0.1, MISSING, "more than once"),
        (0, "Loading plugins ...\na:4\n", 0.1, MISSING, "Loading plugins"),
        (0, "a:four\n", 0.1, MISSING, "a:four"),
        (0, "a:4:4\n", 0.1, MISSING, "a:4:4"),
    ],
)
def test_a_discovery_answer_is_held_against_the_contract(
    returncode: int, stdout: str, seconds: float, verdict: str, words: str
) -> None:
    finding = outside.judge_discovery(returncode, stdout, "warming up\nno credentials\n", seconds)
    assert finding.verdict == verdict
    assert words in finding.found


def test_a_discovery_script_is_run_through_the_shell_as_horovod_does(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho $1:$SLOTS\n")
    script.chmod(0o755)
    assert outside.check_discovery(f"{script} node-1", {"SLOTS": "3", "PATH": "/bin:/usr/bin"}).verdict == OK
    assert outside.check_discovery(str(tmp_path / "absent"), {"PATH": "/bin:/usr/bin"}).verdict == MISSING


@pytest.mark.parametrize(("verdict", "code"), [(OK, 0), (ADVICE, 0), (MISSING, 1)])
def test_the_exit_code_says_whether_something_required_is_missing(
    monkeypatch: pytest.MonkeyPatch, verdict: CheckVerdict, code: int
) -> None:
    finding = CheckResult("Engine", "torch", verdict, "2.13.0 [cpu]", "pip install 'edl-hvd[torch]'")
    monkeypatch.setattr(doctor_cli, "examine", lambda *_: iter([finding]))
    text = CliRunner().invoke(doctor_cli.doctor_command, [])
    assert text.exit_code == code
    assert "pip install 'edl-hvd[torch]'" in text.output
    as_json = CliRunner().invoke(doctor_cli.doctor_command, ["--json"])
    assert as_json.exit_code == code
    assert json.loads(as_json.output)[0]["verdict"] == verdict


def test_the_command_line_loads_neither_torch_nor_horovod() -> None:
    import subprocess

    program = "import sys, edl_hvd, edl_hvd.cli.main; sys.exit(bool({'torch', 'horovod', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(("revision", "has"), [(0, "not mended"), (REVISION + 1, f"mended to revision {REVISION + 1}")])
def test_a_horovod_that_is_not_mended_or_otherwise_is_missing(revision: int, has: str) -> None:
    found = engine.judge_horovod(replace(HOROVOD, revision=revision), TorchFacts("2.13.0"))
    assert found[0].verdict == MISSING
    assert has in found[0].found
