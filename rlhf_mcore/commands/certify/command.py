"""The command: models and layouts to certify, their order, and the page of results."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.engine_kinds import engine_packages
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import write_atomically
from rlhf_mcore.own_processes import adopt_orphans, children

# Of the actor; those that a family or the number of ranks does not allow are left out, by the checks of every run.
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
# Mean errors of a logprob: of sums in another order in fp32; else so many times the error of transformers in the same dtype.
FP32_LIMIT, NOISE_LIMIT = 1e-5, 2.0
GRADIENT_LIMIT = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}

_INTRODUCTION = """\
# Certificate

`rlhf-mcore certify` wrote this page. Every row is a tiny model with random weights under one layout of its actor.

- trainer, rollout: mean distance of their logprobs of sampled tokens from those of transformers in fp32; both: of one from the other.
- limit: what rounding explains. In fp32 it is 1e-5, else twice the distance of transformers itself in that dtype.
- gradient: relative distance of the norm of an update's gradient from that of transformers in fp32.
- sync: whether every tensor has the same hash in trainer and engine. Before, the engine was filled with NaN.
- sleep: whether an engine says the same after a sleep of either level; in the first layout of a family.
- saved: whether the saved model is the one that was loaded, bit for bit.
"""
EPILOG = """\
exit codes:
  0          all agrees
  1          something does not: the table says what, the logs are beside it
  2          a mistake in the command line
  128 + N    ended by signal N, with all that it has started; families that were done are in certificate.json"""


@exit_codes.reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Certify and write the page. Returns the exit code."""
    args = _parser().parse_args(argv)
    from rlhf_mcore.commands.certify import models, names

    if args.names:
        uses = names.check_all()
        say(names.as_text(uses))
        return exit_codes.FAILED if any(use.problem for use in uses) else exit_codes.DONE
    families = args.families.split(",") if args.families else list(models.QUICK if args.quick else models.TINY)
    if unknown := [name for name in families if name not in models.TINY]:
        _parser().error(f"--families {unknown[0]}: no such family; there are {', '.join(models.TINY)}")
    from rlhf_mcore import machine
    from rlhf_mcore.cli.preflight import check_world

    gpus = machine.query_gpus()
    ranks = args.ranks or min(len(gpus), 8) or 2
    folder = Path(args.out).absolute()
    check_world(ranks, "--ranks")
    folder.mkdir(parents=True, exist_ok=True)
    file, page = folder / "certificate.json", folder / "certificate.md"
    earlier = json.loads(file.read_text(encoding="utf-8")) if args.keep and file.is_file() else {"families": {}}
    document: dict[str, Any] = earlier | {"machine": _machine(gpus, ranks)}
    with exit_codes.ended_by_signals():
        for family in families:
            began = time.monotonic()
            rows = _measure_family(family, folder / family, ranks, bool(gpus), quick=args.quick)
            document["families"][family] = rows
            verdict = "; ".join(problem for row in rows for problem in judge(row)) or "all agree"
            say(f"{family}: {len(rows)} layouts in {time.monotonic() - began:.0f} s, {verdict}")
            write_atomically(file, json.dumps(document, indent=1).encode())
        document["resume"] = _resume(families[0], folder / families[0], ranks)
    say(f"resume: {document['resume']['verdict']}")
    document["names"] = names.as_text(names.check_all())
    write_atomically(file, json.dumps(document, indent=1).encode())
    write_atomically(page, as_page(document).encode())
    say(f"written to {page}")
    return exit_codes.DONE if is_whole(document) else exit_codes.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore certify",
        "Hold the installed Megatron-core, vLLM and transformers against each other on this machine: tiny models of every family, "
        "under every layout that its ranks allow. Logprobs of trainer and engine and the gradient are compared with transformers, "
        "a sync with its digests, a sleep and a save with what was there before, a resumed run with one that was not interrupted.",
        examples=[
            "rlhf-mcore certify --quick",
            "rlhf-mcore certify --ranks 8 --out outputs/certificate",
            "rlhf-mcore certify --names",
        ],
        exits=EPILOG,
    )
    parser.add_argument("--quick", action="store_true", help="one family of each kind, two layouts of each")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes (default: one per GPU, at most 8; 2 on a CPU)"
    )
    parser.add_argument("--families", metavar="A,B", help="these families only")
    parser.add_argument(
        "--keep", action="store_true", help="add to the certificate that is there, instead of a new one"
    )
    parser.add_argument(
        "--names", action="store_true", help="only list what we use of the libraries, and what of it is not there"
    )
    parser.add_argument("--out", default="outputs/certificate", metavar="DIR", help="default: outputs/certificate")
    return parser


