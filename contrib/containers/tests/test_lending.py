"""An agent program uses its container over HTTP. ``serve-containers`` checks its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.environments.agents.endpoint import Endpoint
from tests.processes.environments.test_agents import CODES, NAMESPACES, endpoint, folder, play

__all__ = ["endpoint", "folder"]  # fixtures

SHELL = """
read -r task
ask() {
    curl -sS --fail-with-body -H "Authorization: Bearer $1" -H "Content-Type: application/json" -d "$2" "$3"
}
ask "$OPENAI_API_KEY" '{"messages": [{"role": "user", "content": "q"}]}' "$OPENAI_BASE_URL/chat/completions" > /dev/null || exit 5
case "$task" in
    *'"ground_truth": "hangs"'*) sleep 600;;
    *'"ground_truth": "bye"'*) ask "$CONTAINER_KEY" '{"command": "echo bye > x.txt"}' "$CONTAINER_URL/run";;
esac
curl -sS -H "Authorization: Bearer $OPENAI_API_KEY" "$CONTAINER_URL/files?path=x.txt" | grep -q "does not contain the key" || exit 6
"""


@NAMESPACES
def test_a_program_works_in_its_container_with_nothing_but_curl(endpoint: Endpoint) -> None:
    Path("agent.sh").write_text(SHELL)
    bye, no, hangs = play(endpoint, "bye", "no", "hangs", command=["sh", "agent.sh"], timeout_s=6.0, **CODES)
    assert (bye.reward, bye.error, no.reward, no.error) == (1.0, "", 0.0, "")
    assert "took longer than environment.agent.timeout_s=6 s" in hangs.error


@pytest.mark.parametrize("option", ["--memory-gib", "--cpus"])
def test_the_limits_of_containers_are_numbers_above_0(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("nan", "inf", "-1", "0", "1e300", "much"):
        with pytest.raises(SystemExit) as ended:
            main_module.main(
                ["serve-containers", "--host", "0.0.0.0", f"{option}={value}"]
            )  # a rejected address, so that nothing is served
        message = capsys.readouterr().err
        assert ended.value.code == 2 and option in message and f"{value} is out of range; give" in message
