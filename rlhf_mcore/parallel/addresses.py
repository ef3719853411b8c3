"""Addresses and interfaces of this machine, and sockets that listen on only one of them."""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Lower ports belong to well-known services.
_LOWEST_PORT, _PORTS_TRIED = 15000, 100
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def listener(address: str, port: int = 0) -> socket.socket:
    """Open a listening socket on one address of this machine.

    Other interfaces cannot reach it. Port 0 selects a free port.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, port))
    listening.listen()
    return listening


def shared_port(address: str) -> socket.socket:
    """Reserve a free port for one of our programs that listens with SO_REUSEPORT, like gRPC.

    No other program can get the port meanwhile.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((address, 0))
    return reserved


def free_port(address: str) -> int:
    """Return a port that is free now, for a program that does not accept port 0 or a socket.

    The port is below the range that the kernel uses for connections, so only another program's fixed port can take
    it. It is not reserved. If it is taken before the program binds it, the caller must choose another port.
    """
    numbers = range(_LOWEST_PORT, _first_ephemeral_port())
    for port in secrets.SystemRandom().sample(numbers, min(_PORTS_TRIED, len(numbers))):
        with suppress(OSError), listener(address, port):
            return port
    # On this machine, the kernel uses all ports for connections.
    with listener(address) as listening:
        return int(listening.getsockname()[1])


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def source_address(peer: str) -> str:
    """Return this machine's address on the route to ``peer``, an IPv4 address or a name. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(peer), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface with an address.

    Raises:
        ValueError: no interface of this machine has this address.
    """
    addresses = interface_addresses()
    for name, own in addresses.items():
        if own == address:
            return name
    raise ValueError(
        f"no interface of {socket.gethostname()} has the address {address}; its interfaces are {addresses}"
    )


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine's interfaces by name."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
