import os
import socket
from contextlib import suppress

from edl_hvd.worker.engine.sockets import break_sockets, open_sockets


def test_breaking_ends_our_side_at_once_and_then_the_other():
    before = open_sockets()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mine = frozenset(entry for entry in open_sockets() - before if entry[0] == ours.fileno())
        break_sockets(mine)
        assert ours.recv(1) == b""
        assert theirs.recv(1) == b""


def test_what_is_on_its_way_is_read_and_the_other_end_may_write_for_a_moment():
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        mine = frozenset(entry for entry in open_sockets() - before if entry[0] == ours.fileno())
        theirs.sendall(b"on its way")
        break_sockets(mine)
        assert ours.recv(10) == b"on its way"
        assert ours.recv(1) == b""
        ours.close()  # as Gloo does when it reads the end
        theirs.sendall(b"late")
        theirs.sendall(b"later")
        with suppress(ConnectionResetError):  # an end as well
            assert theirs.recv(1) == b""


def test_a_descriptor_that_was_given_out_again_is_left_alone():
    before = open_sockets()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        old = frozenset(entry for entry in open_sockets() - before if entry[0] in (ours.fileno(), theirs.fileno()))
        assert len(old) == 2
        # Both close, and their numbers are given out again, in one call: no other thread takes them in between.
        for end, new_end in zip((ours, theirs), socket.socketpair(), strict=True):
            with new_end:
                os.dup2(new_end.fileno(), end.fileno())
        break_sockets(old)
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
