"""Show the costs of tests, from the JUnit files of a run, and refresh the durations by which shards are balanced.

    RLHF_MCORE_TEST_REPORTS=reports ./launch/test.sh --full
    python tools/test_costs.py reports/*.xml              # CPU seconds by tier and directory, and the most expensive tests
    python tools/test_costs.py --write reports/*.xml      # and write tests/durations.json

CPU seconds are measured by ``tests/costs.py``. Durations are wall seconds of the tests of tier ``full``, by file.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """A test: its file, name and tier, CPU seconds (wall seconds in a report without them) and wall seconds."""

    file: str
    name: str
    tier: str
    cpu_s: float
    wall_s: float


def read(reports: Iterable[Path]) -> list[Cost]:
    """Read all tests of some JUnit files."""
    costs = []
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            properties = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
            file, wall = case.attrib["classname"].replace(".", "/") + ".py", float(case.attrib["time"])
            tier, cpu = properties.get("tier", "unknown"), float(properties.get("cpu_s", wall))
            costs.append(Cost(file, case.attrib["name"], tier, cpu, wall))
    return costs


def durations(costs: Iterable[Cost]) -> dict[str, float]:
    """Return the wall seconds of tier ``full`` by file, rounded to tenths and at least 0.1, so that no file counts as free."""
    sums: dict[str, float] = defaultdict(float)
    for cost in costs:
        if cost.tier == "full":
            sums[cost.file] += cost.wall_s
    return {file: max(0.1, round(seconds, 1)) for file, seconds in sorted(sums.items())}


def table(costs: Sequence[Cost]) -> list[str]:
    """Return the lines of the tables."""
    lines = []
    for tier in dict.fromkeys(cost.tier for cost in sorted(costs, key=lambda cost: cost.tier)):
        chosen = [cost for cost in costs if cost.tier == tier]
        lines += [f"tier {tier}: {len(chosen)} tests, {_sum(chosen):.0f} CPU s", ""]
        directories: dict[str, list[Cost]] = defaultdict(list)
        for cost in chosen:
            directories["/".join(cost.file.split("/")[:3])].append(cost)
        for name, some in sorted(directories.items(), key=lambda pair: -_sum(pair[1])):
            lines.append(f"{_sum(some):10.1f} {len(some):6} {name}")
        lines.append("")
        for cost in sorted(chosen, key=lambda cost: -cost.cpu_s)[:MOST_NAMED]:
            lines.append(f"{cost.cpu_s:10.1f}        {cost.file}::{cost.name}"[:160])
        lines.append("")
    return lines


def _sum(costs: Iterable[Cost]) -> float:
    return sum(cost.cpu_s for cost in costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tests/durations.json; needs reports of a whole run")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    args = parser.parse_args()
    costs = read(path for path in args.reports if not path.name.startswith("megatron-latest"))
    print(*table(costs), sep="\n")
    if args.write:
        DURATIONS.write_text(json.dumps(durations(costs), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
