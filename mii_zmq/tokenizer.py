# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to ids and back, and what a checkpoint says about special tokens and its chat template.

Reads `tokenizer.json` with the `tokenizers` library alone, applying what `tokenizer_config.json` adds to it, so that
no process needs transformers or torch to handle text; transformers is imported only for checkpoints that have no
`tokenizer.json`. Code from a checkpoint never runs. Incremental decoding, stop strings and template rendering live in
the worker; this module knows ids, bytes and files. All methods may be called from several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mii_zmq import qwen_tokenizer
from mii_zmq.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

FAKE_PREFIX = "fake:"
RANDOM_PREFIX = "random:"
"""Of a model's name: random weights of the shape that follows, and no tokenizer of its own."""
TOKENIZER_FILES = ["*.json", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt"]
NO_TOKENIZER_FILE = "no_tokenizer.txt"
"""In an imported checkpoint whose vocabulary could not be converted: one line that says why."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_NAMES = ("additional_special_tokens", "extra_special_tokens")
FAKE_EOS = 256
FAKE_CHAT_TEMPLATE = (
    "{% if tools %}{{ 'tools: ' + tools | tojson + '\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class TextTokenizer:
    """What text handling needs of a tokenizer. Subclasses fill the attributes and implement the methods."""

    vocab_size: int
    """Ids, added tokens included; every id from `encode` is below it."""
    eos_token_ids: tuple[int, ...]
    all_special_ids: frozenset[int]
    special_tokens: dict[str, str]
    """`bos_token` and the like, as templates see them."""
    chat_template: str | None
    tool_chat_template: str | None = None
    """Used instead where a request has tools; None: the other one handles them."""
    max_token_chars: int | None
    """No token stands for more characters of a prompt than this. None: nothing is known."""
    strips_first_space: bool
    """One space at the very start of decoded text is dropped."""
    token_bytes: Callable[[int], bytes] | None
    """The bytes of one token, where decoding is nothing but joining them as UTF-8. None: only `decode` knows."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids that the tokenizer does not know become nothing."""
        raise NotImplementedError


class FakeTokenizer(TextTokenizer):
    """Bytes as ids, 256 as end of sequence: for tests and for the test engine."""

    def __init__(self) -> None:
        self.vocab_size = FAKE_EOS + 1
        self.eos_token_ids = (FAKE_EOS,)
        self.all_special_ids = frozenset(self.eos_token_ids)
        self.special_tokens = {"eos_token": "<eos>"}
        self.chat_template = FAKE_CHAT_TEMPLATE
        self.max_token_chars = 1
        self.strips_first_space = False
        self.token_bytes = self._token_bytes

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        skipped = self.all_special_ids if skip_special_tokens else frozenset()
        return b"".join(self._token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < FAKE_EOS else b"<eos>" if token_id == FAKE_EOS else b""


class HfTokenizer(TextTokenizer):
    """A tokenizer of the `tokenizers` library with what its checkpoint's `tokenizer_config.json` says."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: dict[str, Any],
        chat_template: str | None,
        tool_chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = _special_token_texts(settings)
        _add_missing_tokens(backend, settings, self.special_tokens)
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos_id = backend.token_to_id(self.special_tokens["eos_token"]) if "eos_token" in self.special_tokens else None
        self.eos_token_ids = () if eos_id is None else (eos_id,)
        added = backend.get_added_tokens_decoder()
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template
        self.token_bytes, self.strips_first_space = _bytes_function(backend)
        self.max_token_chars = self._longest_token() if _covers_every_character(backend) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The batch call without offsets lets other threads run meanwhile; the single one does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        text: str | None = self._backend.id_to_token(token_id)
        return text

    def token_id(self, text: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def _longest_token(self) -> int:
        return max((len(text) for text in self._backend.get_vocab(with_added_tokens=True)), default=1)


def load_tokenizer(path_or_id: str) -> TextTokenizer:
    """The tokenizer of a local directory, a hub id, or `fake:` (bytes as ids).

    Raises:
        CheckpointError: nothing there, a malformed file, or a tokenizer that exists only as Python code.
    """
    if path_or_id.startswith(FAKE_PREFIX):
        return FakeTokenizer()
    if path_or_id.startswith(RANDOM_PREFIX):
        raise CheckpointError(
            f"{path_or_id!r} is a shape with random weights and has no tokenizer; name one with --tokenizer: "
            f"a directory, or {FAKE_PREFIX!r} for bytes"
        )
    path = Path(path_or_id).expanduser()
    directory = path if path.is_dir() else hub_snapshot(path_or_id, TOKENIZER_FILES)
    settings = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    if (directory / "tokenizer.json").is_file():
        backend = _load_backend(directory / "tokenizer.json")
    elif (directory / NO_TOKENIZER_FILE).is_file():
        raise CheckpointError((directory / NO_TOKENIZER_FILE).read_text(encoding="utf-8").strip())
    elif (directory / qwen_tokenizer.FILE_NAME).is_file():
        backend = qwen_tokenizer.load_qwen_tokenizer(directory, _byte_level_alphabet())
        settings = qwen_tokenizer.qwen_settings(settings, _read_json(directory / "generation_config.json"))
    else:
        backend, settings = _convert_with_transformers(directory, settings)
    templates = _find_chat_templates(directory, settings)
    try:
        return HfTokenizer(backend, settings, templates.get("default"), templates.get("tool_use"))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / 'tokenizer_config.json'} is malformed: {error!r}") from None


def hub_snapshot(model_id: str, patterns: list[str]) -> Path:
    """Download the files of a hub repository's top folder that match `patterns` (from the local cache if complete).

    Raises:
        CheckpointError: the name is neither a directory nor a hub id, or the hub refuses or cannot be reached.
    """
    parts = model_id.split("/")
    if len(parts) > 2 or model_id.startswith((".", "~", "/")) or not all(parts):
        raise CheckpointError(f"there is no model directory {model_id!r}")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model_id!r} is no local directory, and the model hub did not deliver it: {reason}"
        ) from None


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for every malformed file
        raise CheckpointError(f"{path} is malformed: {error}") from None


def _convert_with_transformers(
    directory: Path, settings: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise CheckpointError(
            f"{directory} has no tokenizer.json, and transformers cannot make one without running the checkpoint's "
            f"code: {str(error).strip().splitlines()[0]}"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"the tokenizer of {directory} has no fast form; add a tokenizer.json to the directory")
    # The conversion has already applied the settings to the backend; only the names of the tokens are still needed.
    named = {name: getattr(loaded, name) for name in SPECIAL_NAMES if getattr(loaded, name, None)}
    return backend, {"chat_template": settings.get("chat_template"), **named}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _find_chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name; a single one is `default`. A template file wins over the entry in `tokenizer_config.json`."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = _read_json(directory / "chat_template.json").get("chat_template") or settings.get("chat_template")
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {str(name): template for name, template in named.items() if isinstance(template, str)}


def _special_token_texts(settings: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(settings.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text}


def _token_text(entry: Any) -> str:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only the settings know: those of `added_tokens_decoder`, in its order, and special ones by name."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    listed = settings.get("added_tokens_decoder") or {}
    for key in sorted(listed, key=int):
        entry = listed[key]
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
        flags["normalized"] = bool(entry.get("normalized", not flags["special"]))
        token = AddedToken(entry["content"], **flags)
        if repr(known.get(int(key))) != repr(token):
            backend.add_tokens([token])
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = [entry for name in EXTRA_NAMES if isinstance(settings.get(name), list) for entry in settings[name]]
    wanted = [text for text in [*named.values(), *map(_token_text, extra)] if text and text not in present]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in wanted])


def _bytes_function(backend: tokenizers.Tokenizer) -> tuple[Callable[[int], bytes] | None, bool]:
    """How to get one token's bytes, if the decoder is of a kind that joins them; and whether it strips a space.

    Both kinds are exact for valid UTF-8. For broken byte-fallback runs the library turns each byte of the run into
    U+FFFD, also those that form characters; joining bytes loses only what is broken.
    """
    if backend.decoder is None:
        return None, False
    config: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        return _ByteTable(backend, lambda text: _byte_level_bytes(text, alphabet)).__getitem__, False
    replaced = kinds[:1] == ["Replace"] and steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " "
    if replaced and kinds[1:] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        strips = kinds[-1] == "Strip"
        if not strips or (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) == (" ", 1, 0):
            return _ByteTable(backend, _fallback_bytes).__getitem__, strips
    return None, False


class _ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled as ids turn up; two threads that fill the same entry write the same value."""

    def __init__(self, backend: tokenizers.Tokenizer, spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._backend = backend
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        text = self._backend.id_to_token(token_id)
        spelt = self[token_id] = b"" if text is None else self._spell(text)
        return spelt


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_level_bytes(text: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:
        return text.encode("utf-8")


def _fallback_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            pass
    return text.replace("▁", " ").encode("utf-8")


def _covers_every_character(backend: tokenizers.Tokenizer) -> bool:
    """Whether each character of a prompt ends up in the spelling of some token: no normaliser, no stripping."""
    if backend.normalizer is not None or backend.decoder is None:
        return False
    if json.loads(backend.decoder.__getstate__())["type"] != "ByteLevel":
        return False
    return not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
