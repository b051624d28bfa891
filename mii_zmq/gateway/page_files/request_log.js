// SPDX-License-Identifier: Apache-2.0
// The requests that this page has made and when their tokens came. Pure: the caller brings the clock, in milliseconds.
//
// A request is `queued` from the moment it is sent to its first text (network, queue and prompt), then `streaming`, then
// ended: `stop`, `length` or another reason of the server's, `stopped` by the user, or `error`.

const MAX_REQUESTS = 20;

export class RequestTiming {
  constructor(id, model, now) {
    this.id = id;
    this.model = model;
    this.sentAt = now;
    this.arrivals = [];
    this.endedAt = null;
    this.outcome = null;
    this.usage = null;
  }

  onText(now) {
    this.arrivals.push(now);
  }

  onEnd(outcome, now) {
    this.outcome = outcome;
    this.endedAt = now;
  }

  get state() {
    if (this.endedAt !== null) return this.outcome;
    return this.arrivals.length ? "streaming" : "queued";
  }

  get firstTokenMs() {
    return this.arrivals.length ? this.arrivals[0] - this.sentAt : null;
  }

  /** Output tokens by the server's count; until it has come, the texts received, of which each is mostly one token. */
  get numTokens() {
    return this.usage?.completion_tokens ?? this.arrivals.length;
  }

  /** Mean time from token to token behind the first one. */
  get interTokenMs() {
    const num = Math.max(this.numTokens, this.arrivals.length) - 1;
    return num > 0 && this.arrivals.length > 1 ? (this.arrivals.at(-1) - this.arrivals[0]) / num : null;
  }

  /** The longest silence between two texts. */
  get longestGapMs() {
    let longest = null;
    for (let i = 1; i < this.arrivals.length; i += 1) {
      longest = Math.max(longest ?? 0, this.arrivals[i] - this.arrivals[i - 1]);
    }
    return longest;
  }

  totalMs(now) {
    return (this.endedAt ?? now) - this.sentAt;
  }
}

export class RequestLog {
  #nextId = 1;
  /** Newest first. */
  requests = [];

  start(model, now) {
    const timing = new RequestTiming(this.#nextId, model, now);
    this.#nextId += 1;
    this.requests.unshift(timing);
    this.requests.length = Math.min(this.requests.length, MAX_REQUESTS);
    return timing;
  }

  get isActive() {
    return this.requests.some((request) => request.endedAt === null);
  }

  /** The time that the full width of the timeline stands for. */
  scaleMs(now) {
    return Math.max(1, ...this.requests.map((request) => request.totalMs(now)));
  }
}

/** Where a request's parts lie on a line of `width` units; `marks` are the arrivals, no two on the same unit. */
export function layOut(timing, scaleMs, width, now) {
  const at = (time) => ((time - timing.sentAt) / scaleMs) * width;
  const end = at(timing.endedAt ?? now);
  const first = timing.arrivals.length ? at(timing.arrivals[0]) : end;
  const marks = [...new Set(timing.arrivals.map((time) => Math.round(at(time))))];
  return { first, end, marks };
}
