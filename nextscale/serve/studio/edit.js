// An edit: a picture that is dropped or reused, painted over, extended, and changed from a stage on.
import { html } from "./html.js";
import { useEffect, useRef, useState } from "preact/hooks";
import { EDITS, stream } from "./api.js";
import { Bars, Facts } from "./bars.js";
import { Board, NO_SIDES, pngsOf } from "./brush.js";
import { Frame } from "./frame.js";
import { bytesOf, savePicture, source } from "./png.js";
import { MOST_PARTIALS, requestOf } from "./settings.js";
import { fittingSize, spelled, stagesOf } from "./sizes.js";

const BRUSHES = [8, 16, 32, 64, 128]; // pixels of the edited picture
const REUSED = 6; // pictures of the history

/** `fit`: called with every picture that is opened. */
export function useEdit(run, remember, say, fit) {
  const [picture, setPicture] = useState(null);
  const [sides, setSides] = useState(NO_SIDES);
  const [strokes, setStrokes] = useState([]);
  const [from, setFrom] = useState(-1); // first stage that changes; -1: by the mask
  const [result, setResult] = useState(null); // {b64, size, final}
  const show = (found) => {
    if (found) fit(found);
    setPicture(found);
    setSides(NO_SIDES);
    setStrokes([]);
    setResult(null);
  };
  const open = async (file) => {
    try {
      show(await createImageBitmap(file));
    } catch {
      say(`${file.name || "The file"} is not a picture that this browser can read.`);
    }
  };
  const start = (settings, model) =>
    run(async (signal) => {
      const { size } = settings;
      const { image, mask } = pngsOf(picture, sides, strokes, size);
      const body = { ...requestOf(settings), images: [{ image_url: image }], partial_images: MOST_PARTIALS };
      if (mask) body.mask = { image_url: mask };
      if (from >= 0) body.from_stage = Math.min(from, stagesOf(model, size) - 1);
      const before = result;
      let finished = false;
      try {
        await stream(
          body,
          (event) => {
            const final = event.report ? event : null;
            finished ||= Boolean(final);
            setResult({ b64: event.b64_json, size, final, original: image, prompt: settings.prompt });
            if (final) remember(event.b64_json);
          },
          signal,
          EDITS,
        );
      } finally {
        if (!finished) setResult(before);
      }
    });
  const reuse = async (b64) => open(new Blob([bytesOf(b64)], { type: "image/png" }));
  const sized = (settings, model) => (picture ? { ...settings, size: fittingSize(model, picture, sides, settings.size) } : settings);
  return { picture, sized, sides, setSides, strokes, setStrokes, from, setFrom, result, setResult, open, reuse, start, close: () => show(null) };
}

/** Until there is a picture: where to get one. */
function Chooser({ edit, pictures }) {
  const file = useRef(null);
  return html`
    <section class="stage" aria-label="Picture">
      <${Frame} size="1x1" class="frame empty" data-empty>
        <div class="blank"><h2>Which picture should change?</h2><p>Drop one here, choose a file, or take one that you have generated.</p>
          <button type="button" class="primary" id="choose" onClick=${() => file.current.click()}>Choose a file</button>
          <input type="file" id="file" hidden ref=${file} accept="image/png,image/jpeg,image/webp" onChange=${(event) => event.target.files[0] && edit.open(event.target.files[0])} />
          <div class="reused">${pictures.slice(0, REUSED).map(({ b64, settings }) => html`<button type="button" class="bare" aria-label=${`Edit: ${settings.prompt}, seed ${settings.seed}`} onClick=${() => edit.reuse(b64)}><img src=${source(b64)} alt="" /></button>`)}</div>
        </div>
      <//>
    </section>`;
}

