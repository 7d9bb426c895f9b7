// The gallery of this browser's pictures.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { savePicture, source } from "./png.js";
import { spelled } from "./sizes.js";

export function HistoryView({ pictures, restore, clear, labelOf }) {
  const [sure, setSure] = useState(false);
  if (!pictures.length) {
    return html`<section class="wide-view"><div class="blank"><h2>No pictures yet</h2><p>Every picture that you generate is kept here, in this browser only. A click brings its settings back.</p><a class="button primary" href="#/generate">Generate one</a></div></section>`;
  }
  return html`
    <section class="wide-view" aria-label="History">
      <div class="bar-row">
        <p class="soft">A click opens a picture with its settings. So does a PNG of this server, dropped anywhere on the page.</p>
        <button type="button" onBlur=${() => setSure(false)} onClick=${() => (sure ? clear() : setSure(true))}>${sure ? `Really clear ${pictures.length}?` : "Clear history"}</button>
      </div>
      <div class="gallery">
        ${pictures.map(({ b64, settings }) => html`
          <figure>
            <button type="button" class="bare" aria-label=${`Open: ${settings.prompt}, seed ${settings.seed}`} onClick=${() => restore(settings, b64)}><img src=${source(b64)} alt="" loading="lazy" /></button>
            <figcaption>
              <b>${settings.prompt}</b>
              <span>${labelOf(settings)}</span>
              <span>${spelled(settings.size || "")} · seed ${settings.seed}</span>
              <button type="button" class="link" onClick=${() => savePicture(b64, settings.seed)}>Save PNG</button>
            </figcaption>
          </figure>`)}
      </div>
    </section>
  `;
}
