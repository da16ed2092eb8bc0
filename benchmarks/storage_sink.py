"""A server that speaks enough of S3 to be measured against: objects in memory, as fast as sockets go or slower.

    python benchmarks/storage_sink.py [--bytes-per-s N]

Prints its URL and serves until its standard input ends. ``--bytes-per-s`` is what each connection carries at most, in
each direction, as one to S3 does. Knows objects written whole, in parts and by copy, ranges, conditional creation,
listing and deletion. It is no test of correctness: signatures and checksums are not looked at. Memory of objects that
were removed or replaced is used again, so that the system does not have to clear it within what is measured.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

_PIECE_BYTES = 1024 * 1024
_HEADER_END = b"\r\n"


@dataclass
class Contents:
    """Bytes in one or several buffers."""

    buffers: list[memoryview] = field(default_factory=list)
    version: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def views(self, start: int, stop: int) -> list[memoryview]:
        found, begin = [], 0
        for buffer in self.buffers:
            view = buffer[max(0, start - begin) : max(0, stop - begin)]
            if view.nbytes:
                found.append(view)
            begin += buffer.nbytes
        return found


class Objects:
    """What the server holds; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, Contents] = {}
        self._uploads: dict[str, dict[int, Contents]] = {}
        self._spare: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._versions = count(1)

    def buffer(self, size_bytes: int) -> memoryview:
        with self._lock:
            spare = self._spare[size_bytes]
            return spare.pop() if spare else memoryview(bytearray(size_bytes))

    def get(self, name: str) -> Contents | None:
        return self._objects.get(name)

    def put(self, name: str, contents: Contents, only_new: bool) -> bool:
        with self._lock:
            if only_new and name in self._objects:
                return False
            contents.version = next(self._versions)
            self._drop(name)
            self._objects[name] = contents
            return True

    def delete(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def begin_upload(self) -> str:
        with self._lock:
            upload = f"upload-{next(self._versions)}"
            self._uploads[upload] = {}
            return upload

    def put_part(self, upload: str, number: int, contents: Contents) -> None:
        self._uploads[upload][number] = contents

    def end_upload(self, upload: str, name: str, only_new: bool) -> bool:
        parts = [contents for _, contents in sorted(self._uploads.pop(upload).items())]
        return self.put(name, Contents([buffer for part in parts for buffer in part.buffers]), only_new)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        return [(name, found.size_bytes) for name, found in sorted(self._objects.items()) if name.startswith(prefix)]

    def _drop(self, name: str) -> None:
        if found := self._objects.pop(name, None):
            for buffer in found.buffers:
                self._spare[buffer.nbytes].append(buffer)


@dataclass
class Request:
    method: str
    name: str
    query: dict[str, str]
    headers: dict[str, str]


class Connection:
    """One client's connection, at the speed that it has."""

    def __init__(self, sock: socket.socket, objects: Objects, bytes_per_s: float | None) -> None:
        self._socket, self._objects, self._bytes_per_s = sock, objects, bytes_per_s
        self._stream: BinaryIO = sock.makefile("rb", buffering=64 * 1024)

    def serve(self) -> None:
        while line := self._stream.readline():
            method, target, _ = line.decode().split(" ", 2)
            headers = {}
            while (line := self._stream.readline()) not in (_HEADER_END, b""):
                key, _, value = line.decode().partition(":")
                headers[key.strip().lower()] = value.strip()
            parts = urlsplit(target)
            query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
            self._handle(Request(method, unquote(parts.path), query, headers))

    def _handle(self, request: Request) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        contents = self._receive(request.headers)
        only_new = "if-none-match" in request.headers
        if request.method in ("GET", "HEAD"):
            self._look(request)
        elif request.method == "DELETE":
            self._objects.delete(request.name)
            self._answer(204)
        elif request.method == "PUT" and "partNumber" in request.query:
            self._objects.put_part(request.query["uploadId"], int(request.query["partNumber"]), contents)
            self._answer(200, {"ETag": f'"{request.query["partNumber"]}"'})
        elif "x-amz-copy-source" in request.headers:
            self._copy(request)
        elif request.method == "PUT":
            done = self._objects.put(request.name, contents, only_new)
            self._answer(200 if done else 412, {"ETag": f'"{contents.version}"'})
        elif "uploads" in request.query:
            upload = self._objects.begin_upload()
            self._answer(
                200,
                text=f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
            )
        elif "uploadId" in request.query:
            done = self._objects.end_upload(request.query["uploadId"], request.name, only_new)
            self._answer(
                200 if done else 412,
                text='<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>',
            )
        else:
            self._answer(501)

    def _copy(self, request: Request) -> None:
        source = self._objects.get("/" + unquote(request.headers["x-amz-copy-source"]).lstrip("/"))
        if source is None:
            self._answer(404, text="<Error><Code>NoSuchKey</Code></Error>")
            return
        copy = Contents([memoryview(bytearray(buffer)) for buffer in source.buffers])
        self._objects.put(request.name, copy, only_new=False)
        self._answer(200, text='<CopyObjectResult><ETag>"1"</ETag></CopyObjectResult>')

    def _look(self, request: Request) -> None:
        if "list-type" in request.query:
            bucket = request.name.rstrip("/") + "/"
            found = self._objects.list(bucket + request.query.get("prefix", ""))
            entries = "".join(
                f'<Contents><Key>{name.removeprefix(bucket)}</Key><Size>{size}</Size><ETag>"1"</ETag>'
                "<LastModified>2020-01-01T00:00:00.000Z</LastModified></Contents>"
                for name, size in found
            )
            self._answer(200, text=f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")
            return
        contents = self._objects.get(request.name)
        if contents is None:
            self._answer(404, text="<Error><Code>NoSuchKey</Code></Error>")
            return
        size = contents.size_bytes
        headers = {"ETag": f'"{contents.version}"', "Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
        headers["Last-Modified"] = "Wed, 01 Jan 2020 00:00:00 GMT"
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        start = int(found[1]) if found else 0
        stop = min(size, int(found[2]) + 1) if found and found[2] else size
        if found:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        views = [] if request.method == "HEAD" else contents.views(start, stop)
        self._answer(206 if found else 200, headers, views=views, length=stop - start)

    def _receive(self, headers: dict[str, str]) -> Contents:
        if "aws-chunked" not in headers.get("content-encoding", "") and "x-amz-decoded-content-length" not in headers:
            buffer = self._objects.buffer(int(headers.get("content-length", 0)))
            self._fill(buffer)
            return Contents([buffer])
        buffer = self._objects.buffer(int(headers["x-amz-decoded-content-length"]))
        position = 0
        while size := int(self._stream.readline().partition(b";")[0], 16):
            self._fill(buffer[position : position + size])
            position += size
            self._stream.readline()
        while self._stream.readline() not in (_HEADER_END, b""):
            pass  # trailers
        return Contents([buffer])

    def _fill(self, buffer: memoryview) -> None:
        begin_s, done = time.monotonic(), 0
        while done < buffer.nbytes:
            found = self._stream.readinto(buffer[done : done + _PIECE_BYTES])  # type: ignore[attr-defined]
            if not found:
                raise ConnectionError
            done += found
            self._keep_pace(done, begin_s)

    def _keep_pace(self, done: int, begin_s: float) -> None:
        if self._bytes_per_s is not None:
            time.sleep(max(0.0, done / self._bytes_per_s - (time.monotonic() - begin_s)))

    def _answer(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        text: str = "",
        views: list[memoryview] | None = None,
        length: int | None = None,
    ) -> None:
        body = text.encode()
        lines = [f"HTTP/1.1 {status} Some", "Server: sink"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        if status != 204:
            lines.append(f"Content-Length: {len(body) if length is None else length}")
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        begin_s, done = time.monotonic(), 0
        for view in views or []:
            for start in range(0, view.nbytes, _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._socket.sendall(piece)
                done += piece.nbytes
                self._keep_pace(done, begin_s)


def serve(sock: socket.socket, objects: Objects, bytes_per_s: float | None) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        try:
            Connection(sock, objects, bytes_per_s).serve()
        except ConnectionError:
            return


def accept(listener: socket.socket, bytes_per_s: float | None) -> None:
    objects = Objects()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock, objects, bytes_per_s), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes-per-s", type=float)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    threading.Thread(target=accept, args=(listener, arguments.bytes_per_s), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
