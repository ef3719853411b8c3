"""Certify the installed Megatron-core, vLLM and transformers on this machine, from a checkout, without an install step:

    python -m tools.certify                         all parts; certificate.md and logs in outputs/certificate.
    python -m tools.certify --quick                 three families in two layouts each, and the short parts.
    python -m tools.certify --only families --families llama,qwen3_moe --ranks 8 --keep
    python -m tools.certify --pack certify.tar.gz   one archive of this checkout and the pure-Python packages that it needs.

Tiny models of every family run under every layout that the ranks allow. Logprobs of trainer and engine and the gradient
are compared with transformers, and a sync with its digests. A sleep and a save are compared with the state before, and
a resumed run with an uninterrupted one. Then trainings run, and the device is measured. The machine needs torch >=
2.10, transformers, Python 3.11 or 3.12 and no network: unpack the archive there and run the command in it. Without
vLLM, transformers generates. Without a GPU, or with --device cpu, the same code runs on tiny sizes. Every part is a
process with a time limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from tools.certify import Table, row
from tools.certify.processes import ROOT, SITE, last_line, run_python

if SITE.is_dir():
    sys.path.append(str(SITE))
if find_spec("xxhash") is None:
    sys.path.append(str(ROOT / "tools" / "standins"))

PACKED = ("rlhf_mcore", "tools", "configs/base.yaml", "setup.py", "README.md", "LICENSE")
DISTRIBUTIONS = (
    "megatron-core",
    "einops",
    "omegaconf",
    "antlr4-python3-runtime",
    "math-verify",
    "latex2sympy2_extended",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
)
MAX_ARCHIVE = 40 * 10**6

_INTRODUCTION = """\
# Certificate

`python -m tools.certify` wrote this page. Each row of this table is a tiny model with random weights under one layout of its actor.

