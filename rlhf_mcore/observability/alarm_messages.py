"""Tell others of an alarm: by a webhook and a command, each in a thread, so that no step waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from rlhf_mcore.config.schema import AlarmsConfig
from rlhf_mcore.config.show import without_secrets

TIMEOUT_S = 30.0  # of a post or a command
CLOSE_S = 10.0  # for messages that are under way when the run ends


class AlarmMessages:
    """Sends alarms to where ``cfg`` tells. ``note`` shows a line: the first failure of each way."""

    def __init__(self, cfg: AlarmsConfig, note: Callable[[str], None]) -> None:
        self._cfg, self._note = cfg, note
        self._failed: set[str] = set()
        self._sending: list[Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def send(self, action: str, content: bytes) -> None:
        """Begin to send. ``action``: webhook or command."""
        thread = Thread(target=self._try, args=(action, content), name=f"alarm {action}", daemon=True)
        self._sending = [other for other in self._sending if other.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Wait a moment for messages that are under way. A command that takes longer is ended with all that it has started."""
        end = time.monotonic() + CLOSE_S
        for thread in self._sending:
            thread.join(max(end - time.monotonic(), 0.0))
        for process in self._commands:
            if process.poll() is None:
                _end_group(process)

    def _try(self, action: str, content: bytes) -> None:
        try:
            (self._post if action == "webhook" else self._call)(content)
        except Exception as error:
            if action not in self._failed:  # once is enough
                self._failed.add(action)
                secret = self._cfg.webhook or "\0"
                why = without_secrets(str(error)).replace(secret, "<redacted>").splitlines() or [""]
                self._note(
                    f"warning: alarms.{action} did not work ({type(error).__name__}: {why[0][:300]}); the run continues"
                )

    def _post(self, content: bytes) -> None:
        assert self._cfg.webhook is not None
        request = urllib.request.Request(self._cfg.webhook, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass

    def _call(self, content: bytes) -> None:
        nothing, program = subprocess.DEVNULL, self._cfg.command[0]  # its arguments may be secrets
        process = subprocess.Popen(
            self._cfg.command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
        self._commands = [other for other in self._commands if other.poll() is None] + [process]
        with process:
            try:
                process.communicate(content, TIMEOUT_S)
            except subprocess.TimeoutExpired as late:
                _end_group(process)
                raise subprocess.TimeoutExpired(program, late.timeout) from None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, program)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
