"""Every command that the documents show is run: here, by another test, or by CI."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from command_runs import HOW, By, Ci, Here
from documents import REPOSITORY, commands, commands_of_markdown, commands_outside_console_blocks, diff_sides


def test_every_command_of_the_documents_is_run_by_a_test():
    shown = commands()
    unknown = [f"{entry.document}: {entry.command}" for entry in shown if entry.command not in HOW]
    assert unknown == [], (
        "no test runs these commands: add each to HOW in tests/docs/command_runs.py, as Here(…) to run it in "
        "this module, or as By(…) with the test that runs it"
    )
    stale = set(HOW) - {entry.command for entry in shown}
    assert stale == set(), "no document shows these commands any more; take them out of HOW"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```console\n$ new one\noutput\n$ two \\\n      lines\n```\n", ["new one", "two lines"]),
        ("see `make coffee` and `make`\n", ["make coffee"]),
        ("```text\n$ make coffee\n```\n", []),
    ],
)
def test_a_new_command_is_noticed(text, found):
    assert list(commands_of_markdown(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("    make coffee\n", 1), ("```sh\nSUGAR=1 make coffee\n```\n", 1), ("    state = make(coffee)\n", 0)],
)
def test_a_command_that_hides_in_another_block_is_noticed(text, found):
    assert len(commands_outside_console_blocks(text)) == found


@pytest.mark.parametrize("command", [command for command, how in HOW.items() if isinstance(how, Ci)])
def test_ci_runs(command):
    how = HOW[command]
    assert isinstance(how, Ci)
    steps = (REPOSITORY / ".ci" / "run").read_text()
    assert re.search(rf"^ *stage .*\b{how.step}$", steps, flags=re.MULTILINE), f".ci/run has no stage {how.step!r}"
    assert command == how.step or command in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize("test", sorted({how.test for how in HOW.values() if isinstance(how, By)}))
def test_the_test_named_for_a_command_exists(test):
    file, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((REPOSITORY / file).read_text()).body if hasattr(node, "name")}
    assert name in functions


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    subprocess.run([sys.executable, str(REPOSITORY / "examples" / "imagenet" / "digits.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def aws():
    from servers import AwsServer

    with AwsServer() as server:
        yield server


THREE_CHECKPOINTS = """\
import sys
import torch
from edl_hvd.checkpoint import CheckpointWriter
from edl_hvd.storage import open_storage
from edl_hvd.worker.commits.state_store import StateStore

store = StateStore({"model": torch.nn.Linear(4, 3)})
writer = CheckpointWriter(open_storage(sys.argv[1]), keep=3)
for step in (1, 2, 3):
    store.step = step
    store.save(step)
    writer.begin(store.snapshot(), 0, 1, f"attempt-{step}")
    assert writer.wait(60)
"""


@pytest.fixture(scope="module")
def trained(aws) -> str:
    """Where a job has left three checkpoints."""
    url = f"s3://{aws.new_bucket()}/resnet50"
    variables = {**os.environ, **aws.environment, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", THREE_CHECKPOINTS, url], env=variables, check=True)
    return url


@pytest.fixture
def values(request) -> Callable[[str], str]:
    """Fills the braces of a text: a folder with images, a bucket, the address of an instance with the tag."""

    def fill(text: str) -> str:
        makers = {"digits": lambda: str(request.getfixturevalue("digits")),
                  "trained": lambda: request.getfixturevalue("trained"),
                  "bucket": lambda: request.getfixturevalue("aws").new_bucket(),
                  "instance": lambda: run_instance(request.getfixturevalue("aws"))}  # fmt: skip
        return re.sub(r"{(\w+)}", lambda match: makers[match[1]](), text)

    return fill


def run_instance(aws) -> str:
    """The private address of a fresh instance with the documents' tag and one GPU, in the documents' region."""
    ec2 = boto3.session.Session().client("ec2", region_name="eu-central-1", endpoint_url=aws.url,
                                         aws_access_key_id="testing", aws_secret_access_key="testing")  # fmt: skip
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "job", "Value": "resnet50"}]}]
    started = ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, InstanceType="g4dn.xlarge", TagSpecifications=tags
    )
    return str(started["Instances"][0]["PrivateIpAddress"])


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a reader has: a checkout, a script, a file of hosts and a plan."""
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "edl_hvd", checkout / "edl_hvd")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    for name in ("Makefile", "constraints.txt", "discovery_scripts", "examples", "benchmarks", "tests"):
        (checkout / name).symlink_to(REPOSITORY / name)
    text = (REPOSITORY / "docs" / "from_horovod.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (checkout / "train.py").write_text(script)
    (checkout / "hosts.txt").write_text("node-1 slots=4\nnode-2:4\nnode-3\n")
    (checkout / "local.txt").write_text("localhost\n127.0.0.1\n")
    (checkout / "plan.txt").write_text("0 add localhost:1\n")
    return checkout


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.waits if how.waits else ())
        for command, how in HOW.items()
        if isinstance(how, Here)
    ],
)
def test_the_command_works(command, folder, values, request):
    how = HOW[command]
    assert isinstance(how, Here)
    words, prints = f"{command} {how.more}", values(how.prints)
    for theirs, ours in how.swaps:
        assert theirs in words
        words = words.replace(theirs, values(ours))
    cloud = request.getfixturevalue("aws").environment if "s3:" in command or "from_ec2" in command else {}
    done = subprocess.run(
        words, shell=True, cwd=folder, env={**environment(folder), **cloud, **dict(how.variables)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == how.exit_code, f"{words}\n{done.stdout[-6000:]}"
    assert prints in done.stdout, f"{words}\n{done.stdout[-6000:]}"
    assert "does not provide the extra" not in done.stdout


AROUND_THE_DIFF = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
device = "cpu"
dataset = TensorDataset(torch.randn(1024, 4), torch.randint(3, (1024,)))
build_model = lambda: torch.nn.Linear(4, 3)

"""


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_both_sides_of_the_readmes_diff_train(side, folder, aws):
    script = diff_sides((REPOSITORY / "README.md").read_text())[side]
    assert script.count("num_workers=8") == 1
    (folder / "diff.py").write_text(AROUND_THE_DIFF + script.replace("num_workers=8", "num_workers=0"))
    storage = aws.client("s3")
    storage.create_bucket(Bucket="bucket")
    for entry in storage.list_objects_v2(Bucket="bucket").get("Contents", []):  # of the other side
        storage.delete_object(Bucket="bucket", Key=entry["Key"])
    done = subprocess.run([sys.executable, "diff.py"], cwd=folder, env={**environment(folder), **aws.environment},
                          stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    keys = [entry["Key"] for entry in storage.list_objects_v2(Bucket="bucket").get("Contents", [])]
    assert [key for key in keys if key.endswith("/manifest.json")] == (
        ["resnet50/checkpoints/000000000090/manifest.json"] if side else []
    )


def environment(folder: Path) -> dict[str, str]:
    """Programs are those of the environment under test; what is kept between calls is in the folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    foreign = ("HOROVOD_", "EDL_HVD_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "EDL_HVD_PYTHON": sys.executable,
        "EDL_HVD_DISCOVERY_CACHE": str(folder),
    }
