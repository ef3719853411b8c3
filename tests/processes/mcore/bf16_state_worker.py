"""Train with bf16 optimizer state in a world of one, save it, and resume with the same and the other state. Prints the findings.

Transformer Engine's FusedAdam keeps the state. Slow versions replace its kernels (tests/fused_adam.py). Everything else is real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS, LR = 20, 1e-2


def replace_kernels() -> None:
    from tests import fused_adam

    native: Any = sys.modules["transformer_engine_torch"]
    kernels: dict[str, Callable[..., Any]] = {
        "multi_tensor_adam": fused_adam.adam,
        "multi_tensor_adam_param_remainder": fused_adam.adam_param_remainder,
        "multi_tensor_l2norm": fused_adam.l2norm,
        "multi_tensor_scale": fused_adam.scale,
    }
    for name, kernel in kernels.items():
        getattr(native, name).side_effect = kernel


def main(folder: str) -> None:
    from tests.processes.mcore.transformer_engine_worker import import_transformer_engine

    import_transformer_engine(folder)
    replace_kernels()
    import torch
    import torch.distributed as dist

    from rlhf_mcore.bridge.files.export import Exporter
    from rlhf_mcore.config.errors import ConfigError
    from rlhf_mcore.config.schema import OptimizerConfig, TrainerConfig
    from rlhf_mcore.masters import SplitMaster
    from rlhf_mcore.mcore.groups import build_groups
    from rlhf_mcore.mcore.model import MegatronModel
    from rlhf_mcore.mcore.optimizer import check_state_dtype
    from rlhf_mcore.parallel.collectives import world_group
    from rlhf_mcore.parallel.layout import ParallelLayout
    from rlhf_mcore.residency.ledger import KINDS
    from rlhf_mcore.residency.sharing import DeviceSharing
    from rlhf_mcore.roles.role_files import RoleFiles
    from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
    from tests.distributed.models import make
    from tests.unit.mcore.test_model import build

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    groups = build_groups(ParallelLayout(1))
    assert groups is not None

    def trainable(path: Path, state: str, **others: Any) -> MegatronModel:
        model = build(path, groups, trainable=True, dtype="bf16")
        cfg = OptimizerConfig(lr=LR, weight_decay=0.1, clip_grad=0.5, state_dtype=state, **others)
        check_state_dtype(cfg, "actor.optimizer")
        model.add_optimizer(cfg)
        return model

    def train(model: MegatronModel, count: int) -> list[float]:
        chance, norms = torch.Generator().manual_seed(0), []
        for _ in range(count):
            with model.updating():
                for buffer in model.chunks[0].buffers:
                    buffer.grad_data.copy_(0.1 * torch.randn(buffer.grad_data.shape, generator=chance))
                norms.append(model.step(lr=LR).grad_norm)
        return norms

    def state_of(model: MegatronModel) -> dict[str, torch.Tensor]:
        assert model.optimizer is not None
        state = {
            f"{one.name} {k}": t.float().clone() for one in model.optimizer.shards() for k, t in one.tensors.items()
        }
        return state | {p.name: model.movable.current(p.tensor).clone() for p in model.local_parameters()}

    def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], kind: str = "") -> float:
        assert first.keys() == second.keys()
        keys = [key for key in first if key.endswith(kind)]
        return max(float((first[key].float() - second[key].float()).abs().max()) for key in keys)

    def files(model: MegatronModel, companions: Path) -> RoleFiles:
        plan = MinibatchPlan(1)
        role = TrainedModel(
            groups.layout, model, model.spec, TrainerConfig(), optimizer=OptimizerConfig(), plan=plan, name="actor"
        )
        role.num_updates = STEPS + 3  # at most, in this module
        with role.on_device():
            exporter = Exporter(
                model.local_parameters(), model.spec.geometry, [str(companions)], world_group(), bucket_bytes=10_000
            )
        return RoleFiles("actor", role, exporter)

    with TemporaryDirectory() as name:
        directory = Path(name)
        make("qwen3_tied", start := directory / "start")
        plain, model = trainable(start, "fp32"), trainable(start, "bf16")
        assert model.optimizer is not None and plain.optimizer is not None
        norms = [train(one, STEPS) for one in (plain, model)]
        found: dict[str, Any] = {"norms_are_equal": norms[0] == norms[1], "scalars": model.optimizer.scalars()}
        found["difference_to_fp32"] = difference(state_of(model), state_of(plain), " master")
        sizes = [sum(t.nbytes for t in one.optimizer.device_state()) for one in (plain, model)]  # type: ignore[union-attr]
        found["bytes_per_weight"] = [size / sum(p.tensor.numel() for p in model.local_parameters()) for size in sizes]
        found["kept"] = sorted({type(t).__name__ for one in model.optimizer.shards() for t in one.tensors.values()})
        found["is_finite"] = model.optimizer.is_finite()

        # Offloaded, as between phases. The snapshot is written after another update.
        model.share(sharing := DeviceSharing(model.platform), "actor", KINDS)
        sharing.settle()
        write, before = files(model, start).snapshot(), state_of(model)
        train(model, 3)
        write(directory / "bf16")
        expected = state_of(model)
        resumed = trainable(directory / "bf16" / "actor", "bf16")
        files(resumed, start).load_state(directory / "bf16")
        found["resumed"] = difference(state_of(resumed), before)
        train(resumed, 3)
        found["continued"] = difference(state_of(resumed), expected)

        other = trainable(directory / "bf16" / "actor", "fp32")
        files(other, start).load_state(directory / "bf16")
        found["as_fp32"] = difference(state_of(other), before)
        train(other, 3)
        files(other, start).write(directory / "fp32")
        again = trainable(directory / "fp32" / "actor", "bf16")
        files(again, start).load_state(directory / "fp32")
        rounded = {key: t.bfloat16() if "exp_avg" in key else t for key, t in state_of(other).items()}
        found["as_bf16"] = difference(state_of(again), rounded)
        hosted = trainable(directory / "bf16" / "actor", "fp32", offload=1.0)
        files(hosted, start).load_state(directory / "bf16")
        found["as_hosted"] = difference(state_of(hosted), before)
        try:
            files(trainable(start, "bf16"), start).load_state(directory / "bf16")
        except ConfigError as error:
            found["mixed"] = str(error)
        assert isinstance(next(iter(again.optimizer.shards())).tensors["master"], SplitMaster)  # type: ignore[union-attr]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
