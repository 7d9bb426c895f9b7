// The place of a picture, as large as the window allows, in the shape of its size.
import { html } from "./html.js";
import { sidesOf } from "./sizes.js";

export function Frame({ size, children, ...more }) {
  const [width, height] = sidesOf(size);
  return html`<div class="frame" style=${{ "--width": width, "--height": height }} ...${more}>${children}</div>`;
}

const TEXTS = ["a 3D icon of a red apple", "a green frog", "a flat icon of a red car", "a 3D icon of sunglasses"];
const CLASSES = { 207: "golden retriever", 88: "macaw", 387: "red panda", 980: "volcano" };

/** What to do first: prompts to click. `busy` is what it says while a picture is on its way. */
export function Empty({ size, title, text, busy, classes, choose }) {
  const prompts = classes ? Object.entries(CLASSES) : TEXTS.map((prompt) => [prompt, prompt]);
  return html`
    <${Frame} size=${size} class="frame empty" data-empty>
      ${busy
        ? html`<p class="waiting"><i class="spinner"></i>${busy}</p>`
        : html`<div class="blank"><h2>${title}</h2><p>${text}</p><div class="prompts">${prompts.map(([prompt, shown]) => html`<button type="button" onClick=${() => choose(prompt)}>${shown}</button>`)}</div></div>`}
    <//>
  `;
}