def _machine(gpus: Sequence[Any], ranks: int) -> dict[str, str]:
    """Collect versions and device for the head of the page."""
    from rlhf_mcore import machine
    from rlhf_mcore.expected_kernels import expected_kernels, kernels_text

    engines = chain.from_iterable(engine_packages().values())
    packages = ["rlhf_mcore", "torch", "megatron-core", *engines, "transformers", "transformer-engine", "ray"]
    versions = machine.installed_versions(packages)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": f"{len(gpus)} x {gpus[0].name}" if gpus else f"CPU, {machine.processor()}",
        "ranks": str(ranks),
        "python": sys.version.split()[0],
        **versions,
        "kernels": kernels_text(expected_kernels(bool(gpus))).removeprefix("kernels: "),
    }


def _measure_family(family: str, folder: Path, ranks: int, on_cuda: bool, *, quick: bool) -> list[dict[str, Any]]:
    """Measure a family in ranks of its own, so that their failure hides no other family. A signal ends the command.

    Raises:
        SystemExit: a signal came meanwhile, and the ranks are ended.
    """
    from rlhf_mcore.cli.launch import ENDED_FROM_OUTSIDE, launch
    from rlhf_mcore.commands.certify.models import make_run

    shutil.rmtree(folder, ignore_errors=True)  # of an earlier certificate: its runs would be continued
    folder.mkdir()
    config = make_run(family, folder, on_cuda=on_cuda)
    try:
        layouts, note = _layouts(config, ranks)
    except ConfigError as error:
        return [{"layout": "all", "problem": str(error)}]
    if quick:
        layouts = dict(list(layouts.items())[:: max(len(layouts) - 1, 1)])
    order = folder / "order.json"
    order.write_text(json.dumps({"config": str(config), "layouts": layouts}), encoding="utf-8")
    (logs := folder / "logs").mkdir()
    code = launch([str(order)], ranks, 1, module="rlhf_mcore.commands.certify.worker", logs=logs)
    if code in ENDED_FROM_OUTSIDE:
        raise SystemExit(code)
    if code != exit_codes.DONE or not (results := folder / "rows.json").is_file():
        return [{"layout": "all", "problem": f"its ranks ended with code {code}, see {logs}"}]
    rows: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    return [row | {"note": note} for row in rows]


def _layouts(config: Path, ranks: int) -> tuple[dict[str, list[str]], str]:
    """List the layouts that a run of this family may have: name -> overrides. Returns also why it does not use vLLM, or ""."""
    from rlhf_mcore.cli.preflight import check_engine, check_packages
    from rlhf_mcore.config.derive import resolve
    from rlhf_mcore.config.load import load_config
    from rlhf_mcore.config.validate import validate

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
            if not allowed:  # that of no cut at all: it is the run that is wrong
                raise
            continue
        allowed[layout.replace("sequence_parallel=true", "sp").replace("=", "").replace(" ", "_")] = overrides
    return allowed, note


