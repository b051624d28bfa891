// SPDX-License-Identifier: Apache-2.0
// Starts the page: asks for the status once a second while somebody looks, and connects the three parts.

import { ChatView } from "./chat_view.js";
import { RequestLog } from "./request_log.js";
import { StatusHistory } from "./status_history.js";
import { StatusView } from "./status_view.js";
import { TimelineView } from "./timeline_view.js";

const POLL_MS = 1_000;
const TIMEOUT_MS = 5_000;

const requests = new RequestLog();
const timeline = new TimelineView(requests);
const chat = new ChatView(requests, () => timeline.wake());
const history = new StatusHistory();
const statusView = new StatusView();

async function readStatus() {
  const response = await fetch("/status", { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  const body = await response.json();
  if (!response.ok) throw new Error(body.message ?? response.statusText);
  return body;
}

async function poll() {
  if (!document.hidden) {
    try {
      const view = history.add(await readStatus(), performance.now());
      chat.offerModels(view.deployments.map((deployment) => deployment.name));
      statusView.show(view, history.points);
    } catch (error) {
      const isGone = error instanceof TypeError || error.name === "TimeoutError";
      statusView.showProblem(isGone ? "The gateway cannot be reached; trying again." : error.message);
    }
  }
  setTimeout(poll, POLL_MS);
}

poll();
