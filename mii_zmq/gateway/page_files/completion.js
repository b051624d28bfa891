// SPDX-License-Identifier: Apache-2.0
// One streamed chat completion over /v1/chat/completions: the request's body, the events of the answer, the errors.
// Knows no page; `fetch` can be handed in.

import { EventStreamParser } from "./event_stream.js";

/** What the server said was wrong, or what became of the connection, as a text for people. */
export class CompletionError extends Error {}

/** The request's body. Settings that are left empty are not sent: the model's own defaults hold. */
export function requestBody({ model, system, messages, temperature, maxTokens }) {
  const opening = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  const body = { model, messages: [...opening, ...messages], stream: true, stream_options: { include_usage: true } };
  if (temperature !== null) body.temperature = temperature;
  if (maxTokens !== null) body.max_tokens = maxTokens;
  return body;
}

/**
 * Yields {text}, {reasoning}, {finishReason} and {usage} as they arrive; aborting `signal` closes the connection, by which the
 * gateway cancels the request. Throws CompletionError, or the AbortError of the signal.
 */
export async function* streamCompletion(body, signal, fetcher = fetch) {
  let response;
  try {
    response = await fetcher("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    throw asCompletionError(error, "The server cannot be reached.");
  }
  if (!response.ok) throw new CompletionError(await refusal(response));
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventStreamParser();
  let isComplete = false;
  try {
    for (;;) {
      const { done, value } = await reader.read(); // also past [DONE]: to the server, leaving earlier would be a cancel
      if (done && isComplete) return;
      if (done) throw new CompletionError("The connection ended before the answer did.");
      for (const data of parser.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") isComplete = true;
        else yield* parts(JSON.parse(data));
      }
    }
  } catch (error) {
    throw asCompletionError(error, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {}); // of a connection that is gone already
  }
}

function* parts(event) {
  if (event.error) throw new CompletionError(String(event.error.message ?? "The request failed."));
  for (const choice of event.choices ?? []) {
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
    if (reasoning) yield { reasoning };
    if (choice.delta?.content) yield { text: choice.delta.content };
    if (choice.finish_reason) yield { finishReason: choice.finish_reason };
  }
  if (event.usage) yield { usage: event.usage };
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 500) || response.statusText;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? message;
  } catch {
    // not from our gateway: shown as it is
  }
  const seconds = Number(response.headers.get("Retry-After"));
  const later = seconds > 0 ? ` Try again in ${seconds} s.` : "";
  return `${message} (${response.status})${later}`;
}

function asCompletionError(error, text) {
  if (error instanceof CompletionError || error.name === "AbortError") return error;
  return new CompletionError(text, { cause: error });
}
