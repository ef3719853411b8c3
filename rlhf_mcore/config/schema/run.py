"""Groups of a run: data, the shape of a step, checkpoints, evaluation, logging and alarms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, Optional, Union

from annotated_types import Ge, Le

from rlhf_mcore.config.schema.group import (
    Choices,
    Group,
    Item,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    TopK,
    group,
    is_address,
    key,
)

BYTES_PER_ROW = 4096  # bytes of data.max_bytes per allowed row
MAX_WORLD = 2**17  # processes, because plans list all of them; the largest published runs have a tenth of it
AUTO, NEVER = "auto", "never"  # values of checkpoint.resume; checkpoint.save_by also allows "auto"
PRIVATE, FILE_MODES = "private", ("0600", "0640", "0644", "0660", "0664")  # values of checkpoint.mode
SLURM_END = "SLURM_JOB_END_TIME"


Columns = Union[str, list[Optional[str]]]  # one column for all files, or one per file
Action = Literal["warn", "save", "stop", "webhook", "command"]  # performed by an alarm


def _is_evaluation(metric: str) -> bool:
    return re.fullmatch(r"-?evaluate/\S+", metric) is not None


def _is_port(text: str) -> bool:
    return is_address(text if ":" in text else f"loopback:{text}")


def octal_mode(text: str) -> int | None:
    """Return the file mode of a text, or None if it is not in ``FILE_MODES``.

    YAML reads 0640 without quotes as the number 416, which is accepted too.
    """
    return next((int(mode, 8) for mode in FILE_MODES if text in (mode, str(int(mode, 8)))), None)


def time_left(save_by: str | None, now: float, environment: Mapping[str, str]) -> float | None:
    """Return the seconds from ``now`` until the job's time limit, or None if it is unknown.

    Args:
        save_by: the key's value: minutes from now, a time in ISO 8601 (local unless it names a zone), ``auto`` or None.
        now: the wall clock when the job was started, in seconds since the epoch.
        environment: the job's environment variables; ``auto`` reads SLURM's end of the job from them.

    Raises:
        ValueError: ``save_by`` is not one of these values.
    """
    if save_by is None:
        return None
    if save_by == AUTO:
        end = environment.get(SLURM_END, "")
        return float(end) - now if end.isdecimal() else None
    if re.fullmatch(r"\d+(\.\d+)?", save_by):
        return 60 * float(save_by)
    return datetime.fromisoformat(save_by).timestamp() - now


def _is_time(text: str) -> bool:
    try:
        return time_left(text, 0.0, {}) is not None
    except ValueError:
        return False


JobLimit = Annotated[str, Choices((AUTO,), _is_time, "minutes or a time like 2026-01-01T00:00")]
FileMode = Annotated[str, Choices((PRIVATE, *FILE_MODES), lambda text: octal_mode(text) is not None)]
Port = Annotated[str, Choices(allows=_is_port, form="a port, or host:port")]
EvaluationMetric = Annotated[
    str, Choices(allows=_is_evaluation, form="an evaluation metric, such as evaluate/accuracy")
]


class DataConfig(Group):
    """Prompts, from parquet or jsonl files."""

    train: list[str] = key([], "parquet or jsonl files, or Hub ids of data sets, `ORG/NAME:split`", is_fixed=True)
    eval: list[str] = key([], "held-out files for `evaluate`")
    prompt_key: Columns = key("prompt", "column of the prompt: a string, or a list of `{role, content}`", is_fixed=True)
    """A list, such as `[question, prompt]`, names one column per file of `data.train`. `column.field` names a field of
    a column of objects."""
    answer_key: Optional[Columns] = key(None, "column of the answer, or one column per file", is_fixed=True)
    """`null`: `reward_model.ground_truth`, else `answer`."""
    eval_prompt_key: Optional[Columns] = key(None, "as `prompt_key`, for `data.eval`; null: `data.prompt_key`")
    eval_answer_key: Optional[Columns] = key(None, "as `answer_key`, for `data.eval`; null: `data.answer_key`")
    response_key: str = key("response", "`sft`: column of the response", is_fixed=True)
    chosen_key: str = key("chosen", "`reward_model`, `dpo`: column of the better response", is_fixed=True)
    rejected_key: str = key("rejected", "`reward_model`, `dpo`: column of the worse response", is_fixed=True)
    apply_chat_template: Literal["auto", "true", "false"] = key("auto", "render string prompts as one user message")
    """`auto`: if the tokenizer has a chat template and the string contains none of its special tokens. `false`: strings
    are used unchanged. Lists of messages always use the template. See [data](guide/data.md#chat-templates)."""
    transform: Optional[str] = key(None, "`path/to/file.py:name`, called with every row as a dict", is_fixed=True)
    """It returns the row to use, or None to skip it."""
    max_prompt_tokens: PositiveInt = key(512, "maximum length of a prompt in tokens", is_fixed=True)
    max_tokens: Optional[Annotated[int, Ge(2)]] = key(None, "maximum tokens of prompt and response together")
    """`sft`, `reward_model`, `dpo`: instead of `max_prompt_tokens`. `null`: the tokens that fit into a microbatch."""
    overlong_prompts: Literal["error", "drop"] = key("error", "handling of longer prompts", is_fixed=True)
    shuffle: bool = key(True, "shuffle the prompts in every epoch", is_fixed=True)
    weights: Optional[list[PositiveFloat]] = key(None, "share of each file of `data.train`, in any unit")
    """For example `[3, 1]`. With weights each file has separate epochs. `null`: all rows form one data set."""
    image_key: Optional[str] = key("images", "column of the images of a prompt; null: ignore images", is_fixed=True)
    """Bytes, paths relative to the file, or objects with `bytes` and `path`. Only for models that read images. See
    [images](guide/images.md#data)."""
    image_pixels: Optional[list[int]] = key(None, "`[minimum, maximum]` pixels of a scaled image", is_fixed=True)
    """`null`: the limits in the model's `preprocessor_config.json`."""
    max_images: PositiveInt = key(16, "maximum number of images per prompt")
    max_image_pixels: PositiveInt = key(33554432, "maximum number of pixels of an image, checked before decoding")
    max_row_bytes: PositiveInt = key(16777216, "maximum bytes of a jsonl line, a parquet cell or an image")
    """Longer values are rejected before they are read."""
    max_bytes: PositiveInt = key(8589934592, "maximum bytes of the rows of a file, which every rank keeps in memory")
    """`data.train` and `data.eval` may each have one row per 4096 of these bytes."""

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of ``train``, and of ``eval``."""
        return max(self.max_bytes // BYTES_PER_ROW, 1)


class ProfileConfig(Group):
    """Set which steps are profiled."""

    steps: list[int] = key([], "steps that torch's profiler records, including the phases of the run")
    """All ranks share one timeline per sequence of consecutive steps, `profile/steps-<first>-<last>.json.gz` in the run
    directory; open it in ui.perfetto.dev. It does not include disaggregated engines."""


class TrainerConfig(Group):
    """Size and shape of a training step."""

    num_steps: PositiveInt = key(100, "number of steps; each step generates, scores and trains")
    num_epochs: Optional[PositiveFloat] = key(None, "passes over the rows of `data.train`, instead of `num_steps`")
    """`num_steps` is then `num_epochs` · rows / `prompts_per_step`, rounded up, including rows that `data.transform` or
    `data.overlong_prompts: drop` skips. If a file sets one key and the command line the other, the later value wins.
    If Python sets both, `num_epochs` is used."""
    prompts_per_step: PositiveInt = key(32, "prompts per step, over all ranks")
    """With `sft`, `reward_model` and `dpo`: examples or pairs per update."""
    minibatch_size: Optional[PositiveInt] = key(None, "prompts per optimizer update; null: `prompts_per_step`")
    ppo_epochs: PositiveInt = key(1, "passes over the responses of a step")
    max_tokens_per_microbatch: PositiveInt = key(8192, "maximum number of tokens of a forward pass per rank")
    """It must fit the longest prompt and response together."""
    forward_tokens: Optional[PositiveInt] = key(None, "maximum tokens per rank of a pass without gradients")
    """Such a pass stores no activations. At least `max_tokens_per_microbatch`; `null`: twice as much."""
    logit_chunk_tokens: Optional[PositiveInt] = key(None, "maximum tokens whose logits a rank computes at a time")
    """If a microbatch has more tokens, logits are computed in chunks and recomputed in the backward pass. `null`: the
    number of tokens whose fp32 logits need 512 MiB."""
    packing: bool = key(True, "concatenate sequences without padding; false: pad microbatches of similar lengths")
    share_prefixes: bool = key(True, "compute common prefixes once: prompts of a group, pairs, branches of an episode")
    """Prefixes shorter than 32 tokens are not shared. `packing: false` ignores this key."""
    world_size: Optional[Annotated[int, Ge(1), Le(MAX_WORLD)]] = key(None, "processes that `rlhf-mcore train` starts")
    """`null`: the smallest number that the layouts divide. The run is rejected if the processes do not fit into the
    machine's free memory, at 200 MiB each."""
    threads_per_rank: PositiveInt = key(
        1, "CPU threads per process, for passes on a CPU and optimizer steps on the host"
    )
    bind_numa: Literal["auto", "off"] = key("auto", "CUDA: CPU cores of ranks, and of engines under Ray")
    """`auto`: cores of the GPU's NUMA node, if the machine has several nodes. `off`: all cores."""
    max_staleness: Annotated[int, Ge(0), Le(64)] = key(0, "`disaggregated`: maximum staleness of a token in versions")
    """The versions between sampling a token and learning from it. 0: trainer and engines wait for each other in every
    step. 1: engines sample for the next step while the trainer learns. See [asynchronous training](scale/async.md)."""
    profile: ProfileConfig = group(ProfileConfig, "profile steps on all ranks")
    collective_timeout_s: PositiveInt = key(1800, "seconds that a rank waits for other ranks in a collective")
    """During sampling: seconds without a new token."""
    watchdog_s: NonNegativeInt = key(3600, "seconds without progress after which the job ends; 0: off")
    """Progress is a new phase or a sampled token. Ranks print their stacks."""
    max_restarts: NonNegativeInt = key(0, "maximum number of restarts of a failed run from its last checkpoint")


class CheckpointConfig(Group):
    """Set when checkpoints are saved, which checkpoints are kept, and how a run resumes."""

    save_steps: NonNegativeInt = key(20, "interval between saves in steps; 0: off")
    save_epochs: NonNegativeFloat = key(0.0, "interval between saves in epochs of `data.train`, such as 0.5; 0: off")
    save_minutes: NonNegativeFloat = key(30.0, "minutes since the last save after which a step saves; 0: off")
    metric_for_best_model: Optional[EvaluationMetric] = key(None, "metric of which each improvement saves a checkpoint")
    """For example `evaluate/accuracy`, or `-evaluate/loss` if smaller is better. The link `best` points to the best
    checkpoint."""
    load_best_model_at_end: bool = key(False, "end with the best checkpoint", only_with=".metric_for_best_model")
    """After the last step is saved, the best checkpoint is loaded and evaluated (`final/*` in the metrics)."""
    save_by: Optional[JobLimit] = key("auto", "time limit of the job: minutes from the start, a time, `auto`, or null")
    """A time is written as `2026-01-01T00:00`. `auto` uses `SLURM_JOB_END_TIME` if it is set. If the next step and a
    save would not fit, the run saves and ends with exit code 75."""
    save_total_limit: Optional[PositiveInt] = key(2, "newest checkpoints to keep, besides the best one; null: all")
    keep_every: Optional[PositiveInt] = key(None, "also keep checkpoints whose step is a multiple of this number")
    keep: list[int] = key([], "steps that are saved and whose checkpoints are kept")
    """A link in `RUN/pins` keeps any other checkpoint."""
    mode: Optional[FileMode] = key(None, "permissions of checkpoint files; null: set by the umask")
    """`private`: 0600 for optimizer, state and configuration (also the run's `config.yaml`). Otherwise the mode of
    every file."""
    archive: bool = key(False, "pack dropped checkpoints in the background", only_with=".save_total_limit")
    """Into `archive/checkpoint-<step>.tar.zst`."""
    async_save: bool = key(False, "copy to host memory, continue training and write in the background")
    deltas: NonNegativeInt = key(0, "number of saves after each full save that store compressed differences to it")
    resume: str = key("auto", "`auto` (newest checkpoint of the run directory), `never`, or the path of a checkpoint")
    """`never` starts a new run; the directory must not contain checkpoints."""
    changed_inputs: Literal["refuse", "warn"] = key("refuse", "handling of inputs that differ from the checkpoint's")
    """Inputs are data, user code, tokenizer, chat template and model. `warn`: warn and continue."""
    on_damaged: Literal["fallback", "error"] = key("fallback", "with `resume: auto`, after a damaged newest checkpoint")
    """`fallback`: use the checkpoint before it."""
    on_failed_save: Literal["stop", "continue"] = key("stop", "handling of a checkpoint that cannot be written")
    """`continue`: continue, and try again at the next save."""
    verify: bool = key(True, "check the hash of every file before loading a checkpoint")


class EvaluateConfig(Group):
    """Evaluation on held-out prompts: before, during and after training, and by ``rlhf-mcore evaluate``."""

    every: NonNegativeInt = key(0, "interval in steps between evaluations; 0: only before and after training")
    max_prompts: Optional[PositiveInt] = key(None, "maximum number of held-out prompts; null: all")
    samples: PositiveInt = key(1, "responses per prompt; 2 or more also give pass@k and majority@k")
    """Values above 1 require `evaluate.temperature` above 0."""
    temperature: NonNegativeFloat = key(0.0, "as `rollout.sampling.temperature`; 0: greedy")
    top_p: Share = key(1.0, "as `rollout.sampling.top_p`")
    top_k: TopK = key(-1, "as `rollout.sampling.top_k`")
    max_new_tokens: Optional[PositiveInt] = key(None, "maximum length of a response in tokens")
    """`null`: `rollout.sampling.max_new_tokens`."""
    checkpoint: Optional[str] = key(None, "`rlhf-mcore evaluate`: the evaluated model")
    """A Hugging Face directory, FSDP or Megatron shards, a checkpoint (its actor) or a run directory (its latest
    checkpoint). `null`: the latest checkpoint of this configuration's run."""
    compare: Optional[str] = key(None, "`rlhf-mcore evaluate`: baseline model, evaluated on the same prompts")
    """An improvement over the baseline is positive."""
    output_dir: Optional[str] = key(None, "`rlhf-mcore evaluate`: directory of the results")
    """`null`: `evaluations/<checkpoint>-<settings>` next to the checkpoint."""


class LoggingConfig(Group):
    """Logging of a run, in addition to ``metrics.jsonl``."""

    console: Literal["auto", "rich", "plain", "json", "off"] = key("auto", "output on the terminal")
    """`auto`: rich on a terminal, else plain. `rich`: live display. `plain`: one line per step. `json`: one object per
    line, as `--json`. `off`: only errors, as `--quiet`."""
    every: PositiveInt = key(1, "`plain`, `json`: interval in steps between printed steps, from the first step on")
    """Steps with an evaluation and the last step are always printed. metrics.jsonl and trackers receive every step."""
    trackers: list[str] = key(["tensorboard"], "trackers that also receive the metrics")
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, `comet`, `swanlab`, or a plug-in's. A tracker can neither stop nor
    delay a run. See [metrics](operations/monitoring.md#trackers)."""
    offline: bool = key(False, "`wandb`, `comet` and `swanlab` write only to the run directory, for a later upload")
    prometheus: Optional[Port] = key(None, "port on the loopback, or host:port, on which Prometheus reads metrics")
    """The first rank's machine serves `GET /metrics`, including engine states. See
    [Prometheus](operations/monitoring.md#prometheus)."""
    peak_tflops: Optional[PositiveFloat] = key(None, "peak performance of a device in TFLOP/s, for the MFU")
    """`null`: dense bf16 peak by the device's name (no MFU for unknown devices and CPUs)."""
    entropy_every: NonNegativeInt = key(10, "interval in steps between values of `actor/entropy`; 0: never")
    """With `algorithm.entropy_coef` every step computes it."""
    rollouts_every: NonNegativeInt = key(1, "interval in steps between files `rollouts/step-*.jsonl`; 0: never")
    rollout_tokens: Annotated[int, Ge(0), Le(4096)] = key(0, "responses per rollout file whose tokens are written too")
    """`rollouts/tokens-*.jsonl` contains advantages and logprob differences, about 30 bytes per token. The
    [report](operations/report.md) colours responses by these values."""
    episode_traces: Annotated[int, Ge(0), Le(4096)] = key(0, "episodes per rollout file that are traced, as OTLP JSON")
    """Only episodes with several turns, in `rollouts/traces-*/` ([report](operations/report.md#traces))."""


def wanted_trackers(cfg: LoggingConfig) -> list[str]:
    """Return the trackers of a run, each once."""
    return list(dict.fromkeys(cfg.trackers))


class AlarmRuleConfig(Item):
    """A bound on a metric. It replaces the default rules of that metric."""

    metric: str = key("???", "name of the metric, as in [metrics](reference/metrics.md)")
    above: Optional[float] = key(None, "raise an alarm if the value is above this bound; null: no upper bound")
    below: Optional[float] = key(None, "raise an alarm if the value is below this bound; null: no lower bound")
    measure: Literal["value", "mean", "growth", "spike"] = key("value", "value that is compared with the bounds")
    """`value`: the value of the step. `mean`: mean of the last tenth of the steps. `growth`: mean of the last tenth
    divided by the mean of the first tenth. `spike`: the value of the step divided by the median."""
    steps: PositiveInt = key(1, "number of consecutive reported steps that raise the alarm")
    actions: Optional[list[Action]] = key(None, "actions of the alarm; null: `alarms.actions`")


class AlarmsConfig(Group):
    """Rules on metrics, checked after every step."""

    defaults: bool = key(True, "enable the built-in rules")
    """They are the [health rules](reference/health-rules.md). See [alarms](operations/monitoring.md#alarms)."""
    actions: list[Action] = key(["warn"], "actions of alarms without their own")
    """Every action also prints the remedy, as `warn` does. `save` saves a checkpoint after the step; `stop` saves one
    and ends the run with exit code 76, after which nothing restarts it automatically."""
    rules: list[AlarmRuleConfig] = key([], "your rules")
    webhook: Optional[str] = key(None, "URL for the action `webhook`, such as `${oc.env:ALARM_URL}`")
    """The alarm is posted as JSON with a `text`."""
    command: list[str] = key([], "program and arguments for the action `command`")
    """It reads the same JSON from standard input and is killed after 30 s."""
