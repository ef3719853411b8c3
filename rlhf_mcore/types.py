"""The records that travel through a step: Prompt -> Request -> Completion -> Trajectory -> TrainBatch -> Microbatch.

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

Array = TypeVar("Array")  # of numpy where engines draw, of torch where models learn


@dataclass(slots=True, eq=False)
class Ragged(Generic[Array]):
    """Any number of values for each of N tokens, or none: those of token k follow those of the tokens before it."""

    counts: Array  # [N] int32
    values: Array  # [sum of counts, ...]


# What there is of each of N tokens, in numpy where engines draw and in torch where models learn: [N, ...], or any number of values.
Recorded = Union["NDArray[Any]", "Ragged[NDArray[Any]]"]
Field = Union["Tensor", "Ragged[Tensor]"]


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
    messages: list[dict[str, Any]] | None = None  # of a conversation, before it was rendered
    file: int = 0  # which of the files it is from
    occurrence: int = 0  # how often the step holds it before
    images: tuple[str, ...] = ()  # their digests, in the order of their tokens in ``prompt_ids``
    question: str | None = None  # a text of the data that was rendered as a message of the user


@dataclass(slots=True)
class Sampling:
    """Set how a response is drawn. ``temperature == 0`` is greedy; ``top_k == -1`` and ``top_p == 1.0`` are off.

    ``records_support``: completions have the tokens that each of theirs was drawn from. ``records_routes``: they have the experts
    that every token went to, in the field ``ROUTES``. ``records_drafts``: they have the field ``DRAFTS``. ``baseline``: beside the
    ``n`` responses that are learned from, each prompt has a greedy one, its sample number ``n``.
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
    def num_drawn(self) -> int:
        """Responses to a prompt that are drawn."""
        return self.n + self.baseline

    def of_sample(self, sample: int) -> Sampling:
        """Return how response ``sample`` to a prompt is drawn."""
        if sample < self.n:
            return self
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, records_support=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation of ``prompt_ids`` to be drawn.

    ``request_id`` is unique among the requests of a call; ``name`` is for messages. Of ``sampling`` neither ``n`` nor ``seed`` is
    used: every request is drawn once, with the ``seed`` of its own.
    """

    request_id: int
    name: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    images: tuple[str, ...] = field(default=(), kw_only=True)  # as a prompt's


@dataclass(frozen=True, slots=True)
class EpisodeRequest(Request):
    """One episode in an environment, for response ``sample`` to ``prompt`` at ``step``. The rest is of its first turn."""

    prompt: Prompt
    sample: int
    step: int


@dataclass(slots=True, eq=False)
class Completion:
    """Hold what an engine drew for a request: N tokens, the last one the end-of-sequence token if ``finish_reason`` is "stop".

    ``logprobs`` are of the distribution that was sampled from. ``versions`` as those of a ``Trajectory``. To an ``EpisodeRequest``
    the last turn of the policy is the answer, and the whole episode its ``trajectory``. ``num_cached``: tokens before it whose keys
    and values the engine had already; None where it does not count them. ``support``: for each token the ids of the tokens that top-k
    and top-p had left to draw from, where the request asks for them.
    """

    request_id: int
    token_ids: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str  # "stop" or "length"
    trajectory: Trajectory | None = None
    num_cached: int | None = None
    support: Ragged[NDArray[np.int32]] | None = None
    # What else the engine recorded, by name: of the N tokens, or if it is no Ragged of all tokens before them too.
    fields: Mapping[str, Recorded] = field(default_factory=dict)


MAX_LOGPROB = 1e-5  # of a token: rounding may put it above 0

# The field with the experts that predicted a token: those, plus one, that the token before it went to, [N, layers with experts,
# experts per token] int16. Zero where they are not known.
ROUTES = "routes"
# The field with the drafts of the pass that begins with a token: how many there were and how many were taken, [N, 2] int16.
DRAFTS = "drafts"
LIMITS = ("length", "turns", "seconds")  # that end an episode: of tokens, of turns of the policy, of time


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Count what engines have done: ``steps`` of decoding, the tokens that these drew, and the seconds that they took.

    ``lent``: turns of episodes that another engine has drawn than the one that plays them. ``preemptions``: responses that lost their
    cache to others.
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
    """Tokens ``start`` to ``stop`` of an episode, by who wrote them: "prompt", "policy" or "environment".

    ``reward`` is what a turn of the policy got by itself, at its last token; the score of the whole episode comes at the end.
    ``text``, without special tokens, is there where an environment has answered.
    """

    writer: str
    start: int
    stop: int
    reward: float = 0.0
    text: str = ""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sampled episode: N tokens, of which the policy sampled those in ``loss_mask``.

    ``logprobs`` are the engine's, at the sampling temperature, and zero where the mask is not. ``versions`` are (first token, policy
    version) in ascending order: each version holds until the next one begins. A policy turn whose ``finish_reason`` is "stop" ends
    with the end-of-sequence token.

    An episode that has branched is several sequences back to back: what they share is repeated, and in ``loss_mask`` once.
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
    score: Score | None = None  # that the environment gave
    num_prefilled: int = 0  # tokens before each turn of the policy, where the engine counts which of them it had cached
    num_cached: int = 0
    # As a completion's; tokens that the policy has not sampled have none
    support: Ragged[NDArray[np.int32]] | None = None
    fields: Mapping[str, Recorded] = field(default_factory=dict)  # those of completions; zeros, or no values, elsewhere
    sequences: tuple[int, ...] = ()  # tokens of each of several sequences; none: it is one
    sequence_images: tuple[tuple[str, ...], ...] = ()  # and the digests of each one's images, where any has some
    # Its turns as a tree with times, as environments/episode_log.py has them; JSON values
    record: Mapping[str, Any] | None = None

    @property
    def sampled_ids(self) -> NDArray[np.int32]:
        """The tokens that the policy sampled."""
        return self.token_ids[self.loss_mask]

    @property
    def sampled_logprobs(self) -> NDArray[np.float32]:
        """Their logprobs."""
        return self.logprobs[self.loss_mask]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def policy_version(self) -> int:
        """Version of the policy that sampled the first of them."""
        return self.versions[0][1]

    @property
    def is_truncated(self) -> bool:
        """Tell whether a limit ended it, and neither the policy nor the environment."""
        return self.finish_reason in LIMITS


FAILURES = ("error", "timeout")  # why a response may have got no score


@dataclass(slots=True)
class Score:
    """Hold what a grader gives a trajectory: the scalar reward, and named parts for the metrics."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # of FAILURES: there is no score, and ``value`` replaces it
    cause: str = field(default="", compare=False)  # of the failure, for people
    answered: bool = field(default=True, compare=False)  # whether the rules that look for an answer have found one


