"""Strangers in the place of a teacher or a student, and the sockets over which the two speak."""

from __future__ import annotations

import json
import random
import resource
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from fleet import CLASSES, Fleet, Sums, fleet
from students import TOKEN, check, make_loader
from test_distill_conversation import malformed
from waiting import soon

from edl_hvd import proof
from edl_hvd.distill import DistillLoader, Teachers
from edl_hvd.distill.calling import Calling
from edl_hvd.distill.same_host import is_own
from edl_hvd.distill.serving import Serving
from edl_hvd.distill.teacher import Teacher
from edl_hvd.errors import NoTeacherError, UsageError

pytestmark = pytest.mark.distill


def families(loader: DistillLoader) -> list[socket.AddressFamily]:
    assert loader._open.service is not None
    calling = loader._open.service.calling
    assert isinstance(calling, Calling)
    return [call.stream.connection.family for call in calling._calls.values()]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_a_teacher_of_the_same_host_is_called_over_a_unix_socket(tmp_path):
    with fleet(tmp_path, Sums()) as teachers:
        loader = make_loader(Teachers(teachers.source, port=teachers.port))
        check(loader)
        assert families(loader) == [socket.AF_UNIX]
        loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_who_takes_the_name_of_a_teachers_unix_socket_is_not_used(tmp_path):
    teachers = Fleet(tmp_path, TOKEN)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0edl_hvd/teacher/2/127.0.0.1:{teachers.port}")
        taken.listen()
        heard = bytearray()

        def pretend() -> None:
            connection, _ = taken.accept()
            with connection:
                connection.sendall(b'{"what":"nonce","fields":{"protocol":1,"nonce":"' + b"0" * 64 + b'"}}\n')
                connection.sendall(b'{"what":"proof","fields":{"proof":"' + b"0" * 64 + b'"}}\n')
                while chunk := connection.recv(1 << 16):
                    heard.extend(chunk)

        thread = threading.Thread(target=pretend)
        thread.start()
        try:
            teachers.start(Sums())
            loader = make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN))
            check(loader)
            assert families(loader) == [socket.AF_INET]
            soon(thread)
            loader.close()
        finally:
            teachers.close()
    assert b"arrays" not in heard


def test_an_address_of_another_host_is_none_of_this_one():
    assert is_own("127.0.0.1")
    assert is_own("::1")
    assert not is_own("192.0.2.1")
    assert not is_own("2001:db8::1")


@pytest.mark.parametrize("host", ["127.x.example", "127.0.0.1.x.example", "0.0.0.0"])
def test_a_teacher_without_a_token_listens_on_the_loopback_interface_alone(host):
    with pytest.raises(UsageError, match="would answer anybody"):
        Serving(Teacher.of(Sums()), 8, host)


def test_a_wrong_token_is_said_at_once_and_no_data_travels(tmp_path):
    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, token=TOKEN + "x")
        with pytest.raises(NoTeacherError, match=r"localhost:\d+: it refused: the token is another one") as caught:
            next(iter(make_loader(wanted)))
        assert str(teachers.port) in str(caught.value)
        assert "edl-hvd teach" in str(caught.value)
        check(make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN)))


def test_a_stranger_in_a_teachers_place_gets_no_data(tmp_path):
    """It listens where a teacher was, and does not know the token."""
    heard = bytearray()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(
                json.dumps({"what": "nonce", "fields": {"protocol": 1, "nonce": "0" * 64}}).encode() + b"\n"
            )
            connection.sendall(json.dumps({"what": "proof", "fields": {"proof": "0" * 64}}).encode() + b"\n")
            while chunk := connection.recv(1 << 16):
                heard.extend(chunk)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        (tmp_path / "teachers.txt").write_text("localhost:1\n")
        wanted = Teachers(f"file:{tmp_path / 'teachers.txt'}", port=server.getsockname()[1], token=TOKEN)
        with pytest.raises(NoTeacherError, match="it holds another token"):
            next(iter(make_loader(wanted)))
        soon(thread)
    assert b"arrays" not in heard
    assert len(heard) < 1000


# --- malformed messages ---


def test_ten_thousand_malformed_messages_to_a_teacher_change_nothing(tmp_path):
    chance = random.Random(9)
    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        address = ("127.0.0.1", teachers.port)
        before = _memory_mb(teachers)
        sent = 0
        while sent < 10_000:
            with socket.create_connection(address, timeout=60) as connection:
                connection.settimeout(60)
                for _ in range(chance.randint(1, 4)):
                    sent += 1
                    if chance.random() < 0.2:
                        line = b'{"what":"nonce","fields":{"protocol":1,"nonce":"' + b"0" * 64 + b'"}}\n'
                    else:
                        line = malformed(chance)
                    try:
                        connection.sendall(line)
                    except OSError:
                        break
        assert _memory_mb(teachers) < before + 32
        check(make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN)))


def _memory_mb(teachers: Fleet) -> float:
    text = Path(f"/proc/{teachers.processes[0].pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def test_ten_thousand_malformed_messages_to_a_student_change_nothing(tmp_path):
    """Teachers that talk nonsense at every stage, some of them after a right proof."""
    chance, sent = random.Random(4), [0]
    is_over = threading.Event()

    def babble(server: socket.socket) -> None:
        server.settimeout(0.2)
        while not is_over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            with connection:
                connection.settimeout(5)
                with suppress(OSError, ValueError, KeyError):
                    talk(connection)

    def talk(connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        nonce = "0" * 64

        def say(what: str, **fields: object) -> None:
            connection.sendall(json.dumps({"what": what, "fields": fields}).encode() + b"\n")

        depth = chance.randrange(4)
        if depth:
            say("nonce", protocol=1, nonce=nonce)
            theirs = json.loads(lines.readline())["fields"]["nonce"]
            lines.readline()
        if depth > 1:
            say("proof", proof=proof.prove(TOKEN, proof.TEACHER, nonce, theirs))
            lines.readline()
        if depth > 2:
            row = {"name": "logits", "dtype": "float32", "shape": [CLASSES]}
            say("teaching", process=str(chance.random()), model="m", fingerprint="", answer=[row], max_batch=8)
            say("want")
            lines.readline()
        for _ in range(40):
            sent[0] += 1
            connection.sendall(malformed(chance))

    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        servers = [socket.create_server(("127.0.0.1", teachers.port + number)) for number in range(1, 41)]
        threads = [threading.Thread(target=babble, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        teachers.list(41)
        loader = make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while sent[0] < 10_000:
            check(loader)
            calling = loader._open.service.calling
            calling._dial_s = 0.0
            calling._book.call_at_once()  # nonsense is called again after ten seconds; here at once
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)
        is_over.set()
        for thread in threads:
            soon(thread)
        for server in servers:
            server.close()
        loader.close()
