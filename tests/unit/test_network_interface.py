"""Addresses of network interfaces."""

import socket

import pytest

from edl_hvd.errors import PlatformError
from edl_hvd.network_interface import address_of, interface_of


def test_an_interface_without_an_address_is_told_with_those_that_are_there():
    assert address_of(interface_of("127.0.0.1")) == "127.0.0.1"
    with pytest.raises(PlatformError, match=r"interface 'none0' has no IPv4 address on this host, which has .*lo"):
        address_of("none0")


def test_an_address_belongs_to_an_interface():
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    with pytest.raises(PlatformError, match=r"no network interface .* has the address 192\.0\.2\.1; set --net"):
        interface_of("192.0.2.1")
