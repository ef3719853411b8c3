"""Serve the report over HTTP on the loopback interface: the page, and newer data if files have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import quote, unquote

from rlhf_mcore.commands.report.page import as_json, page
from rlhf_mcore.commands.report.run_data import RunData, find_runs, read_run
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.run_directory import METRICS, ROLLOUTS

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serve ``/`` and ``/data.json``. Requests for other host names are rejected, so that pages of other sites cannot read the data.

    With ``folder``, the page shows all runs in this folder instead of ``directories``, including later runs. It shows no rollouts;
    each run has its own page with rollouts at ``/run/<path in the folder>/``. Runs that cannot be read are skipped.

    Raises:
        ConfigError: a directory is not a run directory, or the port is taken.
    """

    daemon_threads = True

    def __init__(
        self, directories: Sequence[Path], max_rollouts: int, port: int, *, folder: Path | None = None
    ) -> None:
        self._directories = list(directories)
        self._folder = folder
        self._max_rollouts = max_rollouts
        self._lock = Lock()
        self._read: dict[str, tuple[str, list[RunData]]] = {}  # address -> state of its files, and its runs
        self.newest("")
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}; choose another port, or 0 for any free port"
            ) from error

    def newest(self, run: str) -> tuple[list[RunData], str]:
        """Return the runs and a tag of their state. Runs are read again if their files have changed.

        ``run``: the path of a single run in the folder; "" for all runs.

        Raises:
            ConfigError: a run cannot be read.
        """
        with self._lock:
            places = self._places(run)
            state = _state(places)
            if run not in self._read or self._read[run][0] != state:
                self._read[run] = state, list(self._runs(places, is_index=self._folder is not None and not run))
            return self._read[run][1], state

    def links(self, runs: Sequence[RunData]) -> list[str]:
        """Return the addresses of the pages of single runs; [] without a folder."""
        if self._folder is None:
            return []
        return [f"/run/{quote(Path(run.path).relative_to(self._folder).as_posix())}/" for run in runs]

    def _places(self, run: str) -> list[Path]:
        if self._folder is None:
            return self._directories
        places = find_runs(self._folder)
        return [place for place in places if not run or place.relative_to(self._folder).as_posix() == run]

    def _runs(self, places: Sequence[Path], *, is_index: bool) -> Iterator[RunData]:
        for place in places:
            try:
                yield read_run(place, 0 if is_index else self._max_rollouts)
            except ConfigError:
                if not is_index:
                    raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that close the connection during an answer; print the traceback of other errors."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _state(places: Sequence[Path]) -> str:
    digest = blake2b(digest_size=12)
    for directory in places:
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
        place, _, file = unquote(self.path).removeprefix("/").rpartition("/")
        run = place.removeprefix("run/")
        if file not in ("", "data.json") or (place and run == place):
            return self.send_error(404)
        try:
            runs, tag = self.server.newest(run)
        except (ConfigError, OSError) as error:
            return self.send_error(503, "the run cannot be read now", str(error))
        if run and not runs:
            return self.send_error(404)
        links = self.server.links(runs) if not run else []
        if not file:
            return self._send(page(runs, live=True, links=links), "text/html; charset=utf-8", tag)
        if self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            return self.end_headers()
        return self._send(as_json(runs, links), "application/json", tag)

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
        """Print nothing, so that the terminal shows only the address."""
