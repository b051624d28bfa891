# SPDX-License-Identifier: Apache-2.0
"""From a GENERATE message to a sequence for the engine: everything about a request that may be slow or go wrong.

Runs in the tokenizer threads. Each refusal is a `MiiError` for that request alone. Holds no state but the tokenizer
and the engine's limits, both fixed once loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.errors import InvalidRequest
from mii_zmq.protocol import GenerateBody, GenerateHeader, Message, parse_body
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.embedding import PreparedEmbedding, build_embedding
from mii_zmq.worker.engine_channel import ids_from_bytes
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import PreparedSequence, build_sequence
from mii_zmq.worker.text_tasks import TextAnswer, answer_text_task

Prepared = PreparedSequence | PreparedEmbedding | TextAnswer


@dataclass(frozen=True, slots=True)
class Intake:
    """What every request is checked against."""

    tokenizer: TextTokenizer
    limits: EngineLimits
    pooling: str = "last"
    """Of embeddings whose requests name none."""

    def prepare(self, message: Message, header: GenerateHeader, seq_id: int) -> Prepared:
        """Validate and tokenize one request; what needs no engine is answered here.

        Raises:
            RequestError, ProtocolError: what is wrong with the request, naming the field.
        """
        body = parse_body(message, GenerateBody)
        params = SamplingParams.from_mapping(body.params)
        if params.n != 1:
            raise InvalidRequest(
                f"n is {params.n}, but a GENERATE message asks for one continuation; send {params.n} messages with "
                "n = 1 and different seeds",
                param="n",
            )
        prompt = PromptInput(
            text=body.prompt,
            token_ids=body.prompt_token_ids,
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            continue_final_message=body.continue_final_message,
            return_reasoning_start=body.return_reasoning_start,
        )
        if body.task != "embed":
            _check_embedding_fields(body)
        if body.task != "generate" and header.stream:
            raise InvalidRequest(f"the task {body.task!r} has one answer; leave stream out", param="stream")
        if body.task in ("tokenize", "detokenize"):
            return answer_text_task(self.tokenizer, self.limits, body.task, prompt)
        resumed = _resumed_ids(message)
        if body.task == "embed":
            if resumed:
                raise InvalidRequest("an embedding has no output to resume behind; leave it out", param="resume")
            return build_embedding(
                self.tokenizer, self.limits, body, prompt, self.pooling,
                seq_id=seq_id, priority=header.priority, cache_salt=header.tenant,
            )  # fmt: skip
        return build_sequence(
            self.tokenizer,
            self.limits,
            params,
            message.request_id,
            prompt,
            seq_id=seq_id,
            resumed_token_ids=resumed,
            priority=header.priority,
            cache_salt=header.tenant,
            # They came with the first row.
            score_prompt=not (header.stream and resumed),
        )


def _check_embedding_fields(body: GenerateBody) -> None:
    for name, default in (("pooling", None), ("dimensions", None), ("normalize", True)):
        if getattr(body, name) is not default:
            raise InvalidRequest(f"{name} belongs to the task 'embed'; leave it out", param=name)


def _resumed_ids(message: Message) -> list[int]:
    if not message.raw:
        return []
    if len(message.raw) > 1:
        raise InvalidRequest(
            f"GENERATE takes one raw frame (the token ids to resume behind), this one has {len(message.raw)}",
            param="resume",
        )
    data = message.raw[0]
    if len(data) % 4:
        raise InvalidRequest(
            f"the resume frame has {len(data)} bytes; it must hold int32 token ids, 4 bytes each", param="resume"
        )
    return ids_from_bytes(data)
