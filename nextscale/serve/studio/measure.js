// Likeness and speed of a picture against best quality with the same seed.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { compare, generate } from "./api.js";
import { Figures, likeness, seconds, speedup } from "./figures.js";
import { requestOf } from "./settings.js";
import { DENSE } from "./speeds.js";

const MOST = 12; // references that are kept

/** All settings but the method, as text. */
const keyOf = (settings) => JSON.stringify({ ...requestOf(settings), method: "" });

/** Pictures at best quality of this visit, and the likeness of others to them. */
export function useReferences() {
  const [references, setReferences] = useState([]); // [{key, b64, report}], the latest first
  const [likenesses, setLikenesses] = useState([]); // [{b64, distance}], the latest first
  const find = (settings) => references.find(({ key }) => key === keyOf(settings));
  const keep = (settings, image) => setReferences((before) => [{ key: keyOf(settings), b64: image.b64_json, report: image.report }, ...before].slice(0, MOST));
  const keepDistance = (image, distance) => setLikenesses((before) => [{ b64: image.b64_json, distance }, ...before].slice(0, MOST));
  /** Generates the same seed at best quality where it is not known yet, and compares. */
  const measure = async (settings, image, signal) => {
    const known = find(settings);
    const dense = known || (await generate(requestOf({ ...settings, method: DENSE }), signal)).data[0];
    if (!known) keep(settings, dense);
    keepDistance(image, await compare(known ? known.b64 : dense.b64_json, image.b64_json, signal));
    return known ? null : dense;
  };
  const distanceOf = (image) => likenesses.find(({ b64 }) => b64 === image.b64_json)?.distance;
  return { find, keep, measure, distanceOf };
}

/** The card beside a finished picture. */
export function ResultCard({ image, settings, references, measure, busy }) {
  const reference = references.find(settings);
  const distance = references.distanceOf(image);
  const best = settings.method === DENSE;
  const like = likeness(distance);
  const measured = !best && reference && speedup(reference.report, image.report);
  const times = best ? "1" : measured >= 1 ? measured.toFixed(1) : null; // one run cannot show that a method is slower
  const timing = !best && reference && (times ? "one run" : "uneven runs: use Compare");
  return html`
    <${Figures} figures=${[
      { id: "seconds", value: seconds(image.report.total_ms), unit: "s", label: "Time" },
      { id: "times", value: times, unit: "×", label: "Times faster", about: timing },
      { id: "likeness", value: best ? "100" : like?.value, unit: best ? "%" : like?.unit, label: "Likeness", about: best ? "reference" : like?.about },
    ]} />
    ${!best && !like && html`<button type="button" id="measure" disabled=${busy} onClick=${measure}>Measure against best quality</button>`}
    ${like?.missing && html`<p class="soft">${like.missing}</p>`}
  `;
}
