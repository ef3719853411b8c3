from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from rlhf_mcore.cli.generation import _closed_at_end


class Engine:
    closed = 0

    def close(self) -> None:
        self.closed += 1
        if self.closed > 1:
            raise RuntimeError("it is closed")


@pytest.mark.parametrize(("world_size", "fails", "closed"), [(1, False, 1), (2, False, 1), (1, True, 1), (2, True, 0)])
def test_an_engine_is_closed_when_its_run_ends_unless_other_ranks_may_be_gone(
    world_size: int, fails: bool, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    engine: Any = Engine()
    try:
        with _closed_at_end(engine):
            if fails:
                raise KeyError("of the run")
    except KeyError:
        pass
    assert engine.closed == closed
    engine.closed = 1
    if world_size == 1 and fails:  # what closing raises does not hide the run's own error
        with pytest.raises(KeyError, match="of the run"), _closed_at_end(engine):
            raise KeyError("of the run")
