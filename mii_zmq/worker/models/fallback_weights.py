# SPDX-License-Identifier: Apache-2.0
"""Builds a transformers model and fills it from a checkpoint's safetensors files: strict, and nothing else is read.

The tensors are handed to transformers as slices of mapped files, under the names of the checkpoint; transformers
renames, fuses and places them. It never looks for files itself, so neither pickles, adapters, other weight files that
a config may name, nor the network come into play.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.checkpoint_files import check_header, find_safetensors
from mii_zmq.worker.models.fallback_attention import PROBE, register
from mii_zmq.worker.models.fallback_config import FallbackConfig
from mii_zmq.worker.models.transformers_log import quiet

Progress = Callable[[str, float], None]

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def build_model(
    directory: Path, found: FallbackConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Any:
    """The model with its weights on `device`, its attention answered by `fallback_attention`.

    Raises:
        CheckpointError: a file or tensor is missing, malformed, unknown or has the wrong shape.
        ModelUnsupported: quantized tensors, or a config that transformers' code cannot build.
    """
    register()
    progress("loading weights", 0.0)
    with ExitStack() as files, quiet(progress):
        tensors = _open_tensors(directory, files)
        try:
            model, report = found.model_class.from_pretrained(
                None,
                config=found.config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=PROBE,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise CheckpointError(f"a file in {directory} is damaged: {error}; download it again") from None
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            message = " ".join(str(error).split())[:300]
            raise ModelUnsupported(
                f"transformers cannot build the {found.facts.family} model: {type(error).__name__}: {message}"
            ) from error
    _check_report(directory, found.facts.family, report)
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


def _open_tensors(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Every tensor of the checkpoint as a slice that has not been read yet."""
    tensors: dict[str, Any] = {}
    for path in find_safetensors(directory):
        check_header(path)
        try:
            opened = files.enter_context(safe_open(path, framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                if name in tensors:
                    raise CheckpointError(f"{path.name} holds {name}, which was already loaded")
                view = opened.get_slice(name)
                if name.endswith("weight") and view.get_dtype() not in _FLOAT_DTYPES:
                    raise ModelUnsupported(
                        f"{path.name}: {name} has the dtype {view.get_dtype()}; quantized checkpoints are not supported"
                    )
                tensors[name] = view
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}; download it again") from None
    return tensors


def _check_report(directory: Path, family: str, report: dict[str, Any]) -> None:
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors, e.g. {', '.join(missing[:3])}")
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds {len(unexpected)} tensors that the {family} family with this config.json does not "
            f"have, e.g. {', '.join(unexpected[:3])}; they would be left out silently"
        )
    for name, found, implied in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{directory}: {name} has the shape {list(found)}, but config.json implies {list(implied)}"
        )
    for kind in ("error_msgs", "conversion_errors"):
        if report.get(kind):
            raise CheckpointError(f"{directory}: transformers reports {kind}: {str(report[kind])[:300]}")
