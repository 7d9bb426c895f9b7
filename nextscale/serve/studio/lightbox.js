// One picture of many, enlarged.
import { html } from "./html.js";
import { useEffect, useRef } from "preact/hooks";
import { savePicture, source } from "./png.js";

/** `pictures`: [{b64, seed, label}]. `place` is null while it is closed. */
export function Lightbox({ pictures, place, setPlace, restore }) {
  const dialog = useRef(null);
  const picture = place === null ? null : pictures[place];
  useEffect(() => {
    if (picture && !dialog.current.open) dialog.current.showModal();
    if (!picture && dialog.current.open) dialog.current.close();
  }, [picture]);
  const step = (by) => setPlace((place + by + pictures.length) % pictures.length);
  const pressed = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) step(by);
  };
  return html`
    <dialog ref=${dialog} class="lightbox" aria-label="Enlarged picture" onClose=${() => setPlace(null)} onKeyDown=${pressed} onClick=${(event) => event.target === dialog.current && setPlace(null)}>
      ${picture && html`
        <img src=${source(picture.b64)} alt=${picture.label} />
        <div class="bar-row">
          <span>${picture.label}</span>
          <span class="buttons">
            <button type="button" aria-label="Previous picture" onClick=${() => step(-1)}>←</button>
            <button type="button" aria-label="Next picture" onClick=${() => step(1)}>→</button>
            <button type="button" onClick=${() => savePicture(picture.b64, picture.seed)}>Save PNG</button>
            <button type="button" onClick=${() => (setPlace(null), restore(picture.b64))}>Open in Generate</button>
            <button type="button" class="primary" onClick=${() => setPlace(null)}>Close</button>
          </span>
        </div>`}
    </dialog>
  `;
}
