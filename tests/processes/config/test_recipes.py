"""Follow CONTRIBUTING's recipes for a policy loss, a grader and a tracker to the letter, in a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
_BLOCK = re.compile(
    r"^(?:In .*, )?`(\S+\.py)`(?:, in `(\w+)`)?:\n\n```(?:python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL
)

USE_ALL = """
import json, pathlib
import torch
import rlhf_mcore
from rlhf_mcore.algorithms.interfaces import LossInputs
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.trackers import build_trackers
from rlhf_mcore.rewards.graders import GRADERS

chosen = ["algorithm.policy_loss=vanilla", "reward.rules=[{name: contains}]", "logging.trackers=[csv]"]
cfg = load_config("run.yaml", chosen)
validate(cfg)
logprobs = torch.tensor([[-1.0, -2.0, 7.0]], requires_grad=True)
ids = torch.zeros(1, 3, dtype=torch.int64)
inputs = LossInputs(
    logprobs, torch.zeros(1, 3), torch.tensor([[2.0, -1.0, 5.0]]), torch.tensor([[True, True, False]]),
    torch.tensor([[0.5, 0.25, 0.0]]), ids, 1,
)
loss, _ = find_policy_loss(cfg.algorithm)(inputs)
loss.backward()
grade = GRADERS[cfg.reward.rules[0].name]
run = RunDirectory.create(".", "p", "e")
tracker = build_trackers(cfg, run, None, print)
tracker.log(3, {"loss/total": 0.5})
tracker.close()
print(json.dumps({
    "package": rlhf_mcore.__file__,
    "loss": loss.item(), "gradient": logprobs.grad.tolist()[0],
    "grades": [grade("it is 42.", "42"), grade("it is 41.", "42")],
    "csv": pathlib.Path("p/e/trackers/csv/metrics.csv").read_text(),
}))
"""


def recipe(title: str) -> str:
    """Return the text below a heading of the page. The heading states the number of code lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### {title}: .*?(?=^##)", page, re.MULTILINE | re.DOTALL)
    return section


def follow(copy: Path, section: str) -> None:
    """Append each block to the table or class that the page names, otherwise to the end of the file, which may be new."""
    for name, inside, code in _BLOCK.findall(section):
        file = copy / name
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        start = re.search(rf"^(class )?{inside}\b", text, re.MULTILINE) if inside else None
        if start is None:
            file.write_text(f"{text}\n\n{code}", encoding="utf-8")
            continue
        end = re.compile(r"^[})]" if not start[1] else r"^\n\n|\Z", re.MULTILINE).search(text, start.end())
        assert end is not None
        file.write_text(text[: end.start()] + code + text[end.start() :], encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package and follow all recipes in it."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("rlhf_mcore", "tools", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for title in ("A policy loss", "A grader", "A tracker"):
        follow(folder, recipe(title))
    (group, line), *others = re.findall(r'^\[project\.entry-points\."(\S+)"\]\n(.*)', recipe("A tracker"), re.MULTILINE)
    assert not others
    installed = folder / "my_trackers-1.dist-info"  # as pip would install it from the page's pyproject.toml
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-trackers\nVersion: 1\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n", encoding="utf-8")
    return folder


def run(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("title", ["A policy loss", "A grader", "A tracker"])
def test_the_lines_of_a_recipe_are_counted(title: str) -> None:
    section = recipe(title)
    lines = [line for _, _, code in _BLOCK.findall(section) for line in code.splitlines() if line.strip()]
    assert section.startswith(f"### {title}: {len(lines)} lines\n")


def test_what_is_added_is_accepted_by_its_name_and_used(workspace: Any, copy: Path) -> None:
    found = json.loads(run(copy, "-c", USE_ALL))
    assert Path(found["package"]).is_relative_to(copy)
    # -(0.5 * 2 * -1 + 0.25 * -1 * -2); the gradient is -w A.
    assert (found["loss"], found["gradient"]) == (0.5, [-1.0, 0.25, 0.0])
    assert found["grades"] == [1.0, 0.0]
    assert found["csv"] == "3,loss/total,0.5\n"


def test_the_pages_name_what_is_added(copy: Path) -> None:
    run(copy, str(copy / "tools" / "document_config.py"))
    base = (copy / "configs" / "base.yaml").read_text(encoding="utf-8")
    pages = copy / "docs" / "reference" / "config"
    page = (pages / "algorithm.md").read_text(encoding="utf-8")
    words = " ".join(base.replace("#", " ").split())
    losses = (
        "ppo_clip | gspo | cispo | gmpo | sapo | dppo_tv | dppo_kl | kl_cov | clip_cov | vanilla | path/to/file.py:name"
    )
    assert f"policy loss: {losses} policy_loss: ppo_clip" in words
    assert "`clip_cov`, `vanilla` or `path/to/file.py:name`" in page
    rewards = (pages / "reward.md").read_text(encoding="utf-8").splitlines()
    assert "`contains`" in next(line for line in rewards if line.startswith("| `reward.rules[*].name` |"))
