"""Compare models that read images on four ranks with transformers: logprobs, loaded and saved weights, and tower gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches, restore_tokens
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.weights import weight_storage
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.planning.memory import state_bytes
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.trained_weights import freeze
from rlhf_mcore.types import Microbatch
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.parity_worker import difference_from_file, held_and_predicted
from tests.distributed.setting import MOE_LAYOUTS, finish, gatherer, groups_of, moe_groups_of, start, write_together

# The layouts of a model test its update in turn: all weights or only the merger, with and without recomputation.
FEW = {
    "qwen2_5_vl": ("dp4", "tp2_pp2_vpp2_sp", "tp2_sp_cp2", "cp4"),
    "qwen3_vl": ("tp2_pp2", "pp2_cp2", "tp4_sp"),
    "qwen3_vl_moe": ("tp2_sp_cp2_ep2_etp1",),
    "qwen3_5": ("tp2_pp2", "tp2_sp_cp2"),
    "qwen3_5_moe": ("tp2_sp_cp2_ep2_etp1", "pp2_ep2_dp2_uneven"),
    "gemma3": ("tp2_sp_cp2", "pp2_cp2"),
}
LEARNED = ("all", "merger", "all", "none")
RECOMPUTED = (
    RecomputeConfig(),
    RecomputeConfig(granularity="full", num_layers=1),
    RecomputeConfig(granularity="full", num_layers=1),
    RecomputeConfig(),
)
GRIDS = {"wide": (1, 4, 6), "small": (1, 2, 2), "tall": (1, 10, 4)}
SQUARES = dict.fromkeys(GRIDS, (1, 6, 6))  # for models that scale all images to one size
# Images of each row, and whether the row starts with an image. Rows share images, one row has two, and two rows have none.
ROWS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("wide",), False),
    (("wide",), False),
    (("tall", "small"), True),
    ((), False),
    (("tall", "small"), True),
    (("small",), False),
    ((), False),
    (("tall",), False),
)


@dataclass(frozen=True, slots=True)
class Picture:
    pixel_values: Tensor
    grid_thw: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Noise images by name."""

    squares: bool = False

    @classmethod
    def of(cls, model: str) -> Pictures:
        return cls(model == "gemma3")

    @property
    def grids(self) -> dict[str, tuple[int, int, int]]:
        return SQUARES if self.squares else GRIDS

    def features(self, digest: str) -> Picture:
        grid, frames = self.grids[digest], 1 if self.squares else 2
        generator = torch.Generator().manual_seed(sum(map(ord, digest)))
        return Picture(torch.randn(grid[1] * grid[2], 3 * frames * 4 * 4, generator=generator), grid)


def tokens(pictures: Pictures = Pictures()) -> list[tuple[list[int], int]]:
    """Return the token ids of each row and the number of its prompt tokens."""
    generator = torch.Generator().manual_seed(3)

    def text(count: int) -> list[int]:
        return torch.randint(0, models.IMAGE_TOKEN, (count,), generator=generator).tolist()

    made = []
    for number, (images, begins) in enumerate(ROWS):
        prompt = [] if begins else text(2 + number % 3)
        for name in images:
            _, rows, columns = pictures.grids[name]
            count = rows * columns // 4
            prompt += [92, *[models.IMAGE_TOKEN] * count, 93]
        prompt += text(3)
        made.append((prompt + text(1 if number == 3 else 4 + number), len(prompt)))
    return made


def hf_row(hf: torch.nn.Module, number: int) -> Tensor:
    """Return the logprobs of a row's response from transformers."""
    pictures = Pictures.of(hf.config.model_type)  # type: ignore[union-attr]
    (ids, prompt), (names, _) = tokens(pictures)[number], ROWS[number]
    given = hf_inputs(ids, names, pictures)
    logprobs = hf(**given).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, given["input_ids"][0, 1:, None])[prompt - 1 :, 0]


def hf_inputs(ids: Sequence[int], names: Sequence[str], pictures: Pictures = Pictures()) -> dict[str, Tensor]:
    """Return the inputs of transformers for a row with these images."""
    whole, images = torch.tensor([list(ids)]), [pictures.features(name) for name in names]
    return {"input_ids": whole, **models.image_arguments(whole, images, squares=pictures.squares)}


def make_model(
    path: Path, groups: ModelGroups, platform: Platform, learned: str = "none", recompute: RecomputeConfig | None = None
) -> MegatronModel:
    spec = load_spec(path)
    vision = FAMILIES[spec.geometry.family].vision
    assert vision is not None
    frozen = partial(
        freeze, geometry=spec.geometry, layout=groups.layout, patterns=vision.frozen(spec.geometry, learned)
    )
    options = BuildOptions(
        "fp32",
        "local",
        recompute or RecomputeConfig(),
        True,
        False,
        0,
        freeze=frozen if learned != "all" else None,
        images=Pictures.of(spec.geometry.family),
        trains_tower=learned != "none",
    )
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    return model


def microbatches(model: MegatronModel, packing: bool) -> tuple[list[int], list[Microbatch]]:
    """Return the rows and the microbatches of this rank."""
    layout = model.groups.layout
    replica = layout.coordinates(dist.get_rank())["dp"]
    rows = list(range(replica, len(ROWS), layout.dp))
    held = tokens(Pictures.of(model.spec.geometry.family))
    lengths = [len(held[row][0]) for row in rows]
    ids = torch.tensor([token for row in rows for token in held[row][0]], dtype=torch.int32)
    weights = torch.tensor([float(k >= held[row][1]) for row in rows for k in range(len(held[row][0]))])
    made = make_microbatches(
        RowTokens(rows, lengths, {"token_ids": ids, "weights": weights}),
        max_tokens=48 if packing else 96,
        packing=packing,
        pad_multiple=layout.token_multiple,
        sequence_multiple=layout.sequence_multiple,
        multiple_of=layout.pp if layout.vpp else 1,
    )
    return rows, [replace(m, images=[ROWS[rows[place]][0] for place in m.rows]) for m in made]


