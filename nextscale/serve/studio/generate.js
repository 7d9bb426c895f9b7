// One picture: it grows stage by stage, can be scrubbed, and says what it took.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";
import { COMPLETED, stream } from "./api.js";
import { Bars, Facts } from "./bars.js";
import { Empty, Frame } from "./frame.js";
import { ComputeMap, Legend } from "./masks.js";
import { ResultCard } from "./measure.js";
import { savePicture, source } from "./png.js";
import { addressOf, VIEWS } from "./route.js";
import { MOST_PARTIALS, requestOf } from "./settings.js";
import { DENSE } from "./speeds.js";
import { Stages } from "./stages.js";

/** `shown`: the last finished picture; it stays until the next one has its first stage, and comes back if that fails. */
export function useGeneration(run, remember, references) {
  const [shown, setShown] = useState(null); // {frames, final, stages, settings}
  const [growing, setGrowing] = useState(null);
  const [place, setPlace] = useState(null); // null: the latest
  const generate = (settings, masks) =>
    run(async (signal) => {
      const frames = [];
      let current = true;
      setGrowing({ frames: [], stages: 0, settings });
      try {
        await stream(
          { ...requestOf(settings), partial_images: MOST_PARTIALS, masks },
          (event) => {
            const final = event.type === COMPLETED ? event : null;
            const stages = final ? event.report.stages.length : event.stages;
            frames.push({ stage: final ? stages - 1 : event.stage, b64: event.b64_json });
            if (!final) return setGrowing({ frames: [...frames], stages, settings });
            const used = { ...settings, seed: String(event.seed) };
            current = false;
            setGrowing(null);
            setPlace(null);
            setShown({ frames, final, stages, settings: used });
            remember(event.b64_json);
            if (settings.method === DENSE) references.keep(used, event);
            else if (references.find(used)) references.measure(used, event).catch(() => {}); // the card then still has its button
          },
          signal,
        );
      } finally {
        if (current) setGrowing(null);
      }
    });
  const measure = () =>
    run(async (signal) => {
      const dense = await references.measure(shown.settings, shown.final, signal);
      if (dense) remember(dense.b64_json);
    });
  const restore = (b64, settings) => {
    setPlace(null);
    setShown({ frames: [{ stage: 0, b64 }], final: null, stages: 1, settings });
  };
  return { shown, growing, place, setPlace, generate, measure, restore };
}

/** What else there is, until there is a picture. */
const Tour = () => html`
  <aside class="panel tour" aria-label="Other views">
    <h2>More to do here</h2>
    <dl>${Object.entries(VIEWS).slice(1).map(([name, [title, about]]) => html`<dt><a href=${addressOf(name)}>${title}</a></dt><dd>${about}</dd>`)}</dl>
  </aside>`;

export function GenerateView({ generation, busy, settings, classes, masked, setMasked, references, choose, change }) {
  const { shown, growing, place, setPlace } = generation;
  const live = growing?.frames.length ? growing : null;
  const picture = live || shown;
  const last = picture ? picture.frames.length - 1 : 0;
  const at = live || place === null ? last : Math.min(place, last);
  const final = live ? null : shown?.final;
  useEffect(() => {
    if (masked && !busy && shown && !shown.final?.masks) generation.generate(shown.settings, true);
  }, [masked]);
  if (!picture) {
    return html`
      <section class="stage" aria-label="Picture">
        <${Empty} size=${settings.size} title="What should the picture show?" text="Write a prompt, or start with one of these." busy=${growing && "Waiting for the first stage"} classes=${classes} choose=${choose} />
      </section>
      <${Tour} />`;
  }
  const frame = picture.frames[at];
  const mask = masked && final?.masks?.find((one) => one.stage === frame.stage);
  return html`
    <section class="stage" aria-label="Picture">
      <${Frame} size=${picture.settings.size} class=${mask ? "frame faded" : "frame"} data-stage=${frame.stage} data-frames=${picture.frames.length} data-live=${live ? "" : undefined}>
        <img src=${source(frame.b64)} alt=${picture.stages > 1 ? `${picture.settings.prompt}, after stage ${frame.stage + 1} of ${picture.stages}` : picture.settings.prompt} />
        ${mask && html`<${ComputeMap} b64=${mask.b64_json} />`}
        ${growing && !live && html`<p class="waiting over"><i class="spinner"></i>Waiting for the first stage</p>`}
      <//>
      <div class="tools">
        <${Stages} frames=${picture.frames} stages=${picture.stages} place=${at} setPlace=${setPlace} busy=${Boolean(live)} />
        <label class="switch" title="Slower on a GPU"><input type="checkbox" role="switch" id="masked" checked=${masked} onChange=${(event) => setMasked(event.target.checked)} /><i></i>Where it computed</label>
        ${masked && html`<${Legend} />`}
      </div>
    </section>
    <section class="panel result" aria-label="Result">
      ${final?.report
        ? html`
          <div class="used"><p><b>${shown.settings.prompt}</b><br /><span class="soft">seed <span id="used-seed">${final.seed}</span></span></p>
          <span class="buttons"><button type="button" id="edit" onClick=${() => change(final.b64_json)}>Edit this</button>
          <button type="button" id="save" onClick=${() => savePicture(final.b64_json, final.seed)}>Save PNG</button></span></div>
          <${ResultCard} image=${final} settings=${shown.settings} references=${references} measure=${generation.measure} busy=${busy} />
          <${Bars} report=${final.report} dense=${shown.settings.method === DENSE ? null : references.find(shown.settings)?.report} />
          <${Facts} report=${final.report} />`
        : html`<p class="soft">${live ? `Stage ${frame.stage + 1} of ${picture.stages} is done.` : "A picture of the history. Generate it again to see its stages and times."}</p>`}
    </section>
  `;
}
