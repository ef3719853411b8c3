"""The records of a step, in the order in which they are built: Prompt, Request, Completion, Trajectory, TrainBatch, Microbatch.

Axes: P prompts, G samples per prompt, B = P * G rows of a step, R of them on one rank, N tokens back to back, T padded tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch import device as Device

    from rlhf_mcore.data.prefixes import PrefixTree

Array = TypeVar("Array")  # numpy arrays in engines, torch tensors in training


@dataclass(slots=True, eq=False)
class Ragged(Generic[Array]):
    """Zero or more values for each of N tokens. The values of the tokens are stored in token order."""

    counts: Array  # [N] int32
    values: Array  # [sum of counts, ...]


# Data of each of N tokens, in numpy for engines and in torch for training: [N, ...], or any number of values per token.
Recorded = Union["NDArray[Any]", "Ragged[NDArray[Any]]"]
Field = Union["Tensor", "Ragged[Tensor]"]


@dataclass(slots=True)
class Prompt:
    """A row of the data, rendered and tokenised.

    ``prompt_id`` is unique within a data set and stable across runs. ``index`` is the row's number in the data set, and determines the
    seeds of rollouts. A step may contain a row several times; ``occurrence`` numbers them, so that each has different seeds.
    """

    prompt_id: str
    index: int
    prompt_ids: list[int]
    text: str
    data_source: str = "unknown"
    ground_truth: Any = None
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None  # messages of a conversation before rendering
    file: int = 0  # index of its data file
    occurrence: int = 0  # number of earlier occurrences in the step
    images: tuple[str, ...] = ()  # image digests, in the order of their tokens in ``prompt_ids``
    question: str | None = None  # a plain text in the data, which was rendered as a user message


@dataclass(slots=True)
class Sampling:
    """Sampling parameters of responses. ``temperature == 0`` is greedy; ``top_k == -1`` and ``top_p == 1.0`` are off.

    ``records_support``: completions include, for each token, the tokens that top-k and top-p kept. ``records_routes``: they include
    the experts of every token, in the field ``ROUTES``. ``records_drafts``: they include the field ``DRAFTS``. ``baseline``: in
    addition to the ``n`` responses for training, each prompt gets a greedy response with sample number ``n``.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    seed: int = 0
    records_support: bool = False
    records_routes: bool = False
    records_drafts: bool = False
    baseline: bool = False

    @property
    def num_responses(self) -> int:
        """Return the number of sampled responses per prompt."""
        return self.n + self.baseline

    def of_sample(self, sample: int) -> Sampling:
        """Return the sampling parameters of response ``sample`` to a prompt."""
        if sample < self.n:
            return self
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, records_support=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A rollout to run: response ``sample`` to ``prompt`` at ``step``. ``number`` is unique among the open jobs of an engine.

    ``is_single_turn``: sample one response, even in a run with an environment.
    """

    number: int
    prompt: Prompt
    sample: int
    sampling: Sampling
    step: int
    is_single_turn: bool = False

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return f"prompt {self.prompt.prompt_id!r}, sample {self.sample}"

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Return the tokens of the prompt."""
        return self.prompt.prompt_ids


@dataclass(frozen=True, slots=True)
class Request:
    """A request to sample one continuation of ``prompt_ids``.

    ``request_id`` is unique among the requests of a call; ``name`` is for messages. ``n`` and ``seed`` of ``sampling`` are ignored,
    because every request is sampled once, with its own ``seed``.
    """

    request_id: int
    name: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    images: tuple[str, ...] = field(default=(), kw_only=True)  # as in ``Prompt``


@dataclass(slots=True, eq=False)
class Completion:
    """The N tokens that an engine sampled for a request. If ``finish_reason`` is "stop", the last is the end-of-sequence token.

    ``logprobs`` refer to the distribution that was sampled from. ``versions`` are defined as in ``Trajectory``.
    ``num_cached``: number of tokens before the completion that the engine found in its KV cache; None if it does not count them.
    ``support``: for each token, the ids of the tokens that top-k and top-p kept, if the request asks for them.
    """

    request_id: int
    token_ids: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str  # "stop" or "length"
    num_cached: int | None = None
    support: Ragged[NDArray[np.int32]] | None = None
    # Further data from the engine, by name. A Ragged covers the N tokens. An array may also cover the tokens before them.
    fields: Mapping[str, Recorded] = field(default_factory=dict)


