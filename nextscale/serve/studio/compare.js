// The same seed, dense and with a method, under one slider.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { compare, generate } from "./api.js";
import { source } from "./png.js";
import { randomSeed, requestOf } from "./settings.js";

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
      setPair({ dense, other, distance: null });
      const distance = await compare(dense.b64_json, other.b64_json, signal);
      setPair({ dense, other, distance });
    });
  return { pair, start };
}

export function CompareView({ pair, busy }) {
  const [split, setSplit] = useState(50);
  if (!pair) return html`<section class="view"><div class="canvas empty">${busy ? "generating both" : "dense against the method, with the same seed"}</div></section>`;
  const { dense, other, distance } = pair;
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
          <dt>LPIPS</dt><dd id="lpips">${distance ? (distance.lpips ?? html`<span title=${distance.lpips_missing}>not at hand</span>`) : "…"}</dd>
          <dt>PSNR</dt><dd id="psnr">${distance ? `${distance.psnr.toFixed(2)} dB` : "…"}</dd>
          <dt>SSIM</dt><dd>${distance ? distance.ssim : "…"}</dd>
          <dt>speedup</dt><dd>${(dense.report.total_ms / other.report.total_ms).toFixed(2)} (batches of ${dense.report.batch} and ${other.report.batch})</dd>
          <dt>MACs</dt><dd>${(100 * other.report.cost_share).toFixed(0)} %</dd>
          <dt>seed</dt><dd>${dense.seed}</dd>
        </dl>
        ${distance?.lpips_missing && html`<p class="facts">${distance.lpips_missing}</p>`}
      </div>
    </section>
  `;
}
