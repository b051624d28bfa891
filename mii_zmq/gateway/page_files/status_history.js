// SPDX-License-Identifier: Apache-2.0
// What the page shows, made of the bodies of GET /status: plain numbers per deployment and group, and speeds out of the
// counters of successive bodies. Pure: the caller brings the clock, in milliseconds. Missing numbers are null.

import { isNumber } from "./format.js";

const RATE_WINDOW_MS = 5_000;
const KEPT_MS = 120_000;
const LATE_HEARTBEAT_MS = 1_500;
const COUNTERS = ["generated_tokens", "prompt_tokens", "cached_tokens"];

const number = (value) => (isNumber(value) ? value : null);
const milliseconds = (seconds) => (isNumber(seconds) ? seconds * 1000 : null);
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

export class StatusHistory {
  #samples = new Map(); // by group and incarnation: [{at, generated_tokens, prompt_tokens, cached_tokens}]
  /** Output tokens per second, oldest first: [{at, value}]. */
  points = [];

  /** Take the body of GET /status that arrived at `now`; returns the view of it. */
  add(body, now) {
    const at = now - (number(body.age_ms) ?? 0);
    const broker = body.broker ?? {};
    const deployments = Object.entries(broker.deployments ?? {})
      .sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([name, facts]) => this.#deployment(name, facts, at));
    for (const [key, samples] of this.#samples) if (samples.at(-1).at < at) this.#samples.delete(key);
    const groups = deployments.flatMap((deployment) => deployment.groups);
    const totals = this.#totals(deployments, groups);
    if (totals.tokensPerS !== null) this.points.push({ at, value: totals.tokensPerS });
    this.points = this.points.filter((point) => point.at >= at - KEPT_MS);
    return {
      totals,
      deployments,
      isDraining: broker.is_draining === true,
      isLeaving: body.gateway?.is_leaving === true,
      broker: { uptimeMs: milliseconds(broker.uptime_s), numClients: number(broker.num_clients) },
      gateway: { uptimeMs: milliseconds(body.gateway?.uptime_s), numInFlight: number(body.gateway?.num_in_flight) },
    };
  }

  #totals(deployments, groups) {
    const kept = [...this.#samples.values()];
    const known = groups.map((group) => group.tokensPerS).filter((rate) => rate !== null);
    return {
      running: sum(groups.map((group) => group.running)),
      waiting: sum(deployments.map((deployment) => deployment.waiting)) + sum(groups.map((group) => group.waiting)),
      tokensPerS: known.length ? sum(known) : null,
      ...hitRate(kept),
    };
  }

  #deployment(name, facts, at) {
    const groups = (facts.groups ?? []).map((group) => this.#group(name, group, at));
    return {
      name,
      state: deploymentState(facts),
      waiting: number(facts.num_waiting),
      waitingTokens: number(facts.waiting_tokens),
      finishedPerS: number(facts.finished_per_s),
      groups,
    };
  }

  #group(deployment, facts, at) {
    const load = facts.load ?? {};
    const info = facts.info ?? {};
    const key = JSON.stringify([deployment, facts.group, facts.incarnation]);
    const samples = this.#samples.get(key) ?? [];
    if (!samples.length || at > samples.at(-1).at) {
      samples.push({ at, ...Object.fromEntries(COUNTERS.map((name) => [name, number(load[name]) ?? 0])) });
    }
    this.#samples.set(key, samples.filter((sample) => sample.at >= at - KEPT_MS));
    return {
      key,
      name: String(facts.group ?? ""),
      state: groupState(facts),
      model: info.model === undefined ? null : String(info.model),
      pid: number(info.pid),
      device: info.device === undefined ? null : String(info.device),
      running: number(load.running),
      waiting: number(load.waiting),
      numRequests: number(facts.num_requests),
      maxRequests: number(facts.max_requests),
      usedBlocks: number(load.used_blocks),
      totalBlocks: number(load.total_blocks),
      heartbeatMs: number(facts.heartbeat_age_ms),
      stepMs: number(load.step_ms),
      uptimeMs: milliseconds(facts.uptime_s),
      tokensPerS: rate(samples, "generated_tokens"),
      promptTokensPerS: rate(samples, "prompt_tokens"),
    };
  }
}

/** A counter's growth per second over the last RATE_WINDOW_MS; null before there are two samples. */
function rate(samples, counter) {
  const last = samples.at(-1);
  const first = samples.find((sample) => sample.at >= last.at - RATE_WINDOW_MS);
  return first.at < last.at ? Math.max(0, ((last[counter] - first[counter]) / (last.at - first.at)) * 1000) : null;
}

/** The share of prompt tokens that the prefix cache had: of the last two minutes, or since the start if none came. */
function hitRate(kept) {
  const grown = (counter) => sum(kept.map((samples) => samples.at(-1)[counter] - samples[0][counter]));
  const total = (counter) => sum(kept.map((samples) => samples.at(-1)[counter]));
  for (const [scope, of] of [["last 2 min", grown], ["since the start", total]]) {
    const prompts = of("prompt_tokens") + of("cached_tokens");
    if (prompts > 0) return { hitShare: of("cached_tokens") / prompts, hitScope: scope };
  }
  return { hitShare: null, hitScope: "no prompts yet" };
}

function deploymentState(facts) {
  if (!(facts.groups ?? []).length) return { text: "no group", tone: "bad" };
  if (!(facts.takes_requests ?? facts.is_ready)) return { text: "takes no requests", tone: "warn" };
  return { text: "ready", tone: "good" };
}

function groupState(facts) {
  if (facts.state !== "ready") return { text: String(facts.state ?? "unknown"), tone: "warn" };
  if (facts.heartbeat_age_ms > LATE_HEARTBEAT_MS) return { text: "silent", tone: "bad" };
  return { text: "ready", tone: "good" };
}
