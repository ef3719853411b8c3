"""Declare the names that a configuration may choose, with their properties for validation.

Importing the functions takes seconds, so they register themselves in their modules (``plugins.registering``). An undeclared name is
rejected there, and a test finds a declared name without a function.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from rlhf_mcore.plugins import find_plugins

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator (``algorithms/advantages.py``, ``returns.py``)."""

    compares_group: bool = False  # compares the responses to a prompt, so it needs at least two
    needs_values: bool = False  # needs a critic
    whitens: bool = False  # can whiten over the tokens of a step (algorithm.whiten_advantages)
    discounts: bool = False  # discounts later rewards of a response by algorithm.gamma
    credits_turns: bool = True  # supports algorithm.turn_credit
    needs_greedy: bool = False  # uses the score of a greedy response to each prompt as baseline
    compares_parts: bool = False  # compares the parts of scores that algorithm.reward_weights names, and nothing else
    reads_scores: bool = True  # otherwise the policy learns only from a teacher, and needs no scores


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A loss over pairs of responses (``algorithms/supervised.py``)."""

    needs_reference: bool = True  # compares the policy with a frozen reference
    needs_mismatched: bool = False  # also compares responses to other prompts, to estimate the divergence


@dataclass(frozen=True, slots=True)
class Grader:
    """A rule that grades responses (``rewards/graders.py``)."""

    needs_answer: bool = True  # compares a response with a ground truth
    options: tuple[str, ...] = ()  # keys of a rule that only this grader reads


# Beginnings of the keys that only generating runs read.
_GROUPS = ("rollout.", "bridge.", "reward.", "environment.", "critic.", "reference.", "teacher.")
_GENERATION = (*_GROUPS, "algorithm.advantage", "algorithm.policy_loss")


@dataclass(frozen=True, slots=True)
class RunKind:
    """A kind of run: the keys that it reads, the model that it trains and the directory that it saves.

    Only this module compares values of ``algorithm.kind``.
    """

    name: str  # the value of algorithm.kind
    generates: bool  # learns from responses of engines; false: from responses in the data
    head: str  # head of the trained model: lm | sequence
    starting_heads: tuple[str, ...]  # heads that the model in model.path may have
    saved_as: str  # the model's directory in a checkpoint
    response_keys: tuple[str, ...] = ()  # keys that name the columns of an example's responses
    compares: bool = False  # uses a loss of algorithm.dpo

    @property
    def rows_per_example(self) -> int:
        """Return the sequences of one example: one for each of its responses."""
        return max(len(self.response_keys), 1)

    @property
    def reads_conversations(self) -> bool:
        """Return whether a column of messages can replace the prompt and its only response."""
        return len(self.response_keys) == 1

    def reads(self, key: str) -> bool:
        """Return whether a run of this kind reads a key."""
        if self.compares and key.startswith("reference."):
            return True
        return self.generates or not key.startswith(_GENERATION)


ADVANTAGES = {
    "gae": Estimator(needs_values=True, whitens=True, discounts=True),
    "grpo": Estimator(compares_group=True),
    "rloo": Estimator(compares_group=True),
    "opo": Estimator(compares_group=True, credits_turns=False),
    "gdpo": Estimator(compares_group=True, credits_turns=False, compares_parts=True),
    "remax": Estimator(credits_turns=False, needs_greedy=True),
    "reinforce": Estimator(whitens=True, discounts=True),
    "reinforce_plus_plus": Estimator(whitens=True, discounts=True),
    "reinforce_plus_plus_baseline": Estimator(compares_group=True, whitens=True),
    "distillation": Estimator(reads_scores=False),
}
POLICY_LOSSES = (
    "ppo_clip",
    "gspo",
    "cispo",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "kl_cov",
    "clip_cov",
)
READS_COVARIANCE = ("kl_cov", "clip_cov")  # read the covariance of old logprobs and advantages, before the update
PREFERENCE_LOSSES = {
    "dpo": PreferenceLoss(),
    "ipo": PreferenceLoss(),
    "simpo": PreferenceLoss(needs_reference=False),
    "orpo": PreferenceLoss(needs_reference=False),
    "kto": PreferenceLoss(needs_mismatched=True),
}
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_IN_LOSS = ("k2", "k3")  # the expected gradient of k1 is 0
GRADERS = {
    "final_number": Grader(),
    "boxed": Grader(),
    "answer_line": Grader(),
    "math": Grader(),
    "exact_match": Grader(),
    "multiple_choice": Grader(),
    "format": Grader(needs_answer=False),
    "regex": Grader(options=("pattern",)),  # with a pattern it needs no answer
    "length": Grader(needs_answer=False, options=("min_chars", "max_chars", "margin_chars")),
    "language": Grader(needs_answer=False, options=("scripts",)),
    "code": Grader(options=("partial", "max_tests", "test_s", "total_s")),
}
# The package that each tracker imports; ``pip install rlhf_mcore[<tracker>]`` installs it.
TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
    "swanlab": "swanlab",
}
_CORE_TRACKERS = {"tensorboard": "TensorboardTracker", "wandb": "WandbTracker", "mlflow": "MlflowTracker"}

AGENT = "agent"
ROLLOUT = "rollout"  # the environment that runs rollout.function
CONTRIB_ENVIRONMENTS = ("gymnasium", "openenv", "verifiers")  # plug-ins: contrib/environments
ASKING = (AGENT, "verifiers")  # environments that request turns from an endpoint
ENVIRONMENTS = ("tools", *CONTRIB_ENVIRONMENTS, AGENT)  # environments that need no file of the user

_KL_IN_REWARD = {"kl.estimator": "k1", "kl.placement": "reward"}


def _clip(low: float, high: float) -> dict[str, Any]:
    return {"clip_low": low, "clip_high": high}


# What algorithm.preset sets in the group algorithm: the choices of each algorithm's paper.
PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3-4: group-normalised advantage, mean per sequence, k3 KL
    # in the loss.
    "grpo": {"advantage": "grpo", "normalize_std": True, "loss_aggregation": "sequence"},
    # Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): no std, constant length.
    "dr_grpo": {"advantage": "grpo", "normalize_std": False, "loss_aggregation": "constant"},
    # Schulman et al. 2017 (arXiv 1707.06347) with GAE (arXiv 1506.02438), as Ouyang et al. 2022, InstructGPT (arXiv 2203.02155)
    # use it: KL in the reward.
    "ppo": {
        "advantage": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": True,
        "loss_aggregation": "token",
        **_KL_IN_REWARD,
    },
    # Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740): the log-likelihood of a response is a sum over its tokens.
    "rloo": {"advantage": "rloo", "loss_aggregation": "constant", **_KL_IN_REWARD},
    # Li et al. 2023 (arXiv 2310.10505): the log-likelihood of a response is a sum over its tokens, the KL part of the reward.
    "remax": {"advantage": "remax", "loss_aggregation": "constant", **_KL_IN_REWARD},
    # Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "loss_aggregation": "token", **_KL_IN_REWARD},
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "loss_aggregation": "token",
        "kl.estimator": "k2",
        "kl.placement": "loss",
    },
    # Zheng et al. 2025 (arXiv 2507.18071), clip ranges of section 5.1.
    "gspo": {"advantage": "grpo", "policy_loss": "gspo", "loss_aggregation": "sequence", **_clip(3e-4, 4e-4)},
    # MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), eq. 4-5: no lower bound. The paper does not give its upper one.
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "loss_aggregation": "token", **_clip(1.0, 4.0)},
    # Zhao et al. 2025 (arXiv 2507.20673): clip range of section 4, e^-0.4 to e^0.4.
    "gmpo": {"advantage": "grpo", "policy_loss": "gmpo", "loss_aggregation": "sequence", **_clip(0.4, 0.4)},
    # Gao et al. 2025 (arXiv 2511.20347), eq. 5: the mean of each response's mean.
    "sapo": {"advantage": "grpo", "policy_loss": "sapo", "loss_aggregation": "sequence"},
    # Qi et al. 2026 (arXiv 2602.04879), with the thresholds and the constant divisor of the authors' scripts.
    "dppo": {
        "advantage": "grpo",
        "normalize_std": False,
        "policy_loss": "dppo_tv",
        "loss_aggregation": "constant",
        **_clip(0.15, 0.15),
    },
    # Cui et al. 2025 (arXiv 2505.22617), with the numbers of the authors' scripts for 7B models.
    "kl_cov": {"advantage": "grpo", "policy_loss": "kl_cov", "loss_aggregation": "token", "covariance.share": 2e-3},
    "clip_cov": {"advantage": "grpo", "policy_loss": "clip_cov", "loss_aggregation": "token"},
    # Hao et al. 2025 (arXiv 2505.23585), exactly on policy.
    "opo": {"advantage": "opo", "loss_aggregation": "token"},
    # Liu et al. 2026 (arXiv 2601.05242); algorithm.reward_weights names the parts.
    "gdpo": {"advantage": "gdpo", "normalize_std": True, "loss_aggregation": "sequence"},
    # Yu et al. 2025, DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping.
    "dapo": {
        "advantage": "grpo",
        "loss_aggregation": "token",
        **_clip(0.2, 0.28),
        "dynamic_sampling.enabled": True,
        "overlong.enabled": True,
    },
    # Lu and Thinking Machines Lab 2025, On-Policy Distillation: the reverse KL to a teacher (Agarwal et al. 2023, arXiv 2306.13649;
    # Gu et al. 2023, arXiv 2306.08543) at each sampled token is its advantage.
    "distillation": {"advantage": "distillation", "loss_aggregation": "token"},
    # Not reinforcement learning: the likelihood of given responses, and Bradley and Terry 1952 over pairs of them.
    "sft": {"kind": "sft", "loss_aggregation": "token"},
    "reward_model": {"kind": "reward_model"},
    # Policies that learn from such pairs. Rafailov et al. 2023 (arXiv 2305.18290), appendix B.
    "dpo": {"kind": "dpo", "dpo.loss": "dpo", "dpo.beta": 0.1},
    # Azar et al. 2023 (arXiv 2310.12036). The paper gives no number for language models.
    "ipo": {"kind": "dpo", "dpo.loss": "ipo", "dpo.beta": 0.1},
    # Meng et al. 2024 (arXiv 2405.14734), with the authors' numbers for Llama-3-Base.
    "simpo": {"kind": "dpo", "dpo.loss": "simpo", "dpo.beta": 2.0, "dpo.gamma": 1.0},
    # Hong et al. 2024 (arXiv 2403.07691), with the lambda of Mistral-ORPO.
    "orpo": {"kind": "dpo", "dpo.loss": "orpo", "dpo.beta": 0.1},
    # Ethayarajh et al. 2024 (arXiv 2402.01306).
    "kto": {"kind": "dpo", "dpo.loss": "kto", "dpo.beta": 0.1},
}

_PAIR = ("data.chosen_key", "data.rejected_key")
RL = RunKind("rl", True, "lm", ("lm",), "actor")
SFT = RunKind("sft", False, "lm", ("lm",), "actor", ("data.response_key",))
REWARD_MODEL = RunKind("reward_model", False, "sequence", ("lm", "sequence"), "reward", _PAIR)
DPO = RunKind("dpo", False, "lm", ("lm",), "actor", _PAIR, compares=True)
RUN_KINDS = {kind.name: kind for kind in (RL, SFT, REWARD_MODEL, DPO)}

MTP_TRAINED = ("train", "joint")  # values of actor.mtp.mode with which the layers are trained


def find_trackers() -> dict[str, EntryPoint]:
    """Return the entry points of all installed trackers, of the core and of plug-ins.

    Each is a class whose argument is an ``observability.trackers.TrackedRun``.
    """
    group, folder = "rlhf_mcore.trackers", "rlhf_mcore.observability.services"
    core = {name: EntryPoint(name, f"{folder}.{name}:{made}", group) for name, made in _CORE_TRACKERS.items()}
    return {**find_plugins("trackers"), **core}


def run_kind(cfg: Config) -> RunKind:
    """Return the kind of a configuration's run. An unknown name counts as "rl"; validation rejects it."""
    return RUN_KINDS.get(cfg.algorithm.kind, RL)
