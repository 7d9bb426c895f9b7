// The same seed, dense and with a method, under one slider.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { compare, generate } from "./api.js";
import { source } from "./png.js";
import { randomSeed, requestOf } from "./settings.js";

const ROUNDS = 3; // timed, after a warm-up
const UNEVEN = 1 / 3; // difference of rounds above which the user is told

/** Median, lowest and highest speedup of the rounds. */
function spread(rounds) {
  const sorted = rounds.map(([dense, other]) => dense.total_ms / other.total_ms).sort((a, b) => a - b);
  const [low, high] = [sorted[0], sorted.at(-1)];
  const middle = (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
  return { middle, low, high, uneven: high / low - 1 > UNEVEN };
}

/** Images of the same seed with several methods, at once: the server joins what it can. */
export async function sideBySide(settings, methods, signal) {
  const seed = String(settings.seed).trim() || randomSeed();
  const answers = methods.map((method) => generate(requestOf({ ...settings, seed, method }), signal));
  return (await Promise.all(answers)).map((answer) => answer.data[0]);
}

export function useComparison(run, remember) {
  const [pair, setPair] = useState(null);
  const start = (settings) =>
    run(async (signal) => {
      setPair(null);
      const [dense, other] = await sideBySide(settings, ["dense", settings.method], signal);
      [dense, other].forEach((image) => remember(image.b64_json, image.report));
      const rounds = [];
      setPair({ dense, other, rounds, distance: null });
      const distance = await compare(dense.b64_json, other.b64_json, signal);
      setPair({ dense, other, rounds, distance });
      while (rounds.length < ROUNDS) {
        const reports = [];
        for (const method of ["dense", settings.method]) {
          reports.push((await generate(requestOf({ ...settings, seed: dense.seed, method }), signal)).data[0].report);
        }
        rounds.push(reports);
        setPair({ dense, other, rounds, distance });
      }
    });
  return { pair, start };
}

export function CompareView({ pair, busy }) {
  const [split, setSplit] = useState(50);
  if (!pair) return html`<section class="view"><div class="canvas empty">${busy ? "generating both" : "dense against the method, with the same seed"}</div></section>`;
  const { dense, other, rounds, distance } = pair;
  const { middle, low, high, uneven } = spread(rounds);
  return html`
    <section class="view" aria-label="comparison">
      <div class="picture">
        <div class="canvas split">
          <img src=${source(other.b64_json)} alt=${other.report.method} />
          <img class="above" src=${source(dense.b64_json)} alt="dense" style=${{ clipPath: `inset(0 ${100 - split}% 0 0)` }} />
          <i class="line" style=${{ left: `${split}%` }}></i>
        </div>
        <label class="scrubber">dense <input type="range" min="0" max="100" value=${split} aria-label="slider" onInput=${(event) => setSplit(Number(event.target.value))} /> ${other.report.method}</label>
      </div>
      <div class="side">
        <dl class="numbers" id="distance">
          <dt>LPIPS</dt><dd id="lpips">${distance ? (distance.lpips ?? "too small") : "…"}</dd>
          <dt>PSNR</dt><dd id="psnr">${distance ? `${distance.psnr.toFixed(2)} dB` : "…"}</dd>
          <dt>SSIM</dt><dd>${distance ? distance.ssim : "…"}</dd>
          <dt>speedup</dt><dd id="speedup">${rounds.length ? `${middle.toFixed(2)} (${low.toFixed(2)} to ${high.toFixed(2)})` : busy ? "measuring" : "not measured"}</dd>
          <dt>rounds</dt><dd id="rounds">${rounds.length} of ${ROUNDS}, in turns</dd>
          <dt>MACs</dt><dd>${(100 * other.report.cost_share).toFixed(0)} %</dd>
          <dt>seed</dt><dd>${dense.seed}</dd>
        </dl>
        ${uneven && html`<p class="facts" role="status">Rounds differ by more than a third: the machine is busy. Compare again when it is quiet.</p>`}
      </div>
    </section>
  `;
}