export function EditView({ edit, settings, model, busy, pictures }) {
  const { picture, sides, setSides, strokes, setStrokes, from, setFrom, result, setResult } = edit;
  const [brush, setBrush] = useState({ size: 32, erase: false });
  const [held, setHeld] = useState(false);
  const undo = () => setStrokes(strokes.slice(0, -1));
  const wider = (by) => setBrush({ ...brush, size: BRUSHES[Math.min(Math.max(BRUSHES.indexOf(brush.size) + by, 0), BRUSHES.length - 1)] });
  useEffect(() => {
    const pressed = (event) => {
      if (event.target.closest("input:not([type=range]), textarea, select")) return;
      const key = event.key.toLowerCase();
      const act = event.ctrlKey || event.metaKey ? { z: undo }[key] : { "[": () => wider(-1), "]": () => wider(1), x: () => setBrush({ ...brush, erase: !brush.erase }) }[key];
      if (act) event.preventDefault();
      act?.();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  if (!picture) return html`<${Chooser} edit=${edit} pictures=${pictures} />`;
  const { size } = settings;
  const stages = stagesOf(model, size);
  const extended = Object.values(sides).some(Boolean);
  const holding = { onPointerDown: () => setHeld(true), onPointerUp: () => setHeld(false), onPointerLeave: () => setHeld(false), onKeyDown: (event) => event.key === " " && setHeld(true), onKeyUp: () => setHeld(false) };
  return html`
    <section class="stage" aria-label="Picture">
      ${result
        ? html`<${Frame} size=${result.size} data-edited=${result.final ? "" : undefined}><img src=${held ? result.original : source(result.b64)} alt=${held ? "Before" : result.prompt} /><span class="tag left">${held ? "Before" : result.final ? "After" : "Changing"}</span><//>`
        : html`<${Frame} size=${size} class="frame board"><${Board} picture=${picture} sides=${sides} setSides=${setSides} strokes=${strokes} setStrokes=${setStrokes} brush=${brush} size=${size} /><//>`}
      <div class="tools">
        ${result
          ? html`
            <button type="button" id="hold" disabled=${!result.final} ...${holding}>Hold to compare</button>
            <button type="button" id="again" disabled=${busy} onClick=${() => setResult(null)}>Back to the mask</button>
            <button type="button" id="reuse" disabled=${!result.final} onClick=${() => edit.reuse(result.b64)}>Edit this</button>
            <button type="button" disabled=${!result.final} onClick=${() => savePicture(result.b64, result.final.seed)}>Save PNG</button>`
          : html`
            <label class="brush-size">Brush <input type="range" id="brush" min="0" max=${BRUSHES.length - 1} value=${BRUSHES.indexOf(brush.size)} aria-valuetext=${`${brush.size} pixels`} onInput=${(event) => setBrush({ ...brush, size: BRUSHES[event.target.value] })} /></label>
            <label class="switch"><input type="checkbox" role="switch" id="erase" checked=${brush.erase} onChange=${(event) => setBrush({ ...brush, erase: event.target.checked })} /><i></i>Erase</label>
            <button type="button" id="undo" disabled=${!strokes.length} onClick=${undo}>Undo</button>
            <button type="button" id="invert" onClick=${() => setStrokes([...strokes, { invert: true }])}>Invert</button>
            <button type="button" id="clear" disabled=${!strokes.length} onClick=${() => setStrokes([...strokes, { clear: true }])}>Clear</button>
            <button type="button" onClick=${edit.close}>Another picture</button>
            <span class="keys"><kbd>[</kbd> <kbd>]</kbd> size, <kbd>X</kbd> erase, <kbd>Ctrl</kbd>+<kbd>Z</kbd> undo</span>`}
      </div>
    </section>
    <section class="panel result" aria-label="Edit">
      <div class="field">
        <label for="from">Changes from stage <output class="soft" id="from-text">${from < 0 ? (strokes.length || extended ? "by the mask" : "by strength, 60 % of the stages") : `${Math.min(from, stages - 1) + 1} of ${stages}`}</output></label>
        <input type="range" id="from" min="-1" max=${stages - 1} value=${Math.min(from, stages - 1)} aria-valuetext=${from < 0 ? "automatic" : `stage ${from + 1}`} onInput=${(event) => setFrom(Number(event.target.value))} />
        <p class="soft">Early stages decide color and layout, late ones detail.</p>
      </div>
      <p class="soft">${strokes.length || extended ? "What is striped changes; everything else stays as it is, pixel by pixel." : "Paint over what should change, or drag an edge outward. Without either the whole picture changes."} The result has ${spelled(size)} pixels.</p>
      ${result?.final && html`<${Bars} report=${result.final.report} /><${Facts} report=${result.final.report} />`}
    </section>
  `;
}
