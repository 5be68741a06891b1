// Gamma, what was kept, and alpha, pass by pass. The drawing is uPlot's.

const HEIGHT = 220;
// Steps of an axis that counts.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

export class Chart {
  /** @param {HTMLElement} root an empty element, as wide as the drawing is to be */
  constructor(root) {
    this.root = root;
    this.clear();
    this.plot = new uPlot(this.#options(), this.data, root);
    new ResizeObserver(() => this.plot.setSize({ width: root.clientWidth, height: HEIGHT })).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false, true));
  }

  clear() {
    this.data = [[], [], [], []];
    this.plot?.setData(this.data);
    this.root.setAttribute("aria-label", "No passes yet");
  }

  /**
   * Show one more pass.
   * @param {import("./tally.js").Pass} pass
   */
  add(pass) {
    const [numbers, gammas, kept, alphas] = this.data;
    numbers.push(numbers.length + 1);
    gammas.push(pass.gamma);
    kept.push(pass.numAccepted);
    alphas.push(pass.alphaHat);
  }

  /** Draw what was added. */
  draw() {
    this.plot.setData(this.data);
    const [numbers, gammas, , alphas] = this.data;
    const last = numbers.length - 1;
    if (last < 0) return;
    const alpha = alphas[last] === null ? "" : `, alpha ${alphas[last].toFixed(2)}`;
    this.root.setAttribute("aria-label", `${last + 1} passes; at the last one gamma ${gammas[last]}${alpha}`);
  }

  #options() {
    const bars = { paths: uPlot.paths.bars({ size: [0.7, 40] }), points: { show: false }, width: 1 };
    const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 } };
    const name = (scale, label) => ({ ...axis, scale, label, labelSize: 20, labelFont: "12px sans-serif" });
    const series = (label, scale, property, more) => ({ label, scale, stroke: () => colour(property), ...more });
    return {
      width: this.root.clientWidth,
      height: HEIGHT,
      scales: {
        x: { time: false, range: (_, first, last) => [(first ?? 1) - 0.5, (last ?? 1) + 0.5] },
        tokens: { range: (_, __, most) => [0, Math.max(4, most ?? 0)] },
        alpha: { range: [0, 1] },
      },
      axes: [
        { ...name("x", "pass"), incrs: WHOLE },
        { ...name("tokens", "drafted tokens"), incrs: WHOLE },
        { ...name("alpha", "alpha"), side: 1, grid: { show: false } },
      ],
      series: [
        { label: "pass" },
        series("gamma", "tokens", "--muted", { ...bars, fill: () => colour("--line") }),
        series("kept", "tokens", "--accepted-line", { ...bars, fill: () => colour("--accepted-fill") }),
        series("alpha so far", "alpha", "--bonus-line", {
          width: 2, dash: [6, 4], points: { show: false }, value: (_, value) => value?.toFixed(2) ?? "–",
        }),
      ],
    };
  }
}

function colour(property) {
  return getComputedStyle(document.documentElement).getPropertyValue(property);
}
