// An image as it grows, its stages afterwards, and where the network ran.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { source } from "./png.js";

/** `frames`: [{stage, b64}], the last one is the finished image once `final` is there. `place`: of the frame to show; null: the latest. */
export function Viewer({ frames, final, stages, place, setPlace, busy }) {
  const [opacity, setOpacity] = useState(0.6);
  const [masked, setMasked] = useState(false);
  if (!frames.length) return html`<div class="canvas empty">${busy ? "waiting for the first stage" : "nothing generated yet"}</div>`;
  const shown = busy || place === null ? frames.length - 1 : Math.min(place, frames.length - 1);
  const frame = frames[shown];
  const mask = masked && final?.masks?.find((one) => one.stage === frame.stage);
  return html`
    <div class="canvas" data-stage=${frame.stage} data-frames=${frames.length}>
      <img src=${source(frame.b64)} alt=${`the image after stage ${frame.stage + 1} of ${stages}`} />
      ${mask && html`<img class="mask" alt="" src=${source(mask.b64_json)} style=${{ opacity: String(opacity) }} />`}
    </div>
    <label class="scrubber">stage <b>${frame.stage + 1}</b> of ${stages}
      <input type="range" min="0" max=${frames.length - 1} step="1" value=${shown} disabled=${busy} aria-label="stage" onInput=${(event) => setPlace(Number(event.target.value))} />
    </label>
    ${final?.masks && html`
      <label class="scrubber"><input type="checkbox" checked=${masked} onChange=${(event) => setMasked(event.target.checked)} /> compute mask: darker where less of the network ran
        <input type="range" min="0" max="1" step="0.05" value=${opacity} aria-label="opacity of the mask" onInput=${(event) => setOpacity(Number(event.target.value))} />
      </label>`}
  `;
}
