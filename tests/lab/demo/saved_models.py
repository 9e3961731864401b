"""Small models in directories, as `tiercache demo --model` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.transformers.models import build


def save(directory: Path, name: str, **options: Any) -> str:
    """Save a model of 300 tokens, with a tokenizer whose tokens are bytes; return the directory."""
    build(name, vocab_size=300, **options).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return str(directory)
