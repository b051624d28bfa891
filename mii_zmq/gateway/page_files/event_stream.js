// SPDX-License-Identifier: Apache-2.0
// Server-sent events out of pieces of text that may be cut anywhere. Pure.

export class EventStreamParser {
  #rest = "";
  #data = [];

  /** Take a piece; returns the data of every event that it completes. */
  push(piece) {
    this.#rest += piece;
    const events = [];
    for (;;) {
      const end = this.#rest.search(/\r\n|\n|\r(?!$)/); // a CR at the very end may be half of a CRLF
      if (end < 0) return events;
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(end + (this.#rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}
