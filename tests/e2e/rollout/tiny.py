"""Tiny Hugging Face model directories with random weights and a character tokenizer."""

from __future__ import annotations

import string
from pathlib import Path

VOCABULARY = ["<pad>", "<eos>", "<unk>", *string.ascii_letters, *string.digits, *string.punctuation][:97]
EOS = 1


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def save_model(directory: Path, family: str, seed: int) -> None:
    """``family``: "qwen3" (tied embeddings, q/k norms) or "llama" (untied, biases); weights wide enough to matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, attention_bias=True, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # or they would be all zeros or ones, and could be lost unseen
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(directory)
    save_tokenizer(directory)
