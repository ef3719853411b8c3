"""The command: exit codes, JSON, and that --quick imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.commands.doctor import command as doctor
from rlhf_mcore.commands.doctor.findings import Finding

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("severity", "code"), [("ok", 0), ("note", 0), ("warning", 0), ("error", 1)])
def test_only_an_error_fails(
    severity: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    finding = Finding("x", severity, "seen", "so what", "do this")
    assert doctor.main([], lambda args, num_ranks: [finding]) == code
    assert capsys.readouterr().out.startswith(severity)


def test_a_single_rank_has_nobody_to_talk_to() -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--ranks", "1"])
    assert ended.value.code == 2


def test_ranks_that_do_not_start_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("rlhf_mcore.commands.doctor.command.launch", lambda *args, **kwargs: 134)
    assert doctor.main(["--ranks", "2"], lambda args, num_ranks: []) == 1
    assert "2 ranks ended with code 134" in capsys.readouterr().out
