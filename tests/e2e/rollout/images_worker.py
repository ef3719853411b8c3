"""Run vLLM and transformers on the same images under torchrun. Writes the largest differences of logprobs to findings.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.config.schema import DataConfig, RolloutConfig
from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.data.source import load_prompts
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.types import Completion, Prompt, Request, Sampling
from tests.commands import ROOT


def main(directory: Path, *families: str) -> None:
    dist.init_process_group("gloo")
    findings = {family: check(directory / family, family) for family in families}
    (directory / "findings.json").write_text(json.dumps(findings))


def check(directory: Path, family: str) -> dict[str, Any]:
    reference, prompts, store = make(directory, family)
    model = str(directory / "model")
    sizes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    engine = build_engine(
        RolloutConfig(engine="vllm", max_num_seqs=4, kv_cache_gib=0.0625),
        EngineModel(model, model, "fp32", 128, 0, shapes=sizes, images=str(store.patches), max_images=2),
    )
    engine.load_weights(reference.state_dict().items(), version=0)
    requests = requests_to(prompts)
    first = engine.generate(requests)
    again = engine.generate(requests)  # from vLLM's prefix cache and its cache of tower outputs
    other = with_other_tower(reference)
    engine.load_weights(other.state_dict().items(), version=1)
    after = engine.generate(requests)
    engine.close()
    return {
        "gap": max(gaps(reference, store, requests, first)),
        "gap again": max(gaps(reference, store, requests, again)),
        "gap after a sync": max(gaps(other, store, requests, after)),
        "moved by the sync": max(gaps(reference, store, requests, after)),
        "images": [len(request.images) for request in requests],
        "drawn": sum(len(completion.token_ids) for completion in first),
    }


@torch.no_grad()
def with_other_tower(model: Any) -> Any:
    other = deepcopy(model)
    for name, tensor in other.named_parameters():
        if "visual" in name:
            tensor.mul_(1.5)
    return other


def make(directory: Path, family: str) -> tuple[Any, list[Prompt], ImageStore]:
    """Build a model with random weights, prompts with one picture each, and a store of their pixels."""
    sys.path.append(str(ROOT / "tools"))
    import make_images as world

    folder = directory / "model"
    folder.mkdir(parents=True)
    tokenizer = world.make_picture_tokenizer()
    world.write_processor(folder, family)
    reference = world.make_model(tokenizer, family, seed=0, num_layers=3).eval()
    reference.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    problems, _ = world.make_problems(0, 4, 0)
    world.write_parquet(directory / "train.parquet", problems, "train")
    data, store = DataConfig(), ImageStore(directory / "images" / "patches")
    images = ImageReader(store, str(folder), data)
    return reference, load_prompts([str(directory / "train.parquet")], tokenizer, data, images=images), store


def requests_to(prompts: Sequence[Prompt]) -> list[Request]:
    """Build one request per prompt, one with two images, and one without."""
    first, second = prompts[:2]
    rows = [(prompt.prompt_ids, prompt.images) for prompt in prompts]
    rows += [([*first.prompt_ids, *second.prompt_ids], first.images + second.images), (first.prompt_ids[-6:], ())]
    sampling = Sampling(max_new_tokens=8)
    return [
        Request(place, f"p{place}", list(ids), sampling, seed=place, images=images)
        for place, (ids, images) in enumerate(rows)
    ]


@torch.no_grad()
def gaps(reference: Any, store: ImageStore, requests: Sequence[Request], drawn: Sequence[Completion]) -> list[float]:
    """Return the largest difference of each response's logprobs from transformers.

    Tokens after a sampled image token are left out.
    """
    found, pad = [], reference.config.image_token_id
    for request, completion in zip(requests, drawn, strict=True):
        response = completion.token_ids.tolist()
        response = response[: response.index(pad)] if pad in response else response
        ids, images = torch.tensor([[*request.prompt_ids, *response]]), [store.features(d) for d in request.images]
        pixels: dict[str, Any] = {}
        if images:
            grids = torch.tensor([image.grid_thw for image in images])
            pixels = {"pixel_values": torch.cat([image.pixel_values for image in images]), "image_grid_thw": grids}
        reference.model.rope_deltas = None  # otherwise it reuses the value of the previous call
        logits = reference(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **pixels).logits[0]
        expected = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)[range(len(response)), response]
        mine = torch.as_tensor(completion.logprobs[: len(response)])
        found.append(float((mine - expected).abs().max()) if response else 0.0)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
