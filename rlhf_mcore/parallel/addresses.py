"""Addresses and interfaces of this machine, and sockets that listen on one of them only."""

from __future__ import annotations

import fcntl
import socket
import struct

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def listener(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address of this machine: other interfaces do not reach it. Port 0 picks a free one."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen()
    return made


def free_port(address: str) -> int:
    """A port of this machine that nobody listens on now."""
    with listener(address) as made:
        return int(made.getsockname()[1])


def source_address(peer: str) -> str:
    """This machine's address on the way to ``peer``, an IPv4 address or a name. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(peer), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that has an address.

    Raises:
        ValueError: no interface of this machine has it.
    """
    addresses = interface_addresses()
    for name, found in addresses.items():
        if found == address:
            return name
    raise ValueError(f"no interface of {socket.gethostname()} has the address {address}; there are {addresses}")


def interface_addresses() -> dict[str, str]:
    """Names and IPv4 addresses of this machine's interfaces."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
