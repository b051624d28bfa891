// SPDX-License-Identifier: Apache-2.0
// The requests of this page on a common time scale, newest first: waiting for the first token, then every arrival.

import { byId, element, setAttributes, setText, showEach, svgElement } from "./elements.js";
import { duration, perSecond, plural } from "./format.js";
import { layOut } from "./request_log.js";

const WIDTH = 1000;
const HEIGHT = 20;
const REDRAW_MS = 100;
const TONES = { error: "bad", stopped: "warn", length: "good", stop: "good" };

export class TimelineView {
  #log;
  #rows = new Map();
  #timer = null;

  constructor(log) {
    this.#log = log;
  }

  /** Something has changed: draw soon, and on while a request is under way. */
  wake() {
    this.#timer ??= setTimeout(() => this.#draw(), REDRAW_MS);
  }

  #draw() {
    const now = performance.now();
    const scaleMs = this.#log.scaleMs(now);
    const isEmpty = this.#log.requests.length === 0;
    byId("no-requests").hidden = !isEmpty;
    setText(byId("scale"), isEmpty ? "" : `full width: ${duration(scaleMs)}`);
    showEach(
      byId("timeline"), this.#rows, this.#log.requests, (timing) => timing.id, () => new RequestRow(), scaleMs, now,
    );
    this.#timer = this.#log.isActive ? setTimeout(() => this.#draw(), REDRAW_MS) : null;
  }
}

class RequestRow {
  #title = element("span", { class: "title" });
  #state = element("span", { class: "pill" });
  #queued = svgElement("rect", { class: "queued", x: 0, y: 0, height: HEIGHT });
  #streaming = svgElement("rect", { class: "streaming", y: 0, height: HEIGHT });
  #marks = svgElement("path", { class: "marks", "vector-effect": "non-scaling-stroke" });
  #line = svgElement(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    this.#queued,
    this.#streaming,
    this.#marks,
  );
  #facts = element("p", { class: "facts" });
  root = element("li", {}, element("div", { class: "bar" }, this.#title, this.#state), this.#line, this.#facts);

  update(timing, scaleMs, now) {
    setText(this.#title, `#${timing.id} ${timing.model}`);
    setText(this.#state, timing.state);
    setAttributes(this.#state, { "data-tone": TONES[timing.state] ?? "" });
    const { first, end, marks } = layOut(timing, scaleMs, WIDTH, now);
    setAttributes(this.#queued, { width: first.toFixed(1) });
    setAttributes(this.#streaming, { x: first.toFixed(1), width: Math.max(0, end - first).toFixed(1) });
    setAttributes(this.#marks, { d: marks.map((x) => `M${x} 3V${HEIGHT - 3}`).join("") });
    setText(this.#facts, facts(timing, now));
  }
}

function facts(timing, now) {
  const parts = [];
  if (timing.firstTokenMs !== null) parts.push(`first token ${duration(timing.firstTokenMs)}`);
  if (timing.interTokenMs !== null) {
    parts.push(`then every ${duration(timing.interTokenMs)}, at most ${duration(timing.longestGapMs)}`);
    parts.push(`${perSecond(1000 / timing.interTokenMs)} tokens/s`);
  }
  parts.push(plural(timing.numTokens, "token"), `${duration(timing.totalMs(now))} in all`);
  return parts.join(" · ");
}
