"""From URLs to storages, and what is said about URLs that are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.storage import open_storage
from edl_hvd.storage.base import redacted


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/run", "/data/run"),
        ("/data/run/", "/data/run"),
        ("/data/a b%20c", "/data/a b%20c"),
        ("file:///data/run", "/data/run"),
        ("FILE:///data/run", "/data/run"),
        ("file://localhost/data/run", "/data/run"),
        ("file:///data/a%20b", "/data/a b"),
        ("relative/run", os.path.abspath("relative/run")),
        ("~/run", os.path.expanduser("~/run")),
        ("C:", os.path.abspath("C:")),
    ],
)
def test_folders_open_as_absolute_file_urls(url: str, path: str) -> None:
    assert open_storage(url).url == Path(path).as_uri()


def test_the_url_of_a_file_storage_opens_the_same_storage(tmp_path: Path) -> None:
    first = open_storage(str(tmp_path / "odd name #1 100%"))
    first.write("key", b"1")
    assert open_storage(first.url).read("key") == b"1"
    assert not first.url.endswith("%")


@pytest.mark.parametrize(
    "url",
    ["", "  ", "s3:/bucket/run", "s3:bucket", "file:/data", "file://data/run", "s3://", "s3:///run", "memory://",
     "memory:///", "nope://x/y", "s3://key:secret@bucket/run"],
)  # fmt: skip
def test_a_malformed_or_unknown_url_is_refused_saying_what_is_expected(url: str) -> None:
    with pytest.raises(UsageError, match=r"expected|names no") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)


def test_s3_without_boto3_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    for module in ("s3", "s3_requests"):
        monkeypatch.delitem(sys.modules, f"edl_hvd.storage.{module}", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'edl-hvd\[aws\]'"):
        open_storage("s3://bucket/run")


def test_a_scheme_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(UsageError, match=r"(?i)paramiko"):
        open_storage("sftp://host/run")
    monkeypatch.setitem(sys.modules, "obstore", None)
    for module in ("cloud", "cloud_accounts"):
        monkeypatch.delitem(sys.modules, f"edl_hvd.storage.{module}", raising=False)
    for url, extra in (("gs://bucket/run", "google"), ("az://container/run", "azure")):
        with pytest.raises(UsageError, match=rf"needs obstore.*pip install 'edl-hvd\[{extra}\]'"):
            open_storage(url)


HEAVY = {"boto3", "botocore", "fsspec", "gcsfs", "adlfs", "aiohttp", "requests", "urllib3", "google.auth", "torch"}


def modules_of(url: str) -> set[str]:
    """What a process has imported that has opened a storage."""
    program = f"import sys; from edl_hvd.storage import open_storage; open_storage({url!r}); print(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_"))}
    environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AZURE_STORAGE_ACCOUNT_NAME": "account"}
    environment |= {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "GOOGLE_BEARER_TOKEN": "token"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run"])
def test_storage_of_google_and_azure_starts_with_few_imports(url: str) -> None:
    """obstore is compiled; boto3 alone is more than a hundred modules, which take a third of a second."""
    imported = modules_of(url)
    assert "obstore" in imported
    assert imported & HEAVY == set()
    of_s3 = modules_of("s3://bucket/run")
    assert "boto3" in of_s3
    assert len(of_s3) > len(imported) + 100


def test_other_schemes_go_through_fsspec(tmp_path: Path) -> None:
    storage = open_storage(f"local://{tmp_path}/run/")
    storage.write("key", b"1")
    assert storage.url == f"local://{tmp_path}/run"
    assert (tmp_path / "run" / "key").read_bytes() == b"1"


def test_passwords_never_reach_a_message() -> None:
    assert redacted("sftp://ada:secret@host:22/run") == "sftp://ada:***@host:22/run"
    assert redacted("s3://bucket/a:b@c") == "s3://bucket/a:b@c"
    assert redacted("/data/a:b@c") == "/data/a:b@c"


def test_memory_storages_share_a_name_and_nothing_else() -> None:
    open_storage("memory://one").write("key", b"1")
    assert open_storage("memory://one").read("key") == b"1"
    assert open_storage("memory://two").list() == []