@dataclass(slots=True)
class TrainBatch:
    """The rows of one step: every rank knows the numbers of all B rows, and stores the tokens of the rows that it owns.

    Per-token tensors are flat: the rows that this rank owns, ascending and back to back, N tokens in all; ``x[k]`` belongs to
    ``token_ids[k]``. All tensors are on the host. What is computed does not depend on who owns a row. Optional fields are filled in
    the order of the loop.

    A row is an episode, whose score, weight and place in its group are one, however many sequences it is.
    """

    # Of all rows, on every rank.
    lengths: Tensor  # [B] int64: tokens of a row
    num_sampled: Tensor  # [B] int64: those of them in the loss mask
    scores: Tensor  # [B] float64: raw reward
    truncated: Tensor  # [B] bool: the response was ended by the token limit
    group_ids: Tensor  # [B] int64: which prompt of the step
    owners: Tensor  # [B] int64: the rank that stores a row
    # Of the rows that this rank owns.
    rows: Tensor  # [R] int64, ascending: their numbers
    token_ids: Tensor  # [N] int32
    loss_mask: Tensor  # [N] bool: tokens that the policy sampled and may learn from
    rollout_logprobs: Tensor  # [N] float32, zero outside loss_mask
    # By row, on every rank: tokens of each sequence of a row that is several
    sequences: Mapping[int, Sequence[int]] = field(default_factory=dict)
    images: Mapping[int, Sequence[Sequence[str]]] = field(
        default_factory=dict
    )  # digests of each sequence's, where any has some
    # [B, 2] int64, on every rank: tokens of a row that are computed, and those at its beginning that its group shares; None: all, none
    computed: Tensor | None = None
    # [N] float32: rewards of turns at their last tokens; None where no turn of the step has one
    turn_rewards: Tensor | None = None
    # [N] int32: version of the policy that sampled a token, zero outside loss_mask; None in a synchronous run, whose is policy_version
    versions: Tensor | None = None
    # Ids int32 of the tokens that top-k and top-p had left to draw each sampled token from; no ids: from all. None: all tokens so
    support: Ragged[Tensor] | None = None
    # By name, what else engines have recorded of the tokens, and roles computed: losses and estimators declare which of it they read.
    fields: dict[str, Field] = field(default_factory=dict)
    policy_version: int = 0  # of the weights at the start of the step's updates
    # [N] float32, as all that follow zero outside loss_mask; of all tokens of the vocabulary
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None  # [N] float32: of the distribution that was drawn from, ``support`` alone
    # [N] float32, with a support: log of its probability; with old_logprobs, of the same policy
    log_mass: Tensor | None = None
    old_values: Tensor | None = None  # [N] float32: value of the state before each token
    # [B] float32, on every rank: value of the state after the last token; with bootstrap_truncated
    bootstrap_values: Tensor | None = None
    # [B, K] float64, on every rank: the parts of the scores that algorithm.reward_weights names, in its order
    score_parts: Tensor | None = None
    # [B] float64, on every rank: the score of the greedy response to the row's prompt, where one is drawn
    baselines: Tensor | None = None
    correction: Tensor | None = None  # [N] float32: factors of the token weights of the policy loss
    # The prompts of this batch with responses to others of them; for losses that need them
    mismatched: TrainBatch | None = None
    prompts: list[Prompt] | None = None  # of each group, where responses were sampled
    kl_coef: float = 0.0  # of this step, where the KL is in the loss
    with_entropy: bool = True  # whether the actor's entropy is a metric of this step
    rewards: Tensor | None = None  # [N] float64: after shaping and KL
    advantages: Tensor | None = None  # [N] float32
    returns: Tensor | None = None  # [N] float32

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    def sequences_of(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Return the tokens of each sequence of these rows."""
        lengths = self.lengths.tolist()
        return [self.sequences.get(row) or (lengths[row],) for row in rows]

    def images_of(self, rows: Sequence[int]) -> list[tuple[str, ...]] | None:
        """Return the digests of the images of each sequence of these rows; None where no row has any."""
        held = [self.images.get(row) or [()] * len(self.sequences.get(row) or [0]) for row in rows]
        return [tuple(own) for of_row in held for own in of_row] if self.images else None

    def field_of_tokens(self, name: str) -> Field:
        """Return a field by its name: one of ``fields``, or of the optional ones above.

        Raises:
            KeyError: the batch has no such field.
        """
        value = self.fields[name] if name in self.fields else getattr(self, name) if name in TOKEN_FIELDS else None
        if value is None:
            raise KeyError(name)
        return value


# What a teacher says of tokens, zero outside of the loss mask: [N] float32, and [N, 2, k + 1], see ``parallel/top_tokens.py``.
TEACHER_LOGPROBS, TEACHER_TOP = "teacher_logprobs", "teacher_top_tokens"

# Those of a TrainBatch that are of its tokens.
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
    """Hold what the updates of a step have made of a model. ``metrics`` are for the record only: nothing is decided by their names."""

    model: str  # name of its role
    metrics: dict[str, float]
    grad_norm: float = 0.0  # before clipping, mean over the updates
    is_finite: bool = True  # whether the weights and the optimizer's state hold no NaN and no infinity
    bad_in_a_row: int = 0  # updates up to the last one that were skipped because loss or gradient were not finite


@dataclass(slots=True)
class Microbatch:
    """The input of one forward pass: packed (``token_ids`` [1, N]) or padded ([b, T]).

    ``cu_seqlens`` [num_sequences + 1] int32 is set for packed input only. ``rows`` maps sequence k of the microbatch to a row of
    the TrainBatch. Per-token training inputs are in ``fields`` with the shape of ``token_ids``, or that shape and further dimensions;
    those with any number of values per token are in ``ragged``, with counts of that shape.
    """

    token_ids: Tensor  # [1, N] or [b, T] int64
    position_ids: Tensor  # same shape, int64
    rows: list[int]
    lengths: list[int]
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    fields: dict[str, Tensor] = field(default_factory=dict)
    ragged: dict[str, Ragged[Tensor]] = field(default_factory=dict)
    images: list[tuple[str, ...]] = field(
        default_factory=list
    )  # digests, of each sequence of ``rows``; []: there are none
    # What the model computes in the place of ``token_ids`` if rows share beginnings
    tree: PrefixTree | None = None
    # During a pass: copies on the device, by name, of the fields and of what the model derives from the rest.
    placed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Tokens of a line that the model computes."""
        return self.token_ids.size(1) if self.tree is None else len(self.tree.token_ids)

    def fields_on(self, device: Device) -> dict[str, Tensor]:
        """Return the fields on a device, those of ``placed`` where they are there."""
        return {name: self.placed.get(name, value).to(device) for name, value in self.fields.items()}
