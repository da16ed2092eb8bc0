"""From a URL to the storage behind it."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from edl_hvd.errors import UsageError
from edl_hvd.storage.base import Storage, redacted
from edl_hvd.storage.parts import MEMORY_MB, Cut

_FORMS = (
    "a folder such as '/data/run', 'file:///data/run', 's3://bucket/run', 'gs://bucket/run', 'az://container/run', "
    "'memory://name', or a URL fsspec knows"
)
_GOOGLE, _AZURE = ("gs", "gcs"), ("az", "abfs", "abfss")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{0,2})")


def open_storage(url: str, memory_mb: float = MEMORY_MB) -> Storage:
    """The storage at ``url``. Nothing is created or contacted yet.

    S3 takes endpoint, region and credentials from boto3's own sources, ``AWS_*`` variables among them; Google's and
    Azure's storage take them from ``GOOGLE_*`` and ``AZURE_*`` variables, or from the machine.

    Args:
        url: A plain path, ``file:///path``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``az://container/prefix``, ``memory://name`` (this process only), or any other scheme that fsspec and its
            plug-ins understand.
        memory_mb: Memory in megabytes that one transfer may take beside the data itself. Less memory means fewer
            connections at once, one at least.

    Raises:
        UsageError: The URL is malformed, its scheme is unknown, or the package it needs is not installed.
    """
    url = os.fspath(url)
    match = _SCHEME.match(url)
    if not url.strip() or (match and match[2] != "//"):
        raise UsageError(f"{redacted(url)!r} is not a storage URL; expected {_FORMS}")
    if not match:
        return _open_file(os.path.expanduser(url))
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "file":
        return _open_file(_path_of_file_url(url, rest))
    if scheme == "s3":
        return _open_s3(url, rest, memory_mb)
    if scheme in _GOOGLE or scheme in _AZURE:
        return _open_cloud(url, scheme, rest, memory_mb)
    if scheme == "memory":
        if not rest.strip("/"):
            raise UsageError(f"{url!r} names no memory storage; expected 'memory://name'")
        from edl_hvd.storage.memory import MemoryStorage

        return MemoryStorage(rest.strip("/"))
    from edl_hvd.storage.through_fsspec import FsspecStorage

    return FsspecStorage(url, memory_mb)


def _open_file(path: str) -> Storage:
    from edl_hvd.storage.file import FileStorage

    if "\0" in path:
        raise UsageError(f"{path!r} is not a path; it contains a NUL character")
    return FileStorage(path)


def _path_of_file_url(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(
            f"{url!r} names host {host!r}; expected 'file:///absolute/path' with three slashes, "
            "a folder that every host has mounted at the same place"
        )
    return unquote("/" + path)


def _open_s3(url: str, rest: str, memory_mb: float) -> Storage:
    bucket, _, prefix = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,}", bucket):
        # "s3://key:secret@bucket" must not be echoed: some tools accept secrets there.
        shown = redacted(url) if "@" not in bucket else f"s3://***@{bucket.rpartition('@')[2]}"
        raise UsageError(
            f"{shown!r} names no S3 bucket; expected 's3://bucket/prefix', credentials come from boto3's own sources"
        )
    try:
        from edl_hvd.storage.s3 import S3Storage
    except ImportError as error:
        raise UsageError(f"{url!r} needs boto3, which is not installed; run: pip install 'edl-hvd[aws]'") from error
    return S3Storage(bucket, prefix.strip("/"), Cut.within(memory_mb))


def _open_cloud(url: str, scheme: str, rest: str, memory_mb: float) -> Storage:
    place, _, prefix = rest.partition("/")
    word = "bucket" if scheme in _GOOGLE else "container"
    form = "gs://bucket/prefix" if scheme in _GOOGLE else "az://container/prefix"
    account = ""
    if scheme in _AZURE and (
        found := re.fullmatch(r"([^@]*)@([a-z0-9]{3,24})\.(?:dfs|blob)\.core\.windows\.net", place)
    ):
        place, account = found[1], found[2]  # as Hadoop and Spark write it
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", place):
        raise UsageError(f"{redacted(url).split('@')[-1]!r} names no {word}; expected {form!r}, without credentials")
    extra = "google" if scheme in _GOOGLE else "azure"
    try:
        from edl_hvd.storage.cloud_accounts import open_azure, open_google
    except ImportError as error:
        raise UsageError(
            f"{url!r} needs obstore, which is not installed; run: pip install 'edl-hvd[{extra}]'"
        ) from error
    if scheme in _GOOGLE:
        return open_google(place, prefix.strip("/"), memory_mb)
    return open_azure(place, prefix.strip("/"), memory_mb, account)
