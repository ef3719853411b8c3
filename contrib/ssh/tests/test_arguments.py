"""Invalid arguments of ``rlhf-mcore multinode``, and Ctrl-C before the nodes start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore_contrib.ssh.command import main
from tests.unit.hostile.test_arguments import place as place


def test_hosts_that_cannot_be(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--hosts=-oProxyCommand=touch pwned,b"], "'-oProxyCommand=touch pwned' is not a host name"),
        (["--hosts=a,,b"], "'' is not a host name"),
        (["--hosts=a", "--ranks-per-node=0"], "a host needs at least one process"),
        (["--hosts=a", "--ssh=no-such-program"], "no-such-program: No such file or directory"),
        (["--hosts=a", "--ssh=echo x y z w"], "gave no address for the ranks"),
        (["--hosts=a", "--ssh=false"], "gave no address for the ranks (exit code 1)"),
    ]:
        assert main(["run.yaml", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (place / "pwned").exists()


def test_ctrl_c_while_nodes_meet_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.run", interrupt)
    assert main(["--hosts", "a,b", "run.yaml"]) == 130
    assert capsys.readouterr().err == "\ninterrupted before any process was started\n"
