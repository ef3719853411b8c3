"""Compare tiny models with transformers and with their engine, under every layout, and a resumed run with a whole one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mcore.cli.preflight import check_engine, check_packages
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.validate import validate
from tools.certify import Table, row
from tools.certify.families import make_run
from tools.certify.processes import last_line, run_python, run_ranks

# Layouts of the actor. Layouts that a family or the number of ranks does not allow fail the checks of a run, and are skipped.
LAYOUTS = (
    "tp=1",
    "tp=2",
    "tp=2 sequence_parallel=true",
    "pp=2",
    "pp=2 vpp=2",
    "cp=2",
    "ep=2",
    "tp=2 sequence_parallel=true ep=2 etp=1",
    "tp=2 pp=2",
    "tp=2 sequence_parallel=true cp=2 ep=2 etp=1",
    "tp=2 sequence_parallel=true pp=2 ep=2 etp=1",
    "pp=2 cp=2",
    "tp=2 sequence_parallel=true pp=2 cp=2",
    "tp=2 sequence_parallel=true pp=2 cp=2 ep=2 etp=1",
)
# Limits of the mean error of a logprob: absolute in fp32 (other order of sums), else a multiple of transformers' error in the dtype.
FP32_LIMIT, NOISE_LIMIT = 1e-5, 2.0
GRADIENT_LIMIT = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
HEAD = "| family | layout | dtype | engine | trainer | rollout | both | limit | gradient | sync | sleep | saved | verdict |"
_FAMILY_LIMIT_S = 1800


def measure_family(family: str, folder: Path, ranks: int, on_cuda: bool, *, quick: bool) -> list[dict[str, Any]]:
    """Measure a family in separate ranks, so that a failure does not affect other families. Returns a row for each layout."""
    shutil.rmtree(folder, ignore_errors=True)  # remove an earlier certificate, whose runs would be continued
    folder.mkdir()
    config = make_run(family, folder, on_cuda=on_cuda)
    try:
        layouts, note = find_layouts(config, ranks)
    except ConfigError as error:
        return [{"layout": "all", "problem": str(error)}]
    if quick:
        layouts = dict(list(layouts.items())[:: max(len(layouts) - 1, 1)])
    order, results, log = folder / "order.json", folder / "rows.json", folder / "ranks.log"
    order.write_text(json.dumps({"config": str(config), "layouts": layouts}), encoding="utf-8")
    code = run_ranks("tools.certify.worker", [str(order)], ranks, log, _FAMILY_LIMIT_S)
    if code != 0 or not results.is_file():
        return [{"layout": "all", "problem": f"its ranks ended with code {code}, see {log}: {last_line(log)}"}]
    rows: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    return [each | {"note": note} for each in rows]


def find_layouts(config: Path, ranks: int) -> tuple[dict[str, list[str]], str]:
    """Return the possible layouts of this family (name -> overrides), and the reason why it does not use vLLM, or ""."""
    engine, note = [f"rollout.layout.tp={2 if ranks >= 4 else 1}"], ""
    cfg = resolve(load_config(config, engine))
    try:
        check_packages(cfg)
        check_engine(cfg)
    except ConfigError as error:
        engine, note = ["rollout.engine=hf"], str(error).replace(f"model.path={cfg.model.path}", "it")
    allowed: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        overrides = [*engine, *(f"actor.layout.{word}" for word in layout.split())]
        try:
            validate(load_config(config, overrides), ranks)
        except ConfigError:
            if not allowed:  # the first layout has no parallelism, so the run itself is invalid
                raise
            continue
        allowed[layout.replace("sequence_parallel=true", "sp").replace("=", "").replace(" ", "_")] = overrides
    return allowed, note


def judge(cells: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a row."""
    if "problem" in cells:
        yield cells["problem"]
        return
    limit = limit_of(cells)
    for name, what in (("trainer", "the trainer"), ("rollout", "the engine")):
        if not cells[name] <= limit:
            yield f"{cells['layout']}: logprobs of {what} are {cells[name]:.1e} from those of transformers, the limit is {limit:.1e}"
    if not cells["gradient"] <= GRADIENT_LIMIT[cells["dtype"]]:
        yield f"{cells['layout']}: the gradient's norm is off by {cells['gradient']:.1e} of itself"
    for name in ("sync", "sleep", "saved"):
        if cells[name] and not cells[name].startswith("equal"):
            yield f"{cells['layout']}: {name}: {cells[name]}"


def limit_of(cells: dict[str, Any]) -> float:
    """Return the largest mean error of a logprob that rounding explains."""
    return FP32_LIMIT if cells["dtype"] == "fp32" else NOISE_LIMIT * cells["noise"]


def as_table(families: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows of all families in Markdown, followed by the reasons why families do not use vLLM."""
    lines = [HEAD, "---".join("|" * HEAD.count("|"))]
    for family, rows in families.items():
        for cells in rows:
            wrong = "; ".join(judge(cells))
            if "problem" in cells:
                lines.append(f"| {family} | {cells['layout']} {'| ' * 10}| WRONG: {wrong} |")
                continue
            errors = [f"{cells[name]:.1e}" for name in ("trainer", "rollout", "agreement")]
            words = [family, cells["layout"], cells["dtype"], cells["engine"], *errors, f"{limit_of(cells):.1e}"]
            words += [f"{cells['gradient']:.1e}", cells["sync"], cells["sleep"], cells["saved"]]
            lines.append(f"| {' | '.join(words)} | {f'WRONG: {wrong}' if wrong else 'ok'} |")
    notes = {family: rows[0]["note"] for family, rows in families.items() if rows and rows[0].get("note")}
    lines += ["", *(f"{family} has the engine hf here: {note}\n" for family, note in notes.items())]
    return "\n".join(lines)


def resume(device: str, folder: Path, ranks: int) -> Table:
    """Compare a run of four steps with two runs of two steps: metrics and weights must be equal, bit for bit."""
    config = make_run("qwen3", folder, on_cuda=device == "cuda")
    layout, options = list(find_layouts(config, ranks)[0].items())[-1]
    for name, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        overrides = [*options, f"experiment={name}", f"trainer.num_steps={steps}", f"trainer.world_size={ranks}"]
        command = ["-m", "rlhf_mcore.cli.main", "train", str(config), *overrides]
        if code := run_python(command, log := folder / f"{name}-{steps}.log", _FAMILY_LIMIT_S):
            raise RuntimeError(f"a run ended with code {code}, see {log}: {last_line(log)}")
    runs = [folder / "certificate" / name for name in ("whole", "halves")]
    whole, halves = (_metrics(run) for run in runs)
    keys = sorted(whole.keys() | halves.keys())
    differing = [f"step {step} {name}" for step, name in keys if whole.get((step, name)) != halves.get((step, name))]
    weights = [(run / "latest" / "actor" / "model.safetensors").read_bytes() for run in runs]
    same = weights[0] == weights[1]
    return [
        row(
            f"metrics that differ in a run in two parts, {layout}",
            ", ".join(differing[:3]) or "none",
            "none",
            not differing,
        ),
        row("its weights", "equal" if same else "differ", "equal", same),
    ]


def _metrics(run: Path) -> dict[tuple[int, str], Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("timing/", "throughput/", "memory/")
    return {
        (line["step"], name): value for line in lines for name, value in line.items() if not name.startswith(measured)
    }
