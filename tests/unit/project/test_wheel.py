"""The package as ``pip install`` leaves it: what is in the wheel, what its metadata says, and that it works alone."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import edl_hvd

REPOSITORY = Path(__file__).parents[3]
URL = "https://git.example.com/team/edl_hvd"


def copied_by_the_image() -> list[str]:
    """What the Dockerfile copies to build a wheel of: no more is needed."""
    lines = re.findall(r"^COPY (?!--)(.+)$", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def build(folder: Path, **variables: str) -> Path:
    """Build the wheel of a copy of the sources, without a network."""
    source = folder / "source"
    for name in copied_by_the_image():
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
        else:
            source.mkdir(exist_ok=True, parents=True)
            shutil.copy(REPOSITORY / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "PIP_NO_CACHE_DIR": "1", **variables}
    environment.pop("EDL_HVD_PROJECT_URL", None) if not variables else None
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder / "wheels"), str(source)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, beside the packages of this one; the folder of its programs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    others = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (site / "others.pth").write_text("".join(f"{path}\n" for path in others))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(installed: Path, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), "/usr/bin", "/bin"])
    environment = {"PATH": path, "HOME": str(folder), "EDL_HVD_DISCOVERY_CACHE": str(folder), **variables}
    program = words[0] if "/" in words[0] else str(installed / words[0])
    return subprocess.run([program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)


def test_it_holds_the_discovery_scripts_and_the_trace_of_the_documents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(entry.filename): entry.external_attr >> 16 for entry in archive.infolist()}
    scripts = {path.name for path in (REPOSITORY / "discovery_scripts").iterdir()}
    assert {path.name for path in held if path.parent == Path("edl_hvd/discovery_scripts")} == scripts
    programs = [mode for path, mode in held.items() if path.parent.name == "discovery_scripts" and not path.suffix]
    assert all(mode & 0o111 for mode in programs)
    assert Path("edl_hvd/traces/shipped/spot-day.csv") in held
    assert Path("edl_hvd/py.typed") in held
    assert {path.parts[0] for path in held} == {"edl_hvd", f"edl_hvd-{edl_hvd.__version__}.dist-info"}


def test_its_metadata_names_an_author_and_says_that_it_is_typed(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Author"]
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_text_for_an_index_has_no_link_that_leads_nowhere_there(wheel: Path, tmp_path: Path) -> None:
    relative = re.compile(r"\]\((?!https?:|#)[^)]*\)")
    assert relative.search((REPOSITORY / "README.md").read_text())
    assert relative.findall(str(metadata_of(wheel).get_payload())) == []
    published = metadata_of(build(tmp_path, EDL_HVD_PROJECT_URL=f"{URL}/"))
    text = str(published.get_payload())
    assert relative.findall(text) == []
    assert f"]({URL}/blob/main/docs/build.md)" in text
    assert f"]({URL}/raw/main/docs/demo.png)" in text
    urls = dict(entry.split(", ") for entry in published.get_all("Project-URL", []))
    assert urls["Source"] == URL
    assert {"Documentation", "Changelog"} <= urls.keys()


def test_extras_hold_what_their_names_say(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    extras = set(metadata.get_all("Provides-Extra", []))
    assert "horovod" not in extras
    assert {"torch", "build-horovod", "aws", "example"} <= extras
    needed = metadata.get_all("Requires-Dist", [])
    of_torch = [entry for entry in needed if 'extra == "torch"' in entry]
    assert not any(entry.startswith("torchvision") for entry in of_torch)
    assert any(entry.startswith("torchvision") and 'extra == "example"' in entry for entry in needed)


def test_the_version_is_that_of_the_newest_release_in_the_changelog() -> None:
    releases = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases
    assert next(name for name in releases if name != "Unreleased") == edl_hvd.__version__
    assert edl_hvd.__version__ != "0.1.0"


def test_it_says_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "edl-hvd", "--version").stdout.split()[-1] == edl_hvd.__version__
    assert run(installed, tmp_path, "edlrun", "--version").stdout.split()[-1] == edl_hvd.__version__


@pytest.mark.parametrize("way", ["command", "script"])
def test_hosts_are_printed_as_horovodrun_reads_them(installed: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "hosts.txt").write_text("b:2\na:1\n")
    command = ["edl-hvd", "hosts", "file:hosts.txt"]
    if way == "script":
        scripts = run(installed, tmp_path, "edl-hvd", "hosts", "--scripts").stdout.strip()
        assert scripts.endswith("site-packages/edl_hvd/discovery_scripts")
        command = [f"{scripts}/from_file", "hosts.txt"]
    polled = run(installed, tmp_path, *command)
    assert (polled.returncode, polled.stdout, polled.stderr) == (0, "a:1\nb:2\n", "")
    (tmp_path / "hosts.txt").unlink()
    refused = run(installed, tmp_path, *command)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "cannot read the hosts file hosts.txt" in refused.stderr


def test_hosts_of_a_source_that_is_not_understood_are_exit_code_2(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "edl-hvd", "hosts", "nothing:x").returncode == 2
    assert run(installed, tmp_path, "edl-hvd", "hosts").returncode == 2
    assert run(installed, tmp_path, "edl-hvd", "hosts", "--help").returncode == 0


def test_the_first_example_of_simulate_works_anywhere(installed: Path, tmp_path: Path) -> None:
    text = run(installed, tmp_path, "edl-hvd", "simulate", "--help").stdout
    example = next(line.split() for line in text.splitlines() if line.startswith("    edl-hvd simulate "))
    done = run(installed, tmp_path, *example)
    assert done.returncode == 0, done.stderr
    assert "stock Horovod elastic" in done.stdout


def test_without_torch_a_name_that_needs_it_is_one_sentence(installed: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; import edl_hvd; edl_hvd.init"
    done = run(installed, tmp_path, "python", "-c", program)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: edl_hvd.init needs torch, which this Python does not have; install it with pip"
    )
    assert "During handling" not in done.stderr
    program = "import sys; sys.modules['torch'] = None; import edl_hvd; print(edl_hvd.__version__, dir(edl_hvd)[:1])"
    assert run(installed, tmp_path, "python", "-c", program).returncode == 0
