// Seeds across, methods down.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { generate } from "./api.js";
import { source } from "./png.js";
import { randomSeed, requestOf } from "./settings.js";

export function useGrid(run) {
  const [rows, setRows] = useState([]); // [{method, images: [{b64_json, seed, report}] or null}]
  const start = (settings, methods, seeds) =>
    run(async (signal) => {
      const seed = String(settings.seed).trim() || randomSeed(); // the first: the server counts on
      setRows(methods.map((method) => ({ method, images: null })));
      await Promise.all(
        methods.map(async (method) => {
          const answer = await generate({ ...requestOf({ ...settings, seed, method: method.text }), n: seeds }, signal);
          setRows((before) => before.map((row) => (row.method === method ? { method, images: answer.data } : row)));
        }),
      );
    });
  return { rows, start };
}

export function GridView({ rows, methods, chosen, setChosen, seeds, setSeeds, most, busy }) {
  const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
  return html`
    <section class="view column" aria-label="grid">
      <fieldset class="choices"><legend>Methods</legend>
        ${Object.keys(methods).map((name) => html`<label><input type="checkbox" checked=${chosen.includes(name)} onChange=${() => toggle(name)} /> ${name}</label>`)}
      </fieldset>
      <label>Seeds from the one above <input type="number" min="1" max=${most} value=${seeds} onInput=${(event) => setSeeds(Number(event.target.value))} /></label>
      ${rows.length > 0 && html`
        <table class="grid">
          <tbody>
            ${rows.map(({ method, images }) => html`
              <tr>
                <th scope="row">${method.name}${images && html`<br /><small>${(100 * images[0].report.cost_share).toFixed(0)} % MACs</small>`}</th>
                ${images
                  ? images.map((image) => html`<td><img src=${source(image.b64_json)} alt=${`${method.name}, seed ${image.seed}`} title=${`seed ${image.seed}`} /></td>`)
                  : html`<td class="hint">${busy ? "…" : "stopped"}</td>`}
              </tr>`)}
          </tbody>
        </table>`}
    </section>
  `;
}
