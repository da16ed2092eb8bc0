"""Students and teachers that speak TLS, with certificates of a CA of our own."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading

import pytest
import torch
from certificates import Authority
from fleet import Sums, fleet, free_port, sums
from inference_server import ServerKind, inference_servers
from students import TOKEN, check, make_loader
from waiting import soon, until

from edl_hvd.distill import Teachers
from edl_hvd.distill.asking import ask
from edl_hvd.distill.conversation import Address
from edl_hvd.errors import NoTeacherError, UsageError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, ArrayType, Frame, Limits
from edl_hvd.tls import client_context, server_context, wrap

pytestmark = pytest.mark.distill


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def files_of(authority: Authority, **issued) -> tuple[str, str]:
    files = authority.issue("teacher", **issued)
    return files.certificate, files.key


@pytest.mark.parametrize(("workers", "side"), [(0, 4), (2, 256)])
def test_answers_by_tls_are_those_of_the_model(tmp_path, authority, workers, side):
    with fleet(tmp_path, Sums(), Sums(0.02), token=TOKEN, tls=files_of(authority)) as teachers:
        wanted = Teachers(teachers.source, port=teachers.port, token=TOKEN, tls_ca=authority.path)
        loader = make_loader(wanted, workers=workers, side=side)
        check(loader)
        check(loader, 64, lambda number: teachers.kill(0) if number == 4 else None)
        assert loader._open.service is not None
        for call in loader._open.service.calling._calls.values():  # type: ignore[attr-defined]
            assert isinstance(call.stream.connection, ssl.SSLSocket)
            assert call.stream.connection.version() == "TLSv1.3"
        loader.close()


def test_the_token_is_proved_by_tls_too(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority)) as teachers:
        other = "another-token-of-this-length"
        loader = make_loader(Teachers(teachers.source, port=teachers.port, token=other, tls_ca=authority.path))
        with pytest.raises(NoTeacherError, match="the token is another one"):
            next(iter(loader))
        loader.close()


def fails(teachers, words: str, **wanted) -> None:
    loader = make_loader(Teachers(teachers.source, port=teachers.port, token=TOKEN, **wanted))
    with pytest.raises(NoTeacherError, match=words):
        next(iter(loader))
    loader.close()


def test_a_certificate_of_another_ca_is_refused(tmp_path, authority):
    other = Authority(tmp_path, "other")
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority)) as teachers:
        fails(teachers, "its certificate is not accepted: .*(self-signed|local issuer)", tls_ca=other.path)
        fails(teachers, "its certificate is not accepted", tls_ca="system")


def test_a_certificate_that_has_expired_is_refused(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority, days=-1)) as teachers:
        fails(teachers, "its certificate is not accepted: certificate has expired", tls_ca=authority.path)


def test_a_certificate_of_another_host_is_refused(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority, host="elsewhere")) as teachers:
        fails(teachers, "its certificate is not accepted: Hostname mismatch.*localhost", tls_ca=authority.path)


def test_a_student_without_tls_is_told_so(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority)) as teachers:
        fails(teachers, "this teacher speaks TLS; give the student its CA, as in EDL_HVD_TEACHERS_TLS_CA")


def test_a_teacher_without_tls_is_told_so(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN) as teachers:
        fails(teachers, "it does not speak TLS; start it with a certificate", tls_ca=authority.path)


def test_who_begins_no_handshake_keeps_nobody_waiting(tmp_path, authority):
    """Strangers that say nothing, or nonsense: the teacher takes no processor time for them, and answers others."""
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority)) as teachers:
        pid = teachers.processes[0].pid
        strangers = [socket.create_connection(("127.0.0.1", teachers.port)) for _ in range(8)]
        for number, stranger in enumerate(strangers):
            stranger.sendall([b"", b"\x16", b"\x16\x03\x01\xff\xff", b"GET / HTTP/1.1\r\n\r\n"][number % 4])
        before_s = processor_s(pid)
        wanted = Teachers(teachers.source, port=teachers.port, token=TOKEN, tls_ca=authority.path)
        loader = make_loader(wanted)
        check(loader)
        threading.Event().wait(2.0)
        assert processor_s(pid) - before_s < 1.5
        loader.close()
        for stranger in strangers:
            stranger.close()


def processor_s(pid: int | None) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_large_messages_pass_both_ways_at_once(authority):
    """More than the system buffers, in both directions, so that each side has to read while it writes."""
    issued = authority.issue("both")
    plain = socket.socketpair()
    ends = [
        wrap(plain[0], server_context(issued.certificate, issued.key)),
        wrap(plain[1], client_context(str(authority.path)), "localhost"),
    ]
    body = os.urandom(20 << 20)
    whole = Frame("give", {"number": 1}, (Array(ArrayType("x", "uint8", (len(body),)), body),))
    streams = [FrameStream(end, Limits(1 << 16, len(body))) for end in ends]
    got: list[Frame] = []
    for stream in streams:
        stream.put(whole)
    while len(got) < 2 or not all(stream.is_flushed for stream in streams):
        for stream in streams:
            stream.flush()
            frame = stream.receive()
            if frame is not None:
                got.append(frame)
    assert all(bytes(frame.arrays[0].content) == body for frame in got)
    for end in ends:
        end.close()


def test_files_that_are_no_certificates_are_named(tmp_path, authority):
    issued, other = authority.issue("one"), authority.issue("two")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(UsageError, match="holds no certificate of a CA"):
        Teachers("file:x", tls_ca=tmp_path / "empty.pem")
    with pytest.raises(UsageError, match=r"cannot read the CA file '.*nowhere.pem': No such file"):
        Teachers("file:x", tls_ca=tmp_path / "nowhere.pem")
    with pytest.raises(UsageError, match="are no certificate and its key"):
        server_context(issued.certificate, other.key)


def test_the_command_lines_speak_tls(tmp_path, authority):
    (tmp_path / "model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(3, 2)\n")
    (tmp_path / "token.txt").write_text(TOKEN)
    (tmp_path / "teachers.txt").write_text("localhost:1\n")
    issued, port = authority.issue("cert"), free_port(1)
    command = [sys.executable, "-m", "edl_hvd.cli.main"]
    words = [*command, "teach", "model.py:build", "--port", str(port), "--listen", "127.0.0.1", "--devices", "cpu",
             "--token-file", "token.txt", "--tls-cert", issued.certificate, "--tls-key", issued.key]  # fmt: skip
    teach = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert teach.stdout is not None
    try:
        assert teach.stdout.readline().startswith("Linear answers")
        show = [*command, "teachers", "file:teachers.txt", "--port", str(port), "--token-file", "token.txt", "--json"]
        shown = subprocess.run([*show, "--tls-ca", str(authority.path)], capture_output=True, text=True, cwd=tmp_path)
        assert json.loads(shown.stdout)["teachers"][0]["model"] == "Linear"
        plain = subprocess.run(show, capture_output=True, text=True, cwd=tmp_path)
        assert "this teacher speaks TLS" in json.loads(plain.stdout)["teachers"][0]["problem"]
        other = Authority(tmp_path, "other")
        wrong = subprocess.run([*show, "--tls-ca", str(other.path)], capture_output=True, text=True, cwd=tmp_path)
        assert "its certificate is not accepted" in json.loads(wrong.stdout)["teachers"][0]["problem"]
        # A student that was told by variables, as edlrun's workers are.
        variables = {**os.environ, "EDL_HVD_TEACHERS": "file:teachers.txt", "EDL_HVD_TEACHERS_TOKEN": TOKEN,
                     "EDL_HVD_TEACHERS_TLS_CA": str(authority.path)}  # fmt: skip
        code = (
            "import torch\nfrom edl_hvd import distill\n"
            f"wanted = distill.Teachers(port={port})\n"
            "print(tuple(wanted.ask(torch.ones(2, 3)).result().shape))\nwanted.close()"
        )
        words = [sys.executable, "-c", code]
        student = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=variables)
        assert student.stdout == "(2, 2)\n", student.stderr
    finally:
        teach.send_signal(signal.SIGTERM)
        assert soon(teach) == 0
        teach.stdout.close()
    half = subprocess.run(
        [*command, "teach", "model.py:build", "--tls-cert", issued.certificate],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert half.returncode == 2
    assert "go together" in half.stderr


def test_servers_of_the_open_inference_protocol_are_verified_by_the_same_ca(tmp_path, authority):
    issued = authority.issue("server")
    kind = ServerKind(certificate=issued.certificate, key=issued.key)
    with inference_servers(kind) as (server,):
        source = server.source().replace("http:", "https:").replace("127.0.0.1", "localhost")
        loader = make_loader(Teachers(source, tls_ca=authority.path))
        for images, _, answer in loader:
            torch.testing.assert_close(answer, sums(images), rtol=1e-5, atol=1e-5)
        loader.close()
        loader = make_loader(Teachers(source, tls_ca="system", patience=1))
        with pytest.raises(NoTeacherError, match="its certificate is not"):
            next(iter(loader))
        loader.close()


def test_asking_a_teacher_that_is_gone_ends(tmp_path, authority):
    with fleet(tmp_path, Sums(), token=TOKEN, tls=files_of(authority)) as teachers:
        context = client_context(str(authority.path))
        there = ask(Address("localhost", teachers.port), TOKEN, context=context)
        assert there.model == "Sums"
        until(lambda: ask(Address("localhost", teachers.port), TOKEN, context=context).students == 0)
