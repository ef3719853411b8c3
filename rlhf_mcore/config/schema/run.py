"""Groups of a run: its data, the shape of a step, checkpoints, evaluation, its record and its alarms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Optional, Union

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.group import Group, Item
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, SHARE, Range, group, key, one_of

BYTES_PER_ROW = 4096  # of data.max_bytes, for a bound of the number of rows
MAX_WORLD = 2**17  # processes; plans list them. The largest runs that are published have a tenth of it
AUTO, NEVER = "auto", "never"  # of checkpoint.resume; the first of checkpoint.save_by, too
PRIVATE, FILE_MODES = "private", ("0600", "0640", "0644", "0660", "0664")  # of checkpoint.mode
ACTIONS = ("warn", "save", "stop", "webhook", "command")  # of an alarm
SLURM_END = "SLURM_JOB_END_TIME"
_MINUTES = re.compile(r"\d+(\.\d+)?")


Columns = Union[str, list[Optional[str]]]  # of each file one, or one of all


class DataConfig(Group):
    """Prompts, from parquet or jsonl files."""

    train: list[str] = key(
        [], "parquet or jsonl files, or ids of data sets on the hub, `ORG/NAME:split`", is_fixed=True
    )
    eval: list[str] = key([], "held-out files, for `evaluate`")
    prompt_key: Columns = key(
        "prompt",
        "column of the prompt: a string, or a list of `{role, content}`",
        more="A list, `[question, prompt]`, names one column for each file of `data.train`.",
        is_fixed=True,
    )
    answer_key: Optional[Columns] = key(
        None,
        "column of the answer, or a list with one for each file of `data.train`",
        null="`reward_model.ground_truth`, else `answer`",
        more="`column.field` names a field of a column that holds objects.",
        is_fixed=True,
    )
    eval_prompt_key: Optional[Columns] = key(
        None, "column of the prompt in the files of `data.eval`, or a list with one for each", null="`data.prompt_key`"
    )
    eval_answer_key: Optional[Columns] = key(None, "likewise for the answer", null="`data.answer_key`")
    response_key: str = key("response", "`sft`: column of the response", is_fixed=True)
    chosen_key: str = key("chosen", "`reward_model`, `dpo`: column of the better response", is_fixed=True)
    rejected_key: str = key("rejected", "`reward_model`, `dpo`: column of the other one", is_fixed=True)
    apply_chat_template: str = key(
        "auto",
        "prompts that are strings, as one message of the user through the tokenizer's chat template",
        one_of(
            auto="where the tokenizer has one and the string holds none of its special tokens",
            true="all of them",
            false="none: they are used as they are",
        ),
        more="With `true` a tokenizer without a template is refused. Lists of messages always go through the template. "
        "See [data](guide/data.md#chat-templates).",
    )
    transform: Optional[str] = key(
        None,
        "`path/to/file.py:name`, called with every row as a dict; returns the row to use, or None to leave it out",
        null="none",
        is_fixed=True,
    )
    max_prompt_tokens: int = key(512, "longest prompt", AT_LEAST_1, is_fixed=True)
    max_tokens: Optional[int] = key(
        None,
        "`sft`, `reward_model`, `dpo`: longest prompt and response together, instead of `max_prompt_tokens`",
        Range(2),  # a prompt and a response
        null="as many as a microbatch has room for",
    )
    overlong_prompts: str = key("error", "what happens to longer ones", one_of("error", "drop"), is_fixed=True)
    shuffle: bool = key(True, "a new order of the prompts in every epoch", is_fixed=True)
    weights: Optional[list[float]] = key(
        None,
        "share of each file of `data.train` in what is trained on, as `[3, 1]`, in any unit",
        null="one data set of all rows",
        more="Each file then has epochs of its own.",
    )
    image_key: Optional[str] = key(
        "images",
        "column of a prompt's images: bytes, paths relative to the file, or objects of `bytes` and `path`",
        null="images are left out",
        more="`<image>` in a prompt is the place of one. Only for models that see images. See [images](guide/images.md).",
        is_fixed=True,
    )
    image_pixels: Optional[list[int]] = key(
        None,
        "`[least, most]`: pixels that an image is scaled to",
        null="as the model's `preprocessor_config.json` has them",
        is_fixed=True,
    )
    max_images: int = key(16, "bound of the images of a prompt", AT_LEAST_1)
    max_image_pixels: int = key(33554432, "bound of the pixels of an image, checked before it is decoded", AT_LEAST_1)
    max_row_bytes: int = key(
        16777216,
        "bound of a line of jsonl, of a cell of parquet, and of an image",
        AT_LEAST_1,
        more="Longer ones are refused before they are read.",
    )
    max_bytes: int = key(
        8589934592,
        "bound of the size of the rows of a file; `data.train`, and `data.eval`, have at most a row for 4096 of these bytes",
        AT_LEAST_1,
        more="Every rank holds the rows in memory.",
    )

    @property
    def max_rows(self) -> int:
        """Bound of the rows of ``train``, and of ``eval``."""
        return max(self.max_bytes // BYTES_PER_ROW, 1)


class ProfileConfig(Group):
    """Set which steps are profiled."""

    steps: list[int] = key(
        [],
        "steps that torch's profiler records, with the phases of the run",
        more="All ranks are on one timeline, `profile/steps-<first>-<last>.json.gz` in the run directory, one for each row of "
        "steps; open it in ui.perfetto.dev. Engines on ranks of their own are not on it. On CUDA phases "
        "are NVTX ranges, with or without this.",
    )


class TrainerConfig(Group):
    """Size and shape of a step."""

    num_steps: int = key(100, "steps; each generates, scores and trains", AT_LEAST_1)
    num_epochs: Optional[float] = key(
        None,
        "passes over the rows of `data.train`, in the place of `num_steps`, which follows from it",
        ABOVE_0,
        null="`num_steps` tells",
        more="`num_steps` is `num_epochs` · rows / `prompts_per_step`, rounded up. Rows that `data.transform` or "
        "`data.overlong_prompts: drop` leaves out are counted. Of a file and the command line the later one wins; both in one place "
        "are refused. Where both are set in Python, `num_epochs` decides.",
    )
    prompts_per_step: int = key(
        32,
        "prompts of a step, over all ranks",
        AT_LEAST_1,
        more="With `sft`, `reward_model` and `dpo`, examples or pairs of an update.",
    )
    minibatch_size: Optional[int] = key(None, "prompts per optimizer update", AT_LEAST_1, null="`prompts_per_step`")
    ppo_epochs: int = key(1, "passes over the responses of a step", AT_LEAST_1)
    max_tokens_per_microbatch: int = key(
        8192,
        "most tokens of one forward pass of a rank",
        AT_LEAST_1,
        more="No less than the longest prompt and response together.",
    )
    forward_tokens: Optional[int] = key(
        None,
        "likewise of a pass without gradients, which keeps no activations",
        AT_LEAST_1,
        null="twice `max_tokens_per_microbatch`",
        more="No less than `max_tokens_per_microbatch`.",
    )
    logit_chunk_tokens: Optional[int] = key(
        None,
        "most tokens of a rank that have logits at a time",
        AT_LEAST_1,
        null="as many as 512 MiB of fp32 logits hold",
        more="Logits of more tokens of a microbatch are made in chunks, and again in the backward pass; those of fewer are kept.",
    )
    packing: bool = key(True, "concatenate sequences without padding; false: padded microbatches of similar lengths")
    share_prefixes: bool = key(
        True,
        "compute once what sequences begin with alike: prompts of a group, pairs, branches of an episode",
        more="Beginnings of less than 32 tokens are not shared. `packing: false` ignores it.",
    )
    world_size: Optional[int] = key(
        None,
        "processes that `rlhf-mcore train` starts",
        Range(1, MAX_WORLD),
        null="the fewest that the layouts divide",
        more="More than the machine's free memory has room for, at 200 MiB each, are refused.",
    )
    threads_per_rank: int = key(1, "CPU: compute threads of a process", AT_LEAST_1)
    bind_numa: str = key(
        "auto",
        "CUDA: cores that ranks, and engines under Ray, run on",
        one_of(auto="those of the NUMA node of their GPU, on a machine with several nodes", off="all"),
    )
    max_staleness: int = key(
        0,
        "`rollout.placement: disaggregated`: versions that the policy may be ahead of the one that sampled a token it learns from",
        Range(0, 64),
        more="0: a step waits for its responses and engines wait for the step. 1: responses of the next step are sampled meanwhile. "
        "See [asynchronous training](scale/async.md).",
    )
    profile: ProfileConfig = group(ProfileConfig, "where the time of a step goes, on all ranks")
    collective_timeout_s: int = key(
        1800,
        "how long a rank waits for the others in a collective; while they sample, how long for the next token of any of them",
        AT_LEAST_1,
    )
    watchdog_s: int = key(
        3600,
        "seconds without a new phase and without a sampled token, after which ranks print their stacks and the job ends; 0: off",
        AT_LEAST_0,
    )
    max_restarts: int = key(
        0, "times that the launcher starts a failed run again, from its last checkpoint", AT_LEAST_0
    )


class CheckpointConfig(Group):
    """Set when checkpoints are saved, which of them stay, and how a run resumes."""

    save_steps: int = key(20, "save every so many steps; 0: not by steps", AT_LEAST_0)
    save_epochs: float = key(
        0.0, "save when so many epochs of `data.train` have passed, fractions too; 0: not by epochs", AT_LEAST_0
    )
    save_minutes: float = key(
        30.0, "save when so many minutes have passed since the last save; 0: not by time", AT_LEAST_0
    )
    metric_for_best_model: Optional[str] = key(
        None,
        "metric of the evaluation, such as `evaluate/accuracy`, or `-evaluate/loss` if smaller is better; a checkpoint is saved "
        "whenever it has improved",
        null="none",
        more="The link `best` names that checkpoint.",
    )
    load_best_model_at_end: bool = key(
        False,
        "end with the best checkpoint instead of the last step",
        more="When the last step is made and saved, the best checkpoint is loaded into the process and evaluated (`final/*` in the "
        "metrics).",
    )
    save_by: Optional[str] = key(
        "auto",
        "when the job will be ended: minutes from the start, a time like `2026-01-01T00:00`, or `auto` (SLURM's)",
        null="no limit",
        more="`auto` is `SLURM_JOB_END_TIME` where it is set. The run saves and ends with exit code 75 when the next step and a save "
        "would not fit any more.",
    )
    save_total_limit: Optional[int] = key(
        2, "newest checkpoints that stay, beside the best one", AT_LEAST_1, null="all"
    )
    keep_every: Optional[int] = key(
        None, "checkpoints whose step is a multiple of this stay too", AT_LEAST_1, null="none"
    )
    keep: list[int] = key(
        [],
        "steps that are saved, and whose checkpoints stay",
        more="A link in `RUN/pins` keeps another one.",
    )
    mode: Optional[str] = key(
        None,
        "who may read a checkpoint's files: `private` (optimizer, state and configuration 0600), or the mode of every file, `0600`, "
        "`0640`, `0644`, `0660` or `0664`",
        null="the umask decides",
        more="With `private`, `config.yaml` of the run is 0600 too.",
    )
    archive: bool = key(
        False, "what does not stay is packed into `archive/checkpoint-<step>.tar.zst`, in the background"
    )
    async_save: bool = key(False, "copy to host memory, continue training and write in the background")
    deltas: int = key(
        0,
        "saves between two full ones that store weights as compressed differences to the last full one; 0: every save is full",
        AT_LEAST_0,
    )
    resume: str = key(
        "auto",
        "`auto` (the newest checkpoint of the run directory, if there is one), `never`, or the path of a checkpoint",
        more="`never` begins anew, in a directory without checkpoints.",
    )
    changed_inputs: str = key(
        "refuse",
        "when data, the user's code, tokenizer, chat template or a model has another content than in the checkpoint",
        one_of("refuse", warn="and continue"),
    )
    on_damaged: str = key(
        "fallback",
        "with `resume: auto`, when the newest checkpoint is damaged",
        one_of(fallback="to the one before it", error=""),
    )
    on_failed_save: str = key(
        "stop",
        "when a checkpoint cannot be written",
        one_of("stop", **{"continue": "and try again when the next save is due"}),
    )
    verify: bool = key(True, "check the hash of every file before loading a checkpoint")


class EvaluateConfig(Group):
    """Evaluation on held-out prompts: before, during and after training, and by ``rlhf-mcore evaluate``."""

    every: int = key(0, "steps between evaluations; 0: only before and after training", AT_LEAST_0)
    max_prompts: Optional[int] = key(None, "use only so many held-out prompts", AT_LEAST_1, null="all")
    samples: int = key(
        1,
        "responses per prompt; with 2 or more also pass@k and majority@k",
        AT_LEAST_1,
        more="`evaluate.temperature` has to be above 0 then.",
    )
    temperature: float = key(0.0, "as `rollout.sampling.temperature`; 0: greedy", AT_LEAST_0)
    top_p: float = key(1.0, "as `rollout.sampling.top_p`", SHARE)
    top_k: int = key(-1, "as `rollout.sampling.top_k`", Range(1, off=-1))
    max_new_tokens: Optional[int] = key(None, "longest response", AT_LEAST_1, null="`rollout.sampling.max_new_tokens`")
    checkpoint: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: a Hugging Face directory, a checkpoint, a run directory, or shards of FSDP or Megatron",
        null="the latest of this configuration's own run",
        more="Of a checkpoint of ours the actor is evaluated, of a run directory the latest checkpoint.",
    )
    compare: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: what it is compared with, on the same prompts",
        null="nothing",
        more="An improvement on this one is positive.",
    )
    output_dir: Optional[str] = key(
        None,
        "`rlhf-mcore evaluate`: where results go",
        null="`evaluations/<checkpoint>-<settings>` beside the checkpoint",
    )


class LoggingConfig(Group):
    """The record of a run, beside ``metrics.jsonl``."""

    console: str = key(
        "auto",
        "",
        one_of(
            auto="rich on a terminal, else plain",
            rich="live display",
            plain="a line per step",
            json="an object per line: `--json`",
            off="errors alone: `--quiet`",
        ),
    )
    every: int = key(
        1,
        "`plain`, `json`: steps between step lines, from the first step on",
        AT_LEAST_1,
        more="Steps with an evaluation and the last step are always printed. metrics.jsonl and trackers get every step.",
    )
    trackers: list[str] = key(
        ["tensorboard"],
        f"where metrics go too: {', '.join(TRACKERS)}",
        more="A tracker can neither stop nor delay a run. See [metrics](operations/monitoring.md#trackers).",
    )
    offline: bool = key(False, "`wandb`, `comet` and `swanlab` write to the run's directory alone, for a later upload")
    prometheus: Optional[str] = key(
        None,
        "port on which Prometheus reads the metrics and the engines, of the loopback, or host:port",
        null="none",
        more="`GET /metrics` on the machine of the first rank. See [Prometheus](operations/monitoring.md#prometheus).",
    )
    peak_tflops: Optional[float] = key(
        None,
        "peak of a device for the MFU in the metrics",
        ABOVE_0,
        null="that of dense bf16 by the device's name; without a name that is known, as on a CPU, there is no MFU",
        unit="TFLOP/s",
    )
    entropy_every: int = key(
        10,
        "steps between values of `actor/entropy`, from the first step on; 0: never",
        AT_LEAST_0,
        more="With `algorithm.entropy_coef` it is computed in every step.",
    )
    rollouts_every: int = key(1, "steps between `rollouts/step-*.jsonl`; 0: never", AT_LEAST_0)
    rollout_tokens: int = key(
        0,
        "responses of such a step whose tokens are written too, with advantage and logprob difference; 0: none",
        Range(0, 4096),
        more="About 30 bytes a token, in `rollouts/tokens-*.jsonl`; the [report](operations/report.md) colours the responses by them.",
    )
    episode_traces: int = key(
        0,
        "episodes of such a step of which a trace is written, as OpenTelemetry's JSON (OTLP); 0: none",
        Range(0, 4096),
        more="Of episodes of several turns, in `rollouts/traces-*/` ([report](operations/report.md#traces)).",
    )


def wanted_trackers(cfg: LoggingConfig) -> list[str]:
    """Name the trackers of a run, each once."""
    return list(dict.fromkeys(cfg.trackers))


def octal_mode(text: str) -> int | None:
    """Return the file mode that a user means, None if it is none of ``FILE_MODES``.

    YAML takes 0640 without quotes for the number 416.
    """
    return next((int(mode, 8) for mode in FILE_MODES if text in (mode, str(int(mode, 8)))), None)


def time_left(save_by: str | None, now: float, environment: Mapping[str, str]) -> float | None:
    """Compute the seconds from ``now`` until the job will be ended; None: not known.

    Args:
        save_by: the key's value: minutes from now, a time in ISO 8601 (local unless it names a zone), ``auto`` or None.
        now: the wall clock when the job was started, in seconds since the epoch.
        environment: where ``auto`` finds SLURM's end of the job.

    Raises:
        ConfigError: ``save_by`` is none of these.
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
            f"checkpoint.save_by={save_by!r} is no time; give minutes from the start, a time like 2026-01-01T00:00, "
            f"auto ({SLURM_END} where it is set) or null"
        ) from None


