# SPDX-License-Identifier: Apache-2.0
"""Fits what a request demands of its answer's form to the deployment that will write it. Pure.

Four things meet in one grammar: the form demanded (`output_forms`), the tools that must or may be called, the way the
deployment's model writes calls (`call_grammars`), and whether it reasons before it answers: what stands between <think>
and </think> is free. Where the chat template has opened that block in the prompt, the worker lets the grammar read the
opening tag before the first token, as the text that it sends begins with it, too (`return_reasoning_start`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.broker_status import DeploymentStatus
from mii_zmq.gateway.call_formats import Format, const, either, schema_format
from mii_zmq.gateway.call_grammars import behind_reasoning, forced_calls, guarded_calls
from mii_zmq.gateway.core_request import CoreRequest, renamed
from mii_zmq.gateway.tool_formats import ToolFormat
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.structured_output import StructuredOutput, check_structured_output

R = TypeVar("R", bound=CoreRequest)

INSTALL = "install mii_zmq[structured] where its groups run"
STRICT = "tools.strict"
"""As which it is named among the fields that are ignored."""


def constrain(asked: R, deployment: DeploymentStatus | None, tool_format: ToolFormat) -> R:
    """The request with the one grammar that its answer has to follow, if any.

    `deployment`: None where nobody knows it yet; the worker decides then.

    Raises:
        InvalidRequest: it cannot be honoured there; `param` is the request's field.
    """
    use, demanded = asked.tools, asked.params.structured_output
    is_forced = use is not None and use.is_forced
    if demanded is None and (use is None or not (is_forced or use.strict)):
        return asked
    is_compiled, reasons = _has_compiler(deployment), _reasons(asked, deployment)
    if demanded is None and not is_forced and not is_compiled:
        return _without_strict(asked)
    if not is_compiled:
        raise no_compiler(asked.model, "tool_choice" if is_forced else asked.names["structured_output"])
    if use is None and not reasons:
        return asked
    form = _answer_format(asked, tool_format)
    if form is None:
        return _without_strict(asked)
    return _with_grammar(asked, behind_reasoning(form) if reasons else form)


def check_compiler(params: SamplingParams, deployment: DeploymentStatus | None) -> None:
    """Refuse a grammar as it is (of MII's own door) where no group could follow it. Raises InvalidRequest."""
    if params.structured_output is not None and deployment is not None and not _has_compiler(deployment):
        raise no_compiler(deployment.name, "structured_output")


def no_compiler(model: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: no group of {model!r} can constrain its output; {INSTALL}", param=field)


def as_format(grammar: StructuredOutput) -> Format:
    """The same demand as a part of a structural tag."""
    match grammar.kind:
        case "json_object":
            return schema_format({"type": "object"})
        case "json_schema":
            return schema_format(json.loads(grammar.value))
        case "regex":
            return {"type": "regex", "pattern": grammar.value}
        case "choice":
            return either([const(choice) for choice in json.loads(grammar.value)])
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.value}
        case "structural_tag":
            form: Format = json.loads(grammar.value)["format"]
            return form


def _answer_format(asked: CoreRequest, tool_format: ToolFormat) -> Format | None:
    """The form of what follows the reasoning; None: strict arguments are not to be had of such calls."""
    use, demanded = asked.tools, asked.params.structured_output
    if use is None:
        return None if demanded is None else as_format(demanded)
    if demanded is None and not use.is_forced:
        return guarded_calls(tool_format.name, use)
    calls = forced_calls(tool_format.name, use)
    if calls is None:
        field = "tool_choice" if use.is_forced else asked.names["structured_output"]
        raise InvalidRequest(
            f"{field}: calls of a model that writes them as {tool_format.name!r} cannot be prescribed; send "
            "tool_choice 'none', or 'auto' and no form of the answer",
            param=field,
        )
    # A form that is demanded is that of the text, of which forced calls have none.
    return calls if demanded is None or use.is_forced else either([calls, as_format(demanded)])


def _with_grammar(asked: R, form: Format) -> R:
    # What is wrong with the grammar is wrong with the form demanded, or else with the tools' schemas.
    names = {"structured_output": "tools", **asked.names}
    text = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    grammar = StructuredOutput("structural_tag", text)
    try:
        check_structured_output(grammar)
    except InvalidRequest as error:
        raise renamed(error, names) from None
    return replace(asked, params=msgspec.structs.replace(asked.params, structured_output=grammar), names=names)


def _without_strict(asked: R) -> R:
    return replace(asked, ignored=[*asked.ignored, STRICT])


def _has_compiler(deployment: DeploymentStatus | None) -> bool:
    return deployment is None or not deployment.has_groups or deployment.offers_grammars


def _reasons(asked: CoreRequest, deployment: DeploymentStatus | None) -> bool:
    """Whether its answer may begin with reasoning that is read as such."""
    body = asked.prompts[0]
    is_read = body.return_reasoning_start and not body.continue_final_message
    return is_read and deployment is not None and deployment.reasons
