// The page: the form, the two runs, and what they come to.

import { Chart } from "./chart.js";
import { Column, fixed } from "./column.js";
import { completion, models, Refusal } from "./events.js";

const at = (id) => document.getElementById(id);
const chart = new Chart(at("chart"));
const columns = { off: new Column(at("off")), on: new Column(at("on")) };
let abort = null;

/** What to ask, but for whether to speculate. */
function commonRequest() {
  return {
    prompt: at("prompt").value,
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    max_tokens: Number(at("max-tokens").value),
    ...(at("regex").value ? { regex: at("regex").value } : {}),
    stream: true,
    return_trace: true,
    return_provenance: true,
  };
}

function speculation() {
  const gamma = at("gamma").value;
  return {
    enabled: true,
    ...(gamma === "auto" ? {} : { gamma: Number(gamma) }),
    ...(at("drafter").value ? { drafter: at("drafter").value } : {}),
    ...(at("seed-stable").checked ? { mode: "seed_stable" } : {}),
  };
}

/** Stream an answer into a column; true if it came to its end. */
async function answer(column, request, shown = () => {}) {
  column.say("running");
  column.root.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of completion(request, { key: at("key").value, signal: abort.signal })) {
      at("model").textContent = chunk.model;
      shown(column.add(chunk, performance.now()));
    }
    column.finish();
  } catch (error) {
    if (!(error instanceof Refusal) && error.name !== "AbortError") throw error;
    column.fail(error instanceof Refusal ? error.words : "Aborted.");
    if (error.status === 401) showKeyField();
  } finally {
    column.root.removeAttribute("aria-busy");
  }
  return column.isComplete;
}

function showPasses(passes) {
  for (const pass of passes) chart.add(pass);
  chart.draw();
}

async function run() {
  const common = commonRequest();
  const isTogether = at("order").value === "together";
  const mustEqual = common.temperature === 0 || at("seed-stable").checked;
  const mode = at("seed-stable").checked ? { mode: "seed_stable" } : {};
  const off = { ...common, speculation: { enabled: false, ...mode } };
  const on = { ...common, speculation: speculation() };
  for (const column of Object.values(columns)) column.clear(common.prompt, "waiting");
  chart.clear();
  compare(mustEqual);
  const runOn = () => answer(columns.on, on, showPasses);
  if (isTogether) await Promise.all([answer(columns.off, off), runOn()]);
  else if (await answer(columns.off, off)) await runOn();
  else columns.on.say("not run");
  compare(mustEqual);
}

/** Set both answers beside each other, as far as they are complete. */
function compare(mustEqual) {
  const { off, on } = columns;
  const isComplete = off.isComplete && on.isComplete;
  const both = isComplete && off.msPerToken !== null && on.msPerToken;
  at("speed-up").textContent = both ? `${fixed(off.msPerToken / on.msPerToken, 2)}×` : "–";
  const passes = [on.tally.passes.length, off.tally.passes.length];
  at("passes").textContent = isComplete ? `${passes[0]} instead of ${passes[1]}` : "–";
  const verdict = off.tally.text === on.tally.text ? "yes" : "NO";
  const line = mustEqual ? verdict : "not promised";
  at("identical").textContent = isComplete ? line : "–";
  at("identical").dataset.verdict = isComplete && mustEqual ? verdict : "";
}

async function runOnce(event) {
  event.preventDefault();
  if (abort) return;
  abort = new AbortController();
  swap("run", "abort");
  at("status").textContent = "Running.";
  try {
    await run();
  } finally {
    const isComplete = columns.off.isComplete && columns.on.isComplete;
    at("status").textContent = isComplete ? outcome() : "Ended without both answers.";
    swap("abort", "run");
    abort = null;
  }
}

/** Disable a button and enable another, which takes the focus along. */
function swap(before, after) {
  const hasFocus = document.activeElement === at(before);
  at(after).disabled = false;
  if (hasFocus) at(after).focus();
  at(before).disabled = true;
}

function outcome() {
  return `Done. Speed-up ${at("speed-up").textContent}; identical: ${at("identical").textContent}.`;
}

function showKeyField() {
  at("key-label").hidden = false;
  at("key").focus();
}

/** Say what is served. */
async function introduce() {
  try {
    const [model] = await models(at("key").value);
    at("model").textContent = model.id;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    at("model").textContent = error.words;
    if (error.status === 401) showKeyField();
  }
}

at("form").addEventListener("submit", runOnce);
at("abort").addEventListener("click", () => abort?.abort());
at("key").addEventListener("change", introduce);
await introduce();
