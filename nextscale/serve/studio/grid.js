// Seeds across, methods down.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { generate } from "./api.js";
import { seconds } from "./figures.js";
import { Lightbox } from "./lightbox.js";
import { source } from "./png.js";
import { randomSeed, requestOf } from "./settings.js";
import { sidesOf } from "./sizes.js";

export function useGrid(run, remember) {
  const [rows, setRows] = useState([]); // [{name, text, size, images: [{b64_json, seed, report}] or null}]
  const [seeds, setSeeds] = useState([]);
  const start = (settings, methods, count) =>
    run(async (signal) => {
      const first = BigInt(String(settings.seed).trim() || randomSeed()); // the server counts on
      setSeeds(Array.from({ length: count }, (_, place) => String(first + BigInt(place))));
      setRows(methods.map((method) => ({ ...method, size: settings.size, images: null })));
      await Promise.all(
        methods.map(async ({ name, text }) => {
          const { data } = await generate({ ...requestOf({ ...settings, seed: String(first), method: text }), n: count }, signal);
          for (const image of data) remember(image.b64_json);
          setRows((before) => before.map((row) => (row.name === name ? { ...row, images: data } : row)));
        }),
      );
    });
  return { rows, seeds, start };
}

export function GridView({ grid, methods, chosen, setChosen, count, setCount, most, busy, restore }) {
  const [place, setPlace] = useState(null);
  const { rows, seeds } = grid;
  const names = Object.keys(methods);
  const toggle = (text) => setChosen(chosen.includes(text) ? chosen.filter((one) => one !== text) : [...chosen, text]);
  const box = (name) => html`<label><input type="checkbox" checked=${chosen.includes(methods[name])} onChange=${() => toggle(methods[name])} /><span>${name}</span></label>`;
  const pictures = rows.flatMap(({ name, images }) => (images || []).map((image) => ({ b64: image.b64_json, seed: image.seed, label: `${name}, seed ${image.seed}` })));
  return html`
    <section class="wide-view" aria-label="Grid">
      <div class="panel">
        <fieldset class="choice"><legend>Rows: methods</legend><div class="chips">${names.slice(0, 4).map(box)}</div>
          <details><summary>More methods</summary><div class="chips">${names.slice(4).map(box)}</div></details>
        </fieldset>
        <div class="field inline"><label for="count">Columns: seeds</label><input id="count" type="number" min="1" max=${most} value=${count} onInput=${(event) => setCount(Number(event.target.value))} /></div>
      </div>
      ${!rows.length && html`<div class="blank"><h2>Many at once</h2><p>Every method with the same seeds: methods down, seeds across. Choose the methods, then “Generate grid”.</p></div>`}
      ${rows.length > 0 && html`
        <div class="scroll" tabindex="0" role="region" aria-label="Pictures of the grid">
          <table class="sheet">
            <thead><tr><td></td>${seeds.map((seed) => html`<th scope="col">seed ${seed}</th>`)}</tr></thead>
            <tbody>
              ${rows.map(({ name, images, size }) => html`
                <tr>
                  <th scope="row">${name}${images && html`<span class="soft">${seconds(images[0].report.total_ms / images[0].report.batch)} s per picture</span><span class="soft">${(100 * images[0].report.cost_share).toFixed(0)} % computed</span>`}</th>
                  ${seeds.map((seed, column) => {
                    const image = images?.[column];
                    const label = `${name}, seed ${seed}`;
                    const [width, height] = sidesOf(size);
                    return html`<td>${image
                      ? html`<button type="button" class="bare" aria-label=${`Enlarge: ${label}`} onClick=${() => setPlace(pictures.findIndex((one) => one.label === label))}><img src=${source(image.b64_json)} alt="" title=${`seed ${image.seed}`} /></button>`
                      : html`<span class="hole" style=${{ aspectRatio: `${width} / ${height}` }}>${busy ? html`<i class="spinner"></i>` : "stopped"}</span>`}</td>`;
                  })}
                </tr>`)}
            </tbody>
          </table>
        </div>`}
      <${Lightbox} pictures=${pictures} place=${place} setPlace=${setPlace} restore=${restore} />
    </section>
  `;
}
