"""Shards that lie in a bucket or behind a web server: the same samples as from local files, whatever breaks."""

from __future__ import annotations

import http.server
import itertools
import random
import ssl
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cloud_servers import GoogleStorageServer
from kubernetes_server import make_certificate
from servers import AwsServer
from shards import add, number_of, write_shards
from torch.utils.data import DataLoader
from waiting import soon

import edl_hvd
from edl_hvd.errors import ObjectMissingError, StorageError, UsageError
from edl_hvd.storage.remote_file import open_remote
from edl_hvd.storage.retries import Patience
from edl_hvd.storage.web import WebObject

MIB = 1024 * 1024


class FileServer(http.server.ThreadingHTTPServer):
    """Serves the files of a folder in parts; what else it does can be set by a test.

    Attributes:
        asked: First bytes of the parts that were asked for.
        sent: Bytes sent.
        statuses: Statuses that the next requests are answered with.
        cut_after: Bytes after which the next answers break off, one number for each.
        gives_parts: Whether it knows ``Range``.
        moves_to: Place that everything redirects to.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[int] = []
        self.sent = 0
        self.statuses: list[int] = []
        self.cut_after: list[int] = []
        self.gives_parts = True
        self.moves_to = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        path = server.folder / urlsplit(self.path).path.lstrip("/")
        status = server.statuses.pop(0) if server.statuses else 0
        if server.moves_to and not self.path.startswith("/moved/"):
            return self._say(302, {"Location": server.moves_to + self.path})
        path = server.folder / path.relative_to(server.folder).name
        if status or not path.exists():
            return self._say(status or 404, {})
        size = path.stat().st_size
        start, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        first, end = int(start), min(size, int(last) + 1)
        server.asked.append(first)
        if not server.gives_parts:
            return self._say(200, {"ETag": "x"}, path.read_bytes())
        if first >= size:
            return self._say(416, {"Content-Range": f"bytes */{size}"})
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{size}", "ETag": str(path.stat().st_mtime_ns)}
        with open(path, "rb") as file:
            file.seek(first)
            return self._say(206, headers, file.read(end - first))

    def _say(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.server.cut_after and body:
            self.wfile.write(body[: self.server.cut_after.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)
        self.server.sent += len(body)

    def log_message(self, *_: object) -> None:
        """Requests are of no interest in a test's output."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "web").mkdir()
    server = FileServer(tmp_path / "web")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    soon(thread)
    server.server_close()


@pytest.fixture(params=["https", "s3", "gs", "file"])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, web: FileServer
) -> Callable[[list[str]], list[str]]:
    """Puts local files behind URLs and returns these."""

    def put(paths: list[str]) -> list[str]:
        if request.param == "https":
            for path in paths:
                (web.folder / Path(path).name).write_bytes(Path(path).read_bytes())
            return [f"{web.url}/{Path(path).name}" for path in paths]
        if request.param == "file":
            return [f"file://{path}" for path in paths]
        if request.param == "gs":
            google: GoogleStorageServer = request.getfixturevalue("google_storage")
            url = f"gs://{google.new_bucket()}/train"
            environment = google.environment
        else:
            aws: AwsServer = request.getfixturevalue("aws")
            url, environment = f"s3://{aws.new_bucket()}/train", aws.environment
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        from edl_hvd.storage import open_storage

        storage = open_storage(url)
        for path in paths:
            storage.write(Path(path).name, Path(path).read_bytes())
        storage.close()
        return [f"{url}/{Path(path).name}" for path in paths]

    return put


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_samples_are_those_of_the_local_file_to_the_byte(
    tmp_path: Path, place: Callable[[list[str]], list[str]], suffix: str
) -> None:
    paths = write_shards(tmp_path, [700, 30], suffix)
    for path, url in zip(paths, place(paths), strict=True):
        assert list(edl_hvd.TarSamples(url)) == list(edl_hvd.TarSamples(path))
        for passed in (0, 1, 17, 29):
            local, remote = edl_hvd.TarSamples(path), edl_hvd.TarSamples(url)
            assert remote.skip(passed) == local.skip(passed) == passed
            assert next(remote) == next(local)
            local.close()
            remote.close()


