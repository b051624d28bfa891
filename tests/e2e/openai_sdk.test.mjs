// SPDX-License-Identifier: Apache-2.0
// The official `openai` package for Node, unchanged; run by test_openai_node.py with BASE_URL and MODEL. "engine" needs a
// gateway in front of a (fake) engine, "scripted" one whose model answers as test_openai_node.py says.

import assert from "node:assert/strict"
import { describe, test } from "node:test"
import OpenAI from "openai"

const { BASE_URL: baseURL, MODEL: model } = process.env
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "unused", maxRetries: 0 })
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: "Hi" }]
const greedy = { model, temperature: 0 }
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] }

async function all(stream) {
  const items = []
  for await (const item of stream) items.push(item)
  return items
}

async function status() {
  return await (await fetch(`${baseURL}/status`)).json()
}

describe("engine", () => {
  test("models", async () => {
    assert.deepEqual((await all(client.models.list())).map(({ id }) => id), [model])
    assert.equal((await client.models.retrieve(model)).object, "model")
  })

  test("chat, whole and streamed", async () => {
    const whole = await client.chat.completions.create({ ...greedy, messages, max_tokens: 12 })
    assert.equal(whole.usage.completion_tokens, 12)
    assert.equal(whole.choices[0].finish_reason, "length")
    const stream_options = { include_usage: true }
    const chunks = await all(
      await client.chat.completions.create({ ...greedy, messages, max_tokens: 12, stream: true, stream_options }),
    )
    assert.equal(chunks[0].choices[0].delta.role, "assistant")
    assert.deepEqual(chunks.at(-1).usage, whole.usage)
    const text = chunks.map(({ choices }) => choices[0]?.delta.content ?? "").join("")
    assert.equal(text, whole.choices[0].message.content)
  })

  test("the streaming helper", async () => {
    const runner = client.chat.completions.stream({ ...greedy, messages, max_tokens: 12 })
    let text = ""
    runner.on("content", (piece) => (text += piece))
    assert.equal((await runner.finalChatCompletion()).choices[0].message.content, text)
    assert.ok(text)
  })

  test("log-probabilities", async () => {
    const { choices } = await client.chat.completions.create({
      ...greedy, messages, max_tokens: 4, logprobs: true, top_logprobs: 2,
    })
    assert.equal(choices[0].logprobs.content.length, 4)
    for (const { logprob, top_logprobs } of choices[0].logprobs.content) {
      assert.ok(logprob <= 0)
      assert.equal(top_logprobs.length, 2)
    }
  })

  test("completions", async () => {
    const whole = await client.completions.create({ ...greedy, prompt: ["a", "b"], max_tokens: 9, n: 2 })
    assert.deepEqual(whole.choices.map(({ index }) => index), [0, 1, 2, 3])
    const parts = await all(await client.completions.create({ ...greedy, prompt: "a", max_tokens: 9, stream: true }))
    assert.equal(parts.map(({ choices }) => choices[0].text).join(""), whole.choices[0].text)
  })

  test("responses", async () => {
    const asked = { ...greedy, input: "Hi", instructions: "Be brief.", max_output_tokens: 9 }
    const whole = await client.responses.create(asked)
    assert.equal(whole.usage.output_tokens, 9)
    assert.ok(whole.output_text)
    const runner = client.responses.stream(asked)
    const events = await all(runner)
    const deltas = events.filter(({ type }) => type === "response.output_text.delta")
    assert.equal(deltas.map(({ delta }) => delta).join(""), whole.output_text)
    assert.equal((await runner.finalResponse()).output_text, whole.output_text)
  })

  test("tools reach the prompt", async () => {
    const tools = [{ type: "function", function: { name: "weather", parameters } }]
    const asked = { ...greedy, messages, max_tokens: 4 }
    const [plain, offered, hidden] = await Promise.all([
      client.chat.completions.create(asked),
      client.chat.completions.create({ ...asked, tools, tool_choice: "auto" }),
      client.chat.completions.create({ ...asked, tools, tool_choice: "none" }),
    ])
    assert.ok(offered.usage.prompt_tokens > plain.usage.prompt_tokens)
    assert.equal(hidden.usage.prompt_tokens, plain.usage.prompt_tokens)
  })

  test("errors", async () => {
    await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError)
      assert.equal(error.code, "model_not_found")
      return true
    })
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 1e9 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError)
      assert.equal(error.param, "temperature")
      return true
    })
    await assert.rejects(client.chat.completions.create({ model, messages, temprature: 1 }), /temprature/)
    await assert.rejects(client.responses.create({ model, input: "x", store: true }), /store/)
  })

  test("an aborted stream is cancelled at the engine", async () => {
    const load = async () => (await status()).broker.deployments[model].groups[0].load
    const before = (await load()).generated_tokens
    const abort = new AbortController()
    const stream = await client.completions.create(
      { ...greedy, prompt: "a", max_tokens: 5000, ignore_eos: true, stream: true },
      { signal: abort.signal },
    )
    let count = 0
    // Iteration ends without an error after an abort of the caller's own.
    for await (const _ of stream) if (++count === 3) abort.abort()
    while ((await load()).running > 0) await new Promise((resolve) => setTimeout(resolve, 20))
    assert.ok((await load()).generated_tokens - before < 5000)
  })

  test("a stream that is left is cancelled at the engine", async () => {
    const asked = { ...greedy, prompt: "a", max_tokens: 5000, ignore_eos: true, stream: true }
    for await (const _ of await client.completions.create(asked)) break
    while ((await status()).broker.num_unfinished > 0) await new Promise((resolve) => setTimeout(resolve, 20))
  })
})

