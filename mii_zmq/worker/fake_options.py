# SPDX-License-Identifier: Apache-2.0
"""The fake executor by a model's name: `fake:` and options, as in 'fake:step_ms=5,num_blocks=64,nan_on=BANE'.

| option | effect |
|---|---|
| `vocab`, `alphabet` | `bytes`; the set of output tokens, see `fake_model.ALPHABETS` |
| `eos_after`, `eos_every` | end-of-sequence after so many output tokens, or with a chance of 1 in so many |
| `max_model_len`, `num_blocks`, `block_size`, `max_sequences`, `token_budget` | the engine's limits |
| `step_ms`, `prefill_ms` | a step takes so long, and so much longer per token of rows with more than one token |
| `raise_at` | the step of that number raises |
| `oom_above` | steps of more tokens do not fit into memory |
| `raise_on`, `lose_on`, `nan_on`, `hang_on`, `exit_on` | a text; if a prompt holds it, see `fake_faults.Hook` |
| `raise_after`, `lose_after`, ... | with the option above: not before the sequence has so many output tokens |

With 'rank_' before its name an option holds for ranks above 0 only, so that these can be made slow or wrong.
"""

from __future__ import annotations

from dataclasses import replace

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.worker.fake import FakeExecutor
from mii_zmq.worker.fake_faults import Faults, Hook, Marker
from mii_zmq.worker.fake_model import ALPHABETS, EOS_TOKEN_ID, VOCAB_SIZE, FakeModel
from mii_zmq.worker.plan import EngineLimits

_LIMIT_OPTIONS = ("max_model_len", "num_blocks", "block_size", "max_sequences", "token_budget")
_HOOK_OPTIONS = tuple(f"{hook.value}_{when}" for hook in Hook for when in ("on", "after"))
_OPTIONS = (
    "vocab", "alphabet", "step_ms", "prefill_ms", "eos_after", "eos_every", "raise_at", "oom_above",
    *_LIMIT_OPTIONS, *_HOOK_OPTIONS,
)  # fmt: skip
_RANK = "rank_"
HIDDEN_SIZE = 32
"""Of the fake model's vectors."""


def is_fake_model(model: str) -> bool:
    return model.startswith("fake:")


def make_fake_executor(config: EngineConfig, rank: int = 0) -> FakeExecutor:
    """Build from a model name such as 'fake:step_ms=5,num_blocks=64'; options there win over the config's fields.

    Raises:
        ConfigError: unknown option or impossible value.
    """
    options = _options_of_rank(_parse_options(config.model), rank)
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 8192,
        num_blocks=config.num_blocks or 4096,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget or 512,
        eos_token_ids=(EOS_TOKEN_ID,),
        scores_prompts=True,
        hidden_size=HIDDEN_SIZE,
    )
    for name in _LIMIT_OPTIONS:
        if name in options:
            limits = replace(limits, **{name: _positive(name, options[name])})  # type: ignore[arg-type]
    if limits.block_size & (limits.block_size - 1):
        raise ConfigError(f"option block_size of the fake model is {limits.block_size}; it must be a power of two")
    counts = {name: _positive(name, options[name]) for name in ("eos_after", "eos_every") if name in options}
    model = FakeModel(ALPHABETS[_choice("alphabet", options.get("alphabet", "printable"), ALPHABETS)], **counts)
    _choice("vocab", options.get("vocab", "bytes"), ("bytes",))
    step_ms, prefill_ms = (_milliseconds(name, options.get(name, "0")) for name in ("step_ms", "prefill_ms"))
    return FakeExecutor(limits, model, step_ms=step_ms, prefill_ms=prefill_ms, faults=_faults(options))


def _faults(options: dict[str, str]) -> Faults:
    faults = Faults()
    if "raise_at" in options:
        step = _positive("raise_at", options["raise_at"])
        faults.steps[step] = RuntimeError(f"step {step} fails (made up by a test)")
    if "oom_above" in options:
        faults.oom_above = _positive("oom_above", options["oom_above"])
    for hook in Hook:
        on, after = f"{hook.value}_on", f"{hook.value}_after"
        if options.get(on):
            num_tokens = _positive(after, options[after]) if after in options else 0
            faults.markers[hook] = Marker(tuple(options[on].encode()), num_tokens)
        elif on in options or after in options:
            raise ConfigError(f"option {on} of the fake model needs a text to look for in prompts")
    return faults


def _parse_options(model: str) -> dict[str, str]:
    if not is_fake_model(model):
        raise ConfigError(f"{model!r} is not a fake model; such names are 'fake:' and options, as in 'fake:step_ms=5'")
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in model.partition(":")[2].split(","))):
        name, separator, value = part.partition("=")
        if name.removeprefix(_RANK) not in _OPTIONS or not separator:
            raise ConfigError(
                f"option {part!r} of the fake model is unknown; known are {', '.join(_OPTIONS)} as NAME=VALUE"
            )
        if name in options:
            raise ConfigError(f"option {name} of the fake model is given twice")
        options[name] = value
    return options


def _options_of_rank(options: dict[str, str], rank: int) -> dict[str, str]:
    common = {name: value for name, value in options.items() if not name.startswith(_RANK)}
    above = {name.removeprefix(_RANK): value for name, value in options.items() if name.startswith(_RANK)}
    return {**common, **above} if rank else common


def _positive(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ConfigError(f"option {name} of the fake model is {text!r}; it must be a whole number above 0")
    return int(text)


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60_000:
        raise ConfigError(f"option {name} of the fake model is {text!r}; it must be 0 to 60000 milliseconds")
    return value


def _choice(name: str, value: str, allowed: dict[str, tuple[int, ...]] | tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"option {name} of the fake model is {value!r}; it must be one of {', '.join(allowed)}")
    return value
