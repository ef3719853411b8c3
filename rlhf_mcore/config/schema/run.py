"""Groups of a run: data, the shape of a step, checkpoints, evaluation, logging and alarms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Optional, Union

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.group import Group, Item
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, SHARE, Range, group, key, one_of

BYTES_PER_ROW = 4096  # bytes of data.max_bytes per allowed row
MAX_WORLD = 2**17  # processes, because plans list all of them; the largest published runs have a tenth of it
AUTO, NEVER = "auto", "never"  # values of checkpoint.resume; checkpoint.save_by also allows "auto"
PRIVATE, FILE_MODES = "private", ("0600", "0640", "0644", "0660", "0664")  # values of checkpoint.mode
ACTIONS = ("warn", "save", "stop", "webhook", "command")  # actions of an alarm
SLURM_END = "SLURM_JOB_END_TIME"
_MINUTES = re.compile(r"\d+(\.\d+)?")


Columns = Union[str, list[Optional[str]]]  # one column for all files, or one per file


class DataConfig(Group):
    """Prompts, from parquet or jsonl files."""

    train: list[str] = key([], "parquet or jsonl files, or Hub ids of data sets, `ORG/NAME:split`", is_fixed=True)
    eval: list[str] = key([], "held-out files for `evaluate`")
    prompt_key: Columns = key(
        "prompt",
        "column of the prompt: a string, or a list of `{role, content}`",
        more="A list, such as `[question, prompt]`, names one column per file of `data.train`.",
        is_fixed=True,
    )
    answer_key: Optional[Columns] = key(
        None,
        "column of the answer, or a list with one column per file of `data.train`",
        null="`reward_model.ground_truth`, else `answer`",
        more="`column.field` names a field of a column of objects.",
        is_fixed=True,
    )
    eval_prompt_key: Optional[Columns] = key(
        None,
        "column of the prompt in the files of `data.eval`, or a list with one column per file",
        null="`data.prompt_key`",
    )
    eval_answer_key: Optional[Columns] = key(
        None,
        "column of the answer in the files of `data.eval`, or a list with one column per file",
        null="`data.answer_key`",
    )
    response_key: str = key("response", "`sft`: column of the response", is_fixed=True)
    chosen_key: str = key("chosen", "`reward_model`, `dpo`: column of the better response", is_fixed=True)
    rejected_key: str = key("rejected", "`reward_model`, `dpo`: column of the worse response", is_fixed=True)
    apply_chat_template: str = key(
        "auto",
        "render string prompts as one user message with the tokenizer's chat template",
        one_of(
            auto="if the tokenizer has a template and the string contains none of its special tokens",
            true="always",
            false="never; strings are used unchanged",
        ),
        more="With `true` a tokenizer without a template is rejected. Lists of messages always use the template. See "
        "[data](guide/data.md#chat-templates).",
    )
    transform: Optional[str] = key(
        None,
        "`path/to/file.py:name`, called with every row as a dict; returns the row to use, or None to skip it",
        null="none",
        is_fixed=True,
    )
    max_prompt_tokens: int = key(512, "maximum length of a prompt in tokens", AT_LEAST_1, is_fixed=True)
    max_tokens: Optional[int] = key(
        None,
        "`sft`, `reward_model`, `dpo`: maximum tokens of prompt and response together, instead of `max_prompt_tokens`",
        Range(2),  # a prompt and a response
        null="the tokens that fit into a microbatch",
    )
    overlong_prompts: str = key("error", "handling of longer prompts", one_of("error", "drop"), is_fixed=True)
    shuffle: bool = key(True, "shuffle the prompts in every epoch", is_fixed=True)
    weights: Optional[list[float]] = key(
        None,
        "share of each file of `data.train` in training, such as `[3, 1]`, in any unit",
        null="all rows form one data set",
        more="With weights each file has separate epochs.",
    )
    image_key: Optional[str] = key(
        "images",
        "column with the images of a prompt: bytes, paths relative to the file, or objects with `bytes` and `path`",
        null="images are ignored",
        more="`<image>` in a prompt marks the position of an image. Only for models that read images. See "
        "[images](guide/images.md).",
        is_fixed=True,
    )
    image_pixels: Optional[list[int]] = key(
        None,
        "`[minimum, maximum]` number of pixels to which an image is scaled",
        null="the limits in the model's `preprocessor_config.json`",
        is_fixed=True,
    )
    max_images: int = key(16, "maximum number of images per prompt", AT_LEAST_1)
    max_image_pixels: int = key(33554432, "maximum number of pixels of an image, checked before decoding", AT_LEAST_1)
    max_row_bytes: int = key(
        16777216,
        "maximum bytes of a jsonl line, a parquet cell or an image",
        AT_LEAST_1,
        more="Longer values are rejected before they are read.",
    )
    max_bytes: int = key(
        8589934592,
        "maximum bytes of the rows of a file; `data.train` and `data.eval` may each have one row per 4096 of these bytes",
        AT_LEAST_1,
        more="Every rank keeps the rows in memory.",
    )

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of ``train``, and of ``eval``."""
        return max(self.max_bytes // BYTES_PER_ROW, 1)


class ProfileConfig(Group):
    """Set which steps are profiled."""

    steps: list[int] = key(
        [],
        "steps that torch's profiler records, including the phases of the run",
        more="All ranks share one timeline per sequence of consecutive steps, `profile/steps-<first>-<last>.json.gz` in the "
        "run directory; open it in ui.perfetto.dev. It does not include disaggregated engines. On CUDA, phases are "
        "always NVTX ranges too.",
    )


class TrainerConfig(Group):
    """Size and shape of a training step."""

    num_steps: int = key(100, "number of steps; each step generates, scores and trains", AT_LEAST_1)
    num_epochs: Optional[float] = key(
        None,
        "passes over the rows of `data.train`, instead of `num_steps`",
        ABOVE_0,
        null="`num_steps` sets the length of the run",
        more="`num_steps` is then `num_epochs` · rows / `prompts_per_step`, rounded up. Rows that `data.transform` or "
        "`data.overlong_prompts: drop` skips are counted. If a file sets one key and the command line the other, the "
        "later value wins; both in one place are rejected. If Python sets both, `num_epochs` is used.",
    )
    prompts_per_step: int = key(
        32,
        "prompts per step, over all ranks",
        AT_LEAST_1,
        more="With `sft`, `reward_model` and `dpo`: examples or pairs per update.",
    )
    minibatch_size: Optional[int] = key(None, "prompts per optimizer update", AT_LEAST_1, null="`prompts_per_step`")
    ppo_epochs: int = key(1, "passes over the responses of a step", AT_LEAST_1)
    max_tokens_per_microbatch: int = key(
        8192,
        "maximum number of tokens of a forward pass per rank",
        AT_LEAST_1,
        more="It must fit the longest prompt and response together.",
    )
    forward_tokens: Optional[int] = key(
        None,
        "maximum number of tokens per rank of a pass without gradients, which stores no activations",
        AT_LEAST_1,
        null="twice `max_tokens_per_microbatch`",
        more="It must be at least `max_tokens_per_microbatch`.",
    )
    logit_chunk_tokens: Optional[int] = key(
        None,
        "maximum number of tokens whose logits a rank computes at a time",
        AT_LEAST_1,
        null="the number of tokens whose fp32 logits need 512 MiB",
        more="If a microbatch has more tokens, logits are computed in chunks and recomputed in the backward pass. Otherwise "
        "they are kept.",
    )
    packing: bool = key(True, "concatenate sequences without padding; false: pad microbatches of similar lengths")
    share_prefixes: bool = key(
        True,
        "compute common prefixes of sequences once: prompts of a group, pairs, branches of an episode",
        more="Prefixes shorter than 32 tokens are not shared. `packing: false` ignores this key.",
    )
    world_size: Optional[int] = key(
        None,
        "number of processes that `rlhf-mcore train` starts",
        Range(1, MAX_WORLD),
        null="the smallest number that the layouts divide",
        more="The run is rejected if the processes do not fit into the machine's free memory, at 200 MiB each.",
    )
    threads_per_rank: int = key(1, "CPU: compute threads per process", AT_LEAST_1)
    bind_numa: str = key(
        "auto",
        "CUDA: CPU cores of ranks, and of engines under Ray",
        one_of(auto="cores of the GPU's NUMA node, if the machine has several nodes", off="all cores"),
    )
    max_staleness: int = key(
        0,
        "`rollout.placement: disaggregated`: maximum staleness of a sampled token, in policy versions",
        Range(0, 64),
        more="Staleness is the distance between the version that sampled a token and the version that learns from it. 0: "
        "trainer and engines wait for each other in every step. 1: engines sample for the next step while the trainer "
        "learns. See [asynchronous training](scale/async.md).",
    )
    profile: ProfileConfig = group(ProfileConfig, "profile steps on all ranks")
    collective_timeout_s: int = key(
        1800,
        "seconds that a rank waits for other ranks in a collective; during sampling, seconds without a new token",
        AT_LEAST_1,
    )
    watchdog_s: int = key(
        3600,
        "seconds without a new phase or sampled token after which ranks print their stacks and the job ends; 0: off",
        AT_LEAST_0,
    )
    max_restarts: int = key(0, "maximum number of restarts of a failed run from its last checkpoint", AT_LEAST_0)


class CheckpointConfig(Group):
    """Set when checkpoints are saved, which checkpoints are kept, and how a run resumes."""

    save_steps: int = key(20, "interval between saves in steps; 0: off", AT_LEAST_0)
    save_epochs: float = key(
        0.0, "interval in epochs of `data.train` between saves, fractions allowed; 0: off", AT_LEAST_0
    )
    save_minutes: float = key(30.0, "minutes since the last save after which a step saves; 0: off", AT_LEAST_0)
    metric_for_best_model: Optional[str] = key(
        None,
        "evaluation metric, such as `evaluate/accuracy`, or `-evaluate/loss` if smaller is better; each improvement "
        "saves a checkpoint",
        null="none",
        more="The link `best` points to the best checkpoint.",
    )
    load_best_model_at_end: bool = key(
        False,
        "end with the best checkpoint instead of the last step",
        more="After the last step is saved, the best checkpoint is loaded and evaluated (`final/*` in the metrics).",
    )
    save_by: Optional[str] = key(
        "auto",
        "time limit of the job: minutes from the start, a time such as `2026-01-01T00:00`, or `auto` (SLURM's limit)",
        null="no limit",
        more="`auto` uses `SLURM_JOB_END_TIME` if it is set. If the next step and a save would not fit, the run saves and "
        "ends with exit code 75.",
    )
    save_total_limit: Optional[int] = key(
        2, "number of newest checkpoints to keep, in addition to the best one", AT_LEAST_1, null="all"
    )
    keep_every: Optional[int] = key(
        None, "also keep checkpoints whose step is a multiple of this number", AT_LEAST_1, null="none"
    )
    keep: list[int] = key(
        [],
        "steps that are saved and whose checkpoints are kept",
        more="A link in `RUN/pins` keeps any other checkpoint.",
    )
    mode: Optional[str] = key(
        None,
        "permissions of checkpoint files: `private` (0600 for optimizer, state and configuration), or the mode of every "
        "file: `0600`, `0640`, `0644`, `0660` or `0664`",
        null="set by the umask",
        more="With `private`, the run's `config.yaml` is 0600 too.",
    )
    archive: bool = key(False, "pack dropped checkpoints into `archive/checkpoint-<step>.tar.zst` in the background")
    async_save: bool = key(False, "copy to host memory, continue training and write in the background")
    deltas: int = key(
        0,
        "number of saves after each full save that store weights as compressed differences to it; 0: every save is full",
        AT_LEAST_0,
    )
    resume: str = key(
        "auto",
        "`auto` (the newest checkpoint of the run directory, if any), `never`, or the path of a checkpoint",
        more="`never` starts a new run; the directory must not contain checkpoints.",
    )
    changed_inputs: str = key(
        "refuse",
        "handling of data, user code, tokenizer, chat template or model whose content differs from the checkpoint",
        one_of("refuse", warn="warn and continue"),
    )
    on_damaged: str = key(
        "fallback",
        "`resume: auto`: handling of a damaged newest checkpoint",
        one_of(fallback="use the checkpoint before it", error=""),
    )
    on_failed_save: str = key(
        "stop",
        "handling of a checkpoint that cannot be written",
        one_of("stop", **{"continue": "continue, and try again at the next save"}),
    )
    verify: bool = key(True, "check the hash of every file before loading a checkpoint")


class EvaluateConfig(Group):
    """Evaluation on held-out prompts: before, during and after training, and by ``rlhf-mcore evaluate``."""

    every: int = key(0, "interval in steps between evaluations; 0: only before and after training", AT_LEAST_0)
    max_prompts: Optional[int] = key(None, "maximum number of held-out prompts", AT_LEAST_1, null="all")
    samples: int = key(
        1,
        "responses per prompt; 2 or more also give pass@k and majority@k",
        AT_LEAST_1,
        more="Values above 1 require `evaluate.temperature` above 0.",
    )
    temperature: float = key(0.0, "as `rollout.sampling.temperature`; 0: greedy", AT_LEAST_0)
    top_p: float = key(1.0, "as `rollout.sampling.top_p`", SHARE)
    top_k: int = key(-1, "as `rollout.sampling.top_k`", Range(1, off=-1))
    max_new_tokens: Optional[int] = key(
        None, "maximum length of a response in tokens", AT_LEAST_1, null="`rollout.sampling.max_new_tokens`"
    )
    checkpoint: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: a Hugging Face directory, a checkpoint, a run directory, or FSDP or Megatron shards",
        null="the latest checkpoint of this configuration's run",
        more="In a checkpoint the actor is evaluated, in a run directory the latest checkpoint.",
    )
    compare: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: baseline model, evaluated on the same prompts",
        null="no comparison",
        more="An improvement over the baseline is positive.",
    )
    output_dir: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: directory of the results",
        null="`evaluations/<checkpoint>-<settings>` next to the checkpoint",
    )