describe("scripted", () => {
  test("tool calls, whole and streamed", async () => {
    const tools = [{ type: "function", function: { name: "weather", parameters } }]
    const asked = { model, messages: [{ role: "user", content: "Weather?" }], tools, tool_choice: "auto" }
    const { choices } = await client.chat.completions.create(asked)
    assert.equal(choices[0].finish_reason, "tool_calls")
    assert.equal(choices[0].message.content, "One moment.")
    assert.equal(choices[0].message.reasoning_content, "Look it up.")
    const [call] = choices[0].message.tool_calls
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Zürich" })
    const final = await client.chat.completions.stream(asked).finalChatCompletion()
    assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: "Zürich" })
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" }
    const next = await client.chat.completions.create({
      ...asked, messages: [...asked.messages, choices[0].message, result],
    })
    assert.equal(next.choices[0].message.content, "It is sunny.")
  })

  test("the package runs tools by itself", async () => {
    const asked = []
    const weather = ({ city }) => {
      asked.push(city)
      return "sunny"
    }
    const run = { name: "weather", description: "The weather.", parameters, parse: JSON.parse, function: weather }
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({
        model, stream, messages: [{ role: "user", content: "Weather?" }], tools: [{ type: "function", function: run }],
      })
      assert.equal(await runner.finalContent(), "It is sunny.")
    }
    assert.deepEqual(asked, ["Zürich", "Zürich"])
  })

  test("responses with a function", async () => {
    const tools = [{ type: "function", name: "weather", parameters, strict: false }]
    const input = [{ role: "user", content: "Weather?" }]
    const first = await client.responses.create({ model, input, tools, store: false })
    assert.deepEqual(first.output.map(({ type }) => type), ["reasoning", "message", "function_call"])
    const runner = client.responses.stream({ model, input, tools })
    await all(runner)
    const call = (await runner.finalResponse()).output.at(-1)
    assert.deepEqual(JSON.parse(call.arguments), { city: "Zürich" })
    const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" }
    const next = await client.responses.create({ model, input: [...input, ...first.output, output], tools })
    assert.equal(next.output_text, "It is sunny.")
  })

  test("a refusal that asks for patience is tried again, after Retry-After", async () => {
    const busy = [{ role: "user", content: "BUSY" }]
    await assert.rejects(client.chat.completions.create({ model, messages: busy }), OpenAI.InternalServerError)
    const patient = client.withOptions({ maxRetries: 2 })
    const { choices } = await patient.chat.completions.create({ model, messages: busy })
    assert.equal(choices[0].message.content, "At last.")
  })

  test("an error in the middle of a stream", async () => {
    const asked = { model, messages: [{ role: "user", content: "BREAK" }], stream: true }
    const texts = []
    await assert.rejects(async () => {
      for await (const chunk of await client.chat.completions.create(asked)) {
        texts.push(chunk.choices[0].delta.content)
      }
    }, /the group is gone/)
    assert.equal(texts.join(""), "half an")
  })
})