- trainer, rollout: mean distance of their logprobs of sampled tokens from those of transformers in fp32; both: of one from the other.
- limit: what rounding explains. In fp32 it is 1e-5, else twice the distance of transformers itself in that dtype.
- gradient: relative distance of the norm of an update's gradient from that of transformers in fp32.
- sync: whether every tensor has the same hash in trainer and engine. Before, the engine was filled with NaN.
- sleep: whether an engine says the same after a sleep of either level; in the first layout of a family.
- saved: whether the saved model is the one that was loaded, bit for bit.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A further part of the certificate: a function ``module.name(device, folder, ranks) -> Table`` that runs in a process."""

    name: str
    module: str
    function: str
    limit_s: int
    is_quick: bool = False
    needs_vllm: bool = False

    def load(self) -> Callable[[str, Path, int], Table]:
        function: Callable[[str, Path, int], Table] = getattr(import_module(self.module), self.function)
        return function


FAMILIES = "families"
PARTS = (
    Part("names", "tools.certify.names", "names", 120, is_quick=True),
    Part("resume", "tools.certify.layouts", "resume", 600, is_quick=True),
    Part("mfu", "tools.certify.throughput", "mfu", 120, is_quick=True),
    Part("host_syncs", "tools.certify.throughput", "host_syncs", 120, is_quick=True),
    Part("offload", "tools.certify.throughput", "offload", 120),
    Part("save", "tools.certify.throughput", "save", 120),
    Part("training", "tools.certify.training", "grpo_and_ppo", 300),
    Part("engines", "tools.certify.training", "engines", 900, needs_vllm=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the page. Returns 0 if all agrees, 1 otherwise."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.pack is not None:
        return pack(args.pack)
    device = _device(parser, args.device)
    if args.part is not None:
        return _run_here(next(part for part in PARTS if part.name == args.part), device, args.out, args.ranks)
    import torch

    ranks = args.ranks or (min(torch.cuda.device_count(), 8) if device == "cuda" else 2)
    (out := args.out.absolute()).mkdir(parents=True, exist_ok=True)
    file, page = out / "certificate.json", out / "certificate.md"
    earlier = json.loads(file.read_text(encoding="utf-8")) if args.keep and file.is_file() else {}
    document: dict[str, Any] = {"families": {}, "parts": {}} | earlier | {"machine": _machine(device, ranks)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in args.only or (FAMILIES, *(part.name for part in PARTS if part.is_quick or not args.quick)):
        if name == FAMILIES:
            _measure_families(document, file, _families(parser, args), ranks, device, quick=args.quick)
        else:
            part = next(part for part in PARTS if part.name == name)
            print(f"{name} ...", file=sys.stderr, flush=True)
            document["parts"][name] = run_part(part, device, out, ranks)
        _write(document, file)
        page.write_text(as_page(document), encoding="utf-8")
    print(as_table(document["parts"]))
    print(f"written to {page}")
    return int(not is_whole(document))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.certify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [FAMILIES, *(part.name for part in PARTS)]
    parser.add_argument("--quick", action="store_true", help="three families, two layouts of each, and the short parts")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--families", metavar="A,B", help="these families only")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes (default: one per GPU, at most 8; 2 on a CPU)"
    )
    parser.add_argument("--keep", action="store_true", help="add to the certificate that is there")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda if there is a GPU)")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/certificate"), metavar="DIR", help="default: outputs/certificate"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the archive instead")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def _families(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    from tools.certify.families import QUICK, TINY

    chosen = args.families.split(",") if args.families else list(QUICK if args.quick else TINY)
    if unknown := [name for name in chosen if name not in TINY]:
        parser.error(f"--families {unknown[0]}: no such family; there are {', '.join(TINY)}")
    return chosen


def _device(parser: argparse.ArgumentParser, wanted: str | None) -> str:
    if absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        parser.error(f"{' and '.join(absent)} must be installed here; the archive has the other packages")
    import torch

    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        parser.error("--device cuda: torch finds no CUDA device; leave it out for tiny sizes on the CPU")
    return wanted or ("cuda" if has_gpu else "cpu")


def _measure_families(
    document: dict[str, Any], file: Path, families: list[str], ranks: int, device: str, *, quick: bool
) -> None:
    from tools.certify.layouts import judge, measure_family

    for family in families:
        began = time.monotonic()
        rows = measure_family(family, file.parent / family, ranks, device == "cuda", quick=quick)
        document["families"][family] = rows
        verdict = "; ".join(problem for each in rows for problem in judge(each)) or "all agree"
        print(f"{family}: {len(rows)} layouts in {time.monotonic() - began:.0f} s, {verdict}", flush=True)
        _write(document, file)


def run_part(part: Part, device: str, out: Path, ranks: int) -> Table:
    """Run a part in a separate process, with a time limit."""
    if part.needs_vllm and find_spec("vllm") is None:
        return [row(part.name, "skipped: vLLM is not installed")]
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    result.unlink(missing_ok=True)
    limit_s = part.limit_s * (1 if device == "cuda" else 3)  # a CPU may be busy with other programs
    options = ["--part", part.name, "--device", device, "--out", str(out), "--ranks", str(ranks)]
    code = run_python(["-m", "tools.certify", *options], log, limit_s)
    if code is None:
        return [row(part.name, f"stopped after {limit_s} s: see {log.name}", "-", False)]
    if code or not result.is_file():
        return [row(part.name, f"failed with {code}: {last_line(log)}", "-", False)]
    table: Table = json.loads(result.read_text(encoding="utf-8"))
    return table


def _run_here(part: Part, device: str, out: Path, ranks: int) -> int:
    folder = (out / f"{part.name}.files").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = part.load()(device, folder, ranks)
    (out / f"{part.name}.json").write_text(json.dumps(table), encoding="utf-8")
    return 0


def _machine(device: str, ranks: int) -> dict[str, str]:
    """Return versions and device for the head of the page."""
    from rlhf_mcore import machine
    from rlhf_mcore.config.engine_kinds import engine_packages
    from rlhf_mcore.expected_kernels import expected_kernels, kernels_text

    gpus = machine.query_gpus() if device == "cuda" else []
    engines = chain.from_iterable(engine_packages().values())
    packages = ["rlhf_mcore", "torch", "megatron-core", *engines, "transformers", "transformer-engine", "ray"]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": f"{len(gpus)} x {gpus[0].name}" if gpus else f"CPU, {machine.processor()}",
        "ranks": str(ranks),
        "python": sys.version.split()[0],
        **machine.installed_versions(packages),
        "kernels": kernels_text(expected_kernels(bool(gpus))).removeprefix("kernels: "),
    }


def is_whole(document: dict[str, Any]) -> bool:
    """Return whether the certificate has no failure."""
    from tools.certify.layouts import judge

    rows = chain.from_iterable(document["families"].values())
    return not any(any(judge(each)) for each in rows) and not any(
        cells[3] == "WRONG" for cells in chain.from_iterable(document["parts"].values())
    )


def as_page(document: dict[str, Any]) -> str:
    """Return the certificate in Markdown."""
    from tools.certify import layouts

    lines = [_INTRODUCTION, "| | |", "|---|---|"]
    lines += [*(f"| {name} | {value} |" for name, value in document["machine"].items()), ""]
    lines += [layouts.as_table(document["families"]), as_table(document["parts"]), ""]
    return "\n".join(lines)


def as_table(parts: dict[str, Table]) -> str:
    """Return the parts other than the families in Markdown."""
    lines = ["| part | what | measured | expected | verdict |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        for name, rows in parts.items()
        for cells in rows
    ]
    return "\n".join(lines)


def _write(document: dict[str, Any], file: Path) -> None:
    (new := file.with_suffix(".new")).write_text(json.dumps(document, indent=1), encoding="utf-8")
    new.rename(file)


def pack(target: Path) -> int:
    """Write the archive with this checkout's files and the pure-Python files of installed packages."""
    with tarfile.open(target, "w:gz") as archive:
        for name in PACKED:
            archive.add(ROOT / name, f"certify/{name}", filter=_is_packed)
        for name in DISTRIBUTIONS:
            for file in metadata.files(name) or ():
                path = Path(str(file.locate()))
                if not str(file).startswith("..") and file.suffix not in (".so", ".pyc") and path.is_file():
                    archive.add(path, f"certify/site/{file}")
    size = target.stat().st_size
    print(f"{target}: {size / 1e6:.1f} MB; unpack it and run: python3 -m tools.certify")
    if size > MAX_ARCHIVE:
        print(f"error: more than {MAX_ARCHIVE / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MAX_ARCHIVE)


def _is_packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name or member.name.endswith(".pyc") else member


if __name__ == "__main__":
    sys.exit(main())
