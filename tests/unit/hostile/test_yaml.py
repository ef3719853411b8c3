"""Configuration files that would take the memory or the time of a machine, or that are not what they should be."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_mcore.config.differences import compare_configs
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.settings import SettingReader
from tests.unit.hostile.refusals import refusal


def alias_bomb(kind: str, levels: int = 9) -> str:
    """Every level holds nine times the one before: 9**9 values."""
    open_, close = {"list": "[]", "map": "{}"}[kind]
    items = (
        (lambda name: ", ".join([f"*{name}"] * 9))
        if kind == "list"
        else (lambda name: ", ".join(f"k{i}: *{name}" for i in range(9)))
    )
    lines = [f"l0: &l0 {open_}{'x' if kind == 'list' else 'k: x'}{close}"]
    lines += [f"l{n}: &l{n} {open_}{items(f'l{n - 1}')}{close}" for n in range(1, levels)]
    return "\n".join(lines) + f"\ndata: {{train: *l{levels - 1}}}\n"


def merge_bomb() -> str:
    lines = ["m0: &m0 {a: 1, b: 2, c: 3}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 9)]
    return "\n".join(lines)


DOCUMENTS: dict[str, tuple[str, str]] = {
    "aliases of lists": (alias_bomb("list"), "keys and values; write what is meant without aliases"),
    "aliases of maps": (alias_bomb("map"), "keys and values; write what is meant without aliases"),
    "merged maps": (merge_bomb(), "keys and values; write what is meant without aliases"),
    "an alias of itself": ("data: &a {train: [*a]}", "an alias refers to what holds it"),
    "a list in itself": ("data: {train: &a [*a]}", "an alias refers to what holds it"),
    "depth by lists": ("data: {train: " + "[" * 40 + "]" * 40 + "}", "nested deeper than 24"),
    "depth by maps": ("data: " + "{a: " * 40 + "1" + "}" * 40, "nested deeper than 24"),
    "depth by indentation": ("".join(" " * n + "a:\n" for n in range(40)), "nested deeper than 24"),
    "depth by aliases": (
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40))]),
        "nested deeper than 24",
    ),
    "depth beyond the parser": ("[" * 100_000, "nested deeper than 24"),
    "depth of keys": ("? " * 5000, "nested deeper than 24"),
    "a long file": ("#" * 300_000, "300,000 bytes, but at most 262,144"),
    "thousands of unknown keys": ("".join(f"key{n}: 1\n" for n in range(5000)), "unknown key key0; "),
    "a long key": ("? " + "k" * 50_000 + "\n: 1", "unknown key kkk"),
    "a list as a key": ("? [a, b]\n: 1", "a key has to be a name"),
    "a NUL in a text": ('project: "a\\0b"', "a text with a NUL or a lone surrogate"),
    "half a character": ('project: "\\ud800"', "invalid Unicode character"),
    "half a character in a key": ('"\\udfff": 1', "invalid Unicode character"),
    "no character": ('project: "\\U7fffffff"', "not valid YAML"),
    "bytes that are no text": ("project: \udcff", "not UTF-8"),
    "a NUL": ("seed: 1\0", "a NUL at byte 7"),
    "a control character": ("project: a\x07b", "not valid YAML"),
    "an integer of 200,000 digits": ("seed: " + "9" * 200_000, "not a plain value"),
    "an integer of 100 digits": ("seed: " + "9" * 100, "an integer beyond 64 bits"),
    "an integer in base 60": ("seed: 1" + ":59" * 5000, "not a plain value"),
    "integers beyond 64 bits in a list": ("data: {weights: [1, 0x" + "f" * 100 + "]}", "an integer beyond 64 bits"),
    "a number that is none": ("trainer: {watchdog_s: .nan}", "trainer.watchdog_s"),
    "a learning rate without end": ("actor: {optimizer: {lr: .inf}}", "actor.optimizer.lr=inf"),
    "a day that is none": ("data: {weights: [2001-99-99]}", "not a plain value"),
    "a day": ("data: {weights: [2001-01-01]}", "data.weights"),
    "a tag that calls": ("seed: !!python/object/apply:os.getpid []", "not a plain value"),
    "a tag on a wrong value": ("seed: !!int x", "not a plain value"),
    "a bool that is none": ("seed: !!bool x", "not a plain value"),
    "a time that is none": ("seed: !!timestamp x", "not a plain value"),
    "bytes": ("seed: !!binary aGk=", "seed=b'hi'"),
    "a set": ("data: {weights: !!set {a, b}}", "data.weights"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
    "not a map": ("[1, 2]", "expected keys and values at the top"),
    "a text": ("hello", "expected keys and values at the top"),
    "a map for a number": ("seed: {a: 1}", "seed"),
    "a list for a group": ("actor: [1]", "actor is a group"),
    "interpolations that multiply": (
        "project: ${experiment}${experiment}${experiment}\nexperiment: "
        + "${output_dir}" * 9
        + "\noutput_dir: "
        + "${model.path}" * 9
        + "\nmodel:\n  path: ${seed}${seed}",
        "refers to more than 200 values",
    ),
    "an interpolation of many": ("project: " + "${seed}" * 500, "at most 2000 characters"),
    "references in a reference": ("project: ${${experiment}}\nexperiment: seed", "has to be written out"),
    "a deep default": ("project: '${oc.env:A," + "[" * 400 + "}'", "nested too deep"),
    "an open interpolation": ("project: '" + "${" * 400 + "'", "project="),
    "a resolver that reads files": ("project: ${oc.decode:x}", "uses the resolver oc.decode"),
    "references in a circle": ("project: ${experiment}\nexperiment: ${project}", "does not resolve"),
    "base files that are no names": ("base: {a: 1}", "base={'a': 1} must be a file"),
    "base files that are numbers": ("base: [1, 2]", "must be a file"),
    "a base that is not there": ("base: gone.yaml", "no such file"),
    "a base with a NUL": ('base: "a\\0.yaml"', "a text with a NUL"),
    "a base with a long name": ("base: " + "n" * 5000, "cannot be read (File name too long)"),
    "a base that is a device": ("base: /dev/zero", "a device, not a regular file"),
    "a base that is a directory": ("base: .", "a directory, not a regular file"),
}


def test_documents(tmp_path: Path) -> None:
    for number, name in enumerate(DOCUMENTS):
        here = tmp_path / str(number)
        here.mkdir()
        text, message = DOCUMENTS[name]
        path = here / "run.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        assert message in refusal(_checked, path)


def _checked(path: Path) -> None:
    from rlhf_mcore.config.validate import validate

    validate(load_config(path, ["model.path=gone"]))


def _chain(folder: Path) -> None:
    for n in range(100):
        (folder / f"{n}.yaml").write_text(f"base: {n + 1}.yaml\n")
    (folder / "run.yaml").write_text("base: 0.yaml\n")


def _diamonds(folder: Path) -> None:
    """Two files each way, thirty levels: a billion readings."""
    for n in range(30):
        (folder / f"{n}.yaml").write_text(f"base: [{n + 1}.yaml, {n + 1}.yaml]\n")
    (folder / "30.yaml").write_text("seed: 1\n")
    (folder / "run.yaml").write_text("base: 0.yaml\n")


def _circle(folder: Path) -> None:
    (folder / "run.yaml").write_text("base: a.yaml\n")
    (folder / "a.yaml").write_text("base: run.yaml\n")


def test_files(tmp_path: Path) -> None:
    for number, (make, message) in enumerate(
        [
            (_chain, "more than 32 files by way of base"),
            (_circle, "form a cycle (run.yaml -> a.yaml -> run.yaml)"),
            (lambda folder: (folder / "run.yaml").symlink_to("run.yaml"), "Too many levels of symbolic links"),
            (lambda folder: os.mkfifo(folder / "run.yaml"), "a FIFO, not a regular file"),
            (lambda folder: (folder / "run.yaml").symlink_to("/dev/zero"), "a device, not a regular file"),
            (lambda folder: (folder / "run.yaml").mkdir(), "a directory, not a regular file"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        make(here)
        assert message in refusal(load_config, here / "run.yaml")


def test_an_alias_that_repeats_little_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: &files [a.jsonl, b.jsonl], eval: *files}\nmodel: {path: m}\n")
    assert load_config(path).data.eval == ["a.jsonl", "b.jsonl"]


def test_values_may_refer_to_values_that_refer_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("project: p-${experiment}\nexperiment: e-${seed}-${.seed}\nseed: 7\nmodel: {path: m}\n")
    assert load_config(path).project == "p-e-7-7"


def test_the_configuration_in_a_checkpoint(tmp_path: Path) -> None:
    message = refusal(compare_configs, alias_bomb("list"), "seed: 1")
    assert "config.yaml of the checkpoint" in message
    assert "choose another checkpoint" in message


def test_lists_of_lists_where_single_values_are_meant() -> None:
    for override in ["data.train=[[a.jsonl]]", "data.train=[{a: b}]"]:
        reader = SettingReader()
        reader.read_override(override)
        assert "is a list of single values" in "".join(reader.problems)
