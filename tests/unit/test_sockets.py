import socket

from edl_hvd.worker.sockets import break_sockets, open_sockets


def test_breaking_reaches_the_other_end_at_once():
    before = open_sockets()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mine = frozenset(entry for entry in open_sockets() - before if entry[0] == ours.fileno())
        break_sockets(mine)
        assert theirs.recv(1) == b""


def test_a_descriptor_that_was_given_out_again_is_left_alone():
    before = open_sockets()
    ours, theirs = socket.socketpair()
    old = open_sockets() - before
    ours.close()
    theirs.close()
    ours, theirs = socket.socketpair()  # takes the same numbers
    with ours, theirs:
        assert {number for number, _ in old} == {ours.fileno(), theirs.fileno()}
        break_sockets(old)
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
