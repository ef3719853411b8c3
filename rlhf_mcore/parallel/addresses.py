"""Addresses and interfaces of this machine, and sockets that listen on one of them only."""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _PORTS_TRIED = 15000, 100  # below are those of well-known services
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def listener(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address of this machine: other interfaces do not reach it. Port 0 picks a free one."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen()
    return made


def shared_port(address: str) -> socket.socket:
    """A free port, held for a program of ours that listens with SO_REUSEPORT as gRPC does: no other one gets it meanwhile."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((address, 0))
    return made


def free_port(address: str) -> int:
    """A port that nobody listens on now, for a program that cannot be given port 0 or a socket. It may be taken before that binds it.

    It is below those that the kernel gives to connections, so that only another program's fixed port can take it. No port is
    reserved by this: whoever uses it has to choose another one where it is taken.
    """
    numbers = range(_LOWEST_PORT, _first_ephemeral_port())
    for port in secrets.SystemRandom().sample(numbers, min(_PORTS_TRIED, len(numbers))):
        with suppress(OSError), listener(address, port):
            return port
    with listener(address) as made:  # all ports are for connections here
        return int(made.getsockname()[1])


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


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
