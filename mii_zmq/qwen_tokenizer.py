# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the first Qwen models from its `qwen.tiktoken` file, read as data: no code of the checkpoint runs.

The file lists byte strings with their ranks. Text is cut by a fixed pattern; within a piece the two neighbours whose
joined bytes have the lowest rank are merged until none are in the list. The `tokenizers` library does the same with
one merge rule for every way to cut a listed byte string into two listed ones, in the order of ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mii_zmq.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "qwen.tiktoken"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, *(f"<|extra_{index}|>" for index in range(205)))
"""Their ids follow the last rank."""
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What the chat models' own code writes around messages."""


def load_qwen_tokenizer(directory: Path, alphabet: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The backend of a directory that holds `qwen.tiktoken`; `alphabet` is byte-level BPE's spelling of bytes.

    Raises:
        CheckpointError: the file is malformed.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = read_ranks(directory / FILE_NAME)
    letters = {byte: letter for letter, byte in alphabet.items()}
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (spelt[token[:cut]], spelt[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return backend


def qwen_settings(settings: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `tokenizer_config.json` that these models keep in code instead."""
    filled = {**settings, "eos_token": END_OF_TEXT}
    if generation.get("chat_format") == "chatml":
        filled.setdefault("chat_template", CHAT_TEMPLATE)
    return filled


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte string -> rank; the ranks are 0 to n - 1 and every single byte is there.

    Raises:
        CheckpointError: the file is malformed.
    """
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path}, line {number}: expected base64 bytes and a rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes((byte,)) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path} is incomplete: ranks must run from 0 without gaps and cover every byte")
    return ranks
