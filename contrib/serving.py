"""Serve HTTP from a command until SIGINT or SIGTERM, on the loopback or a private address only."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError


def check_host(host: str, has_token: bool) -> None:
    """Check that a server listens on the loopback, or on a private address with a token.

    Raises:
        ConfigError: ``host`` is another address, or a private address without a token.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ConfigError(f"--host {host} is not an address; give an address such as 127.0.0.1") from error
    if address.is_unspecified or not (address.is_loopback or address.is_private):
        raise ConfigError(
            f"--host {host} is not a private address; give the private address of one interface, such as 10.0.0.5"
        )
    if not (address.is_loopback or has_token):
        raise ConfigError(
            f"--host {host} is reachable from other machines and requires a token; set --token-env to the name of its variable"
        )


def serve(application: Callable[[], web.Application], host: str, port: int, tell: Callable[[str], None]) -> None:
    """Listen until SIGINT or SIGTERM. With ``port`` 0, use a free port. ``tell`` receives the address.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    asyncio.run(_serve(application, host, port, tell))


async def _serve(application: Callable[[], web.Application], host: str, port: int, tell: Callable[[str], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        await web.SockSite(runner, listener, shutdown_timeout=5.0).start()
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{listener.getsockname()[1]}")
        await stop.wait()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}; choose another port, or 0 for a free port") from error
    finally:
        with suppress(asyncio.CancelledError):
            await runner.cleanup()
