// Turns the chunks of one answer into passes and counts. Knows no page and no clock.

/**
 * One pass of the model: tokens in the order in which they were drafted and added.
 * @typedef {{kind: string, text: string}} Token
 * @typedef {{gamma: number, numAccepted: number, isRejected: boolean, tokens: Token[], alphaHat?: number | null}} Pass
 * `alphaHat` is that of all passes up to this one.
 */

const OWN = ["recovered", "bonus"];

export class Tally {
  constructor() {
    this.text = "";
    this.numTokens = 0;
    this.numDrafted = 0;
    this.numAccepted = 0;
    this.numRejections = 0;
    /** @type {Pass[]} */
    this.passes = [];
    // The server's own figures, on the last chunk.
    this.report = null;
  }

  /** Add a chunk and return its passes. */
  add(chunk) {
    for (const choice of chunk.choices) this.text += choice.text;
    const { steps = [], tokens = [], speculation = null } = chunk.outrider ?? {};
    this.report = speculation;
    const provenances = tokens.map((token) => token.provenance);
    const passes = steps.map((step) => passOf(step, provenances));
    for (const pass of passes) this.#count(pass);
    this.numTokens += tokens.length;
    return passes;
  }

  get tokensPerPass() {
    return this.passes.length ? this.numTokens / this.passes.length : null;
  }

  /** Kept drafts over judged ones: those behind a rejection were not judged. */
  get alphaHat() {
    const judged = this.numAccepted + this.numRejections;
    return judged ? this.numAccepted / judged : null;
  }

  #count(pass) {
    this.passes.push(pass);
    this.numDrafted += pass.gamma;
    this.numAccepted += pass.numAccepted;
    this.numRejections += pass.isRejected ? 1 : 0;
    pass.alphaHat = this.alphaHat;
  }
}

/** A step's tokens by where they came from; takes those of the answer out of `provenances`. */
function passOf(step, provenances) {
  const { drafted_text: drafted, num_accepted: numAccepted, forced_text: forced = [] } = step;
  const take = (text) => ({ kind: provenances.shift(), text });
  const tokens = drafted.slice(0, numAccepted).map(take);
  // A pass that ended the answer among its drafts has no token of the model's own.
  const own = OWN.includes(provenances[0]) ? [take(step.next_text)] : [];
  const isRejected = own[0]?.kind === "recovered";
  const dropped = drafted.slice(numAccepted).map((text, index) => ({
    kind: isRejected && index === 0 ? "rejected" : "behind",
    text,
  }));
  const all = [...tokens, ...dropped, ...own, ...forced.map(take)];
  return { gamma: step.gamma ?? drafted.length, numAccepted, isRejected, tokens: all };
}
