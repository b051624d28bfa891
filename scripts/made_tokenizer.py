# SPDX-License-Identifier: Apache-2.0
"""A tokenizer made of nothing: byte-level BPE over short made-up words, for machines that have none and no network.

Costs as much to encode and to decode with as a trained one of the same size; what it makes of a text means nothing.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mii_zmq.config import cache_dir
from mii_zmq.worker.models.demo_model import MODEL_NAME

LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
SPACE = "Ġ"
SPECIAL = ("<s>", "</s>")
DEMO_SIZE = 49152
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def find_tokenizer(scratch: Path, vocab_size: int) -> tuple[Path, str]:
    """A directory with a tokenizer for a vocabulary of that size, and what it is: the demo model's, if that has been
    prepared on this machine and fits, else one that is made in `scratch`."""
    demo = cache_dir() / "models" / MODEL_NAME
    if vocab_size >= DEMO_SIZE and (demo / "tokenizer.json").is_file():
        return demo, "demo"
    make_tokenizer(scratch, min(vocab_size, DEMO_SIZE))
    return scratch, "made up"


def make_tokenizer(directory: Path, num_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; `num_tokens` counts the special ones, at least 300."""
    vocab = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    words: list[str] = [SPACE, *LETTERS]
    room = num_tokens - len(SPECIAL) - len(vocab)
    while room > len(merges):
        longer = list(itertools.islice(itertools.product(words, LETTERS), room - len(merges)))
        merges += longer
        words = [first + second for first, second in longer]
        for word in words:
            vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
