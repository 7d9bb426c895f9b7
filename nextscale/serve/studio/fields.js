// Parts of forms: a field with its error, a choice of few, a method.
import { html } from "./html.js";

const problemId = (id) => `${id}-problem`;

/** Attributes of an input that has a problem. */
export const marked = (id, problem) => ({ id, "aria-invalid": problem ? "true" : undefined, "aria-describedby": problem ? problemId(id) : undefined });

export const Problem = ({ id, text }) => text && html`<p class="problem" id=${problemId(id)} role="alert">${text}</p>`;

export function Field({ id, label, problem, children }) {
  return html`<div class="field"><label for=${id}>${label}</label>${children}<${Problem} id=${id} text=${problem} /></div>`;
}

/** One of a few. `choices`: [{value, label, title}]. */
export function Choice({ name, legend, choices, value, onChoose, kind = "" }) {
  return html`
    <fieldset class=${`choice ${kind}`}>
      <legend>${legend}</legend>
      <div class="tiles">
        ${choices.map((one) => html`
          <label title=${one.title}><input type="radio" name=${name} value=${one.value} checked=${one.value === value} onChange=${() => onChoose(one.value)} /><span>${one.label}</span></label>`)}
      </div>
    </fieldset>
  `;
}

/** A method by its name, or as text. */
export function MethodInput({ id, label, methods, value, onChoose, problem }) {
  const name = Object.keys(methods).find((one) => methods[one] === value);
  return html`
    <div class="field">
      <label for=${`${id}-named`}>${label}</label>
      <select id=${`${id}-named`} value=${name || ""} onChange=${(event) => onChoose(methods[event.target.value])}>
        ${!name && html`<option value="">Custom</option>`}
        ${Object.keys(methods).map((one) => html`<option value=${one}>${one}</option>`)}
      </select>
      <input ...${marked(id, problem)} aria-label=${`${label}, as text`} value=${value} spellcheck="false" autocapitalize="off" onInput=${(event) => onChoose(event.target.value)} />
      <${Problem} id=${id} text=${problem} />
    </div>
  `;
}

/** Names of the methods of a size, those by purpose first. */
export const namedMethods = (speeds, methods) => ({
  ...Object.fromEntries(speeds.map(({ name, method }) => [name, method])),
  ...Object.fromEntries(Object.entries(methods).filter(([, method]) => !speeds.some((one) => one.method === method))),
});

