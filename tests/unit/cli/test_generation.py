from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_mcore.cli import generation
from rlhf_mcore.cli.generation import _close_at_end
from rlhf_mcore.config.schema import Config


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
        with _close_at_end(engine):
            if fails:
                raise KeyError("of the run")
    except KeyError:
        pass
    assert engine.closed == closed
    engine.closed = 1
    if world_size == 1 and fails:  # an error of close does not hide the run's error
        with pytest.raises(KeyError, match="of the run"), _close_at_end(engine):
            raise KeyError("of the run")


class Sleeping:
    """An engine that records its calls, with the models on its device."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.warnings = ("no FlashInfer",)
        self.rank, self.parts, self.engine_bytes, self.sleep_level = None, [object()], 0, 2
        self.ranks = None

    @property
    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    choose_owners = None

    def settle(self) -> None: ...

    def kernels(self) -> dict[str, str]:
        return {"engine attention": "CPU_ATTN"}

    def pop_preemptions(self) -> int:
        return 0

    def close(self) -> None: ...

    def sleep(self, engine: Any) -> None:
        self.told.append("sleeps")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self.told.append("models come")
        yield

    def local_parameters(self) -> list[Any]:
        return []


@pytest.mark.parametrize("shares", [True, False])
def test_an_engine_is_traced_with_its_first_weights_and_the_bridge_planned_while_its_cache_is_away(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Sleeping()
    engine.parts, engine.trained, engine.adapter_geometry = engine.parts if shares else [], None, None
    engine.spec = SimpleNamespace(geometry=SimpleNamespace(trunk=None))
    engine_map = object()

    def trace(model: Any, shapes: Any, weights: str, **options: Any) -> Any:
        engine.told.append("traced")
        return engine_map

    def plan(sent: Any, weights: Any, *_: Any) -> Any:
        assert weights.traced is engine_map
        engine.told.append("planned")
        return SimpleNamespace()

    cfg, notes = Config(), list[str]()
    run: Any = SimpleNamespace(
        cfg=cfg,
        record=SimpleNamespace(memory=engine, progress=lambda text: None, beat=None, note=notes.append),
        stack=ExitStack(),
        platform=None,
        dtype="fp32",
    )
    fakes = {
        "build_engine": lambda *_: engine,
        "EngineModel": SimpleNamespace(of=lambda *_: None),
        "hf_shapes": lambda _: {},
        "part_of": lambda *_: [],
        "map_engine": trace,
        "PlannedBridge": plan,
        "world_group": lambda: None,
        "all_gather_json": lambda own: [own, own],
        "find_machines": lambda: None,
        "SharedProgress": lambda limit_s, beat: SimpleNamespace(note=("notes", limit_s), wait="waits"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(generation, name, fake)
    actor: Any = SimpleNamespace(model=engine)
    rewards: Any = SimpleNamespace(begin=None, add_model=None)
    data: Any = SimpleNamespace(decode=None, train=None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    built = generation.build_colocated(run, actor, rewards, None, data)  # type: ignore[arg-type]
    assert engine.on_progress == ("notes", cfg.trainer.collective_timeout_s) and built.sampler.wait == "waits"  # type: ignore[comparison-overlap]
    assert notes == ["vllm: no FlashInfer"] and built.kernels == {"engine attention": "CPU_ATTN"}
    assert engine.told == ["traced", *["sleeps"] * shares, "models come", "planned"]
