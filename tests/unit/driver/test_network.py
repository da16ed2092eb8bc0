"""Which addresses workers are told, on hosts that have several."""

from __future__ import annotations

import socket

import pytest

from edl_hvd.driver.network import Connection, RendezvousEndpoint, choose_network, own_addresses
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import PlatformError

OWN = Connection("127.0.0.1", "127.0.0.1")
B, C = Connection("10.1.0.2", "10.1.0.1"), Connection("10.2.0.3", "10.2.0.1")


def test_a_world_on_this_machine_meets_on_loopback():
    place = RendezvousEndpoint.of({"a:0": OWN, "a:1": OWN})
    assert (place.address, place.allowed_peers) == ("127.0.0.1", {"127.0.0.1"})
    assert place.address_for(OWN) is None


def test_a_world_on_one_network_meets_there_and_nowhere_else():
    place = RendezvousEndpoint.of({"b:0": B, "b:1": B})
    assert (place.address, place.allowed_peers) == ("10.1.0.1", {"10.1.0.2"})
    assert place.address_for(B) is None


def test_a_worker_on_this_machine_meets_others_where_they_find_it():
    place = RendezvousEndpoint.of({"a:0": OWN, "b:0": B})
    assert (place.address, place.allowed_peers) == ("0.0.0.0", {"127.0.0.1", "10.1.0.2"})
    assert place.address_for(OWN) == "10.1.0.1"
    assert place.address_for(B) is None


def test_every_address_of_this_machine_is_known_to_be_its_own():
    address = next(iter(own_addresses()))
    connection = Connection(address, address)
    assert RendezvousEndpoint.of({"a:0": connection, "b:0": B}).address_for(connection) == "10.1.0.1"


def test_hosts_on_two_networks_each_get_the_address_that_they_reach():
    place = RendezvousEndpoint.of({"b:0": B, "c:0": C})
    assert (place.address, place.allowed_peers) == ("0.0.0.0", {"10.1.0.2", "10.2.0.3"})


def test_a_world_whose_members_have_all_hung_up_meets_nobody():
    assert RendezvousEndpoint.of({}).allowed_peers == frozenset()


def test_a_host_that_is_this_machine_is_told_loopback_and_another_what_leads_to_it():
    network = choose_network((), Ssh(), local=lambda host: host == "here")
    assert network.interface is None
    assert network.toward("here") == "127.0.0.1"
    assert network.toward("127.0.0.2") == "127.0.0.1"


def test_a_named_interface_counts_for_every_host():
    network = choose_network(("lo", "eth7"), Ssh(), local=lambda host: False)
    assert (network.interface, network.toward("b")) == ("lo", "127.0.0.1")


def test_an_interface_that_is_not_there_is_told_with_those_that_are():
    names = ", ".join(name for _, name in socket.if_nameindex())
    with pytest.raises(PlatformError, match=f"network interface 'none0' has no IPv4 address here: .*{names}"):
        choose_network(("none0",), Ssh())


@pytest.fixture
def ssh_that_knows(tmp_path, monkeypatch):
    """Puts an ``ssh`` first into PATH whose configuration calls every host by that name."""

    def make(name: str) -> None:
        program = tmp_path / "ssh"
        program.write_text(f'#!/bin/sh\n[ "$1" = -G ] && echo user me && echo hostname {name}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_a_host_that_only_ssh_knows_is_found_by_the_name_that_ssh_has_for_it(ssh_that_knows):
    ssh_that_knows("127.0.0.3")
    assert choose_network((), Ssh(), local=lambda host: False).toward("only-ssh.invalid") == "127.0.0.1"


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 64])
def test_a_host_that_nobody_knows_is_told_with_a_way_out(ssh_that_knows, host):
    ssh_that_knows(host)
    with pytest.raises(PlatformError, match=f"no way leads from here to host {host}: .*--network-interfaces"):
        choose_network((), Ssh(), local=lambda host: False).toward(host)