def judge(row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a row."""
    if "problem" in row:
        yield row["problem"]
        return
    limit = limit_of(row)
    for name, what in (("trainer", "the trainer"), ("rollout", "the engine")):
        if not row[name] <= limit:
            yield f"{row['layout']}: logprobs of {what} are {row[name]:.1e} from those of transformers, the limit is {limit:.1e}"
    if not row["gradient"] <= GRADIENT_LIMIT[row["dtype"]]:
        yield f"{row['layout']}: the gradient's norm is off by {row['gradient']:.1e} of itself"
    for name in ("sync", "sleep", "saved"):
        if row[name] and not row[name].startswith("equal"):
            yield f"{row['layout']}: {name}: {row[name]}"


def limit_of(row: dict[str, Any]) -> float:
    """Return the largest mean error of a logprob that rounding explains."""
    return FP32_LIMIT if row["dtype"] == "fp32" else NOISE_LIMIT * row["noise"]


def _resume(family: str, folder: Path, ranks: int) -> dict[str, str]:
    """Train four steps in one go and in two, and compare metrics and weights bit for bit."""
    layout, options = list(_layouts(folder / "run.yaml", ranks)[0].items())[-1]
    for name, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        overrides = [*options, f"experiment={name}", f"trainer.num_steps={steps}", f"trainer.world_size={ranks}"]
        command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", str(folder / "run.yaml"), *overrides]
        if code := _train(command, log := folder / f"{name}-{steps}.log"):
            return {"what": f"{family}, {layout}", "verdict": f"a run ended with code {code}, see {log}"}
    runs = [folder / "certificate" / name for name in ("whole", "halves")]
    metrics = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    whole, halves = (
        {
            (line["step"], name): value
            for line in lines
            for name, value in line.items()
            if not name.startswith(("timing/", "throughput/", "memory/"))
        }
        for lines in metrics
    )
    keys = sorted(whole.keys() | halves.keys())
    differing = [f"step {step} {name}" for step, name in keys if whole.get((step, name)) != halves.get((step, name))]
    weights = [(run / "latest" / "actor" / "model.safetensors").read_bytes() for run in runs]
    differing += ["the weights"] if weights[0] != weights[1] else []
    verdict = f"differs: {', '.join(differing[:3])}" if differing else f"equal after {len(metrics[0])} steps"
    return {"what": f"{family}, {layout}", "verdict": verdict}


def _train(command: Sequence[str], log: Path) -> int:
    """Run a command with its output in a file. Returns its exit code; what ends this process ends the command before."""
    from rlhf_mcore.cli.launch import end_rest

    adopt_orphans()
    others = set(children())
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return exit_codes.of_process(child.wait())
    finally:
        child.kill()
        end_rest(others)


def is_whole(document: dict[str, Any]) -> bool:
    """Tell whether nothing is wrong."""
    rows = [row for rows in document["families"].values() for row in rows]
    return document["resume"]["verdict"].startswith("equal") and not any(any(judge(row)) for row in rows)


def as_page(document: dict[str, Any]) -> str:
    """Write the certificate in Markdown."""
    lines = [_INTRODUCTION, "| | |", "|---|---|"]
    lines += [*(f"| {name} | {value} |" for name, value in document["machine"].items()), ""]
    head = "| family | layout | dtype | engine | trainer | rollout | both | limit | gradient | sync | sleep | saved | verdict |"
    lines += [head, "---".join("|" * head.count("|"))]
    for family, rows in document["families"].items():
        for row in rows:
            wrong = "; ".join(judge(row))
            if "problem" in row:
                lines.append(f"| {family} | {row['layout']} {'| ' * 10}| WRONG: {wrong} |")
                continue
            errors = [f"{row[name]:.1e}" for name in ("trainer", "rollout", "agreement")]
            cells = [family, row["layout"], row["dtype"], row["engine"], *errors, f"{limit_of(row):.1e}"]
            cells += [f"{row['gradient']:.1e}", row["sync"], row["sleep"], row["saved"]]
            lines.append(f"| {' | '.join(cells)} | {f'WRONG: {wrong}' if wrong else 'ok'} |")
    notes = {family: rows[0]["note"] for family, rows in document["families"].items() if rows and rows[0].get("note")}
    lines += ["", *(f"{family} has the engine hf here: {note}\n" for family, note in notes.items())]
    resumed = document["resume"]
    lines += [f"Resumed ({resumed['what']}): {resumed['verdict']}.", "", "```", document["names"], "```", ""]
    return "\n".join(lines)
