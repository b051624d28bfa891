# SPDX-License-Identifier: Apache-2.0
"""Language-model serving as a ZeroMQ actor pipeline: `pipeline`, `serve` and `client`, as in DeepSpeed-MII.

Names are imported at their first use, so that `import mii_zmq`, and with it every process of the control plane, starts
fast and without torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from mii_zmq.version import __version__ as __version__

if TYPE_CHECKING:
    from mii_zmq.api import (
        AsyncMIIClient,
        GenerationFinishReason,
        MIIClient,
        Pipeline,
        Response,
        async_client,
        client,
        pipeline,
        serve,
    )
    from mii_zmq.errors import MiiError
    from mii_zmq.mii_settings import UnknownArgument
    from mii_zmq.registry import DeploymentNotFoundError
    from mii_zmq.sampling_params import SamplingParams

__all__ = [
    "AsyncMIIClient",
    "DeploymentNotFoundError",
    "GenerationFinishReason",
    "MIIClient",
    "MiiError",
    "Pipeline",
    "Response",
    "SamplingParams",
    "UnknownArgument",
    "async_client",
    "client",
    "pipeline",
    "serve",
]

_HOMES = {
    "DeploymentNotFoundError": "mii_zmq.registry",
    "MiiError": "mii_zmq.errors",
    "SamplingParams": "mii_zmq.sampling_params",
    "UnknownArgument": "mii_zmq.mii_settings",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "mii_zmq.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """The function `client` shares its name with a submodule; importing the one must not hide the other."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "client" and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
