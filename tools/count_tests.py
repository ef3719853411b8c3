"""Add up pytest's reports: ``count_tests.py [--failed N] REPORT.xml...``.

It prints one line per failed test, one line per reason for skipped tests, and last "N passed, N failed, N skipped". An incomplete
report means that pytest was killed, and counts as one failure. The log (REPORT.log) shows the running test.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MOST_NAMED, MOST_LINES, WIDTH = 12, 15, 300  # continuous integration shows the last lines only


def count(reports: Sequence[Path]) -> tuple[Counter[str], list[str]]:
    """Count the outcomes of all tests in files of --junitxml. Returns them with one line per failure, more for a killed pytest."""
    total: Counter[str] = Counter()
    failures: list[str] = []
    for report in reports:
        try:
            suites = list(ElementTree.parse(report).iter("testsuite"))
        except ElementTree.ParseError:
            total["failed"] += 1
            failures.append(_last_words(report.with_suffix(".log")))
            continue
        for suite in suites:
            tests, errors, failed, skipped = (
                int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped")
            )
            total += Counter(passed=tests - errors - failed - skipped, failed=errors + failed, skipped=skipped)
            failures += _failures(suite)
    return total, failures


def _failures(suite: ElementTree.Element) -> Iterator[str]:
    for case in suite.iter("testcase"):
        for outcome in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            message = (outcome.attrib.get("message") or "no message").strip().splitlines()[0]
            yield f"FAILED {name}: {message}"[:WIDTH]


def skips(reports: Sequence[Path]) -> list[str]:
    """Return one line per reason with the number of skipped tests, the most frequent reason first."""
    reasons: Counter[str] = Counter()
    for report in reports:
        with suppress(ElementTree.ParseError):
            for skipped in ElementTree.parse(report).iter("skipped"):
                if skipped.attrib.get("type") == "pytest.skip":  # and not one that was expected to fail
                    reasons[skipped.attrib.get("message", "no reason given").strip().partition("\n")[0]] += 1
    return [f"SKIPPED {number}: {reason}"[:WIDTH] for reason, number in reasons.most_common()]


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    begun = next((line for line in reversed(lines) if line.startswith("tests/") and "::" in line), "no test")
    last = "\n".join(f"    {line[:WIDTH]}" for line in lines[-MOST_LINES:])
    return f"DIED pytest of {log.stem}; the last test that began: {begun.strip()}; its last lines:\n{last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed", type=int, default=0, help="failures of something else, to be added")
    parser.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args()
    total, failures = count(args.reports)
    for failure in failures[:MOST_NAMED]:
        print(failure)
    if len(failures) > MOST_NAMED:
        print(f"and {len(failures) - MOST_NAMED} more, named above")
    reasons = skips(args.reports)
    print(*reasons[:MOST_NAMED], sep="\n", end="\n" if reasons else "")
    if len(reasons) > MOST_NAMED:
        print(f"and {len(reasons) - MOST_NAMED} further reasons, named above")
    line = f"{total['passed']} passed, {total['failed'] + args.failed} failed"
    print(line + (f", {total['skipped']} skipped" if total["skipped"] else ""))


if __name__ == "__main__":
    main()
