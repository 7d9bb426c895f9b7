// The settings that Generate, Compare and Grid share.
import { html } from "./html.js";
import { useEffect, useRef, useState } from "preact/hooks";
import { Choice, Field, marked, MethodInput, namedMethods, Problem } from "./fields.js";
import { randomSeed } from "./settings.js";
import { aspectOf, aspectsOf, resized, sidesOf, spelled, stagesOf } from "./sizes.js";
import { carriedOver, DENSE, methodsOf, nameOf, speedsOf } from "./speeds.js";

const FIELDS = { width: "size", height: "size", aspect: "size", n: "size" }; // fields of requests that stand in another one here
const OWN = ["prompt", "negative_prompt", "method", "size", "seed", "guidance_scale", "model", "lora"];
const HIDDEN = ["negative_prompt", "guidance_scale", "model"]; // under "Advanced"

const WIDE = matchMedia("(min-width: 800px)"); // options are always open and beside the picture, as in style.css

/** The field of the form that an error is about; undefined if none. */
export function fieldOf(error) {
  const field = FIELDS[error?.param] || error?.param;
  return OWN.includes(field) ? field : undefined;
}

export function Form({ options, settings, change, submit, busy, stop, label, error, view }) {
  const model = options.models.find((one) => one.id === settings.model) || options.models[0];
  const problem = (name) => (fieldOf(error) === name ? error.message : "");
  const field = (name) => ({ ...marked(name, problem(name)), value: settings[name], onInput: (event) => change({ [name]: event.target.value }) });
  const [open, setOpen] = useState(WIDE.matches);
  const [advanced, setAdvanced] = useState(Boolean(settings.negative_prompt || settings.guidance_scale));
  const form = useRef(null);
  const resize = (size, from = model, to = model) =>
    change({ model: to.id, size, ...(to === from ? {} : { lora: [] }), method: carriedOver(settings.method, speedsOf(from, settings.size), speedsOf(to, size)) });
  const chooseModel = (event) => {
    const chosen = options.models.find((one) => one.id === event.target.value);
    resize(chosen.size, model, chosen);
  };
  const send = (event) => {
    event.preventDefault();
    if (!busy) submit();
  };
  useEffect(() => {
    const widened = () => WIDE.matches && setOpen(true);
    WIDE.addEventListener("change", widened);
    return () => WIDE.removeEventListener("change", widened);
  }, []);
  useEffect(() => {
    if (busy && !WIDE.matches) document.querySelector(".stage, .sheet")?.scrollIntoView();
  }, [busy]);
  useEffect(() => {
    const name = fieldOf(error);
    if (!name) return;
    if (name !== "prompt") setOpen(true);
    if (HIDDEN.includes(name)) setAdvanced(true);
    requestAnimationFrame(() => {
      const input = form.current?.querySelector(`#${name}`);
      input?.focus();
      input?.closest(".field").scrollIntoView({ block: "nearest" }); // with its message
    });
  }, [error]);
  const summary = [view !== "grid" && nameOf(settings.method, model, settings.size), spelled(settings.size), settings.seed.trim() ? `seed ${settings.seed}` : "random seed"].filter(Boolean).join(" · ");
  return html`
    <form class="panel form" ref=${form} onSubmit=${send} onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.current.requestSubmit()}>
      <${Field} id="prompt" label=${model.classes ? "Class number" : "Prompt"} problem=${problem("prompt")}>
        <textarea rows="2" required placeholder=${model.classes ? "such as 207" : "such as a green frog"} ...${field("prompt")}></textarea>
      <//>
      <div class="send">
        ${busy ? html`<button type="button" id="stop" onClick=${stop}>Stop</button>` : html`<button class="primary" id="send" type="submit">${label}</button>`}
        <span class="keys"><kbd>Ctrl</kbd>+<kbd>Enter</kbd> starts, <kbd>Esc</kbd> stops</span>
      </div>
      <details open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
        <summary>Options <span class="soft">${summary}</span></summary>
        <div class="options">
          ${view !== "grid" && html`<${Speed} model=${model} settings=${settings} change=${change} problem=${problem("method")} compared=${view === "compare"} />`}
          <${Size} model=${model} size=${settings.size} resize=${resize} problem=${problem("size")} shaped=${view === "edit"} />
          <${Field} id="seed" label="Seed" problem=${problem("seed")}>
            <span class="joined"><input inputmode="numeric" pattern="\\s*[0-9]*\\s*" title="a whole number up to 9223372036854775807" placeholder="random" ...${field("seed")} />
            <button type="button" title="Another seed" aria-label="Another seed" onClick=${() => change({ seed: String(randomSeed()) })}>⚄</button></span>
          <//>
          ${model.adapters.length > 0 && html`<${Adapters} names=${model.adapters} chosen=${settings.lora} change=${(lora) => change({ lora })} problem=${problem("lora")} />`}
          ${Object.keys(settings.carried).length > 0 && html`
            <p class="soft" id="carried">As in the restored picture: ${Object.entries(settings.carried).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ")}.
            ${" "}<button type="button" class="link" onClick=${() => change({ carried: {} })}>Leave out</button></p>`}
          <details class="advanced" open=${advanced} onToggle=${(event) => (event.stopPropagation(), setAdvanced(event.currentTarget.open))}>
            <summary>Advanced</summary>
            <div class="options">
              <${Field} id="negative_prompt" label="Negative prompt" problem=${problem("negative_prompt")}><input ...${field("negative_prompt")} /><//>
              <${Field} id="guidance_scale" label="Guidance" problem=${problem("guidance_scale")}><input title="a number, or one per stage with commas between them" placeholder="as published" ...${field("guidance_scale")} /><//>
              <${Field} id="model" label="Model" problem=${problem("model")}>
                <select ...${marked("model", problem("model"))} value=${settings.model} onChange=${chooseModel}>${options.models.map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select>
              <//>
            </div>
          </details>
        </div>
      </details>
    </form>
  `;
}

function Speed({ model, settings, change, problem, compared }) {
  const speeds = speedsOf(model, settings.size).filter(({ method }) => !compared || method !== DENSE);
  const current = speeds.find(({ method }) => method === settings.method);
  const [more, setMore] = useState(false);
  const shown = more || !current || problem;
  const choose = (value) => {
    setMore(value === "more");
    if (value !== "more") change({ method: value });
  };
  const choices = [...speeds.map(({ name, method, about }) => ({ value: method, label: name, title: about })), { value: "more", label: "More methods" }];
  return html`
    <${Choice} name="speed" legend=${compared ? "Compare best quality with" : "Speed"} kind="speed" choices=${choices} value=${shown ? "more" : settings.method} onChoose=${choose} />
    ${shown
      ? html`<${MethodInput} id="method" label="Method" methods=${namedMethods(speeds, methodsOf(model, settings.size))} value=${settings.method} onChoose=${(method) => (setMore(true), change({ method }))} problem=${problem} />`
      : html`<p class="soft about" title=${current.source}>${current.about}</p>`}
  `;
}

/** A slider per adapter of the server; 0 leaves it out. */
function Adapters({ names, chosen, change, problem }) {
  const scaleOf = (name) => chosen.find((one) => one.name === name)?.scale || 0;
  const weigh = (name, scale) => change([...chosen.filter((one) => one.name !== name), ...(scale ? [{ name, scale }] : [])]);
  return html`
    <fieldset class="adapters">
      <legend>Adapters</legend>
      ${names.map((name) => html`
        <label>${name} <output class="soft">${scaleOf(name) || "off"}</output>
          <input type="range" min="0" max="1.5" step="0.1" value=${scaleOf(name)} onInput=${(event) => weigh(name, Number(event.target.value))} /></label>`)}
      <${Problem} id="lora" text=${problem} />
    </fieldset>
  `;
}

/** `shaped`: the shape is that of a picture. */
function Size({ model, size, resize, problem, shaped }) {
  const aspects = aspectsOf(model);
  const mine = aspectOf(size);
  const [all, setAll] = useState(false);
  const shown = aspects.filter(({ usual, name }) => all || usual || name === mine);
  const sizes = aspects.find(({ name }) => name === mine)?.sizes || [size];
  const shape = ({ name }) => {
    const [width, height] = sidesOf(name.replace(":", "x"));
    const side = 18 / Math.max(width, height);
    return html`<i class="shape" style=${{ width: `${side * width}px`, height: `${side * height}px` }}></i>${name}`;
  };
  const choices = shown.map((aspect) => ({ value: aspect.name, label: shape(aspect) }));
  return html`
    ${!shaped && html`<${Choice} name="aspect" legend=${html`Shape${aspects.length > shown.length && html` <button type="button" class="link" onClick=${() => setAll(true)}>More shapes</button>`}`} kind="aspect" choices=${choices} value=${mine} onChoose=${(name) => resize(resized(aspects.find((one) => one.name === name).sizes, size))} />`}
    <div class="field">
      <label for="size">Size <output class="soft" id="size-text">${spelled(size)}, ${stagesOf(model, size)} stages</output></label>
      <input type="range" ...${marked("size", problem)} min="0" max=${sizes.length - 1} step="1" value=${Math.max(sizes.indexOf(size), 0)} disabled=${sizes.length < 2} aria-valuetext=${spelled(size)} onInput=${(event) => resize(sizes[Number(event.target.value)])} />
      <${Problem} id="size" text=${problem} />
    </div>
  `;
}
