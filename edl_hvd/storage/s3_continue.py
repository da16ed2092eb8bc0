"""A repair of botocore: after a connection that breaks within the answer "100 Continue" it waits for ever.

A body is sent when the server has said that it wants it. ``AWSConnection._consume_headers`` (botocore 1.44.5) reads
that answer up to its empty line, and at the end of the connection reads nothing, again and again: the thread never
comes back, and the checkpoint it belongs to is under way until the process ends.
"""

from __future__ import annotations

from typing import BinaryIO

from botocore.awsrequest import AWSConnection


def _consume_headers(self: AWSConnection, stream: BinaryIO) -> None:
    """The same, up to the end of what there is; the body is then sent to nobody, which is an error that passes."""
    while stream.readline() not in (b"\r\n", b""):
        pass


def repair() -> None:
    """For all clients of this process; does no more once it is done."""
    AWSConnection._consume_headers = _consume_headers
