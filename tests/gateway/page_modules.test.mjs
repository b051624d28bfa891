// SPDX-License-Identifier: Apache-2.0
// The page's pure modules under node: texts, event parsing, the streamed completion, timings, the status model.
// Run by test_page_modules.py, which lays the modules into ./page.

import assert from "node:assert/strict";
import { test } from "node:test";

import { CompletionError, requestBody, streamCompletion } from "./page/completion.js";
import { EventStreamParser } from "./page/event_stream.js";
import { count, duration, percent, perSecond, plural } from "./page/format.js";
import { layOut, RequestLog } from "./page/request_log.js";
import { StatusHistory } from "./page/status_history.js";

test("numbers as people read them", () => {
  const cases = [[0, "0.0 ms"], [9.94, "9.9 ms"], [9.96, "10 ms"], [999.4, "999 ms"], [999.6, "1.00 s"], [9994, "9.99 s"],
    [9996, "10.0 s"], [59_949, "59.9 s"], [59_960, "1 min 0 s"], [125_000, "2 min 5 s"], [11_040_000, "3 h 4 min"],
    [190_800_000, "2 d 5 h"], [null, "—"], [NaN, "—"], ["5", "—"]];
  for (const [ms, text] of cases) assert.equal(duration(ms), text);
  assert.deepEqual([count(1234567.4), count(undefined)], ["1,234,567", "—"]);
  assert.deepEqual([perSecond(0), perSecond(0.04), perSecond(9.9), perSecond(284.4)], ["0", "0", "9.9", "284"]);
  assert.deepEqual([percent(0.694), percent(null)], ["69 %", "—"]);
  assert.deepEqual([plural(1, "token"), plural(0, "token")], ["1 token", "0 tokens"]);
});

test("events are the same however the stream is cut", () => {
  const stream = 'data: {"a":1}\r\n\r\n: comment\nevent: x\ndata:two\ndata: lines\n\ndata: ü\r\rdata: [DONE]\n\n';
  const expected = ['{"a":1}', "two\nlines", "ü", "[DONE]"];
  for (let size = 1; size <= stream.length; size += 1) {
    const parser = new EventStreamParser();
    const events = [];
    for (let at = 0; at < stream.length; at += size) events.push(...parser.push(stream.slice(at, at + size)));
    assert.deepEqual(events, expected, `pieces of ${size}`);
  }
});

test("settings that are left empty are not sent", () => {
  const messages = [{ role: "user", content: "Hi" }];
  const bare = requestBody({ model: "m", system: "  ", messages, temperature: null, maxTokens: null });
  const common = { model: "m", stream: true, stream_options: { include_usage: true } };
  assert.deepEqual(bare, { ...common, messages });
  const full = requestBody({ model: "m", system: "Be brief.", messages, temperature: 0, maxTokens: 5 });
  const opening = { role: "system", content: "Be brief." };
  assert.deepEqual(full, { ...common, messages: [opening, ...messages], temperature: 0, max_tokens: 5 });
});

/** Bytes of the text in pieces of seven, so that events and characters are cut. */
function answer(text, options = {}) {
  const bytes = new TextEncoder().encode(text);
  const pieces = Array.from({ length: Math.ceil(bytes.length / 7) }, (_, i) => bytes.slice(7 * i, 7 * i + 7));
  return async () => new Response(ReadableStream.from(pieces), options);
}

async function collect(fetcher) {
  const parts = [];
  for await (const part of streamCompletion({}, undefined, fetcher)) parts.push(part);
  return parts;
}

const event = (value) => `data: ${typeof value === "string" ? value : JSON.stringify(value)}\n\n`;
const delta = (content, finish_reason = null) => event({ choices: [{ delta: { content }, finish_reason }] });

test("a streamed answer arrives part by part", async () => {
  const usage = { completion_tokens: 2 };
  const thought = event({ choices: [{ delta: { reasoning_content: "hm" } }] });
  const text = delta("") + thought + delta("Grüße") + delta(" 🌍", "stop") + event({ choices: [], usage }) + event("[DONE]");
  assert.deepEqual(await collect(answer(text)), [
    { reasoning: "hm" }, { text: "Grüße" }, { text: " 🌍" }, { finishReason: "stop" }, { usage },
  ]);
});

test("what goes wrong is said in words", async () => {
  const refused = { status: 503, headers: { "Retry-After": "3" } };
  const unknown = JSON.stringify({ error: { message: "there is no model 'x'" } });
  const cases = [
    [answer(unknown, { status: 404 }), "there is no model 'x' (404)"],
    [answer('{"message": "the queue is full"}', refused), "the queue is full (503) Try again in 3 s."],
    [answer("<html>proxy</html>", { status: 502 }), "<html>proxy</html> (502)"],
    [answer(delta("a") + event({ error: { message: "the group died" } })), "the group died"],
    [answer(delta("a")), "The connection ended before the answer did."],
    [answer("data: {broken\n\n"), "The connection broke before the answer was complete."],
    [async () => Promise.reject(new TypeError("fetch failed")), "The server cannot be reached."],
  ];
  for (const [fetcher, message] of cases) {
    await assert.rejects(collect(fetcher), (error) => error instanceof CompletionError && error.message === message);
  }
});