MAX_LOGPROB = 1e-5  # upper bound of a token's logprob, because rounding may give values above 0

# Field with the experts that predicted a token: 1 + the expert indices of the previous token, [N, layers with experts, experts per
# token] int16; 0 means unknown.
ROUTES = "routes"
# Field with the drafts of the pass that begins with a token: number of proposed and of accepted drafts, [N, 2] int16.
DRAFTS = "drafts"
LIMITS = ("length", "turns", "seconds")  # limits that may end an episode: tokens, turns of the policy, time


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Counters of engines: decoding ``steps``, the tokens that they sampled, and their time in seconds.

    ``lent``: turns that were sampled by another engine than the engine of their episode. ``preemptions``: responses that lost their
    cache to other responses.
    """

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    lent: int = 0
    preemptions: int = 0

    def __add__(self, other: EngineWork) -> EngineWork:
        return EngineWork(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: EngineWork) -> EngineWork:
        return EngineWork(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``start`` to ``stop`` of an episode. ``writer`` is "prompt", "policy" or "environment".

    ``reward`` is the reward of a policy turn at its last token, separate from the score of the whole episode. ``text`` is the turn's
    text without special tokens, if an environment has answered.
    """

    writer: str
    start: int
    stop: int
    reward: float = 0.0
    text: str = ""


@dataclass(slots=True, eq=False)
class Trajectory:
    """A sampled episode with N tokens. ``loss_mask`` marks the tokens that the policy sampled.

    ``logprobs`` come from the engine, at the sampling temperature; they are zero outside the mask. ``versions`` contains (first token,
    policy version) in ascending order; each version applies until the next entry. A policy turn whose ``finish_reason`` is "stop"
    ends with the end-of-sequence token.

    A branched episode consists of several sequences back to back. Shared tokens are repeated, but are only once in ``loss_mask``.
    """

    prompt: Prompt
    sample: int
    token_ids: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.bool_]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    turns: tuple[Turn, ...]
    versions: tuple[tuple[int, int], ...]
    response_text: str
    finish_reason: str
    score: Score | None = None  # score from the environment
    num_prefilled: int = 0  # number of tokens before all turns of the policy, if the engine counts cached tokens
    num_cached: int = 0  # number of these tokens that the engine found in its cache
    # As in ``Completion``; empty for tokens that the policy has not sampled
    support: Ragged[NDArray[np.int32]] | None = None
    fields: Mapping[str, Recorded] = field(
        default_factory=dict
    )  # fields of completions; zeros or no values for other tokens
    sequences: tuple[int, ...] = ()  # number of tokens of each sequence; () if there is only one
    sequence_images: tuple[tuple[str, ...], ...] = ()  # image digests of each sequence; () without images
    # The turns as a tree with times, in the format of sampling/episode_log.py; JSON values
    record: Mapping[str, Any] | None = None

    @property
    def sampled_ids(self) -> NDArray[np.int32]:
        """Return the tokens that the policy sampled."""
        return self.token_ids[self.loss_mask]

    @property
    def sampled_logprobs(self) -> NDArray[np.float32]:
        """Return the logprobs of ``sampled_ids``."""
        return self.logprobs[self.loss_mask]

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def policy_version(self) -> int:
        """Return the version of the policy that sampled the first token."""
        return self.versions[0][1]

    @property
    def is_truncated(self) -> bool:
        """Return whether a limit ended the episode, instead of the policy or the environment."""
        return self.finish_reason in LIMITS


FAILURES = ("error", "timeout")  # possible reasons for a missing score


