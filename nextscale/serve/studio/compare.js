// The same seed at best quality and with a method: one picture over the other, three rounds of timing.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { compare, generate } from "./api.js";
import { Facts } from "./bars.js";
import { Figures, likeness, seconds, speedup } from "./figures.js";
import { Empty } from "./frame.js";
import { randomSeed, requestOf } from "./settings.js";
import { DENSE } from "./speeds.js";
import { Split } from "./split.js";

const ROUNDS = 3; // timed, after a warm-up
const SLACK = 1.1; // of a median beyond what the saved work explains
const UNEVEN = 1 / 3; // difference of rounds above which the user is told

const median = (sorted) => (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
const sorted = (numbers) => numbers.sort((a, b) => a - b);
const typical = (rounds, which) => median(sorted(rounds.map((round) => round[which].total_ms)));

/** Median and range of the speedup of the rounds; `middle` is null if the saved work does not explain it. */
function spread(rounds) {
  if (!rounds.length) return { middle: null, uneven: false };
  const ratios = sorted(rounds.map(([dense, other]) => dense.total_ms / other.total_ms));
  const [low, high] = [ratios[0], ratios.at(-1)];
  const [dense, other] = [0, 1].map((which) => ({ ...rounds[0][which], total_ms: typical(rounds, which) }));
  const middle = speedup(dense, other, SLACK) && median(ratios);
  return { middle, range: `${low.toFixed(2)} to ${high.toFixed(2)}`, uneven: !middle || high / low - 1 > UNEVEN };
}

/** Pictures of the same seed with several methods, at once: the server joins what it can. */
export async function sideBySide(settings, methods, signal) {
  const seed = String(settings.seed).trim() || randomSeed();
  const answers = methods.map((method) => generate(requestOf({ ...settings, seed, method }), signal));
  return (await Promise.all(answers)).map((answer) => answer.data[0]);
}

export function useComparison(run, remember, references) {
  const [pair, setPair] = useState(null);
  const [busy, setBusy] = useState(false);
  const start = (settings, label) =>
    run(async (signal) => {
      setBusy(true);
      try {
        const [dense, other] = await sideBySide(settings, [DENSE, settings.method], signal);
        [dense, other].forEach((image) => remember(image.b64_json));
        references.keep({ ...settings, seed: String(dense.seed) }, dense);
        const found = { dense, other, label, size: settings.size, rounds: [], distance: null };
        const show = () => setPair({ ...found });
        show();
        found.distance = await compare(dense.b64_json, other.b64_json, signal);
        show();
        while (found.rounds.length < ROUNDS) {
          const reports = [];
          for (const method of [DENSE, settings.method]) {
            reports.push((await generate(requestOf({ ...settings, seed: dense.seed, method }), signal)).data[0].report);
          }
          found.rounds.push(reports);
          show();
        }
      } finally {
        setBusy(false);
      }
    });
  return { pair, busy, start };
}

export function CompareView({ comparison, settings, label, classes, choose }) {
  const { pair, busy } = comparison;
  if (!pair) {
    return html`
      <section class="stage" aria-label="Comparison">
        <${Empty} size=${settings.size} title="Can you see the difference?" text=${`The same seed at best quality and with “${label}”, one picture over the other.`} busy=${busy && "Generating both"} classes=${classes} choose=${choose} />
      </section>`;
  }
  const { dense, other, rounds, distance } = pair;
  const { middle, range, uneven } = spread(rounds);
  const like = likeness(distance);
  const time = (which) => seconds(rounds.length ? typical(rounds, which) : [dense, other][which].report.total_ms);
  return html`
    <section class="stage" aria-label="Comparison">
      <${Split} size=${pair.size} left=${{ b64: dense.b64_json, label: "Best quality" }} right=${{ b64: other.b64_json, label: pair.label }} />
      <p class="soft tip">Drag the picture, or move the divider with the arrow keys.</p>
    </section>
    <section class="panel result" aria-label="Result">
      <${Figures} figures=${[
        { id: "seconds", value: time(1), unit: "s", label: "Time", about: `${time(0)} s at best quality` },
        { id: "speedup", value: middle?.toFixed(2), unit: "×", label: "Times faster", about: range ? html`<span id="range">${range}</span>` : busy ? "measuring" : "not measured" },
        { id: "likeness", value: like?.value, unit: like?.unit, label: "Likeness", about: like ? like.about : busy ? "measuring" : "not measured" },
      ]} />
      <p class="soft">Times: median of <span id="rounds">${rounds.length} of ${ROUNDS}</span> rounds in turns. ${like && html`<span id="distance">${like.all}</span>. `}Seed ${dense.seed}.</p>
      ${uneven && html`<p class="note" role="status">${middle ? "The rounds differ by more than a third" : "The saved work does not explain these times"}: the machine is busy. Compare again when it is quiet.</p>`}
      ${like?.missing && html`<p class="soft">${like.missing}</p>`}
      <${Facts} report=${other.report} />
    </section>
  `;
}