test("an abort is passed on as such", async () => {
  const aborter = new AbortController();
  const fetcher = async (_, { signal }) => {
    const stream = new ReadableStream({
      start(controller) {
        controller.enqueue(new TextEncoder().encode(delta("a")));
        signal.addEventListener("abort", () => controller.error(signal.reason));
      },
    });
    return new Response(stream);
  };
  const parts = streamCompletion({}, aborter.signal, fetcher);
  assert.deepEqual((await parts.next()).value, { text: "a" });
  aborter.abort();
  await assert.rejects(parts.next(), { name: "AbortError" });
});

test("timings of a request", () => {
  const log = new RequestLog();
  const timing = log.start("m", 1000);
  assert.deepEqual([timing.state, timing.firstTokenMs, timing.interTokenMs], ["queued", null, null]);
  assert.deepEqual(layOut(timing, 400, 100, 1200), { first: 50, end: 50, marks: [] });
  for (const now of [1100, 1110, 1170]) timing.onText(now);
  assert.deepEqual([timing.state, timing.firstTokenMs, timing.longestGapMs, log.isActive], ["streaming", 100, 60, true]);
  assert.equal(timing.interTokenMs, 35);
  timing.usage = { completion_tokens: 8 }; // several tokens in a text
  timing.onEnd("stop", 1200);
  assert.deepEqual([timing.state, timing.numTokens, timing.interTokenMs, log.isActive], ["stop", 8, 10, false]);
  assert.equal(log.scaleMs(9999), 200);
  assert.deepEqual(layOut(timing, 200, 100, 9999), { first: 50, end: 100, marks: [50, 55, 85] });
  for (let i = 0; i < 50; i += 1) log.start("m", 2000);
  assert.deepEqual([log.requests.length, log.requests[0].id], [20, 51]);
});

function status({ generated = 0, cached = 0, prompt = 0, incarnation = "a", ...facts } = {}) {
  const load = { running: 3, waiting: 1, used_blocks: 16, total_blocks: 64, generated_tokens: generated,
    cached_tokens: cached, prompt_tokens: prompt };
  const group = { group: "g", incarnation, state: "ready", heartbeat_age_ms: 100, load, info: { pid: 7 }, ...facts };
  return { age_ms: 0, broker: { deployments: { m: { takes_requests: true, num_waiting: 2, groups: [group] } } } };
}

test("speeds come from the counters of successive statuses", () => {
  const history = new StatusHistory();
  let view = history.add(status({ generated: 100, cached: 1, prompt: 9 }), 0);
  assert.deepEqual([view.totals.tokensPerS, view.totals.hitShare, view.totals.hitScope], [null, 0.1, "since the start"]);
  view = history.add(status({ generated: 150, cached: 7, prompt: 11 }), 1000);
  assert.deepEqual([view.totals.tokensPerS, view.totals.hitShare, view.totals.hitScope], [50, 0.75, "last 2 min"]);
  assert.deepEqual([view.totals.running, view.totals.waiting], [3, 3]);
  for (let second = 2; second <= 200; second += 1) view = history.add(status({ generated: 150 }), 1000 * second);
  assert.equal(view.totals.tokensPerS, 0);
  assert.equal(history.points.length, 121);
  view = history.add(status({ generated: 5, incarnation: "b" }), 201_000);
  assert.equal(view.totals.tokensPerS, null); // started anew: not negative
  view = history.add(status({ generated: 25, incarnation: "b" }), 202_000);
  assert.equal(view.totals.tokensPerS, 20);
});

test("states are named, and odd statuses are shown", () => {
  const state = (facts) => new StatusHistory().add(status(facts), 0).deployments[0].groups[0].state;
  assert.deepEqual(state({}), { text: "ready", tone: "good" });
  assert.deepEqual(state({ heartbeat_age_ms: 2000 }), { text: "silent", tone: "bad" });
  assert.deepEqual(state({ state: "draining" }), { text: "draining", tone: "warn" });
  for (const broker of [undefined, {}, { deployments: { m: {} } }, { deployments: { m: { groups: [{}] } } }]) {
    const view = new StatusHistory().add({ broker }, 0);
    assert.equal(view.totals.running, 0);
    assert.equal(view.totals.tokensPerS ?? 0, 0);
  }
  assert.equal(new StatusHistory().add({ broker: { deployments: { m: {} } } }, 0).deployments[0].state.text, "no group");
});
