"""The network interface of Horovod's connections: all of them, whatever this host's name means.

Horovod 0.28.1 obeys ``HOROVOD_GLOO_IFACE`` in its first Gloo contexts alone. Those of process sets, of which every
world has one, go to the address that the host's own name means, because ``GlooContext::InitializeForProcessSet`` reads
an interface that nobody has set there. Where the name means 127.0.1.1, as Debian has it, or another network, no
other host gets through, and ``hvd.init()`` aborts the process. So the library is answered with the interface's address
when it asks for the host's name.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import psutil

from edl_hvd.errors import PlatformError

# Relocations that a loader fills with the address of a function: elf(5), by machine.
_FUNCTION_SLOTS = {62: (6, 7), 183: (1025, 1026)}  # x86-64 and AArch64, each GLOB_DAT and JUMP_SLOT
_LOAD, _DYNAMIC = 1, 2
_PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _JMPREL = 2, 5, 6, 7, 8, 23
_READ, _WRITE = 1, 2
_NAME_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


def bind_to(interface: str) -> None:
    """Before ``hvd.init()``: make all of Horovod's connections use this interface. May be called again with another.

    Raises:
        PlatformError: The interface has no IPv4 address, or Horovod cannot be told and would use another one.
    """
    entries = psutil.net_if_addrs().get(interface, [])
    own = next((entry.address for entry in entries if entry.family == socket.AF_INET), None)
    if own is None:
        names = ", ".join(psutil.net_if_addrs())
        raise PlatformError(f"network interface {interface!r} has no IPv4 address on this host, which has {names}")
    _name.value = own.encode()
    if not _name.answers:
        _name.answers = redirect(_library(), "gethostname", ctypes.cast(_name.call, ctypes.c_void_p).value or 0)
    if not _name.answers and (meant := _meaning_of_own_name()) != own:
        raise PlatformError(
            f"this host's own name {socket.gethostname()!r} means {meant or 'no address'}, where the other hosts do "
            f"not reach it; give it the address {own} of interface {interface}, for example in /etc/hosts"
        )


class _Name:
    """What Horovod is told when it asks for the host's name. Lives as long as the process: C keeps a pointer to it."""

    def __init__(self) -> None:
        self.value = b""
        self.answers = False
        self.call = _NAME_CALL(self._answer)

    def _answer(self, buffer: int, size: int) -> int:
        ctypes.memmove(buffer, self.value + b"\0", min(len(self.value) + 1, size))
        return 0


_name = _Name()


def _library() -> Path:
    from horovod.torch import mpi_lib_v2

    return Path(mpi_lib_v2.__file__).resolve()


def _meaning_of_own_name() -> str | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0])


def redirect(library: Path, symbol: str, function: int) -> bool:
    """Let a library that is loaded into this process call another function in place of one from elsewhere.

    Args:
        library: Its file.
        symbol: Name of the function that it would call.
        function: Address of the other one, which must never go away.

    Returns:
        Whether there was something to replace. Not on machines other than Linux on x86-64 and AArch64.
    """
    try:
        base = next(start for start, _, _, offset, path in _mappings() if path == str(library) and offset == 0)
        slots = list(_slots(library.read_bytes(), symbol.encode()))
    except (OSError, StopIteration, struct.error):
        return False
    for slot in slots:
        _overwrite(base + slot, function)
    return bool(slots)


def _slots(image: bytes, symbol: bytes) -> Iterator[int]:
    """Where in its memory a library keeps the address of a function, see elf(5)."""
    machine, offset, count = *struct.unpack_from("<H", image, 18), *struct.unpack_from("<Q", image, 32), image[56]
    if image[:6] != b"\x7fELF\x02\x01" or machine not in _FUNCTION_SLOTS:
        return
    segments = [struct.unpack_from("<IIQQQQ", image, offset + 56 * number) for number in range(count)]

    def place(address: int) -> int:
        return next(at + address - start for kind, _, at, start, _, size in segments
                    if kind == _LOAD and start <= address < start + size)  # fmt: skip

    at, size = next((at, size) for kind, _, at, _, _, size in segments if kind == _DYNAMIC)
    known = dict(struct.unpack_from("<QQ", image, entry) for entry in range(at, at + size, 16))
    symbols, names = place(known[_SYMTAB]), place(known[_STRTAB])
    for table, length in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
        first = place(known[table]) if table in known else 0
        for entry in range(first, first + known.get(length, 0), 24):
            slot, kind, number = struct.unpack_from("<QII", image, entry)
            start = names + struct.unpack_from("<I", image, symbols + 24 * number)[0]
            if kind in _FUNCTION_SLOTS[machine] and image.startswith(symbol + b"\0", start):
                yield slot


def _mappings() -> Iterator[tuple[int, int, str, int, str]]:
    """Start, end, permissions, offset and file of each part of this process's memory, see proc(5)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        yield start, end, permissions, int(offset, 16), path[0] if path else ""


def _overwrite(address: int, value: int) -> None:
    writable = any(start <= address < end and "w" in permissions for start, end, permissions, _, _ in _mappings())
    if not writable:  # the loader has protected it since
        _protect(address, _READ | _WRITE)
    ctypes.c_uint64.from_address(address).value = value
    if not writable:
        _protect(address, _READ)


def _protect(address: int, permissions: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address // page * page), ctypes.c_size_t(page), permissions) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