class LoggingConfig(Group):
    """Logging of a run, in addition to ``metrics.jsonl``."""

    console: str = key(
        "auto",
        "output on the terminal",
        one_of(
            auto="rich on a terminal, else plain",
            rich="live display",
            plain="one line per step",
            json="one object per line, as `--json`",
            off="only errors, as `--quiet`",
        ),
    )
    every: int = key(
        1,
        "`plain`, `json`: interval in steps between printed steps, from the first step on",
        AT_LEAST_1,
        more="Steps with an evaluation and the last step are always printed. metrics.jsonl and trackers receive every step.",
    )
    trackers: list[str] = key(
        ["tensorboard"],
        f"trackers that also receive the metrics: {', '.join(TRACKERS)}",
        more="A tracker can neither stop nor delay a run. See [metrics](operations/monitoring.md#trackers).",
    )
    offline: bool = key(False, "`wandb`, `comet` and `swanlab` write only to the run directory, for a later upload")
    prometheus: Optional[str] = key(
        None,
        "port on the loopback, or host:port, on which Prometheus reads metrics and engine states",
        null="none",
        more="The first rank's machine serves `GET /metrics`. See [Prometheus](operations/monitoring.md#prometheus).",
    )
    peak_tflops: Optional[float] = key(
        None,
        "peak performance of a device, for the MFU in the metrics",
        ABOVE_0,
        null="dense bf16 peak by the device's name (no MFU for unknown devices and CPUs)",
        unit="TFLOP/s",
    )
    entropy_every: int = key(
        10,
        "interval in steps between values of `actor/entropy`, from the first step on; 0: never",
        AT_LEAST_0,
        more="With `algorithm.entropy_coef` every step computes it.",
    )
    rollouts_every: int = key(1, "interval in steps between files `rollouts/step-*.jsonl`; 0: never", AT_LEAST_0)
    rollout_tokens: int = key(
        0,
        "number of responses per rollout file whose tokens are written too, with advantages and logprob differences; 0: "
        "none",
        Range(0, 4096),
        more="`rollouts/tokens-*.jsonl` needs about 30 bytes per token. The [report](operations/report.md) colours responses "
        "by these values.",
    )
    episode_traces: int = key(
        0,
        "number of episodes per rollout file that are traced, as OpenTelemetry JSON (OTLP); 0: none",
        Range(0, 4096),
        more="Only episodes with several turns, in `rollouts/traces-*/` ([report](operations/report.md#traces)).",
    )


