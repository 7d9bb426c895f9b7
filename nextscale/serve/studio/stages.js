// The stages of a picture: a filmstrip that scrubs it.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";
import { source } from "./png.js";

const STEP_MS = 220; // of a stage that is played

/** `frames`: [{stage, b64}]. `place`: the frame that is shown. */
export function Stages({ frames, stages, place, setPlace, busy }) {
  const [playing, setPlaying] = useState(false);
  useEffect(() => {
    if (!playing) return;
    if (place >= frames.length - 1) return setPlaying(false);
    const timer = setTimeout(() => setPlace(place + 1), STEP_MS);
    return () => clearTimeout(timer);
  }, [playing, place]);
  useEffect(() => {
    const pressed = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || busy || event.target !== document.body) return;
      setPlace(Math.min(Math.max(place + step, 0), frames.length - 1));
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  if (frames.length < 2 && !busy) return null;
  const at = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const stage = Math.floor(((event.clientX - box.left) / box.width) * stages);
    const found = frames.findLastIndex((frame) => frame.stage <= stage);
    if (!busy) setPlace(Math.max(found, 0));
  };
  const grab = (event) => {
    event.preventDefault();
    event.currentTarget.setPointerCapture(event.pointerId);
    event.currentTarget.querySelector("input").focus({ preventScroll: true });
    setPlaying(false);
    at(event);
  };
  const shown = frames[place];
  return html`
    <div class="film" onPointerDown=${grab} onPointerMove=${(event) => event.buttons && at(event)}>
      ${Array.from({ length: stages }, (_, stage) => {
        const frame = frames.find((one) => one.stage === stage);
        const skipped = !frame && !busy;
        const kind = stage === shown?.stage ? "now" : skipped ? "skipped" : "";
        return html`<span class=${`thumb ${kind}`} title=${skipped ? "skipped" : `stage ${stage + 1}`}>${frame && html`<img src=${source(frame.b64)} alt="" draggable=${false} />`}</span>`;
      })}
      <input type="range" min="0" max=${frames.length - 1} step="1" value=${place} disabled=${busy} aria-label="Stage" aria-valuetext=${`stage ${shown?.stage + 1} of ${stages}`}
        onInput=${(event) => (setPlaying(false), setPlace(Number(event.target.value)))} />
    </div>
    <div class="scrub">
      <button type="button" class="quiet" id="play" disabled=${busy} aria-label="Play the stages" title="Play the stages" onClick=${() => (setPlace(0), setPlaying(true))}>▶</button>
      <span class="count">Stage <b>${shown ? shown.stage + 1 : 0}</b> of ${stages}</span>
    </div>
  `;
}
