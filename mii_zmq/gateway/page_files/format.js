// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them. Pure; a value that is not known is an em dash.

export const UNKNOWN = "—";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 → "1,234,567". */
export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** A speed: one decimal below 10, so that slow ones do not read as 0. */
export function perSecond(value) {
  if (!isNumber(value)) return UNKNOWN;
  return value >= 0.05 && value < 9.95 ? value.toFixed(1) : count(value);
}

/** A share from 0 to 1 → "42 %". */
export function percent(share) {
  return isNumber(share) ? `${Math.round(share * 100)} %` : UNKNOWN;
}

/** Milliseconds → "8.1 ms", "120 ms", "1.25 s", "12.3 s", "2 min 5 s", "3 h 4 min", "2 d 5 h". */
export function duration(ms) {
  if (!isNumber(ms)) return UNKNOWN;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9_995) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** 1 → "1 token", 2 → "2 tokens". */
export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}