def test_a_file_is_read_in_any_order_like_a_local_one(tmp_path: Path, place: Callable[[list[str]], list[str]]) -> None:
    data = random.Random(3).randbytes(5 * MIB + 123)
    (tmp_path / "some.bin").write_bytes(data)
    [url] = place([str(tmp_path / "some.bin")])
    numbers = random.Random(4)
    with open_remote(url) as remote:
        for _ in range(40):
            begin, length = numbers.randrange(len(data) + 100), numbers.choice([1, 512, 70_000, 3 * MIB])
            remote.seek(begin)
            found = b""
            while chunk := remote.read(length - len(found)):
                found += chunk
            assert found == data[begin : begin + length]


def test_an_epoch_from_urls_is_that_from_files_and_goes_on_in_another_world(
    tmp_path: Path, place: Callable[[list[str]], list[str]]
) -> None:
    paths = write_shards(tmp_path, [40, 25, 60, 35])
    urls = place(paths)
    counts = edl_hvd.count_samples(urls, edl_hvd.TarSamples, cache=tmp_path / "counts.json")
    assert counts == edl_hvd.count_samples(paths, edl_hvd.TarSamples) == [40, 25, 60, 35]
    assert _epoch_of_two_worlds(urls, counts) == _epoch_of_two_worlds(paths, counts)


def _epoch_of_two_worlds(shards: list[str], counts: list[int]) -> list[list[int]]:
    """Three steps of both ranks of a world of two, and the rest in a world of one, which takes over where they were."""
    data = edl_hvd.ElasticShards(shards, counts, read=edl_hvd.TarSamples, transform=number_of)
    dealt = []
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        batches = data.sampler(global_batch=20, micro_batch=5, seed=1)
        batches.set_world(rank, size)
        first = 3 if size == 1 else 0
        for step in list(itertools.islice(batches.steps(), first)):
            batches.advance(step)
        micro_batches = [batch.tolist() for batch in DataLoader(data, batch_sampler=batches)]
        dealt += micro_batches if size == 1 else micro_batches[:6]
    assert sorted(number for batch in dealt for number in batch) == list(range(160))
    return dealt


def _bytes_of_a_loader(urls: list[str], counts: list[int], processes: int) -> list[int]:
    data = edl_hvd.ElasticShards(urls, counts, read=edl_hvd.TarSamples, transform=number_of)
    loader = DataLoader(
        data, batch_sampler=data.sampler(global_batch=20, micro_batch=5, seed=1), num_workers=processes,
        multiprocessing_context="spawn" if processes else None,  # a forkserver has the environment of its first user
    )  # fmt: skip
    return [int(number) for batch in loader for number in batch]


def test_the_processes_of_a_loader_read_them(tmp_path: Path, place: Callable[[list[str]], list[str]]) -> None:
    paths = write_shards(tmp_path, [40, 25, 60, 35])
    counts = [40, 25, 60, 35]
    assert _bytes_of_a_loader(place(paths), counts, 2) == _bytes_of_a_loader(paths, counts, 0)


def test_what_is_passed_over_is_not_fetched_and_little_is_in_memory(tmp_path: Path, web: FileServer) -> None:
    with tarfile.open(web.folder / "a.tar", "w") as tar:
        for number in range(10):
            add(tar, f"{number}.bin", bytes([number]) * (8 * MIB))
    samples = edl_hvd.TarSamples(f"{web.url}/a.tar")
    assert samples.skip(9) == 9
    assert web.sent < 12 * MIB, "80 MiB were passed over"
    assert next(samples)["bin"] == bytes([9]) * (8 * MIB)
    with open_remote(f"{web.url}/a.tar") as remote:
        tracemalloc.start()
        while remote.read(65536):
            pass
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most_bytes < 10 * MIB, "of 80; the server's part of it is counted, too"


