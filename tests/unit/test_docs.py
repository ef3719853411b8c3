"""Check code of the documentation: commands use existing names, YAML is a configuration, Python compiles and its imports exist.

Other tests run the blocks: tests/unit/rewards/test_docs.py, tests/unit/environments/test_page.py,
tests/unit/algorithms/test_documented_example.py, tests/unit/mcore/test_family_recipe.py, tests/processes/config/test_recipes.py,
tests/processes/launch/test_submit.py, tests/e2e/test_python_api.py, tests/e2e/test_first_use.py, tests/e2e/test_task_to_model.py.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import rlhf_mcore
from rlhf_mcore.cli.main import COMMANDS
from rlhf_mcore.cli.main import module_of as command_module
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import Group

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOREIGN_KEYS = ("docs/migrating/",)  # pages with keys of other trainers
GENERATED = ("docs/reference/",)
GROUPS = [name for name, value in Config() if isinstance(value, Group)]
FOLDERS = ("configs/", "tools/", "examples/", "launch/", "tests/", "benchmarks/", "requirements/", "./launch/")
RUNNERS = ("rlhf-mcore", "python", "torchrun", "srun")


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:50]}"


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Yield fenced code, and indented code in the language of its first line."""
    text, name = page.read_text(encoding="utf-8"), page_name(page)
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, code in fence.findall(text):
        yield Block(name, language or language_of(code), code)
    for code in re.findall(r"(?:(?<=\n\n)|\A)((?:    .*\n|\n(?=    ))+)", fence.sub("\n", text)):
        yield Block(name, language_of(textwrap.dedent(code)), textwrap.dedent(code))


def language_of(code: str) -> str:
    first = next((line for line in code.splitlines() if line.strip() and not line.startswith("#")), "")
    if re.match(r"(import|from|def|class|@)\b", first):
        return "python"
    if first.partition(":")[0] in Config.model_fields:
        return "yaml"
    return "bash"


EXAMPLES = [path for path in sorted((ROOT / "examples").iterdir()) if path.suffix in (".py", ".sh")]
BLOCKS = [block for page in PAGES for block in blocks(page)]
BLOCKS += [Block(path.name, "bash", path.read_text(encoding="utf-8").replace("# ", "")) for path in EXAMPLES]


