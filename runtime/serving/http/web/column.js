// One column of the page: an answer, token by token, with its figures.

import { Tally } from "./tally.js";

const DROPPED = ["rejected", "behind"];
const DASH = "–";

export class Column {
  /** @param {HTMLElement} root the column's section */
  constructor(root) {
    this.root = root;
    this.clear("", "");
  }

  /** Begin anew. */
  clear(prompt, state) {
    this.tally = new Tally();
    this.firstMs = this.lastMs = null;
    this.numFirst = 0;
    this.isComplete = false;
    this.#part("answer").replaceChildren(element("span", "prompt", prompt));
    this.#part("error").hidden = true;
    this.say(state);
    this.#showFigures();
  }

  /** Show a chunk that came at a time, and return its passes. */
  add(chunk, nowMs) {
    const passes = this.tally.add(chunk);
    if (this.firstMs === null && this.tally.numTokens) {
      this.firstMs = nowMs;
      this.numFirst = this.tally.numTokens;
    }
    this.lastMs = nowMs;
    const answer = this.#part("answer");
    const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 8;
    answer.append(...passes.map(passElement));
    if (isAtEnd) answer.scrollTop = answer.scrollHeight;
    this.#showFigures();
    return passes;
  }

  /** The answer is whole. */
  finish() {
    this.isComplete = true;
    const { report } = this.tally;
    this.say("done", report?.is_on ? `, drafted by ${report.drafter}` : "");
  }

  /** Show why there is no answer, or no more of it. */
  fail(words) {
    const line = this.#part("error");
    line.textContent = words;
    line.hidden = false;
    this.say("ended");
  }

  say(state, more = "") {
    this.#part("state").textContent = state + more;
    this.root.dataset.state = state;
  }

  /** From the first piece to the last; the first one's tokens began before. */
  get msPerToken() {
    const numTimed = this.tally.numTokens - this.numFirst;
    return numTimed > 0 ? (this.lastMs - this.firstMs) / numTimed : null;
  }

  #part(name) {
    return this.root.querySelector(`.${name}`);
  }

  #showFigures() {
    const { passes, numTokens, tokensPerPass, alphaHat, numAccepted, numDrafted } = this.tally;
    const rows = {
      passes: passes.length || DASH,
      tokens: numTokens || DASH,
      "tokens per pass": fixed(tokensPerPass, 2),
      "drafts kept": numDrafted ? `${numAccepted} of ${numDrafted}` : DASH,
      alpha: fixed(alphaHat, 2),
      "ms per token": fixed(this.msPerToken, 1),
    };
    const figures = Object.entries(rows).map(([name, value]) => {
      const row = element("div");
      row.append(element("dt", "", name), element("dd", "", String(value)));
      row.dataset.figure = name;
      return row;
    });
    this.#part("figures").replaceChildren(...figures);
  }
}

export function fixed(value, digits) {
  return value === null ? DASH : value.toFixed(digits);
}

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function passElement(pass) {
  const made = element("span", "pass");
  made.append(...pass.tokens.map((token) => tokenElement(token, pass.gamma)));
  return made;
}

function tokenElement({ kind, text }, gamma) {
  const isPlain = kind === "bonus" && gamma === 0;
  const isDropped = DROPPED.includes(kind);
  const made = element(isDropped ? "del" : "span", `token ${isPlain ? "plain" : kind}`);
  made.title = isPlain ? "nothing drafted" : kind;
  // Line breaks get a mark. Those of drafts that were not kept break no line, and nothing is indented behind them.
  text.split("\n").forEach((line, index) => {
    if (index) made.append(element("i", "break"), isDropped ? "" : "\n");
    made.append(index && isDropped ? line.trimStart() : line);
  });
  return made;
}
