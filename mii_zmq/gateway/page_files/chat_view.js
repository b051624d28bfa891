// SPDX-License-Identifier: Apache-2.0
// The conversation on the page: sends what was typed, shows the answer as it arrives, stops it, shows what went wrong.

import { CompletionError, requestBody, streamCompletion } from "./completion.js";
import { byId, element, setText } from "./elements.js";
import { duration, perSecond, plural } from "./format.js";

const NEAR_END_PX = 80;

export class ChatView {
  #messages = []; // what the model is sent: complete exchanges only
  #aborter = null;
  #log = byId("log");
  #input = byId("message");
  #requests;
  #onChange;

  /** `requests` is the RequestLog; `onChange` is called when one of its requests has changed. */
  constructor(requests, onChange) {
    this.#requests = requests;
    this.#onChange = onChange;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#aborter?.abort();
    });
    byId("stop").addEventListener("click", () => this.#aborter?.abort());
    byId("new-chat").addEventListener("click", () => this.#startOver());
    for (const id of ["temperature", "max-tokens", "system"]) {
      byId(id).addEventListener("input", () => this.#showSettings());
    }
    this.#showSettings();
  }

  /** Offer the deployments that there are; what was chosen stays chosen while it exists. */
  offerModels(names) {
    const select = byId("model");
    const offered = [...select.options].map((option) => option.value);
    const wanted = names.length ? names : [""];
    if (offered.join("\n") !== wanted.join("\n")) {
      const chosen = select.value;
      select.replaceChildren(...wanted.map((name) => element("option", { value: name }, name || "no deployment")));
      select.value = wanted.includes(chosen) ? chosen : wanted[0];
    }
    select.disabled = names.length === 0;
  }

  async #send() {
    const text = this.#input.value.trim();
    const settings = this.#settings();
    if (!text || settings === null || this.#aborter) return;
    this.#input.value = "";
    byId("hint").hidden = true;
    const messages = this.#messages; // a new chat has an array of its own
    const question = { role: "user", content: text };
    const asked = message("user", "You", text);
    const answer = message("assistant", settings.model, "");
    const body = requestBody({ ...settings, messages: [...messages, question] });
    this.#log.append(asked.root, answer.root);
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#setBusy(answer, new AbortController());
    const { content, error } = await this.#receive(body, answer);
    this.#setBusy(answer, null);
    if (error) this.#showFailure(asked, answer, text, error);
    if (content) messages.push(question, { role: "assistant", content });
  }

  /** Show the answer to `body` as it arrives; returns what came of it, and the error that ended it, if one did. */
  async #receive(body, answer) {
    const timing = this.#requests.start(body.model, performance.now());
    let content = "";
    let outcome = "error";
    let failure = null;
    this.#onChange();
    try {
      for await (const part of streamCompletion(body, this.#aborter.signal)) {
        if (part.text || part.reasoning) timing.onText(performance.now());
        if (part.reasoning) this.#append(answer.reasoning, part.reasoning);
        if (part.text) {
          content += part.text;
          this.#append(answer.text, part.text);
        }
        if (part.finishReason) outcome = part.finishReason;
        if (part.usage) timing.usage = part.usage;
        this.#onChange();
      }
    } catch (error) {
      outcome = error.name === "AbortError" ? "stopped" : "error";
      if (outcome === "error") failure = error;
    }
    timing.onEnd(outcome, performance.now());
    setText(answer.footer, summary(timing));
    setText(byId("announcement"), failure ? "" : `Answer ${outcome === "stopped" ? "stopped" : "complete"}.`);
    this.#onChange();
    return { content, error: failure };
  }

  #append(node, text) {
    const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR_END_PX;
    node.parentElement.hidden = false;
    node.appendData(text);
    if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #setBusy(answer, aborter) {
    const hadFocus = document.activeElement === byId(aborter ? "send" : "stop");
    this.#aborter = aborter;
    answer.root.setAttribute("aria-busy", aborter !== null);
    byId("send").hidden = aborter !== null;
    byId("stop").hidden = aborter === null;
    if (hadFocus) (aborter ? byId("stop") : this.#input).focus();
  }

  /** The failed exchange is not sent again with later ones; its text goes back to be sent once more. */
  #showFailure(asked, answer, text, error) {
    const known = error instanceof CompletionError;
    if (!known) console.error(error);
    answer.root.append(element("p", { class: "problem", role: "alert" }, known ? error.message : String(error)));
    if (answer.text.data) return;
    asked.root.dataset.failed = "";
    if (!this.#input.value) this.#input.value = text;
  }

  /** null, and the problem shown, when a setting cannot be sent. */
  #settings() {
    const fields = [["Temperature", "temperature"], ["Max tokens", "max-tokens"]];
    const wrong = fields.filter(([, id]) => !byId(id).checkValidity());
    const model = byId("model").value;
    const problems = wrong.map(([name, id]) => `${name}: ${byId(id).validationMessage}`);
    if (!model) problems.push("No deployment is served now; wait for one, then send again.");
    const problem = byId("problem");
    problem.hidden = problems.length === 0;
    setText(problem, problems.join(" "));
    if (problems.length) return null;
    const value = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return { model, system: byId("system").value, temperature: value("temperature"), maxTokens: value("max-tokens") };
  }

  #showSettings() {
    const parts = [
      byId("temperature").value && `temperature ${byId("temperature").value}`,
      byId("max-tokens").value && `up to ${byId("max-tokens").value} tokens`,
      byId("system").value.trim() && "with a system prompt",
    ];
    setText(byId("settings-summary"), parts.filter(Boolean).join(" · "));
  }

  #startOver() {
    this.#aborter?.abort();
    this.#messages = [];
    for (const child of [...this.#log.children]) if (child.id !== "hint") child.remove();
    byId("hint").hidden = false;
    setText(byId("announcement"), "New chat.");
    this.#input.focus();
  }
}

function message(role, author, content) {
  const text = document.createTextNode(content);
  const reasoning = document.createTextNode("");
  const footer = element("footer");
  const root = element(
    "article",
    { class: `message ${role}` },
    element("h3", {}, author),
    element("div", { class: "text reasoning", hidden: "" }, reasoning),
    element("div", { class: "text" }, text),
    footer,
  );
  return { root, text, reasoning, footer };
}

function summary(timing) {
  if (timing.outcome === "error" && timing.numTokens === 0) return ""; // the error's text says it all
  const parts = [timing.outcome, plural(timing.numTokens, "token")];
  if (timing.firstTokenMs !== null) parts.push(`first after ${duration(timing.firstTokenMs)}`);
  if (timing.interTokenMs) parts.push(`${perSecond(1000 / timing.interTokenMs)} tokens/s`);
  return parts.join(" · ");
}