def help_of(command: str) -> Block:
    """Return the examples of a command's help."""
    epilog = import_module(command_module(command))._parser().epilog
    return Block(command, "bash", re.findall(r"^examples?:\n((?:  .*\n)+)", epilog)[0])


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each line that calls one of our commands. Text after three blanks describes the command."""
    for line in re.sub(r" *\\\n\s*", " ", block.text).splitlines():
        line = re.split(r"   | +#", line.strip())[0]
        words = shlex.split(line.translate(str.maketrans("", "", "[]"))) if re.match(r"[.\w/-]+( |$)", line) else []
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and (words[0].startswith("./launch/") or Path(words[0]).name in RUNNERS):
            yield words


@cache
def options(module: str) -> frozenset[str]:
    """Return the options of a command and its subcommands."""

    def of(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from of(inner)

    return frozenset(of(import_module(module)._parser()))


@cache
def keys() -> frozenset[str]:
    def below(node: Any, prefix: str) -> Iterator[str]:
        for name, value in node:
            yield prefix + name
            if isinstance(value, Group):
                yield from below(value, f"{prefix}{name}.")

    return frozenset(below(Config(), ""))


def is_key(name: str) -> bool:
    """Return whether a key exists. Any key below ``environment.options`` does."""
    return name in keys() or name.startswith(
        ("environment.options.", "model.megatron.", "actor.megatron.", "rollout.vllm.")
    )


def module_of(words: list[str]) -> str | None:
    """Return our module that a command line starts, or None for other programs."""
    if Path(words[0]).name == "rlhf-mcore":
        if len(words) == 1 or words[1].startswith("-") or words[1] == "COMMAND":
            return None
        assert words[1] in COMMANDS, f"there is no command {words[1]}"
        return command_module(words[1])
    module = words[words.index("-m") + 1] if "-m" in words else ""
    assert not module.startswith("rlhf_mcore.") or find_spec(module), f"there is no module {module}"
    return module if module.startswith("rlhf_mcore.cli.") else None


def problems(words: list[str]) -> Iterator[str]:
    """Yield the missing files, keys, modules and options that a command line names."""
    for word in words:
        path = (word.partition("=")[2] or word).partition(":")[0]
        if path.startswith(FOLDERS) and not re.search(r"[*<$]", path) and not (ROOT / path).exists():
            yield f"no file {path}"
        key = re.match(r"([a-z_]+(?:\.[a-z0-9_]+)+)=", word)
        if key and key[1] != "a.b" and not is_key(key[1]):
            yield f"no key {key[1]}"
    module = module_of(words)
    own = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    if module is not None:
        after = words[words.index("-m") + 2 :] if "-m" in words else words[2:]
        own = [word.partition("=")[0] for word in after if re.match(r"--[a-z]", word)]
        yield from (f"{module} has no {option}" for option in own if option not in options(module))
    elif words[0].startswith("./launch/") and "pytest" not in words and words[0] != "./launch/test.sh":
        known = (ROOT / words[0]).read_text() + "".join(
            file.read_text() for file in (ROOT / "rlhf_mcore/cli").glob("*.py")
        )
        known += "".join(file.read_text() for file in (ROOT / "launch/slurm").iterdir())
        yield from (f"{words[0]} has no {option}" for option in own if option not in known)


def test_there_are_blocks_of_every_language() -> None:
    lines = [words for block in BLOCKS if block.language in ("bash", "") for words in commands(block)]
    assert len(lines) > 80 and {"train", "plan", "report", "config"} <= {words[1] for words in lines if len(words) > 1}
    assert min(sum(block.language == name for block in BLOCKS) for name in ("yaml", "python")) > 5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("rlhf-mcore train configs/quickstart/grpo.yml", "no file configs/quickstart/grpo.yml"),
        ("rlhf-mcore train run.yaml --print", "rlhf_mcore.cli.train has no --print"),
        ("torchrun --nproc-per-node 2 -m rlhf_mcore.cli.train run.yaml actor.lr=1", "no key actor.lr"),
        ("rlhf-mcore config explain --why", "rlhf_mcore.commands.config has no --why"),
        ("./launch/slurm/submit.sh CONFIG --knodes 2", "./launch/slurm/submit.sh has no --knodes"),
        ("rlhf-mcore train run.yaml reward.function=examples/reward.py:grade", "no file examples/reward.py"),
    ],
)
def test_what_there_is_not_is_found(line: str, problem: str) -> None:
    [words] = commands(Block("page", "bash", f"    {line}   # told\n"))
    assert list(problems(words)) == [problem]


def test_commands_name_what_there_is() -> None:
    found = [
        f"{block.page}: {' '.join(words)}: {problem}"
        for block in BLOCKS
        if block.language in ("bash", "")
        for words in commands(block)
        for problem in problems(words)
    ]
    assert found == []


def test_the_help_of_every_command_has_examples_of_what_there_is() -> None:
    for command in COMMANDS:
        lines = list(commands(help_of(command)))
        assert [problem for words in lines for problem in problems(words)] == []
        assert all(words[1] == command for words in lines if words[0] == "rlhf-mcore" and command != "serve-reward")
        assert lines or command == "completion", "which a shell evaluates"


@cache
def base_config() -> Config:
    return load_config(ROOT / "configs" / "base.yaml", without_model=True)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_configuration(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.page.startswith(FOREIGN_KEYS):
        return
    for name in re.findall(r"\$\{oc\.env:(\w+)", block.text):
        monkeypatch.setenv(name, "x")
    (tmp_path / "run.yaml").write_text(block.text)
    assert load_config(tmp_path / "run.yaml", without_model=True) != base_config(), "it sets nothing"


def top_level(module: str) -> set[str]:
    """Return the names that one of our modules binds, by its source."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    found: set[str] = set(rlhf_mcore.__all__) if module == "rlhf_mcore" else set()
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_python_compiles_and_imports_what_there_is() -> None:
    for block in [b for b in BLOCKS if b.language == "python" and b.page != "CONTRIBUTING.md"]:
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert all(find_spec(alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlhf_mcore"):
                assert {alias.name for alias in node.names} <= top_level(node.module)
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert find_spec(node.module.partition(".")[0])
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rm":
                assert node.attr in rlhf_mcore.__all__
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rm."):
                given = [ast.unparse(argument) for argument in node.args]
                named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
                inspect.signature(getattr(rlhf_mcore, ast.unparse(node.func)[3:])).bind(*given, **named)


def test_keys_in_the_text_are_keys() -> None:
    found = []
    for page in PAGES:
        if page_name(page).startswith((*FOREIGN_KEYS, *GENERATED)):
            continue
        for span in re.findall(r"(?<!`)`([a-z_]+(?:\.[a-z_0-9]+)+)(?=[`:=])", page.read_text(encoding="utf-8")):
            is_file = span.rpartition(".")[2] in ("py", "yaml", "yml", "json", "jsonl", "md", "sh")
            if span.partition(".")[0] in GROUPS and not is_file and not is_key(span):
                found.append(f"{page_name(page)}: {span}")
    assert found == []


def test_the_table_of_keys_that_matter_shows_the_defaults() -> None:
    page = (ROOT / "docs/guide/configuration.md").read_text(encoding="utf-8")
    reference = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference/config").glob("*.md"))
    rows = re.findall(r"^(\| `[a-z0-9_.]+` \| `[^`]*` \|)", page, re.MULTILINE)
    assert len(rows) == 25
    assert [row for row in rows if row not in reference] == []
