"""Adds up pytest's reports: count_tests.py [--failed N] REPORT.xml... prints one line, "N passed, N failed, N skipped"."""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def count(reports: Iterable[Path]) -> Counter[str]:
    """Outcomes of all tests in files of --junitxml. A file that is not whole is a pytest that was killed: one failure."""
    total: Counter[str] = Counter()
    for report in reports:
        try:
            suites = list(ElementTree.parse(report).iter("testsuite"))
        except ElementTree.ParseError:
            total["failed"] += 1
            continue
        for suite in suites:
            tests, errors, failures, skipped = (
                int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped")
            )
            total += Counter(passed=tests - errors - failures - skipped, failed=errors + failures, skipped=skipped)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed", type=int, default=0, help="failures of something else, to be added")
    parser.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args()
    total = count(args.reports)
    line = f"{total['passed']} passed, {total['failed'] + args.failed} failed"
    print(line + (f", {total['skipped']} skipped" if total["skipped"] else ""))


if __name__ == "__main__":
    main()
