"""What ``edl-hvd train`` would do: the TrainingJob as the operator reads it, the line of edlrun, what it refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from edl_hvd.cli.edlrun import read_command_line
from edl_hvd.cli.main import commands
from edl_hvd.fleet.store import FleetStore
from edl_hvd.json_values import show
from edl_hvd.kubernetes.parsing import read_job
from edl_hvd.kubernetes.pods import launcher_manifest
from edl_hvd.kubernetes.snapshot import GPU


def said(line: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands, ["train", *shlex.split(line)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_printed_job_is_what_the_operator_reads() -> None:
    made = yaml.safe_load(
        said(
            "--min 2 --max 8 --kubernetes --image i --gpus 4 --memory 8Gi --checkpoint s3://b/r --env A=b=c "
            "--retries 5 --priority high -n vision --dry-run src/Train_ResNet.py --epochs 90"
        )
    )
    made["metadata"].update(uid="u", resourceVersion="1")
    seen = read_job(made)
    assert seen.spec is not None, seen.problem
    assert (seen.namespace, seen.name) == ("vision", "train-resnet")
    spec = seen.spec
    assert (spec.least, spec.most, spec.slots, spec.retries) == (2, 8, 4, 5)
    assert (spec.resource, spec.unit) == (GPU, 4)
    assert (spec.checkpoint, spec.priority_class, spec.is_suspended) == ("s3://b/r", "high", False)
    container = spec.template["spec"]["containers"][0]
    assert container["command"] == ["python", "src/Train_ResNet.py", "--epochs", "90"]
    assert container["env"] == [{"name": "A", "value": "b=c"}]
    assert container["resources"]["requests"] == {"memory": "8Gi"}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What a kubelet makes of a command, an argument or the value of a variable."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[1] is None else variables.get(match[1], match[0]),
        text,
    )


def test_dollars_reach_the_script_as_they_were_given() -> None:
    words, value, url = ["--pattern", "$(A)-$$-$HOME-$"], "$(A)$$", "s3://b/$(A)/$$"
    line = ["--kubernetes", "--image", "i", "--env", "A=a", "--env", f"B={value}", "--checkpoint", url, "--dry-run"]
    made = yaml.safe_load(said(shlex.join([*line, "train.py", *words])))
    made["metadata"].update(uid="u", resourceVersion="1")
    seen = read_job(made)
    assert seen.spec is not None, seen.problem
    container = launcher_manifest(seen, seen.spec)["spec"]["containers"][0]
    assert [expanded(word, {"A": "a"}) for word in container["command"][-3:]] == ["train.py", *words]
    values = {entry["name"]: expanded(entry.get("value", ""), {"A": "a"}) for entry in container["env"]}
    assert (values["A"], values["B"], values["EDL_HVD_CHECKPOINT"]) == ("a", value, url)


def test_a_worker_without_gpus_has_a_processor_and_a_command_of_its_own() -> None:
    made = yaml.safe_load(said("--kubernetes --image i --name n --dry-run -- sh run.sh"))
    container = made["spec"]["workers"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["sh", "run.sh"]
    assert container["resources"] == {"requests": {"cpu": "1"}}
    assert (made["spec"]["workers"]["min"], made["spec"]["workers"]["max"]) == (1, 1)
    assert made["metadata"] == {"name": "n"}


def test_without_a_fleet_it_is_a_line_of_edlrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert said("--min 2 --max 3 --dry-run train.py --lr 0.1") == (
        "edlrun -np 3 --min-np 2 -H localhost:3 python train.py --lr 0.1\n"
    )
    assert said("--env 'A=x y' --dry-run train.py").startswith("A='x y' edlrun ")
    variable, *line = shlex.split(said("--max 2 --checkpoint runs/c --dry-run train.py"))
    assert variable == "EDL_HVD_CHECKPOINT=runs/c"
    options = read_command_line(line[1:])
    assert (options.rules.num_proc, options.rules.min_np) == (2, 1)


def test_a_job_does_not_run_here_beside_a_fleet_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/fleet").mkdir(parents=True)
    FleetStore(Path("runs/fleet")).close()
    refused = said("--dry-run train.py", code=1)
    assert refused == (
        "error: the fleet in runs/fleet has no daemon; start it with 'edl-hvd fleet serve', or give --here to run on "
        "this machine without it\n"
    )
    assert said("--here --dry-run train.py").startswith("edlrun ")
    assert "kind: TrainingJob" in said("--kubernetes --image i --dry-run train.py")


def test_a_folder_for_checkpoints_is_printed_with_a_warning() -> None:
    line = ["--kubernetes", "--image", "i", "--checkpoint", "runs/c", "--dry-run", "train.py"]
    done = CliRunner().invoke(commands, ["train", *line])
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["spec"]["checkpoint"] == "runs/c"
    assert (done.stderr.count("\n"), "goes with the pod" in done.stderr) == (1, True)


def test_a_script_that_begins_with_a_digit_gives_a_name_that_does_not() -> None:
    made = yaml.safe_load(said("--kubernetes --image i --dry-run 3d_unet.py"))
    assert made["metadata"]["name"] == "job-3d-unet"


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "image",
    [
        "i", "user/i", "i:1.0_a-B", f"i@{DIGEST}", f"r.io:5000/a/b-c__d.e/f:v1@{DIGEST}", "localhost/i",
        "localhost:5000/i", "[fd00::1]:5000/i", "Registry.Example/i", "EXAMPLE/i", "a--b/c---d", f"i:{'t' * 128}",
        f"i@sha512:{'ab' * 64}", "127.0.0.1:80/a", "r.io:5000", f"r.io/{'a' * 255}",
    ],
)  # fmt: skip
def test_an_image_that_kubernetes_can_pull_is_taken(image: str) -> None:
    made = yaml.safe_load(said(shlex.join(["--kubernetes", "--image", image, "--dry-run", "train.py"])))
    assert made["spec"]["workers"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize(
    "image",
    [
        "I", "user/Image", " i", "i ", "i:", ":1", "i:.a", "i:a:b", f"i:{'t' * 129}", "i@", "i@sha256:abc", "a//b",
        "/i", "i/", "-a", "a-", "a._b", "a___b", "r.io:port/i", "https://r.io/i", f"i@{DIGEST[:-1]}", "0a" * 32,
        f"i@{DIGEST.upper()}", f"i@{DIGEST}:1", f"i@md5:{'ab' * 16}", "i\n", "-r.io/i", "é",
        f"r.io/{'a' * 256}",
    ],
)  # fmt: skip
def test_an_image_that_no_kubelet_can_name_is_refused(image: str) -> None:
    output = said(shlex.join(["--kubernetes", f"--image={image}", "--dry-run", "train.py"]), code=2)
    assert output.startswith(f"error: --image {show(image)} is no reference of an image; expected ")
    assert output.count("\n") == 1


def test_every_name_that_kubernetes_would_refuse_is_a_line() -> None:
    output = said("--kubernetes --image I -n N --priority P --dry-run train.py", code=2)
    assert [line.split()[:3] for line in output.splitlines()] == [
        ["error:", "--namespace", "'N'"], ["error:", "--priority", "'P'"], ["error:", "--image", "'I'"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--kubernetes train.py", "without --image"),
        ("--kubernetes --image i --min 3 --max 2 train.py", "workers.min is 3 and max 2"),
        ("--kubernetes --image i --cpu many train.py", "'many' is no quantity"),
        ("--kubernetes --image i --memory many train.py", "'many' is no quantity"),
        ("--kubernetes --image i --cpu 0 train.py", "request neither nvidia.com/gpu nor cpu"),
        ("--kubernetes --image i --env A train.py", "expected NAME=VALUE"),
        ("--kubernetes --image i --name a_b train.py", "not usable in Kubernetes"),
        ("--kubernetes --image i --name 3d train.py", "the name '3d' is not usable in Kubernetes"),
        ("--kubernetes --image i --name a.b train.py", "choose another --name"),
        (f"--kubernetes --image i --name {'a' * 51} train.py", "expected 50 at most; choose another --name"),
        ("--kubernetes --image i --checkpoint runs/c train.py", "goes with the pod"),
        ("--kubernetes --image i --checkpoint file:///runs/c train.py", "goes with the pod"),
        ("--kubernetes --image i -n Vision --dry-run train.py", "--namespace 'Vision' is no DNS label (RFC 1123)"),
        ("--kubernetes --image i -n a.b --dry-run train.py", "--namespace 'a.b' is no DNS label (RFC 1123)"),
        (f"--kubernetes --image i -n {'a' * 64} train.py", "expected 1 to 63 small letters, digits and '-'"),
        ("--kubernetes --image i --priority high_1 train.py", "--priority 'high_1' is no DNS subdomain (RFC 1123)"),
        (f"--kubernetes --image i --priority {'a' * 254} train.py", "expected 1 to 253 small letters, digits"),
        ("--kubernetes --image i --priority a..b train.py", "--priority 'a..b' is no DNS subdomain"),
        ("--kubernetes --image user/Image train.py", "--image 'user/Image' is no reference of an image"),
        ("--kubernetes --image 'i:' --dry-run train.py", "--image 'i:' is no reference of an image"),
        ("--kubernetes --here --image i train.py", "expected one of them"),
        ("--here --gpus 2 train.py", "use it with --kubernetes"),
        ("--here --priority 2 train.py", "use it with --fleet DIR or --kubernetes"),
        ("--here --min 3 --max 2 train.py", "--min 3 is above --max 2"),
        ("--here --env A train.py", "expected NAME=VALUE"),
        ("--fleet . --priority high train.py", "in a fleet a whole number is expected"),
        ("--fleet . --image i train.py", "has no effect in a fleet"),
        ("--fleet nowhere train.py", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = said(line, code=1 if "nowhere" in line else 2)
    assert problem in output
    assert output.count("\n") == 1