def wanted_trackers(cfg: LoggingConfig) -> list[str]:
    """Return the trackers of a run, each once."""
    return list(dict.fromkeys(cfg.trackers))


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
        environment: where ``auto`` finds SLURM's end of the job.

    Raises:
        ConfigError: ``save_by`` is not one of these values.
    """
    if save_by is None:
        return None
    if save_by == AUTO:
        end = environment.get(SLURM_END, "")
        return float(end) - now if end.isdecimal() else None
    if _MINUTES.fullmatch(save_by):
        return 60 * float(save_by)
    try:
        return datetime.fromisoformat(save_by).timestamp() - now
    except ValueError:
        raise ConfigError(
            f"checkpoint.save_by={save_by!r} is not a time; give minutes from the start, a time like 2026-01-01T00:00, "
            f"auto ({SLURM_END}, if it is set) or null"
        ) from None


class AlarmRuleConfig(Item):
    """A bound on a metric. It replaces the default rules of that metric."""

    metric: str = key("???", "name of the metric, as in [metrics](reference/metrics.md)")
    above: Optional[float] = key(None, "raise an alarm if the value is above this bound", FINITE, null="no upper bound")
    below: Optional[float] = key(None, "raise an alarm if the value is below this bound", FINITE, null="no lower bound")
    measure: str = key(
        "value",
        "value that is compared with the bounds",
        one_of(
            value="the value of the step",
            mean="mean of the last tenth of the steps",
            growth="mean of the last tenth divided by the mean of the first tenth",
            spike="the value of the step divided by the median",
        ),
    )
    steps: int = key(1, "number of consecutive reported steps that raise the alarm", AT_LEAST_1)
    actions: Optional[list[str]] = key(None, "actions of the alarm", null="`alarms.actions`")


class AlarmsConfig(Group):
    """Rules on metrics, checked after every step."""

    defaults: bool = key(
        True,
        "enable the built-in rules: jumps of the mean score, runaway KL, collapsed entropy, rewards that are all 0, "
        "failing rewards, engine and trainer that disagree, gradient spikes, skipped updates, values that are not finite",
        more="See [alarms](operations/monitoring.md#alarms).",
    )
    actions: list[str] = key(
        ["warn"],
        f"actions of alarms without their own `actions`: {', '.join(ACTIONS)}",
        more="Every action also prints the remedy, as `warn` does. `save` saves a checkpoint after the step; `stop` saves one "
        "and ends the run with exit code 76, after which nothing restarts it automatically.",
    )
    rules: list[AlarmRuleConfig] = key([], "your rules")
    webhook: Optional[str] = key(
        None,
        "`webhook`: URL to which the alarm is posted as JSON with a `text`, such as `${oc.env:ALARM_URL}`",
        null="none",
    )
    command: list[str] = key(
        [], "`command`: program and arguments; it reads the same JSON from standard input and is killed after 30 s"
    )
