"""Let models and an engine share a counting device. Check its contents in each phase of a PPO step, and rejected combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_mcore.checkpoint.disk import SaveError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.planning.inputs import GPUS
from rlhf_mcore.planning.plan import make_plan
from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.residency.ledger import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, Ledger, LedgerOrderError
from rlhf_mcore.residency.parts import MovablePart
from rlhf_mcore.residency.sharing import DeviceSharing, Movable, storage_bytes
from rlhf_mcore.trainer.publishers import EnginePublisher
from tests.late_device import LateCuda, LatePlatform

pytestmark = pytest.mark.usefixtures("late_cuda")

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs" / "models" / "Qwen2.5-0.5B-Instruct"
ENGINE = {"weights": 30, "kv_cache": 300}  # bytes of the engine
SIZES = {  # bytes of the models: bf16 weights, fp32 gradients, masters and moments
    "actor": {WEIGHTS: 64, GRADIENTS: 128, OPTIMIZER: 384},
    "critic": {WEIGHTS: 32, GRADIENTS: 64, OPTIMIZER: 192},
    "reference": {WEIGHTS: 64},
}


class CountingDevice(LatePlatform):
    """A device of 1000 bytes that counts the storages of the parts on it, and the engine's memory."""

    def __init__(self, engine: Mapping[str, int], room: int = 1000) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.sizes, self.room, self.levels = engine, room, list[int]()
        self.engine = dict(engine)
        self.log: list[str] = []

    def used_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages) + sum(self.engine.values())

    def free_bytes(self) -> int:
        assert self.used_bytes() <= self.room
        return self.room - self.used_bytes()

    def peak_bytes(self) -> None:
        """Do nothing. It would report torch's allocations, but here the ledger is read."""

    def outside_bytes(self) -> None:
        """Return None, because this device does not know it."""

    # The engine.
    def wake(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self.engine[tag] = self.sizes[tag]
            self.log.append(f"wake {tag} beside {self.used_bytes() - sum(self.engine.values())}")

    def sleep(self, level: int = 2) -> None:
        self.engine.clear()
        self.levels.append(level)
        self.log.append("sleep")


class Colocated:
    """The models of a PPO run with all parts offloaded, and the engine."""

    def __init__(
        self, models: Mapping[str, Mapping[str, int]] = SIZES, engine: Mapping[str, int] = ENGINE, room: int = 1000
    ) -> None:
        self.sizes, self.used_in_sync = models, 0
        self.device = CountingDevice(engine, room)
        self.device.engine.clear()
        self.sharing = DeviceSharing(self.device, engine_bytes=engine["weights"])
        self.models: dict[str, Movable] = {}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        for name, sizes in models.items():
            held = {kind: torch.zeros(size, dtype=torch.uint8) for kind, size in sizes.items()}
            self.device.storages += [tensor.untyped_storage() for tensor in held.values()]
            self.tensors[name], self.models[name] = held, Movable(self.sharing)
            for kind, tensor in held.items():
                copied, lingers = kind != GRADIENTS, name != "reference"
                part = MovablePart(f"{name} {kind}", [tensor], self.device, copied=copied, lingers=lingers)
                self.models[name].add(kind, part)
        self.publisher = EnginePublisher(self.device, self, self, self.sharing)
        self.sharing.sleep(self.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.sharing.phase(name):
            yield

    def sync(self, version: int) -> SyncStats:
        with self.models["actor"].use(WEIGHTS, beside=True):
            assert self.tensors["actor"][WEIGHTS].unique().tolist() == [version]
            self.used_in_sync = self.device.used_bytes()
        return SyncStats(0.0, 0, 0, 0)

    def update(self, name: str) -> None:
        with self.models[name].use(*KINDS, writes=True):
            self.models[name].ready(OPTIMIZER)
            for kind in (WEIGHTS, OPTIMIZER):
                self.tensors[name][kind] += 1

    def step(self, number: int) -> None:
        with self.phase("generate"):
            assert self.device.used_bytes() == sum(self.device.sizes.values())
        self.publisher.withdraw()
        for phase, name in (("reference", "reference"), ("values", "critic"), ("old_logprobs", "actor")):
            with self.phase(phase), self.models[name].use(WEIGHTS):
                assert self.device.used_bytes() == self.sizes[name][WEIGHTS]
        with self.phase("update"):
            self.update("critic")
            self.update("actor")
        self.publisher.publish(number)


def test_the_peak_of_a_step_is_the_greatest_need_of_a_phase_and_not_their_sum(late_cuda: LateCuda) -> None:
    run = Colocated()
    run.publisher.publish(0)
    run.sharing.pop()
    for number in (1, 2):
        run.step(number)
        peaks = run.sharing.pop()
        assert peaks == {
            "memory/generate_bytes": 330.0,
            "memory/reference_bytes": 64.0,
            "memory/values_bytes": 32.0,
            "memory/old_logprobs_bytes": 64.0,
            "memory/update_bytes": 576.0,  # the actor; the offloaded critic would add 288
            "memory/sync_bytes": 478.0,  # gradients and state are offloaded while weights are sent, because they fit
        }
        assert max(peaks.values()) == max(sum(SIZES["actor"].values()), sum(ENGINE.values()))
    assert run.tensors["actor"][OPTIMIZER].untyped_storage().nbytes() == 0
    assert run.models["actor"].current(run.tensors["actor"][OPTIMIZER]).unique().tolist() == [2]
    # Each kept part has one buffer and no second one. Storages begin at multiples of 512.
    assert list(late_cuda.pinned.values()) == [512] * 5


RECORDED_PEAKS = {"generate": 510.0, "update": 180.0, "sync": 510.0}


class SleepingEngine:
    """An engine of 330 bytes with vLLM's allocator. torch counts its memory as reserved even while it sleeps."""

    def __init__(self, cuda: LateCuda) -> None:
        self.mapped, self.outside = 330, 50  # bytes; the device has 1000, and torch reserves 200 for models
        cuda.mem_get_info = lambda: (1000 - 200 - self.mapped - self.outside, 1000)
        cuda.memory_reserved = lambda: 200 + 330
        cuda.max_memory_allocated = lambda: 180 + 330

    def wake(self, tags: Sequence[str]) -> None:
        self.mapped += sum(ENGINE[tag] for tag in tags)

    def sleep(self, level: int = 2) -> None:
        self.mapped = 0


def test_memory_outside_torch_is_recorded_per_phase_also_while_an_engine_sleeps(late_cuda: LateCuda) -> None:
    engine, sharing = SleepingEngine(late_cuda), DeviceSharing(LatePlatform())

    def outside() -> dict[str, float]:
        return {name: size for name, size in sharing.pop().items() if name.endswith("_outside_bytes")}

    with sharing.phase("generate"):
        pass
    sharing.sleep(engine)
    with sharing.phase("update"):
        engine.outside = 90  # NCCL connects in the first update
    assert outside() == {"memory/generate_outside_bytes": 50.0, "memory/update_outside_bytes": 90.0}
    sharing.wake(engine, "weights")
    sharing.wake(engine, "kv_cache")
    with sharing.phase("generate"):
        pass
    assert outside() == {"memory/generate_outside_bytes": 90.0}


def test_allocated_memory_excludes_an_engine_that_sleeps_in_the_whole_phase(late_cuda: LateCuda) -> None:
    engine, sharing = SleepingEngine(late_cuda), DeviceSharing(LatePlatform())
    with sharing.phase("generate"):
        sharing.sleep(engine)
    with sharing.phase("update"):
        pass
    with sharing.phase("sync"):
        sharing.wake(engine, "weights")
        sharing.wake(engine, "kv_cache")
    allocated = {name: size for name, size in sharing.pop().items() if name.endswith("_allocated_bytes")}
    assert allocated == {f"memory/{name}_allocated_bytes": size for name, size in RECORDED_PEAKS.items()}


def test_an_engine_wakes_its_weights_first_and_its_cache_when_nothing_else_is_there() -> None:
    run = Colocated()
    run.publisher.publish(0)
    run.device.log.clear()
    run.step(1)
    # The actor's update leaves 64 bytes of weights next to the engine's weights, and 384 bytes in transit.
    assert run.device.log == ["sleep", "wake weights beside 448", "wake kv_cache beside 0"]


def test_what_the_update_has_left_goes_before_the_engine_comes_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Colocated()
    monkeypatch.setattr(CountingDevice, "free_bytes", lambda self: 0)
    run.publisher.publish(0)
    run.device.log.clear()
    run.step(1)
    assert run.device.log == ["sleep", "wake weights beside 0", "wake kv_cache beside 0"]


def test_what_is_used_again_next_does_not_travel() -> None:
    run, moved = Colocated(), []
    part = run.models["actor"].parts[WEIGHTS]
    come, leave = part.come, part.leave
    part.come = lambda: (moved.append("come"), come())  # type: ignore[assignment, method-assign]
    part.leave = lambda: (moved.append("leave"), leave())  # type: ignore[assignment, method-assign]
    with run.models["actor"].use(WEIGHTS):
        pass
    run.update("actor")
    run.sync(1)
    assert moved == ["come"]
    run.update("critic")
    assert moved == ["come", "leave"]


def test_a_part_of_many_views_comes_back_bit_by_bit() -> None:
    flat = torch.arange(24, dtype=torch.float32)
    matrix, other = flat[4:16].view(3, 4), torch.arange(5, dtype=torch.bfloat16)
    part = MovablePart("x", [matrix, flat[20:], other], LatePlatform())
    assert part.num_bytes == 24 * 4 + 5 * 2
    wanted = matrix.clone(), other.clone()
    part.leave()
    assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert torch.equal(part.on_host(matrix), wanted[0])
    part.on_host(other).mul_(2)
    part.come()
    assert bool(matrix.isnan().all()), "it is on its way"
    part.ready()
    assert torch.equal(matrix, wanted[0]) and torch.equal(other, wanted[1] * 2)


class Layers(torch.nn.Module):
    """Five layers of 400 bytes on a counting device, and 40 bytes outside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False) for _ in range(5))
        self.head = torch.nn.Linear(10, 1, bias=False)
        self.requires_grad_(False)
        self.device = CountingDevice({})
        self.device.storages = [tensor.untyped_storage() for tensor in self.parameters()]
        self.seen: list[int] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda *_: self.seen.append(self.device.used_bytes()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        found: Tensor = self.head(x)
        return found


def test_of_layers_that_come_one_by_one_two_are_there_at_a_time() -> None:
    model, x = Layers(), torch.arange(30.0).view(3, 10)
    wanted = model(x)
    sharing = DeviceSharing(model.device)
    movable = Movable(sharing)
    movable.add_layers("reference", model.layers)
    movable.add(WEIGHTS, MovablePart("reference weights", [model.head.weight], model.device, lingers=False))
    assert model.device.used_bytes() == 0
    sharing.pop()
    model.seen.clear()
    with sharing.phase("reference"), movable.passing():
        for _ in range(2):  # microbatches
            assert torch.equal(model(x), wanted)
            assert model.device.used_bytes() == 40
    # The last layer has no next layer.
    assert model.seen == [840, 840, 840, 840, 440] * 2
    assert sharing.pop() == {"memory/reference_bytes": 840.0}
    with movable.use(WEIGHTS, writes=True):
        assert model.device.used_bytes() == 2040
        for parameter in model.parameters():
            parameter.mul_(-1)
        model(x)
        assert model.device.used_bytes() == 2040  # parts used as a whole stay
    with movable.passing():
        assert torch.equal(model(x), wanted)  # an even number of signs: five layers and the head
    assert model.device.used_bytes() == 0


def test_a_pass_that_fails_leaves_no_layer_behind() -> None:
    model = Layers()
    movable = Movable(DeviceSharing(model.device))
    movable.add_layers("reference", model.layers)
    movable.add(WEIGHTS, MovablePart("reference weights", [model.head.weight], model.device, lingers=False))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), movable.passing():
        model(torch.zeros(1, 9))
    assert model.device.used_bytes() == 0


def failures() -> dict[str, Callable[[Ledger], object]]:
    def twice(ledger: Ledger) -> None:
        ledger.add("actor weights", 1)
        ledger.add("actor weights", 1)

    def beside_the_cache(ledger: Ledger) -> None:
        ledger.add("engine cache", 1)
        ledger.add("actor optimizer", 1)

    def cache_too_early(ledger: Ledger) -> None:
        ledger.add("critic gradients", 1)
        ledger.add("engine cache", 1)

    return {
        "actor weights was allocated twice, the second time in phase update": twice,
        "actor optimizer was allocated in phase update while engine cache is on the device": beside_the_cache,
        "engine cache was allocated in phase update while critic gradients is on the device": cache_too_early,
        "reward weights was freed in phase update but is not on the device": lambda ledger: ledger.remove(
            "reward weights"
        ),
    }


@pytest.mark.parametrize("message", failures())
def test_what_comes_or_goes_out_of_order_is_refused(message: str) -> None:
    ledger = Ledger()
    with pytest.raises(LedgerOrderError, match=f"^{message}$"), ledger.phase("update"):
        failures()[message](ledger)


def test_what_a_save_reads_does_not_stay_beside_an_engine_that_is_awake() -> None:
    run = Colocated()
    run.publisher.publish(0)
    with run.models["actor"].use(WEIGHTS, beside=True):
        assert run.device.used_bytes() == sum(ENGINE.values()) + SIZES["actor"][WEIGHTS]
    assert run.device.used_bytes() == sum(ENGINE.values())


def test_a_save_needs_less_than_an_update_and_leaves_the_engine_as_it_was() -> None:
    run = Colocated()
    run.publisher.publish(0)
    run.step(1)
    run.device.log.clear()
    with run.publisher.asleep(), run.models["actor"].use(WEIGHTS, beside=True):
        assert run.device.used_bytes() == SIZES["actor"][WEIGHTS]
    assert run.device.used_bytes() == sum(ENGINE.values())
    assert run.device.log == ["sleep", f"wake weights beside {SIZES['actor'][WEIGHTS]}", "wake kv_cache beside 0"]
    run.step(2)


def test_the_canary_is_scored_when_the_engine_sleeps_and_before_anything_is_learned() -> None:
    run, scored = Colocated(), list[tuple[int, list[str], int, int]]()

    class Bird:
        def sample(self, version: int) -> list[str]:
            assert run.device.used_bytes() == sum(ENGINE.values())
            return [f"drawn of {version}"]

        def score(self, version: int, drawn: list[str]) -> None:
            with run.models["actor"].use(WEIGHTS):
                scored.append((version, drawn, run.device.used_bytes(), run.tensors["actor"][WEIGHTS].unique().item()))

    run.publisher.canary = Bird()  # type: ignore[assignment]
    run.publisher.publish(0)
    assert scored == []
    run.step(1)
    assert scored == [(0, ["drawn of 0"], SIZES["actor"][WEIGHTS], 0)]
    with run.publisher.asleep():
        assert scored[1:] == [(1, ["drawn of 1"], SIZES["actor"][WEIGHTS], 1)]
    run.step(2)
    assert scored[2:] == [(1, ["drawn of 1"], SIZES["actor"][WEIGHTS], 1)]


def test_after_a_save_that_has_failed_the_engine_is_awake() -> None:
    run = Colocated()
    run.publisher.publish(0)
    with pytest.raises(SaveError), run.publisher.asleep():
        raise SaveError("the disk is full")
    assert run.device.used_bytes() == sum(ENGINE.values())


def test_where_no_model_moves_a_save_leaves_the_engine_awake() -> None:
    run = Colocated(models={})
    run.device.wake(("weights", "kv_cache"))
    run.device.log.clear()
    with run.publisher.asleep():
        assert run.device.used_bytes() == sum(ENGINE.values())
    assert run.device.log == []


def test_an_engine_that_is_awake_keeps_an_update_out() -> None:
    run = Colocated()
    run.publisher.publish(0)
    with pytest.raises(LedgerOrderError, match="while engine cache is on the device"):
        run.update("actor")


LEDGER_PHASES = {  # phase of the ledger -> phase of the planner
    "generate": "generate",
    "reference forward": "reference",
    "critic forward": "values",
    "actor forward": "old_logprobs",
    "actor update": "update",
}
MOVES = ("weights", "gradients", "masters", "moments", "cache")


def test_the_ledger_of_a_step_has_the_planners_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["data.train=[x]", f"model.path={MODEL}", "model.dtype=bf16", "algorithm=ppo", "algorithm.kl.coef=0.01"]
    keys += ["actor.offload=always", "critic.offload=always", "reference.offload=always", "rollout.kv_cache_gib=0.1"]
    plan = make_plan(resolve(load_config(ROOT / "configs" / "base.yaml", keys)), 1, GPUS["H100"])
    # A byte of the test represents a MiB of the plan. Both sides round parts in the same way.
    planned = {
        phase.phase: {
            name: size >> 20 for name, size in phase.parts.items() if name.endswith(MOVES) and "bridge" not in name
        }
        for phase in plan.phases
    }
    sizes: dict[str, dict[str, int]] = {}
    for name in ("actor", "critic", "reference"):
        update = planned.get(f"{name} update", planned[f"{name} forward"])
        sizes[name] = {WEIGHTS: update[f"{name} weights"]}
        if name != "reference":
            state = update[f"{name} masters"] + update[f"{name} moments"]
            sizes[name] |= {GRADIENTS: update[f"{name} gradients"], OPTIMIZER: state}
    engine = {"weights": planned["generate"]["engine weights"], "kv_cache": planned["generate"]["engine cache"]}
    make_room = DeviceSharing.make_room  # the plan of a sync assumes a full device
    monkeypatch.setattr(DeviceSharing, "make_room", lambda self, num_bytes, keep=(): make_room(self, 0, keep))
    run = Colocated(sizes, engine, room=sum(engine.values()))
    run.publisher.publish(0)
    run.sharing.pop()
    run.step(1)
    found = run.sharing.pop()
    for phase, own in LEDGER_PHASES.items():
        assert found[f"memory/{own}_bytes"] == sum(planned[phase].values()), phase
    assert run.used_in_sync == sum(planned["sync"].values())
    assert found["memory/sync_bytes"] == sum(engine.values())  # its cache is allocated at the end of the phase
    assert len(found) == len(LEDGER_PHASES) + 1


@pytest.mark.parametrize("level", [1, 2])
def test_engines_sleep_as_deep_as_they_are_told(level: int) -> None:
    run = Colocated()
    run.sharing.sleep_level = level
    run.publisher.publish(0)
    run.publisher.withdraw()
    assert run.device.levels[-1] == level


def test_what_an_engine_makes_of_a_weight_counts_once() -> None:
    """vLLM's latent attention keeps two views of a projection [heads * (3 + 5), 7] in bf16."""
    projection = torch.nn.Parameter(torch.zeros(4 * 8, 7, dtype=torch.bfloat16))
    keys, values = projection.detach().t().view(7, 4, 8).split([3, 5], dim=-1)
    views = [torch.nn.Parameter(keys.permute(1, 2, 0)), torch.nn.Parameter(values.transpose(0, 1))]
    assert storage_bytes([projection, *views, torch.zeros(3)]) == 4 * 8 * 7 * 2 + 3 * 4