def logprobs(model: MegatronModel, packing: bool) -> dict[int, list[float]]:
    """Return the logprobs of this rank's responses, on the last stage."""
    rows, parts = microbatches(model, packing)
    outputs = model.forward(parts, lambda out, part: model.logprobs_and_entropy(out, part, 1.0)[0])
    if not outputs:
        return {}
    held = tokens(Pictures.of(model.spec.geometry.family))
    lengths = [len(held[row][0]) for row in rows]
    values = restore_tokens(outputs, parts, lengths).split(lengths)
    return {row: value[held[row][1] :].tolist() for row, value in zip(rows, values, strict=True)}


def distance(model: MegatronModel, packing: bool, expected: list[Tensor]) -> float:
    found = logprobs(model, packing)
    worst = max((float((torch.tensor(v) - expected[row]).abs().max()) for row, v in found.items()), default=0.0)
    seen = {row for rows in all_gather_json(sorted(found)) for row in rows}
    assert seen == set(range(len(ROWS))), seen
    return max(all_gather_json(worst))


def learn(model: MegatronModel) -> dict[str, Any]:
    """Update by plain gradient descent. Returns the gradient norm and the loss."""
    model.add_optimizer(OptimizerConfig(name="sgd", lr=0.1, clip_grad=0.0, weight_decay=0.0))
    _, parts = microbatches(model, True)

    def loss(outputs: Tensor, part: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        values = model.logprobs_and_entropy(outputs, part, 1.0)[0]
        return -(values * part.fields_on(values.device)["weights"]).sum() / 10, {}

    model.forward_backward(parts, loss)
    return {"grad_norm": model.step(0.1).grad_norm}


def memory(model: MegatronModel, learned: str) -> list[int]:
    """Return the actual and the planned bytes of weights and gradients on this rank."""
    geometry, vision = model.spec.geometry, FAMILIES[model.spec.geometry.family].vision
    assert vision is not None
    still = set(vision.frozen(geometry, learned))
    frozen = frozenset(rule.mcore for rule in vision.rules(geometry) if still & set(rule.tensors))
    role = PlannedRole("actor", geometry, model.groups.layout, True, "fp32", frozen=frozen)
    planned = state_bytes(role, dist.get_rank())
    weights = sum(tensor.nbytes for chunk in model.chunks for tensor in weight_storage(chunk))
    gradients = sum(
        buffer.grad_data.nbytes for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )  # type: ignore[union-attr]
    return [weights, gradients, planned.weights, planned.gradients]


def hf_after(path: Path, learned: str) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient norm and the weights after the same update in transformers, by their names in files."""
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for name, parameter in hf.named_parameters():
        if any(part in name for part in (".visual.", "vision_tower", "multi_modal")):
            is_merger = "merger" in name or "multi_modal" in name
            parameter.requires_grad_(learned == "all" or (learned == "merger" and is_merger))
    (-sum(hf_row(hf, row).sum() for row in range(len(ROWS))) / 10).backward()
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    norm = torch.stack([parameter.grad.norm() for parameter in trained]).norm().item()
    with torch.no_grad():
        for parameter in trained:
            parameter -= 0.1 * parameter.grad
    hf.save_pretrained(path.parent / f"{path.name}_{learned}")
    models.as_published(path.parent / f"{path.name}_{learned}")
    reader = HFReader(path.parent / f"{path.name}_{learned}")
    return norm, dict(reader.tensors())


def main(directory: Path, wanted: str = "") -> None:
    """Run the checks. ``wanted``: the only model to check; "": all models."""
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    for name in [wanted] if wanted else models.VISION_MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make_with_tower(name, path)
        dist.barrier()
        hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = [hf_row(hf, row) for row in range(len(ROWS))]
        for number, layout in enumerate(FEW[name]):
            mine = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
            model = make_model(path, mine, platform)
            found = findings[f"{name}/{layout}"] = {
                "packed": distance(model, True, expected),
                "padded": distance(model, False, expected),
                "gather": difference_from_file(model, path),
                "names": held_and_predicted(model),
            }
            if number == 0:
                exporter = Exporter(
                    model.local_parameters(),
                    model.spec.geometry,
                    [str(path)],
                    world_group(),
                    bucket_bytes=10_000,
                    shard_bytes=100_000,
                )
                write_together(exporter, saved := directory / f"{name}_saved")
                found["saved"] = first_difference(dict(HFReader(saved).tensors()), dict(HFReader(path).tensors()))
            model = make_model(path, mine, platform, LEARNED[number], RECOMPUTED[number])
            found["memory"] = all_gather_json(memory(model, LEARNED[number]))
            update = found["update"] = learn(model)
            norm, after = hf_after(path, LEARNED[number]) if dist.get_rank() == 0 else (0.0, {})
            update["oracle"] = norm
            gathered = dict(gatherer(model))
            here = "" if dist.get_rank() else first_difference(gathered, after, tolerance=1e-5)
            update["weights"] = any_rank(all_gather_json(here))
    finish(findings, directory)
