// SPDX-License-Identifier: Apache-2.0
// Live status on the page: figures, speed over time, and a card for every deployment with its groups.

import { byId, element, setAttributes, setText, showEach } from "./elements.js";
import { count, duration, isNumber, perSecond, percent, plural, UNKNOWN } from "./format.js";

const SPARK_WIDTH = 240;
const SPARK_HEIGHT = 40;
const SPARK_MS = 120_000;

export class StatusView {
  #deployments = new Map();

  show(view, points) {
    const { totals } = view;
    setText(byId("tokens-per-s"), perSecond(totals.tokensPerS));
    setText(byId("running"), count(totals.running));
    setText(byId("waiting"), count(totals.waiting));
    setText(byId("hits"), percent(totals.hitShare));
    setText(byId("hits-scope"), totals.hitScope);
    drawSparkline(points);
    const isEnding = view.isDraining || view.isLeaving;
    this.#connection(isEnding ? "shutting down" : "live", isEnding ? "warn" : "good");
    const problem = view.deployments.length ? "" : "The broker is there, but no worker group has registered yet.";
    this.#notice(problem);
    setText(byId("processes"), processes(view));
    const container = byId("deployments");
    showEach(container, this.#deployments, view.deployments, (d) => d.name, () => new DeploymentCard());
    container.classList.remove("stale");
  }

  /** The last figures stay, greyed. */
  showProblem(text) {
    this.#connection("no status", "bad");
    this.#notice(text);
    byId("deployments").classList.add("stale");
  }

  #connection(text, tone) {
    setText(byId("connection"), text);
    setAttributes(byId("connection"), { "data-tone": tone });
  }

  #notice(text) {
    byId("notice").hidden = text === "";
    setText(byId("notice"), text);
  }
}

class DeploymentCard {
  #groups = new Map();
  #name = element("h3");
  #state = element("span", { class: "pill" });
  #facts = element("p", { class: "facts" });
  #list = element("ul", { class: "groups" });
  root = element(
    "article",
    { class: "deployment" },
    element("div", { class: "bar" }, this.#name, this.#state),
    this.#facts,
    this.#list,
  );

  update(deployment) {
    setText(this.#name, deployment.name);
    showState(this.#state, deployment.state);
    const queue = deployment.waiting
      ? `${count(deployment.waiting)} in the queue (about ${plural(deployment.waitingTokens, "token")})`
      : "queue empty";
    const finished = `${perSecond(deployment.finishedPerS)} requests/s finished`;
    setText(this.#facts, [plural(deployment.groups.length, "group"), queue, finished].join(" · "));
    showEach(this.#list, this.#groups, deployment.groups, (group) => group.key, () => new GroupRow());
  }
}

class GroupRow {
  #name = element("h4");
  #state = element("span", { class: "pill" });
  #where = element("p", { class: "facts" });
  #blocks = new Meter("KV blocks");
  #requests = new Meter("Requests");
  #cells = Object.fromEntries(
    ["Running", "Waiting", "Tokens/s", "Prompt tokens/s", "Step", "Heartbeat"].map((name) => [name, element("dd")]),
  );
  root = element(
    "li",
    {},
    element("div", { class: "bar" }, this.#name, this.#state),
    this.#where,
    this.#blocks.root,
    this.#requests.root,
    element(
      "dl",
      { class: "cells" },
      ...Object.entries(this.#cells).map(([name, cell]) => element("div", {}, element("dt", {}, name), cell)),
    ),
  );

  update(group) {
    setText(this.#name, group.name);
    showState(this.#state, group.state);
    const pid = isNumber(group.pid) ? `pid ${group.pid}` : null; // an id: no thousands separator
    const up = group.uptimeMs === null ? null : `up ${duration(group.uptimeMs)}`;
    const model = group.model?.split("/").at(-1) ?? null; // of a path its last part
    setText(this.#where, [model, group.device, pid, up].filter((part) => part !== null).join(" · "));
    this.#blocks.update(group.usedBlocks, group.totalBlocks);
    this.#requests.update(group.numRequests, group.maxRequests);
    const values = {
      Running: count(group.running),
      Waiting: count(group.waiting),
      "Tokens/s": perSecond(group.tokensPerS),
      "Prompt tokens/s": perSecond(group.promptTokensPerS),
      Step: group.stepMs ? duration(group.stepMs) : UNKNOWN,
      Heartbeat: group.heartbeatMs === null ? UNKNOWN : `${duration(group.heartbeatMs)} ago`,
    };
    for (const [name, text] of Object.entries(values)) setText(this.#cells[name], text);
  }
}

class Meter {
  #fill = element("span", { class: "fill" });
  #track = element("span", { class: "track", role: "meter", "aria-valuemin": 0 }, this.#fill);
  #value = element("span", { class: "value" });
  root;

  constructor(name) {
    this.#track.setAttribute("aria-label", name);
    this.root = element("div", { class: "meter" }, element("span", {}, name), this.#track, this.#value);
  }

  update(used, total) {
    this.root.hidden = !total;
    const share = total ? Math.min(1, (used ?? 0) / total) : 0;
    const text = `${count(used)} / ${count(total)}`;
    setAttributes(this.#track, { "aria-valuemax": total ?? 0, "aria-valuenow": used ?? 0, "aria-valuetext": text });
    this.#fill.style.width = `${share * 100}%`;
    setAttributes(this.#fill, { "data-tone": share > 0.95 ? "bad" : share > 0.8 ? "warn" : "good" });
    setText(this.#value, text);
  }
}

function processes({ broker, gateway }) {
  const ofBroker = `broker up ${duration(broker.uptimeMs)}, ${plural(broker.numClients, "client")}`;
  return `${ofBroker} · gateway up ${duration(gateway.uptimeMs)}, ${plural(gateway.numInFlight, "request")} under way`;
}

function showState(pill, state) {
  setText(pill, state.text);
  setAttributes(pill, { "data-tone": state.tone });
}

function drawSparkline(points) {
  const svg = byId("sparkline");
  if (points.length < 2) return;
  const end = points.at(-1).at;
  const highest = Math.max(...points.map((point) => point.value));
  const x = (at) => (SPARK_WIDTH * (1 - (end - at) / SPARK_MS)).toFixed(1);
  const y = (value) => (SPARK_HEIGHT - 1 - (SPARK_HEIGHT - 3) * (value / Math.max(highest, 1))).toFixed(1);
  const line = points.map((point, i) => `${i ? "L" : "M"}${x(point.at)} ${y(point.value)}`).join("");
  setAttributes(svg.querySelector(".line"), { d: line });
  setAttributes(svg.querySelector(".area"), { d: `${line}V${SPARK_HEIGHT}H${x(points[0].at)}Z` });
  setAttributes(svg, { "aria-label": `the last 2 minutes; at most ${perSecond(highest)} tokens per second` });
}
