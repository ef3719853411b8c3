"""Measure what the tests protect: change one place of the package at a time, and see whether a test fails.

    python tools/mutants.py sample REVISION         # write tests/mutants/mutants.json: 40 changes of the package at a revision.
    python tools/mutants.py run SUITE CHECKOUT      # run a suite of tests/mutants/suites.json on each; continues an interrupted run.
    python tools/mutants.py report                  # print which suite killed which change

CHECKOUT is a separate git worktree, which this script changes and restores. A change that makes tests run into their time limit counts
as killed. Results are in tests/mutants/results.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "mutants"
MUTANTS, SUITES, RESULTS = FOLDER / "mutants.json", FOLDER / "suites.json", FOLDER / "results.json"
SEED, PER_AREA, LIMIT_S = 45, 5, 600
SWAPS: dict[type[Any], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change: in ``line`` of ``file``, ``new`` replaces ``old`` at ``column``. ``number``: the line number when sampled."""

    area: str
    file: str
    number: int
    line: str
    column: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Change the text of the file. The line nearest to ``number`` counts if several are equal."""
        lines = text.splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if not places:
            raise LookupError(f"{self.file} no longer has the line {self.line.strip()!r}")
        place = min(places, key=lambda place: abs(place + 1 - self.number))
        lines[place] = self.line[: self.column] + self.new + self.line[self.column + len(self.old) :] + "\n"
        return "".join(lines)


def candidates(area: str, file: str, source: str) -> Iterator[Mutant]:
    """Yield every possible change of a file, without texts, annotations, messages and assertions."""
    lines, tree = source.splitlines(), ast.parse(source)
    ignored: set[int] = set()
    for node in ast.walk(tree):
        skipped: list[ast.AST | None] = []
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            skipped = [node]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            skipped = [
                node.returns,
                *(argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)),
            ]
        elif isinstance(node, ast.AnnAssign):
            skipped = [node.annotation]
        ignored |= {id(inner) for outer in skipped if outer is not None for inner in ast.walk(outer)}

    def change(first: int, start: int, last: int, end: int, new: str) -> Iterator[Mutant]:
        if first == last and lines[first - 1].isascii():
            yield Mutant(area, file, first, lines[first - 1], start, lines[first - 1][start:end], new)

    def between(left: ast.expr, right: ast.expr, new: str) -> Iterator[Mutant]:
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            operator = gap.strip(" ()")
            start = left.end_col_offset + gap.find(operator)
            yield from change(right.lineno, start, right.lineno, start + len(operator), new)

    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, SWAPS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPS:
                yield from between(left, right, SWAPS[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, SWAPS[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from change(node.lineno, node.col_offset, operand.lineno, operand.col_offset, "")
            case ast.Constant(value=bool() as value):
                yield from change(
                    node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, str(not value)
                )
            case ast.Constant(value=int() | float() as value):
                yield from change(
                    node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, str(value + 1)
                )
            case ast.Call(func=ast.Name(id=name) as function) if name in CALLS:
                yield from change(
                    function.lineno, function.col_offset, function.lineno, function.end_col_offset or 0, CALLS[name]
                )
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield from change(node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, "pass")


def sample(revision: str) -> list[Mutant]:
    """Choose some changes in every area with a fixed seed, at most two per file if the area has enough files."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    chosen: list[Mutant] = []
    for area in json.loads(SUITES.read_text())["areas"]:
        files = [name for name in git("ls-tree", "-r", "--name-only", revision, area).split() if name.endswith(".py")]
        every = [mutant for name in files for mutant in candidates(area, name, git("show", f"{revision}:{name}"))]
        random.Random(f"{SEED} {area}").shuffle(every)
        some: list[Mutant] = []
        for mutant in every:
            if len(some) < PER_AREA and (len(files) == 1 or sum(other.file == mutant.file for other in some) < 2):
                some.append(mutant)
        chosen += some
    return chosen


def run_tests(checkout: Path, stages: list[list[str]], excluded: list[str]) -> tuple[str, str]:
    """Run the stages until a test fails. Returns "killed", "survived" or "timeout", and the first failure."""
    end = time.monotonic() + LIMIT_S
    environment = {**os.environ, "PYTHONPATH": str(checkout), "RLHF_MCORE_TEST_SLOWNESS": "1", "OMP_NUM_THREADS": "1"}
    for stage in stages:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=300", *stage]
        command += [f"--deselect={name}" for name in excluded]
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "timeout", " ".join(stage)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        if process.returncode not in (0, 5):
            failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return "killed", (failures or output.splitlines()[-1:] or ["no output"])[0][:200]
    return "survived", ""


def run(suite: str, checkout: Path) -> None:
    """Run a suite on every change that has no result yet, and write each result at once."""
    suites, results = json.loads(SUITES.read_text()), json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for number, entry in enumerate(json.loads(MUTANTS.read_text())):
        mutant, key = Mutant(**entry), f"{number}"
        if suite in results.get(key, {}):
            continue
        path, begun = checkout / mutant.file, time.monotonic()
        original = path.read_text()
        try:
            path.write_text(mutant.apply(original))
            outcome, test = run_tests(checkout, suites[suite][mutant.area], suites["excluded"].get(suite, []))
        except LookupError as error:
            outcome, test = "gone", str(error)
        finally:
            path.write_text(original)
        results.setdefault(key, {})[suite] = {
            "outcome": outcome,
            "test": test,
            "seconds": round(time.monotonic() - begun),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(
            number,
            suite,
            mutant.file,
            mutant.number,
            repr(mutant.old),
            "->",
            repr(mutant.new),
            outcome,
            test,
            flush=True,
        )


def report() -> None:
    """Print one line per change, and the sums."""
    results, entries = json.loads(RESULTS.read_text()), json.loads(MUTANTS.read_text())
    suites = sorted({suite for outcomes in results.values() for suite in outcomes})
    for number, entry in enumerate(entries):
        outcomes = results.get(str(number), {})
        told = "  ".join(f"{suite}: {outcomes[suite]['outcome']:8}" for suite in suites if suite in outcomes)
        print(f"{number:3} {entry['file']}:{entry['number']} {entry['old']!r} -> {entry['new']!r}  {told}")
    for suite in suites:
        killed = sum(outcomes.get(suite, {}).get("outcome") in ("killed", "timeout") for outcomes in results.values())
        print(f"{suite}: {killed} of {len(entries)} killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sample").add_argument("revision")
    runs = commands.add_parser("run")
    runs.add_argument("suite")
    runs.add_argument("checkout", type=Path)
    commands.add_parser("report")
    args = parser.parse_args()
    if args.command == "sample":
        MUTANTS.write_text(json.dumps([asdict(mutant) for mutant in sample(args.revision)], indent=1) + "\n")
    elif args.command == "run":
        run(args.suite, args.checkout.resolve())
    else:
        report()


if __name__ == "__main__":
    main()
