"""The records that travel through a step: Prompt -> Trajectory -> RolloutGroup -> TrainBatch -> Microbatch.

Axes: P prompts, G samples per prompt, B = P * G sequences, T padded tokens, N packed tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a decoder that decide where every weight is stored. Read from a Hugging Face config, needs no weights."""

    family: str  # llama | mistral | qwen2 | qwen3 | qwen3_moe | mixtral
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int  # true size, without padding
    tied_embeddings: bool
    num_experts: int = 0  # of every mixture-of-experts layer; 0: a dense model
    expert_ffn_size: int = 0
    dense_layers: tuple[int, ...] = ()  # layers of a mixture-of-experts model that have a dense MLP
    head: str = "lm"  # lm: logits | token: a scalar per token, with a bias | sequence: a scalar per token, no bias

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding as tensor-parallel ranks hold it: the next multiple of ``tp``."""
        return -(-self.vocab_size // tp) * tp


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a tensor a rank holds, and of an expert's tensor: which of the experts.

    ``rank`` of ``size`` is the cut of the tensor itself: tensor parallel, for experts expert tensor parallel. Experts are dealt to
    expert-parallel ranks in equal contiguous runs; ``expert_rank`` of ``expert_size`` is the run of this rank.
    """

    rank: int
    size: int
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(slots=True)
class LocalParameter:
    """A trained tensor as this rank holds it. ``name`` is Megatron's, with the layer's number counted over the whole model."""

    name: str
    tensor: Tensor
    shard: Shard


@dataclass(slots=True)
class StateShard:
    """What the optimizer of this rank keeps for elements ``start`` to ``stop`` of a local parameter, counted in flat order.

    ``tensors`` are live views [stop - start] by kind: ``exp_avg`` and ``exp_avg_sq``, and ``master`` where the weights that the
    optimizer steps are not the parameter itself.
    """

    name: str
    shard: Shard
    start: int
    stop: int
    tensors: dict[str, Tensor]


@dataclass(slots=True)
class Prompt:
    """One row of the data, rendered and tokenised.

    ``prompt_id`` is unique within a data set and stable across runs; ``index`` is the row's number in it, from which the seeds of
    rollouts are derived. A step may hold a row more than once: ``occurrence`` counts that, so that each has seeds of its own.
    """

    prompt_id: str
    index: int
    prompt_ids: list[int]
    text: str
    data_source: str = "unknown"
    ground_truth: Any = None
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
    file: int = 0  # which of the files it is from
    occurrence: int = 0  # how often the step holds it before


@dataclass(slots=True)
class Sampling:
    """How a response is drawn. ``temperature == 0`` is greedy; ``top_k == -1`` and ``top_p == 1.0`` are off."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    seed: int = 0


@dataclass(slots=True)
class Trajectory:
    """One response to one prompt. ``response_ids`` ends with the end-of-sequence token when ``finish_reason`` is "stop".

    ``rollout_logprobs[t]`` is the engine's logprob of ``response_ids[t]`` at the sampling temperature.
    """

    prompt: Prompt
    sample: int
    response_ids: list[int]
    rollout_logprobs: list[float]
    response_text: str
    finish_reason: str
    policy_version: int


@dataclass(slots=True)
class RolloutGroup:
    """The G trajectories of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]


FAILURES = ("error", "timeout")  # why a response may have got no score


@dataclass(slots=True)
class Score:
    """A grader's verdict on one trajectory: the scalar reward and named parts for the metrics."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # of FAILURES: there is no score, and ``value`` replaces it


@dataclass(slots=True)
class TrainBatch:
    """The rows of one step, all of them on every rank. All tensors live on the host; B counts the rows of the step.

    A role takes its share of the rows by its own layout and hands what it computed to all ranks, so roles with different layouts
    meet here, and whatever is estimated from the batch is the same everywhere without communication. Optional fields are filled in
    the order of the loop.
    """

    token_ids: Tensor  # [B, T] int64: prompt, response, padding on the right
    lengths: Tensor  # [B] int64: number of real tokens of a row
    loss_mask: Tensor  # [B, T] bool: response tokens
    rollout_logprobs: Tensor  # [B, T] float32, zero outside loss_mask
    scores: Tensor  # [B] float64: raw reward
    truncated: Tensor  # [B] bool: the response was ended by the token limit
    group_ids: Tensor  # [B] int64: which prompt of the step
    ref_logprobs: Tensor | None = None  # [B, T] float32, as all that follow zero outside loss_mask
    old_logprobs: Tensor | None = None  # [B, T] float32
    old_values: Tensor | None = None  # [B, T] float32: value of the state before each token
    bootstrap_values: Tensor | None = (
        None  # [B] float32: value of the state after the last token; with bootstrap_truncated
    )
    correction: Tensor | None = None  # [B, T] float32: factors of the token weights of the policy loss
    kl_coef: float = 0.0  # of this step, where the KL is in the loss
    rewards: Tensor | None = None  # [B, T] float32: after shaping and KL
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32


@dataclass(slots=True)
class Microbatch:
    """What one forward pass eats: packed (``token_ids`` [1, N]) or padded ([b, T]).

    ``cu_seqlens`` [num_sequences + 1] int32 is set for packed input only. ``rows`` maps sequence k of the microbatch to a row of
    the TrainBatch. Per-token training inputs are in ``fields`` with the shape of ``token_ids``.
    """

    token_ids: Tensor  # [1, N] or [b, T] int64
    position_ids: Tensor  # same shape, int64
    rows: list[int]
    lengths: list[int]
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    fields: dict[str, Tensor] = field(default_factory=dict)