class AlarmRuleConfig(Item):
    """A bound of a metric. It replaces the default rules of that metric."""

    metric: str = key("???", "its name, as in [metrics](reference/metrics.md)")
    above: Optional[float] = key(None, "an alarm where it is above", FINITE, null="no upper bound")
    below: Optional[float] = key(None, "an alarm where it is below", FINITE, null="no lower bound")
    measure: str = key(
        "value",
        "what is compared with the bounds",
        one_of(
            value="the step's",
            mean="mean of the last tenth of the steps",
            growth="that mean over the mean of the first tenth",
            spike="the step's over the median",
        ),
    )
    steps: int = key(1, "so many reported steps in a row", AT_LEAST_1)
    actions: Optional[list[str]] = key(None, "what it does", null="as `alarms.actions`")


class AlarmsConfig(Group):
    """Rules on metrics, judged after every step."""

    defaults: bool = key(
        True,
        "the line about a mean score that jumps, and the rules of [metrics](operations/monitoring.md#alarms): "
        "runaway KL, collapsed entropy, "
        "rewards that are all 0, failing rewards, engine against trainer, spikes of the gradient, skipped updates, numbers that are "
        "not finite",
    )
    actions: list[str] = key(
        ["warn"],
        f"what an alarm does that has no `actions` of its own: {', '.join(ACTIONS)}",
        more="`warn` prints what to do, as the others do too. `save` saves a checkpoint after the step; `stop` saves one "
        "and ends the run with exit code 76, after which nothing starts it again by itself.",
    )
    rules: list[AlarmRuleConfig] = key([], "rules of your own")
    webhook: Optional[str] = key(
        None,
        "`webhook`: where the alarm is posted to, as JSON with a `text`; such as `${oc.env:ALARM_URL}`",
        null="none",
    )
    command: list[str] = key(
        [], "`command`: program and arguments, which gets the same JSON on standard input, and is ended after 30 s"
    )
