// The first view: one image, stage by stage.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { COMPLETED, stream } from "./api.js";
import { Bars } from "./bars.js";
import { bytesOf, download } from "./png.js";
import { MOST_PARTIALS, requestOf } from "./settings.js";
import { Viewer } from "./viewer.js";

const empty = { frames: [], final: null, stages: 0, place: null };

export function useGeneration(run, remember) {
  const [shown, setShown] = useState(empty);
  const generate = (settings, masks) =>
    run(async (signal) => {
      setShown(empty);
      const body = { ...requestOf(settings), partial_images: MOST_PARTIALS, masks };
      await stream(
        body,
        (event) => {
          const last = event.type === COMPLETED;
          const stages = last ? event.report.stages.length : event.stages;
          const stage = last ? stages - 1 : event.stage;
          setShown((before) => ({ ...before, frames: [...before.frames, { stage, b64: event.b64_json }], stages, final: last ? event : null }));
          if (last) remember(event.b64_json, event.report);
        },
        signal,
      );
    });
  const restore = (b64) => setShown({ ...empty, frames: [{ stage: 0, b64 }], stages: 1 });
  const setPlace = (place) => setShown((before) => ({ ...before, place }));
  return { shown, restore, setPlace, generate };
}

export function GenerateView({ generation, busy, masks, setMasks, dense }) {
  const { frames, final, stages, place } = generation.shown;
  return html`
    <section class="view" aria-label="generated image">
      <div class="picture"><${Viewer} frames=${frames} final=${final} stages=${stages} place=${place} setPlace=${generation.setPlace} busy=${busy} /></div>
      <div class="side">
        <label><input type="checkbox" checked=${masks} onChange=${(event) => setMasks(event.target.checked)} /> compute mask with the next image (runs without captured graphs)</label>
        ${final?.report && html`
          <${Bars} report=${final.report} dense=${dense} />
          <p class="actions"><span class="facts">seed <b id="used-seed">${final.seed}</b></span>
          <button type="button" onClick=${() => download(`nextscale-${final.seed}.png`, bytesOf(final.b64_json), "image/png")}>Save PNG</button></p>`}
      </div>
    </section>
  `;
}
