"""Images in a decoder: tower features as token embeddings, positions by row and column, and DeepStack.

The tower is transformers' own module on the first pipeline stage. It reads every image of a pass once, before the
decoder runs. All sequences with that image share the features, which are leaves of the decoder's graph. Their
gradients add up over microbatches.

If the tower is trained, it runs again after the backward pass of the last microbatch, some images at a time, with
these gradients. The tower is therefore independent of the decoder's recomputation and of the pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.images import whole_images
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.vision import MAX_PATCHES, TOWER
from rlhf_mcore.geometry import VisionSizes
from rlhf_mcore.mcore.attention import Rotary
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.image_features import StepFeatures, fingerprint, needed_by_any, read_together
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.platform import Platform
from rlhf_mcore.platform.cpu_libraries import declare_image_operators
from rlhf_mcore.types import Microbatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf_mcore.data.images import ImageStore, ProcessedImage


@dataclass(slots=True)
class _Pass:
    """The images of one microbatch, and its placed tensors, which contain the positions of the features."""

    digests: list[str]
    placed: Mapping[str, Tensor]


@dataclass(slots=True)
class ModelVision:
    """The images of a model on this rank. ``tower`` is None except on the first pipeline stage."""

    sizes: VisionSizes
    source: ImageStore | None  # None: text only, without images
    groups: ModelGroups
    sequence_parallel: bool
    platform: Platform
    hidden_size: int  # hidden size of the decoder
    kept: StepFeatures
    tower: torch.nn.Module | None = None
    attends_within: bool = False  # whether all tokens of an image attend to each other
    _features: dict[str, list[Tensor]] = field(default_factory=dict)  # by digest: [tokens, hidden] fp32 per level
    _current: _Pass | None = None
    _by_angles: dict[int, _Pass] = field(default_factory=dict)

    def derive(self, microbatch: Microbatch, of_rank: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a pass for a microbatch's images, on the host.

        ``rotary_positions`` [b, T, 3] and ``places`` [b * T] (token indices) cover this context-parallel rank. They
        exist if the model rotates tokens by row and column.

        ``image_rows`` [n] are indices of features, counted over the images of the microbatch. ``image_places`` [n]
        are their positions in this rank's flattened hidden states. ``image_blocks`` [b, T] is the image number of
        each token of all ranks, or -1 for text.
        """
        positions, rows, blocks = self._positions_and_rows(microbatch)
        positions, rows = of_rank(positions), of_rank(rows).t()
        if self.sequence_parallel:
            rows = rows.chunk(self.groups.layout.tp)[self.groups.tp_rank]
        rows = rows.flatten()
        places = (rows >= 0).nonzero().flatten()
        derived = {}
        if self.sizes.sections:
            derived = {"rotary_positions": positions, "places": torch.arange(positions[..., 0].numel())}
        if self.attends_within and any(microbatch.images):
            derived["image_blocks"] = blocks
        return derived | {"image_places": places, "image_rows": rows[places]}

    def _positions_and_rows(self, microbatch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions [b, T, 3] of all tokens, and their feature and image numbers [b, T].

        Numbers are -1 for tokens without an image.
        """
        ids, first = microbatch.token_ids, 0
        positions = microbatch.position_ids[..., None].repeat(1, 1, 3)
        rows, blocks = torch.full_like(ids, -1), torch.full_like(ids, -1)
        for number, digests in enumerate(microbatch.images):
            if not digests:
                continue
            if microbatch.cu_seqlens is None:
                line, span = number, slice(None)
            else:
                line, span = 0, slice(*microbatch.cu_seqlens[number : number + 2].tolist())
            grids = [self._image(digest).grid_thw for digest in digests]
            counts = torch.tensor([self.sizes.tokens(grid) for grid in grids])
            total = int(counts.sum())
            # A policy may also generate this token. Only the first ones belong to images.
            places = (ids[line, span] == self.sizes.image_token_id).nonzero().flatten()[:total]
            if len(places) < total:
                raise RuntimeError(
                    f"a sequence has {len(places)} image tokens, but its {len(grids)} images need {total}"
                )
            rows[line, span][places] = torch.arange(first, first + total)
            blocks[line, span][places] = torch.arange(len(grids)).repeat_interleave(counts)
            if self.sizes.sections:
                length = positions[line, span].size(0)
                positions[line, span] = image_positions(length, places, grids, self.sizes.merge_size)
            first += total
        return positions, rows, blocks

    def _image(self, digest: str) -> ProcessedImage:
        assert self.source is not None, "a model of rows with images is built with their source"
        return self.source.features(digest)

    @contextmanager
    def reading(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Keep the features of the microbatches' images within this block."""
        if self.tower is not None:
            wanted = list(dict.fromkeys(d for m in microbatches for digests in m.images for d in digests))
            with torch.no_grad():
                found = self._read(wanted) if self._learns else self._read_frozen(wanted)
            for digest, levels in found.items():
                self._features[digest] = [level.float().requires_grad_(self._learns) for level in levels]
        try:
            yield
        finally:
            self._features, self._by_angles, self._current = {}, {}, None

    def _read(self, digests: Sequence[str]) -> dict[str, list[Tensor]]:
        """Run the tower on images."""
        return {d: f for batch in self._batches(digests) for d, f in zip(batch, self._run(batch), strict=True)}

    def _read_frozen(self, digests: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return stored features, and run the tower on the other images together with the ranks that also need them."""
        tower, group = self.tower, self.groups.collection.tp_cp
        if tower is None or not digests:
            return {}
        first = next(tower.parameters())
        key = fingerprint(tower)
        kept = {digest: self.kept.get((key, digest)) for digest in digests}
        missing = needed_by_any([digest for digest in digests if kept[digest] is None], group)
        like = first.new_empty(1 + self.sizes.deepstack, self.hidden_size)
        costs = {digest: len(self._image(digest).pixel_values) for digest in missing}
        sizes = {digest: self.sizes.tokens(self._image(digest).grid_thw) for digest in missing}
        made = read_together(costs, sizes, like, self._read, group)
        for digest, levels in made.items():
            self.kept.keep((key, digest), levels)
        return {d: made[d] if d in made else [level.to(first.device) for level in kept[d] or ()] for d in digests}

    @property
    def _learns(self) -> bool:
        return self.tower is not None and any(parameter.requires_grad for parameter in self.tower.parameters())

    def backward(self) -> None:
        """Accumulate the tower's gradients from the gradients of its features."""
        if not self._learns:
            return
        tower: Any = self.tower
        if not tower.is_gradient_checkpointing:
            # keeps the activations of one block at a time
            tower.gradient_checkpointing_enable({"use_reentrant": False})
        for batch in self._batches([d for d, levels in self._features.items() if levels[0].grad is not None]):
            with torch.enable_grad():
                found = self._run(batch)
            pairs = [
                (value, leaf.grad.to(value.dtype))
                for digest, levels in zip(batch, found, strict=True)
                for value, leaf in zip(levels, self._features[digest], strict=True)
                if leaf.grad is not None
            ]
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])

    def _batches(self, digests: Sequence[str]) -> Iterator[list[str]]:
        """Split images into batches for the tower."""
        batch, patches = list[str](), 0
        for digest in digests:
            count = len(self._image(digest).pixel_values)
            if batch and patches + count > MAX_PATCHES:
                yield batch
                batch, patches = [], 0
            batch.append(digest)
            patches += count
        if batch:
            yield batch

    def _run(self, digests: Sequence[str]) -> list[list[Tensor]]:
        """Return the features [tokens, hidden] of images: first for tokens, then for each level of DeepStack."""
        images = [self._image(digest) for digest in digests]
        grids = torch.tensor([image.grid_thw for image in images])
        pixels, grids = self.platform.to_device([torch.cat([image.pixel_values for image in images]), grids])
        assert self.tower is not None
        output = self.tower(pixels, grid_thw=grids, return_dict=True)
        sizes = [self.sizes.tokens(image.grid_thw) for image in images]
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return [list(parts) for parts in zip(*(level.split(sizes) for level in levels), strict=True)]

    def enter(self, microbatch: Microbatch) -> None:
        """Set the microbatch that the decoder runs next."""
        self._current = _Pass([d for digests in microbatch.images for d in digests], microbatch.placed)

    def angles(self, inv_freq: Tensor, axes: Tensor) -> Tensor:
        """Return the rotation angles [T, b, 1, head_dim] of the microbatch's tokens."""
        assert self._current is not None
        positions = self._current.placed["rotary_positions"]
        half = positions[..., axes.to(positions.device)].float() * inv_freq.to(positions.device)
        angles = torch.cat((half, half), dim=-1).transpose(0, 1)[:, :, None].contiguous()
        self._by_angles[angles.data_ptr()] = self._current
        return angles

    def insert(self, _module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Replace the embeddings of image tokens by features (a hook of the embedding)."""
        assert self._current is not None
        return self._add_features(self._current, output, 0)

    def add(self, level: int) -> Callable[..., tuple[Tensor, ...]]:
        """Return a hook that adds the features of a DeepStack level to a layer's output.

        A layer can be recomputed while another microbatch is current. The hook finds the right microbatch by the
        angles that the layer receives.
        """

        def hook(
            _module: torch.nn.Module, _inputs: Any, given: dict[str, Any], output: tuple[Tensor, ...]
        ) -> tuple[Tensor, ...]:
            hidden, *rest = output
            return self._add_features(self._by_angles[given["rotary_pos_emb"].data_ptr()], hidden, level), *rest

        return hook

    def _add_features(self, run: _Pass, hidden: Tensor, level: int) -> Tensor:
        """Return hidden states [T, b, hidden] with the features of a level.

        They are inserted at level 0 and added at other levels.
        """
        places = run.placed["image_places"]
        if not len(places):
            return hidden
        features = torch.cat([self._features[digest][level] for digest in run.digests])
        values = features.index_select(0, run.placed["image_rows"]).to(hidden.dtype)
        flat = hidden.reshape(-1, hidden.size(-1))
        flat = flat.index_add(0, places, values) if level else flat.index_copy(0, places, values)
        return flat.view_as(hidden)


def image_positions(length: int, places: Tensor, grids: Sequence[Sequence[int]], merge_size: int) -> Tensor:
    """Return the positions [length, 3] of tokens by time, row and column (M-RoPE: Wang et al. 2024, arXiv 2409.12191).

    Text increments all three. An image starts at the end position of the text before it. The text after it
    starts after the largest of the image's positions.

    Args:
        length: number of tokens.
        places: indices of the tokens of all images, in order. The tokens of an image are contiguous.
        grids: (time, rows, columns) of each image in patches. ``merge_size`` squared patches form a token.
        merge_size: edge of a token in patches.
    """
    positions = torch.empty(length, 3, dtype=torch.int64)
    position = done = taken = 0

    def text(end: int) -> int:
        positions[done:end] = torch.arange(position, position + end - done)[:, None]
        return position + end - done

    for time, rows, columns in grids:
        sizes = (time, rows // merge_size, columns // merge_size)
        begin = int(places[taken])
        position = text(begin)
        count = sizes[0] * sizes[1] * sizes[2]
        positions[begin : begin + count] = position + torch.cartesian_prod(*map(torch.arange, sizes))
        position += max(sizes[1:])
        done, taken = begin + count, taken + count
    text(length)
    return positions


class ImageRotary(Rotary):
    """Rotary embeddings by time, row and column."""

    def __init__(self, like: Any, inv_freq: Tensor, axes: Sequence[int], vision: ModelVision):
        super().__init__(like, inv_freq)
        self._axes, self._vision = torch.tensor(axes), vision

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._vision.angles(self.inv_freq, self._axes)


def add_vision(
    chunks: Sequence[GPTModel],
    spec: ModelSpec,
    groups: ModelGroups,
    config: TransformerConfig,
    platform: Platform,
    source: ImageStore | None,
    kept: StepFeatures | None = None,
) -> ModelVision:
    """Add the tower and its positions to a model that is not wrapped yet.

    Raises:
        ConfigError: the first chunk has fewer layers than DeepStack has levels.
    """
    sizes, family = spec.geometry.vision, FAMILIES[spec.geometry.family]
    assert sizes is not None and family.vision is not None
    hidden_size, kept = spec.geometry.hidden_size, kept or StepFeatures()
    vision = ModelVision(sizes, source, groups, config.sequence_parallel, platform, hidden_size, kept)
    vision.attends_within = family.vision.attends_within
    for chunk in chunks if sizes.sections else ():
        chunk.rotary_pos_emb = ImageRotary(
            chunk.rotary_pos_emb, spec.inv_freq, family.vision.axes(sizes.sections), vision
        )
    if not (first := chunks[0]).pre_process:
        return vision
    if len(first.decoder.layers) < sizes.deepstack:
        raise ConfigError(
            f"the first pipeline stage has {len(first.decoder.layers)} layers, but DeepStack adds image features to the first "
            f"{sizes.deepstack} layers of this model; lower pp or vpp, or set layers_per_stage"
        )
    vision.tower = _tower(spec, config, platform)
    first.add_module(TOWER[:-1], vision.tower)
    first.embedding.register_forward_hook(vision.insert)
    for level, layer in enumerate(first.decoder.layers[: sizes.deepstack], 1):
        layer.register_forward_hook(vision.add(level), with_kwargs=True)
    return vision


def _tower(spec: ModelSpec, config: TransformerConfig, platform: Platform) -> torch.nn.Module:
    declare_image_operators()
    with torch.device(platform.device()):
        tower = _new_tower(spec, config.params_dtype)
    for parameter in tower.parameters():
        # Under sequence parallelism a rank computes the gradient for the features of its own tokens.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    for module in tower.modules():
        for name in list(module._non_persistent_buffers_set):
            # Keep frequencies in fp32, even if a wrapper converts buffers.
            frequencies = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            if frequencies is not None and frequencies.is_floating_point():
                frequencies = frequencies.float()
            setattr(module, name, frequencies)
    return tower


def _new_tower(spec: ModelSpec, dtype: torch.dtype) -> torch.nn.Module:
    sizes = spec.geometry.vision
    assert sizes is not None and spec.vision_config is not None
    if sizes.sections:
        tower: torch.nn.Module = _tower_class(spec.vision_config)._from_config(spec.vision_config, dtype=dtype)
        return tower
    return SquareTower(spec.vision_config, sizes, spec.geometry.hidden_size, dtype)


def _tower_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for this kind of tower.

    ``AutoModel`` lacks some of them before transformers 5.19.
    """
    from transformers import PreTrainedModel  # imports torchvision, whose operators must be declared before

    modeling = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    kinds: list[Any] = [kind for kind in vars(modeling).values() if isinstance(kind, type)]
    [tower] = [kind for kind in kinds if issubclass(kind, PreTrainedModel) and kind.config_class is type(config)]
    return tower


class SquareTower(torch.nn.Module):
    """The tower of Gemma 3, which reads images of one size: transformers' SigLIP and its projection.

    It accepts the same arguments as the towers of Qwen's models.
    """

    def __init__(self, config: PretrainedConfig, sizes: VisionSizes, hidden_size: int, dtype: torch.dtype):
        """Build from the tower's ``config``; ``hidden_size`` is the decoder's."""
        from transformers import AutoModel  # imports torchvision, like the next import
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        super().__init__()
        self._channels = sizes.channels
        self.vision_tower = torch.nn.Module()  # the name in model files
        self.vision_tower.vision_model = AutoModel.from_config(config, dtype=dtype)
        whole: Any = SimpleNamespace(
            vision_config=config,
            text_config=SimpleNamespace(hidden_size=hidden_size),
            mm_tokens_per_image=sizes.positions // sizes.merge_size**2,
        )
        self.multi_modal_projector = Gemma3MultiModalProjector(whole).to(dtype)

    def forward(self, pixels: Tensor, *, grid_thw: Tensor, return_dict: bool) -> SimpleNamespace:
        """Return the features ``pooler_output`` [tokens, hidden] of images in patches.

        See ``data.images.whole_images`` for the order of patches.
        """
        patches = pixels.size(0) // len(grid_thw)
        edge = int(patches**0.5)
        hidden = self._siglip(whole_images(pixels, (1, edge, edge), self._channels)).last_hidden_state
        return SimpleNamespace(pooler_output=self.multi_modal_projector(hidden).flatten(0, 1))

    @property
    def _siglip(self) -> Any:
        return self.vision_tower.vision_model

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self._siglip.is_gradient_checkpointing)

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Keep the activations of one block at a time."""
        self._siglip.gradient_checkpointing_enable(options)
