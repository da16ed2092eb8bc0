"""Answering a library that asks for this host's name; each in a process of its own, as it cannot be undone."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edl_hvd.errors import PlatformError
from edl_hvd.network_interface import interface_of
from edl_hvd.worker.engine.interface import bind_to, redirect

REPLACE = """
import _socket, ctypes, socket
from pathlib import Path
from edl_hvd.worker.engine.interface import redirect

def answer(buffer, size):
    ctypes.memmove(buffer, b"another\\0", 8)
    return 0

answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(answer)
address = ctypes.cast(answer, ctypes.c_void_p).value
assert not redirect(Path(_socket.__file__), "no_such_function", address)
assert redirect(Path(_socket.__file__).resolve(), "gethostname", address)
print(socket.gethostname())
"""

HOROVOD = """
import socket
from edl_hvd.worker.engine import interface

interface.bind_to("lo")
assert interface._name.answers, "else this host's name has to mean the address"
assert interface._name.value == b"127.0.0.1"
assert socket.gethostname() != "127.0.0.1", "only Horovod is answered"
import horovod.torch as hvd
hvd.init()
print(hvd.size())
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_loaded_library_calls_the_other_function():
    pytest.importorskip("_socket")
    if not hasattr(sys.modules["_socket"], "__file__"):
        pytest.skip("this Python has no library of its own for sockets")
    assert run(REPLACE) == "another\n"


def test_horovod_is_told_the_interfaces_address_and_starts():
    pytest.importorskip("horovod.torch")
    assert run(HOROVOD) == "1\n"


def test_what_is_no_library_or_is_not_loaded_is_left_alone(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    assert not redirect(tmp_path / "text.so", "gethostname", 0)
    assert not redirect(tmp_path / "missing.so", "gethostname", 0)
    assert not redirect(Path(sys.executable).resolve(), "no_such_function", 0)


def test_an_interface_without_an_address_is_told_with_those_that_are_there():
    with pytest.raises(PlatformError, match=r"interface 'none0' has no IPv4 address on this host, which has .*lo"):
        bind_to("none0")


def test_an_address_belongs_to_an_interface():
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    with pytest.raises(PlatformError, match=r"no network interface .* has the address 192\.0\.2\.1; set --net"):
        interface_of("192.0.2.1")
