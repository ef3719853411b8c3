"""Speculative decoding (Leviathan et al. 2022, arXiv 2211.17192): how a vLLM engine drafts, and which drafts it accepts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.mtp import mtp_tensors
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.readers.model_files import read_config
from rlhf_mcore.rollout.vllm.cpu import verify_drafts_at_their_temperature
from rlhf_mcore.rollout.vllm.stages import share_drafts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from rlhf_mcore.config.schema import RolloutConfig, SpeculativeConfig
    from rlhf_mcore.rollout.engine import EngineModel


def learned_names(cfg: RolloutConfig, model: EngineModel) -> frozenset[str]:
    """Return the names of the MTP tensors that the trainer sends to an engine.

    The set is empty if the engine loads them from the model directory. For 8-bit weights, the names include their scales.
    """
    if cfg.speculative.method != "mtp" or model.shapes is None:
        return frozenset()
    names = mtp_tensors(model.shapes, read_config(model.model_dir, model.model_dir))
    if cfg.quantization is None:
        return frozenset(names)
    return frozenset(QUANTISATIONS[cfg.quantization].with_scales({name: model.shapes[name] for name in names}))


class Drafts:
    """Lets an engine draft: the arguments of vllm.LLM, the MTP layers if they are trained, and a record of accepted drafts.

    Trained MTP layers start as dummies and are sent with the model. Other MTP layers are loaded from the model directory when
    the engine starts, and do not change. The embedding and the output layer of both kinds are the model's own modules.

    Raises:
        ConfigError: a sleep would discard MTP layers that no sync restores.
    """

    def __init__(self, cfg: RolloutConfig, model: EngineModel, *, on_cuda: bool) -> None:
        self.model: DraftedModel | None = None  # set by attach(), if MTP layers are trained
        self._method, self._on_cuda, self._learned = cfg.speculative.method, on_cuda, learned_names(cfg, model)
        self._in_stages = cfg.layout.pp > 1
        sleeps = on_cuda and cfg.placement == "colocated" and cfg.sleep_level == 2
        if self._method == "mtp" and sleeps and not self._learned:
            raise ConfigError(
                "rollout.speculative.method=mtp: a sleep of rollout.sleep_level=2 discards the MTP layers, which no sync restores "
                "with actor.mtp.mode=keep; set rollout.sleep_level=1, or actor.mtp.mode=train"
            )
        self.options = {"speculative_config": _options(cfg.speculative, self._learned)}

    def attach(self, worker: Any, core: Any) -> None:
        """Connect to vLLM's worker and engine core after their start."""
        if self._method == "ngram":
            import numba

            # Starts numba's threads; otherwise the first draft would, and would change torch's number of threads.
            numba.get_num_threads()
        if self._in_stages:
            share_drafts(worker.model_runner, core)
        if self._learned and (draft := worker.get_draft_model()) is not None:  # on the last stage only
            self.model = DraftedModel(worker.get_model(), draft, self._learned)
        if not self._on_cuda:
            verify_drafts_at_their_temperature()
        self.record = DraftRecord(core.scheduler)


def _options(cfg: SpeculativeConfig, learned: Collection[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"method": cfg.method, "num_speculative_tokens": cfg.num_tokens}
    if cfg.method == "ngram":
        return options | {"prompt_lookup_min": cfg.ngram_tokens, "prompt_lookup_max": cfg.ngram_tokens}
    return options if learned else options | {"draft_load_config": {"load_format": "safetensors"}}


class DraftedModel(nn.Module):
    """A model and its MTP layers, loaded as one module. ``names`` contains the checkpoint's tensor names of the MTP layers."""

    def __init__(self, model: Any, draft: Any, names: Collection[str]) -> None:
        super().__init__()
        self.model, self.draft = model, draft
        self._names = names

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors as vLLM's models do, and return the names of the written parameters."""
        drafted = set[str]()

        def of_model() -> Iterator[tuple[str, Tensor]]:
            for is_draft, part in groupby(weights, lambda pair: pair[0] in self._names):
                if is_draft:
                    drafted.update(self.draft.load_weights(part))
                else:
                    yield from part

        loaded = {f"model.{name}" for name in self.model.load_weights(of_model())}
        return loaded | {f"draft.{name}" for name in drafted}


class DraftRecord:
    """Records the accepted drafts of each pass, by the number of response tokens that the request had before the pass."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._count = scheduler, scheduler.make_spec_decoding_stats
        self._passes: dict[str, list[tuple[int, int, int]]] = {}
        scheduler.make_spec_decoding_stats = self._note

    def _note(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, num_invalid_spec_tokens: Any, request_id: str
    ) -> Any:
        """Replace the scheduler's method. The scheduler calls it for each request with drafts in a pass."""
        place = self._scheduler.requests[request_id].num_output_tokens
        self._passes.setdefault(request_id, []).append((place, num_draft_tokens, num_accepted_tokens))
        return self._count(stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    def take(self, handle: str, num_tokens: int) -> NDArray[np.int16]:
        """Return the field ``DRAFTS`` of a finished response with ``num_tokens`` tokens."""
        field = np.zeros((num_tokens, 2), np.int16)
        for place, drafted, taken in self._passes.pop(handle, []):
            field[place] = drafted, taken
        return field

    def drop(self, handles: Iterable[str]) -> None:
        for handle in handles:
            self._passes.pop(handle, None)
