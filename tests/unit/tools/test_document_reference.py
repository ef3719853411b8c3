"""The pages of docs/reference/ are the ones that the code of this version generates."""

from __future__ import annotations

from tools import document_config, document_reference

REMEDY = "run .venv/bin/python tools/document_reference.py"


def test_reference_pages_are_up_to_date() -> None:
    made = document_reference.pages()
    made |= {f"config/{name}.md": text for name, text in document_config.pages().items()}
    folder = document_reference.PAGES
    committed = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.md")}
    assert committed.keys() == made.keys(), REMEDY
    assert [path for path, text in made.items() if committed[path] != text] == [], REMEDY


def test_command_page_lists_the_options_of_subcommands() -> None:
    page = document_reference.command_page("config")
    assert "## `show`" in page and "| `--changed` |" in page
    assert "```bash\nrlhf-mcore config show" in page


def test_command_page_of_a_plugin_links_to_its_readme() -> None:
    assert "(../../../contrib/simulate/README.md)" in document_reference.pages()["cli/simulate.md"]


def test_agent_protocol_separates_supported_from_rejected_fields() -> None:
    line = next(line for line in document_reference.agent_protocol_page().splitlines() if "/chat/completions" in line)
    supported, rejected = line.split("|")[2:4]
    assert {"`messages`", "`n`", "`tools`"} <= set(supported.replace(",", "").split())
    assert rejected.replace(",", "").split() == ["`response_format`", "`top_logprobs`"]