def test_a_connection_that_breaks_goes_on_where_it_broke(tmp_path: Path, web: FileServer) -> None:
    data = random.Random(5).randbytes(3 * MIB)
    (web.folder / "a.bin").write_bytes(data)
    web.cut_after = [100_000, 0, 1, 50_000]
    web.statuses = [503, 429]
    with open_remote(f"{web.url}/a.bin") as remote:
        assert remote.readall() == data
    assert 100_000 in web.asked
    assert web.asked.count(0) <= 1, "what has come is not asked for again"


@pytest.mark.parametrize(("status", "kind"), [(404, ObjectMissingError), (403, StorageError), (503, StorageError)])
def test_a_server_that_refuses_is_named_without_its_secrets(
    web: FileServer, status: int, kind: type[Exception]
) -> None:
    web.statuses = [status] * 5
    remote = WebObject(f"{web.url}/a.tar?X-Amz-Signature=c2VjcmV0", Patience(attempts=2))
    with pytest.raises(kind, match=rf"cannot read '{web.url}/a.tar\?….*{status}") as caught:
        remote.read_into(0, memoryview(bytearray(10)))
    assert "c2VjcmV0" not in str(caught.value)
    assert len(web.statuses) == (3 if status == 503 else 4)
    remote.close()


def test_a_server_without_parts_and_a_file_that_was_replaced_are_refused(web: FileServer) -> None:
    (web.folder / "a.bin").write_bytes(bytes(3 * MIB))
    with open_remote(f"{web.url}/a.bin") as remote:
        remote.read(1)
        (web.folder / "a.bin").write_bytes(b"1" * (3 * MIB))
        remote.seek(2 * MIB)
        with pytest.raises(StorageError, match=r"was replaced while it was read"):
            remote.read(1)
    web.gives_parts = False
    with open_remote(f"{web.url}/a.bin") as remote:
        assert remote.read(3) == b"111"
        remote.seek(MIB)
        with pytest.raises(StorageError, match="answered 200 'without Content-Range'; shards need"):
            remote.read(1)


def test_redirects_are_followed(web: FileServer) -> None:
    (web.folder / "a.bin").write_bytes(b"moved")
    web.moves_to = f"{web.url}/moved"
    with open_remote(f"{web.url}/a.bin") as remote:
        assert remote.readall() == b"moved"
    web.moves_to = "ftp://elsewhere"
    with open_remote(f"{web.url}/a.bin") as remote, pytest.raises(StorageError, match="sends elsewhere"):
        remote.read(1)


def test_https_is_verified_and_a_redirect_does_not_lead_back_into_the_open(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (web.folder / "a.bin").write_bytes(b"in private")
    make_certificate(tmp_path / "server.pem", tmp_path / "ca.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    private = FileServer(web.folder)
    private.socket = context.wrap_socket(private.socket, server_side=True)
    thread = threading.Thread(target=private.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"https://127.0.0.1:{private.server_port}/a.bin"
    with open_remote(url) as remote, pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
        remote.read(1)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    with open_remote(url) as remote:
        assert remote.readall() == b"in private"
    private.moves_to = f"{web.url}/moved"
    with open_remote(url) as remote, pytest.raises(StorageError, match="sends elsewhere"):
        remote.read(1)
    assert not web.asked, "nothing was asked for in the open"
    private.shutdown()
    private.server_close()
    soon(thread)


def test_no_tar_file_and_a_missing_one_are_named(tmp_path: Path, place: Callable[[list[str]], list[str]]) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar file" * 100)
    [url] = place([str(tmp_path / "a.tar")])
    with pytest.raises(UsageError, match=r"a\.tar' cannot be read as a tar file"):
        edl_hvd.TarSamples(url)
    with pytest.raises(StorageError, match=r"missing\.tar"):
        edl_hvd.TarSamples(url.replace("a.tar", "missing.tar"))
    for wrong in ("https://", "http://host:99999999/a.tar", "https://ada:secret@host/a.tar", "https://host/a b.tar"):
        with pytest.raises(UsageError, match=r"is no address|holds a password") as caught:
            edl_hvd.TarSamples(wrong)
        assert "secret" not in str(caught.value)
