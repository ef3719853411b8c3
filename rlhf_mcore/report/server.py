"""The report over HTTP on the loopback interface: the page, and newer data when files have changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.run_directory import METRICS, ROLLOUTS
from rlhf_mcore.report.page import as_json, page
from rlhf_mcore.report.run_data import RunData, read_run

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves ``/`` and ``/data.json``. A request that names another host is refused: a page elsewhere may not read this one.

    Raises:
        ConfigError: a directory is not that of a run, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, directories: Sequence[Path], max_rollouts: int, port: int) -> None:
        self._directories = list(directories)
        self._max_rollouts = max_rollouts
        self._lock = Lock()
        self._runs = self.read()
        self._tag = self._state()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another, or 0 for any free one") from error

    def read(self) -> list[RunData]:
        """The runs as they stand now."""
        return [read_run(directory, self._max_rollouts) for directory in self._directories]

    def newest(self) -> tuple[list[RunData], str]:
        """The runs, read again if their files have changed, and a tag of their state."""
        with self._lock:
            state = self._state()
            if state != self._tag:
                self._runs, self._tag = self.read(), state
            return self._runs, self._tag

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no error; of others the traceback is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def _state(self) -> str:
        digest = blake2b(digest_size=12)
        for directory in self._directories:
            for path in (directory / METRICS, directory / ROLLOUTS, directory):
                if path.exists():
                    digest.update(f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}\n".encode())
        return f'"{digest.hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in (LOOPBACK, "localhost"):
            return self.send_error(403, "served to this machine only")
        if self.path not in ("/", "/data.json"):
            return self.send_error(404)
        try:
            runs, tag = self.server.newest()
        except (ConfigError, OSError) as error:
            return self.send_error(503, "the run cannot be read now", str(error))
        if self.path == "/":
            return self._send(page(runs, live=True), "text/html; charset=utf-8", tag)
        if self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            return self.end_headers()
        return self._send(as_json(runs), "application/json", tag)

    def _send(self, text: str, kind: str, tag: str) -> None:
        content = text.encode("utf-8")
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("ETag", tag),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal shows the address only."""
