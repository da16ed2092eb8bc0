"""Google's and Azure's storage when something goes wrong, and whose tokens they are given."""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from cloud_servers import AzureStorageServer, GoogleStorageServer
from storage_processes import memory_of_transfers, process_context, read_after_fork
from waiting import soon

from edl_hvd.errors import ObjectExistsError, StorageError, UsageError
from edl_hvd.storage import open_storage
from edl_hvd.storage.cloud import CloudStorage
from edl_hvd.storage.cloud_accounts import open_azure, open_google
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.retries import Patience

MIB = 1024 * 1024
START = Callable[..., Any]


@pytest.fixture
def google(google_storage: GoogleStorageServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStorageServer]:
    """The server; afterwards it is as it was."""
    for variable, value in google_storage.environment.items():
        monkeypatch.setenv(variable, value)
    yield google_storage
    google_storage.before = lambda *_: None
    google_storage.refused_token = ""


@pytest.fixture(params=["gs", "az"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CloudStorage:
    """A storage in which 5 MiB are a part, on the local server of either cloud."""
    if request.param == "gs":
        google: GoogleStorageServer = request.getfixturevalue("google_storage")
        environment, place = google.environment, google.new_bucket()
    else:
        azure: AzureStorageServer = request.getfixturevalue("azure_storage")
        environment, place = azure.environment, azure.new_container()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    opened = (open_google if request.param == "gs" else open_azure)(place, "some/run", 64.0)
    opened._cut = Cut(part_bytes=5 * MIB, connections=4)
    return opened


def test_large_objects_go_in_parts_and_are_created_once_all_the_same(store: CloudStorage) -> None:
    data = random.Random(1).randbytes(17 * MIB)
    store.write_new("large", [data[:1000], memoryview(data)[1000:]])
    assert store.read("large") == data
    with pytest.raises(ObjectExistsError):
        store.write_new("large", data[::-1])
    assert store.read("large") == data
    back = bytearray(len(data) + 10)
    assert store.read_into("large", 3, back) == len(data) - 3
    assert back[: len(data) - 3] == data[3:]
    store.write("large", data[::-1])
    assert store.read("large") == data[::-1]
    assert [entry.key for entry in store.list()] == ["large"]
    assert list(store._entries(".partial")) == [], "what was copied is removed"


def test_of_several_writers_of_a_large_object_exactly_one_succeeds(store: CloudStorage) -> None:
    barrier, outcomes = threading.Barrier(3), []

    def create(number: int) -> None:
        soon(barrier)
        try:
            store.write_new("contested", bytes([number]) * (6 * MIB))
            outcomes.append(number)
        except ObjectExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        soon(thread)
    assert len(outcomes) == 1
    assert store.read("contested") == bytes(outcomes) * (6 * MIB)


def test_a_later_writer_removes_what_a_dead_one_left(store: CloudStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore.put(store._store, ".partial/left", b"half a share")
    store.write_new("first", bytes(6 * MIB))
    assert [entry["path"] for entry in store._entries(".partial")] == [".partial/left"], "it may still be written"
    monkeypatch.setattr("edl_hvd.storage.cloud._ABANDONED_AFTER", timedelta(seconds=-60))
    store._swept = False
    store.write_new("second", bytes(6 * MIB))
    assert list(store._entries(".partial")) == []
    assert [entry.key for entry in store.list()] == ["first", "second"]


def test_an_object_replaced_while_it_is_read_is_read_again(
    store: CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("key", b"a" * (11 * MIB))
    seen, deliver = threading.Event(), CloudStorage._fetch_all

    def replace_first(self: CloudStorage, *arguments: Any) -> None:
        if not seen.is_set():
            seen.set()
            store.write("key", b"b" * (12 * MIB))
        deliver(self, *arguments)

    monkeypatch.setattr(CloudStorage, "_fetch_all", replace_first)
    assert store.read("key") == b"b" * (12 * MIB)


def test_a_missing_bucket_is_named_by_every_call(
    google: GoogleStorageServer, azure_storage: AzureStorageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in azure_storage.environment.items():
        monkeypatch.setenv(variable, value)
    for url in ("gs://no-such-bucket/run", "az://no-such-container/run"):
        storage = open_storage(url)
        for call in (
            storage.list, lambda s=storage: s.read("key"), lambda s=storage: s.exists("key"),
            lambda s=storage: s.write("key", b""), lambda s=storage: s.write_new("key", b""),
        ):  # fmt: skip
            with pytest.raises(StorageError, match=rf"{url}.*does not exist; create it") as caught:
                call()
            assert type(caught.value) is StorageError
            assert len(str(caught.value)) < 300
        assert not storage.place_exists()


def _failing(times: int, status: str, kind: str, body: bytes, methods: tuple[str, ...]) -> tuple[Any, list[str]]:
    """What answers the first requests of some methods so; and the list of those that it has answered."""
    answered: list[str] = []

    def before(environ: dict[str, Any], start_response: START) -> Iterable[bytes] | None:
        if len(answered) >= times or environ["REQUEST_METHOD"] not in methods:
            return None
        answered.append(environ["REQUEST_METHOD"])
        start_response(status, [("Content-Type", kind)])
        return [body]

    return before, answered


@pytest.mark.parametrize("status", ["503 Service Unavailable", "500 Internal Server Error", "429 Too Many Requests"])
def test_a_service_that_is_busy_is_asked_again(google: GoogleStorageServer, status: str) -> None:
    storage = open_storage(f"gs://{google.new_bucket()}/run")
    for call in (lambda: storage.write("key", b"1"), lambda: storage.read("key"), storage.list):
        google.before, answered = _failing(2, status, "application/xml", b"<Error/>", ("GET", "PUT", "POST"))
        call()
        assert len(answered) == 2
    assert storage.read("key") == b"1"


def test_a_service_that_stays_busy_is_an_error_that_says_so(google: GoogleStorageServer) -> None:
    storage = open_google(google.new_bucket(), "run", 64.0, patience=Patience(attempts=2))
    methods = ("GET", "PUT", "HEAD")
    google.before, answered = _failing(100, "503 Service Unavailable", "application/xml", b"<Error/>", methods)
    for call in (lambda: storage.write("key", b"1"), lambda: storage.read("key"), storage.list):
        with pytest.raises(StorageError, match=r"cannot (write|read|list) .*503 Service Unavailable") as caught:
            call()
        assert "Debug source" not in str(caught.value)
    assert len(answered) == 6, "two attempts each"


def test_a_page_of_a_proxy_is_taken_neither_for_a_listing_nor_for_a_written_object(google: GoogleStorageServer) -> None:
    storage = open_google(google.new_bucket(), "run", 64.0, patience=Patience(attempts=1))
    google.before, _ = _failing(100, "200 OK", "text/html", b"<html>be back soon</html>", ("GET", "PUT", "HEAD"))
    for call in (
        storage.list, lambda: storage.write("key", b"1"), lambda: storage.write_new("key", b"1"),
        lambda: storage.read("key"), lambda: storage.read_into("key", 0, bytearray(5)),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="cannot"):
            call()


def test_the_answer_to_a_creation_may_be_lost(google: GoogleStorageServer) -> None:
    """The second attempt finds the object of the first; that is no other writer's."""
    storage = open_storage(f"gs://{google.new_bucket()}/run")
    lost: list[bytes] = []

    def lose_one(environ: dict[str, Any], start_response: START) -> Iterable[bytes] | None:
        if lost or environ["REQUEST_METHOD"] != "PUT":
            return None
        lost.append(b"")
        google.before = lambda *_: None
        b"".join(google._serve(environ, lambda *_: None))
        start_response("503 Service Unavailable", [])
        return [b""]

    google.before = lose_one
    storage.write_new("key", b"1")
    assert lost
    assert storage.read("key") == b"1"
    with pytest.raises(ObjectExistsError):
        storage.write_new("key", b"1")


def test_a_token_that_is_refused_says_what_to_do_and_is_not_shown(
    google: GoogleStorageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "secret-of-ada")
    google.refused_token = "secret-of-ada"
    storage = open_storage(f"gs://{google.new_bucket()}/run")
    for call in (storage.list, lambda: storage.read("key"), lambda: storage.write("key", b"")):
        with pytest.raises(StorageError, match="wrong or have expired; set GOOGLE_APPLICATION_CREDENTIALS") as caught:
            call()
        assert "secret-of-ada" not in str(caught.value)


def test_a_wrong_key_of_azure_says_what_to_do_and_no_signature_is_shown(
    azure_storage: AzureStorageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = azure_storage.new_container()
    for variable, value in azure_storage.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sig=c2lnbmF0dXJl&se=2099-01-01&sp=rwdl&sr=c")
    storage = open_storage(f"az://{container}/run")
    for call in (storage.list, lambda: storage.read("key"), lambda: storage.write("key", b"")):
        with pytest.raises(StorageError, match=r"access denied|wrong or have expired") as caught:
            call()
        assert "c2lnbmF0dXJl" not in str(caught.value)


def test_what_is_missing_is_said_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_storage("az://container/run")
    for url in ("gs://", "gs:///run", "az://", "gs://ada:secret@bucket/run"):
        with pytest.raises(UsageError, match=r"names no (bucket|container); expected") as caught:
            open_storage(url)
        assert "secret" not in str(caught.value)
    for text in (None, "no JSON", "[]"):
        path = tmp_path / "credentials.json"
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        with pytest.raises(UsageError, match=r"GOOGLE_APPLICATION_CREDENTIALS names .* correct or unset it"):
            open_storage("gs://bucket/run")


def test_an_address_of_hadoop_names_account_and_container(
    azure_storage: AzureStorageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in azure_storage.environment.items():
        monkeypatch.setenv(variable, value)
    container = azure_storage.new_container()
    storage = open_storage(f"abfss://{container}@devstoreaccount1.dfs.core.windows.net/run")
    assert storage.url == f"az://{container}/run"
    storage.write("key", b"1")
    assert open_storage(f"az://{container}/run").read("key") == b"1"


class _TokenServer(http.server.BaseHTTPRequestHandler):
    """Google's exchange of a token of another service for one of its own (RFC 8693)."""

    given: list[str] = []  # noqa: RUF012 - of one test

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.given.append(asked)
        body = json.dumps(
            {"access_token": f"exchanged-{len(self.given)}", "issued_token_type": "x", "token_type": "Bearer",
             "expires_in": 3600}
        ).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are of no interest in a test's output."""


def test_credentials_that_obstore_does_not_know_come_through_google_auth(
    google: GoogleStorageServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workload identity federation: a token in a file is exchanged for one of Google's."""
    bucket = google.new_bucket()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _TokenServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        (tmp_path / "token").write_text("token-of-the-cluster")
        (tmp_path / "credentials.json").write_text(
            json.dumps(
                {
                    "type": "external_account",
                    "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/q",
                    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                    "token_url": f"http://127.0.0.1:{server.server_port}/v1/token",
                    "credential_source": {"file": str(tmp_path / "token")},
                }
            )
        )
        monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "credentials.json"))
        storage = open_storage(f"gs://{bucket}/run")
        storage.write("key", b"1")
        assert storage.read("key") == b"1"
        assert "exchanged-1" in google.tokens
        assert len(_TokenServer.given) == 1, "a token is used until it expires"
        assert "token-of-the-cluster" in _TokenServer.given[0]
    finally:
        server.shutdown()
        soon(thread)
        server.server_close()


def test_a_process_that_was_forked_after_the_first_use_is_told_so(google: GoogleStorageServer) -> None:
    url = f"gs://{google.new_bucket()}/run"
    with process_context().Pool(1) as pool:  # of its own, because obstore's threads stay in a process
        told, read = pool.apply(read_after_fork, (url, dict(google.environment)))
    assert "multiprocessing_context='forkserver'" in told
    assert read == b"1"


def test_a_transfer_takes_no_more_memory_than_it_was_given(google: GoogleStorageServer) -> None:
    url = f"gs://{google.new_bucket()}/run"
    with process_context().Pool(1) as pool:
        used = pool.apply(memory_of_transfers, (url, google.environment, 96_000_000, 32))
    assert used.upload_mb < 40
    assert used.download_mb < 40
