"""The table of metrics: its page, its names, and that the package emits what it lists. Real runs are compared in tests/e2e."""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType

import pytest

from rlhf_mcore.commands.metrics import main
from rlhf_mcore.config.keys import DESCRIPTIONS
from rlhf_mcore.metrics.catalogue import METRICS, find_metric
from rlhf_mcore.metrics.rules import RULES

PACKAGE = Path(__file__).resolve().parents[3] / "rlhf_mcore"
READERS = ("config", "report", "cli/metrics.py", "observability/figures.py", "observability/live_display.py")


def literals() -> str:
    """Every text in the code that may emit metrics, parts of f-strings among them."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if not file.relative_to(PACKAGE).as_posix().startswith(READERS):
            pending: list[object] = [compile(file.read_text(encoding="utf-8"), file, "exec")]
            while pending:
                value = pending.pop()
                if isinstance(value, CodeType):
                    pending += [*value.co_consts, *value.co_names]
                elif isinstance(value, str):
                    found.add(value)
                elif isinstance(value, tuple | frozenset):
                    pending += value
    return "\n".join(sorted(found))


@pytest.mark.full  # compiles the package
def test_every_metric_of_the_table_is_emitted_somewhere() -> None:
    # A name is written whole, or as its last part after an f-string's or a table's prefix.
    emitted, families = literals(), ("reward/<part>_mean", "final/<evaluation>", "progress/", "throughput/engine_")
    for name in METRICS:
        if name.startswith(families) or name in ("reward/errors", "reward/timeouts"):
            continue  # the names of fields, of failures and of a user's parts: e2e runs have them
        words = [part for part in re.split(r"<\w+>", name.rpartition("/")[2] or name) if part]
        words = words or [name.partition("<")[0].rpartition("/")[0]]
        assert all(re.search(rf"(?<![a-z]){re.escape(word.strip('_'))}(?![a-z])", emitted) for word in words), name


def test_a_name_is_found_by_itself_or_by_its_family() -> None:
    for name, entry in [
        ("reward/mean", "reward/mean"),
        ("reward/mean/openai/gsm8k", "reward/mean/<source>"),
        ("reward/format_mean", "reward/<part>_mean"),
        ("timing/old_logprobs_s", "timing/<phase>_s"),
        ("timing/step_s", "timing/step_s"),
        ("critic/grad_norm", "<role>/grad_norm"),
        ("actor/grad_norm", "actor/grad_norm"),
        ("throughput/update_tokens_per_s", "throughput/<phase>_tokens_per_s"),
        ("memory/update_allocated_bytes", "memory/<phase>_allocated_bytes"),
        ("evaluate/pass_at_16", "evaluate/pass_at_<k>"),
        ("evaluate/pass_at_x", None),
        ("critic/entropy", None),
    ]:
        found = find_metric(name)
        assert (found and found.name) == entry


def test_every_rule_is_of_a_metric_and_remedies_name_keys_and_metrics_that_exist() -> None:
    assert {rule.metric for rule in RULES} <= set(METRICS)
    for metric in METRICS.values():
        text = re.sub(r"docs/[\w/-]+\.md", "", f"{metric.meaning} {metric.advice}")
        for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", text):
            assert any(known.startswith(f"{key}.") for known in DESCRIPTIONS) or key in DESCRIPTIONS, key
        for name in re.findall(r"see ((?:\w+/\w+(?: and )?)+)", text):
            assert all(find_metric(part) for part in name.split(" and ")), name


def test_the_command_explains_a_metric_and_finds_a_misspelt_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kl/mean"]) == 0
    assert capsys.readouterr().out == (
        "kl/mean: KL of the policy before the step to the reference (algorithm.kl.estimator)\n"
        "  unit     nats per token\n"
        "  healthy  the recent mean below 1; bad from 10; alarm after 3 steps in a row\n"
        "  else     raise algorithm.kl.coef, or lower the learning rate; read responses, because the policy may exploit the reward\n"
    )
    assert main(["actor/entropi"]) == 2
    assert "there is no metric actor/entropi; did you mean actor/entropy?" in capsys.readouterr().err