@dataclass(slots=True)
class Score:
    """The score of a trajectory: the scalar reward, and named parts for metrics."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # one of FAILURES if there is no score; ``value`` is then a substitute
    cause: str = field(default="", compare=False)  # cause of the failure, for messages
    answered: bool = field(default=True, compare=False)  # whether rules that search an answer have found it


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes of the B rows of a step, equal on every rank. They decide which rank runs a row."""

    lengths: Tensor  # [B] int64: tokens of a row
    group_ids: Tensor  # [B] int64: index of the prompt in the step
    computed: Tensor | None = None  # [B, 2] int64, as in ``TrainBatch``


@dataclass(slots=True)
class TrainBatch:
    """The rows of a step. Every rank knows the per-row values of all B rows, and stores the tokens of the rows that it owns.

    Per-token tensors are flat: the N tokens of the rows that this rank owns, ascending and back to back; ``x[k]`` belongs to
    ``token_ids[k]``. All tensors are on the host. Optional fields are filled in the order of the loop.

    In reinforcement learning, the owner of a row is one of the ranks on which the actor learns from it. The actor and its reference
    therefore move it only among these ranks. The results of algorithms do not depend on owners.

    A row is an episode. It has one score, one weight and one position in its group, even if it consists of several sequences.
    """

    # All rows, on every rank.
    lengths: Tensor  # [B] int64: tokens of a row
    num_sampled: Tensor  # [B] int64: tokens of a row in the loss mask
    scores: Tensor  # [B] float64: raw reward
    truncated: Tensor  # [B] bool: the token limit ended the response
    group_ids: Tensor  # [B] int64: index of the prompt in the step
    owners: Tensor  # [B] int64: the rank that stores a row
    # The rows that this rank owns.
    rows: Tensor  # [R] int64, ascending: indices of these rows
    token_ids: Tensor  # [N] int32
    loss_mask: Tensor  # [N] bool: tokens that the policy sampled and may learn from
    rollout_logprobs: Tensor  # [N] float32, zero outside loss_mask
    # The ranks of each data-parallel replica of the actor, which own its rows; (): rows are spread over all ranks of the world
    replicas: tuple[tuple[int, ...], ...] = ()
    # By row, on every rank: number of tokens of each sequence, for rows with several sequences
    sequences: Mapping[int, Sequence[int]] = field(default_factory=dict)
    images: Mapping[int, Sequence[Sequence[str]]] = field(
        default_factory=dict
    )  # by row: image digests of each sequence, for rows with images
    # [B, 2] int64, on every rank: number of computed tokens of a row, and of first tokens shared with its group. None: all, and none
    computed: Tensor | None = None
    # [N] float32: rewards of turns at their last tokens; None if no turn of the step has a reward
    turn_rewards: Tensor | None = None
    # [N] int32: version of the policy that sampled a token, zero outside loss_mask; None in a synchronous run (see policy_version)
    versions: Tensor | None = None
    # int32 ids of the tokens that top-k and top-p kept for each sampled token; no ids mean all tokens. None: all tokens everywhere
    support: Ragged[Tensor] | None = None
    # Further token data by name, recorded by engines or computed by roles. Losses and estimators declare the fields that they read.
    fields: dict[str, Field] = field(default_factory=dict)
    policy_version: int = 0  # version of the weights before the step's updates
    # [N] float32, over the whole vocabulary. This and all following per-token tensors are zero outside loss_mask
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None  # [N] float32: logprobs of the distribution that was sampled, within ``support``
    # [N] float32: log of the total probability of ``support`` under the policy of old_logprobs; None without a support
    log_mass: Tensor | None = None
    old_values: Tensor | None = None  # [N] float32: value of the state before each token
    # [B] float32, on every rank: value of the state after the last token; None without bootstrap_truncated
    bootstrap_values: Tensor | None = None
    # [B, K] float64, on every rank: the parts of the scores that algorithm.reward_weights names, in its order
    score_parts: Tensor | None = None
    # [B] float64, on every rank: score of the greedy response to the row's prompt; None if no greedy responses are sampled
    baselines: Tensor | None = None
    correction: Tensor | None = None  # [N] float32: factors of the policy loss's token weights
    # The prompts of this batch with responses to other prompts; for losses that need them
    mismatched: TrainBatch | None = None
    prompts: list[Prompt] | None = None  # the prompt of each group; None if responses are given
    kl_coef: float = 0.0  # KL coefficient of this step, if the KL is part of the loss
    with_entropy: bool = True  # whether the actor's entropy is a metric of this step
    rewards: Tensor | None = None  # [N] float64: after shaping and KL
    advantages: Tensor | None = None  # [N] float32
    returns: Tensor | None = None  # [N] float32

    @property
    def num_rows(self) -> int:
        """Return B, the number of rows."""
        return len(self.lengths)

    @property
    def sizes(self) -> RowSizes:
        """Return the sizes of all rows."""
        return RowSizes(self.lengths, self.group_ids, self.computed)

    def sequences_of(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Return the number of tokens of each sequence of these rows."""
        lengths = self.lengths.tolist()
        return [self.sequences.get(row) or (lengths[row],) for row in rows]

    def images_of(self, rows: Sequence[int]) -> list[tuple[str, ...]] | None:
        """Return the image digests of each sequence of these rows, or None if the batch has no images."""
        held = [self.images.get(row) or [()] * len(self.sequences.get(row) or [0]) for row in rows]
        return [tuple(own) for of_row in held for own in of_row] if self.images else None

    def field_of_tokens(self, name: str) -> Field:
        """Return a field by its name: from ``fields``, or an optional per-token attribute.

        Raises:
            KeyError: the batch has no such field.
        """
        value = self.fields[name] if name in self.fields else getattr(self, name) if name in TOKEN_FIELDS else None
        if value is None:
            raise KeyError(name)
        return value


# Fields with a teacher's logprobs, zero outside the loss mask: [N] float32, and [N, 2, k + 1] (see ``parallel/top_tokens.py``).
TEACHER_LOGPROBS, TEACHER_TOP = "teacher_logprobs", "teacher_top_tokens"

# Attributes of a TrainBatch that contain one value per token.
TOKEN_FIELDS = (
    *(
        "rollout_logprobs",
        "turn_rewards",
        "versions",
        "support",
        "ref_logprobs",
        "old_logprobs",
        "log_mass",
        "old_values",
    ),
    *("correction", "rewards", "advantages", "returns"),
)


@dataclass(slots=True)
class UpdateResult:
    """The result of a step's updates of a model. ``metrics`` are only recorded; no decision depends on their names."""

    model: str  # name of its role
    metrics: dict[str, float]
    grad_norm: float = 0.0  # before clipping, mean over the updates
    is_finite: bool = True  # whether the weights and the optimizer's state contain no NaN and no infinity
    bad_in_a_row: int = (
        0  # consecutive updates, up to the last, that were skipped because loss or gradient was not finite
    )


@dataclass(slots=True)
class Microbatch:
    """The input of one forward pass: packed (``token_ids`` [1, N]) or padded ([b, T]).

    ``cu_seqlens`` [num_sequences + 1] int32 is set only for packed input. ``rows`` maps sequence k of the microbatch to a row of the
    TrainBatch. ``fields`` contains per-token training inputs with the shape of ``token_ids`` and possibly further dimensions.
    ``ragged`` contains inputs with any number of values per token, and counts with the shape of ``token_ids``.
    """

    token_ids: Tensor  # [1, N] or [b, T] int64
    position_ids: Tensor  # same shape, int64
    rows: list[int]
    lengths: list[int]
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    fields: dict[str, Tensor] = field(default_factory=dict)
    ragged: dict[str, Ragged[Tensor]] = field(default_factory=dict)
    images: list[tuple[str, ...]] = field(default_factory=list)  # image digests of each sequence; [] without images
    # The model computes this tree instead of ``token_ids`` if rows share prefixes
    tree: PrefixTree | None = None
    # During a pass: copies on the device, by name, of the fields and of derived tensors.
    placed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Return the number of tokens per line that the model computes."""
        return self.token_ids.size(1) if self.tree is None else len(self.tree.token_ids)

    def fields_on(self, device: Device) -> dict[str, Tensor]:
        """Return the fields on a device, using the copies in ``placed`` if they exist."""
        return {name: self.placed.get(name, value).to(device) for name, value in self.fields.items()}
