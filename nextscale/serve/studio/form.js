// The settings that all views share.
import { html } from "./html.js";
import { methodsOf, randomSeed } from "./settings.js";

export function Form({ options, settings, change, submit, busy, stop, label = "Generate" }) {
  const model = options.models.find((one) => one.id === settings.model) || options.models[0];
  const field = (name) => ({ id: name, value: settings[name], onInput: (event) => change({ [name]: event.target.value }) });
  const chooseModel = (event) => {
    const chosen = options.models.find((one) => one.id === event.target.value);
    change({ model: chosen.id, size: chosen.size });
  };
  const send = (event) => {
    event.preventDefault();
    if (!busy) submit();
  };
  return html`
    <form class="settings" onSubmit=${send}>
      <label class="wide" for="prompt">${model.classes ? "Class number" : "Prompt"}
        <textarea rows="3" required ...${field("prompt")} onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form.requestSubmit()}></textarea>
      </label>
      <label class="wide" for="negative_prompt">Steer away from <input ...${field("negative_prompt")} /></label>
      <label for="model">Model
        <select id="model" value=${settings.model} onChange=${chooseModel}>${options.models.map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select>
      </label>
      <label for="size">Size (stages)
        <select ...${field("size")} onChange=${(event) => change({ size: event.target.value })}>${model.sizes.map(({ size, stages }) => html`<option value=${size}>${size} (${stages})</option>`)}</select>
      </label>
      <label for="seed">Seed
        <span class="joined"><input inputmode="numeric" pattern="\\s*[0-9]*\\s*" title="a whole number up to 9223372036854775807" placeholder="random" ...${field("seed")} />
        <button type="button" title="another seed" aria-label="another seed" onClick=${() => change({ seed: String(randomSeed()) })}>⚄</button></span>
      </label>
      <label for="guidance_scale">Guidance <input title="a number, or one per stage with commas between them" placeholder="as published" ...${field("guidance_scale")} /></label>
      <label class="wide" for="method">Method <${MethodInput} methods=${methodsOf(model, settings.size)} ...${field("method")} /></label>
      ${Object.keys(settings.carried).length > 0 && html`
        <p class="wide facts" id="carried">As in the restored image: ${Object.entries(settings.carried).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ")}
        ${" "}<button type="button" class="small" onClick=${() => change({ carried: {} })}>leave out</button></p>`}
      <div class="wide actions">
        <button class="primary" type="submit" disabled=${busy}>${label}</button>
        <button type="button" disabled=${!busy} onClick=${stop}>Stop</button>
        <span class="hint"><kbd>Ctrl</kbd> <kbd>Enter</kbd> generates, <kbd>Esc</kbd> stops</span>
      </div>
    </form>
  `;
}

/** A method by name or written out; names of a list stand for their settings. */
export function MethodInput({ methods, id, value, onInput }) {
  const name = Object.keys(methods).find((one) => methods[one] === value);
  return html`
    <span class="stacked">
      <select aria-label="named methods" value=${name || ""} onChange=${(event) => onInput({ target: { value: methods[event.target.value] } })}>
        ${!name && html`<option value="">written out</option>`}
        ${Object.keys(methods).map((one) => html`<option value=${one}>${one}</option>`)}
      </select>
      <input id=${id} value=${value} spellcheck="false" onInput=${onInput} />
    </span>
  `;
}
