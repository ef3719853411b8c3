from __future__ import annotations

import json
from typing import Any

from rlhf_mcore.readers.tokenizer_match import tokenizer_difference
from tests.unit.config.checking import check, only

VOCAB = {"a": 0, "b": 1, "ab": 2, "<end>": 3}


def write(
    workspace: Any, folder: str, vocab: Any = None, merges: Any = ("a b",), end: str = "<end>", **parts: Any
) -> None:
    vocab = VOCAB if vocab is None else vocab
    added = [{"id": vocab[end], "content": end, "special": True}] if isinstance(vocab, dict) and end in vocab else []
    content = {"model": {"vocab": vocab, "merges": list(merges)}, "added_tokens": added, **parts}
    workspace.write(f"{folder}/tokenizer.json", json.dumps(content))
    workspace.write(f"{folder}/tokenizer_config.json", json.dumps({"eos_token": end}))


def test_a_permuted_tokenizer_is_refused_with_the_first_difference(workspace: Any) -> None:
    write(workspace, "model")
    write(workspace, "other", {"b": 0, "a": 1, "ab": 2, "<end>": 3})
    problem = only(check("model.tokenizer_path=other"))
    assert "token 0, 'a', is 'b' there; 2 of 4 tokens differ" in problem
    assert "model.allow_other_tokenizer=true" in problem
    assert check("model.tokenizer_path=other", "model.allow_other_tokenizer=true") == []
    write(workspace, "copy")
    assert check("model.tokenizer_path=copy") == []


def test_differences(workspace: Any) -> None:
    for changes, difference in [
        ({"vocab": {**VOCAB, "more": 4}}, None),
        ({"vocab": {"a": 0, "b": 1, "<end>": 3}}, "token 2, 'ab', is not there; 1 of 4 tokens differ"),
        ({"merges": [["a", "b"]]}, None),  # written in the other way
        ({"merges": ["b a"]}, "its merges are in another order"),
        ({"vocab": {"a": 0, "b": 1, "ab": 2, "<stop>": 3}, "end": "<stop>"}, "token 3, '<end>', is '<stop>' there"),
        ({"end": "ab"}, "it ends a text with 'ab', the model's own with '<end>'"),
        ({"vocab": [["a", 0.0], ["b", -1.0], ["ab", -2.0], ["<end>", 0.0]]}, None),
    ]:
        write(workspace, "model")
        write(workspace, "other", **changes)
        found = tokenizer_difference("other", "model")
        assert found is None if difference is None else difference in str(found)


def test_tokenizers_without_a_tokenizer_json(workspace: Any) -> None:
    for folder, text in (("model", "one"), ("other", "two"), ("same", "one")):
        (workspace.root / folder / "tokenizer.json").unlink(missing_ok=True)
        workspace.write(f"{folder}/tokenizer.model", text)
    assert tokenizer_difference("other", "model") == "its tokenizer.model has other contents"
    assert tokenizer_difference("same", "model") is None


def test_ids_of_the_config_are_special_tokens_of_the_tokenizer_beside_it(workspace: Any) -> None:
    write(workspace, "model")
    workspace.write_hf_config(eos_token_id=3, bos_token_id=None)
    assert check() == []
    workspace.write_hf_config(eos_token_id=[3, 1])
    assert "config.json has eos_token_id=1, which is 'b' in its tokenizer.json" in only(check())
    workspace.write_hf_config(bos_token_id=0)
    assert "config.json has bos_token_id=0, which is 'a'" in only(check())
