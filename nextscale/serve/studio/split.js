// Two pictures in one place: the divider follows the pointer, or the arrow keys.
import { html } from "./html.js";
import { useState } from "preact/hooks";
import { Frame } from "./frame.js";
import { source } from "./png.js";

const STEPS = { ArrowLeft: -2, ArrowDown: -2, ArrowRight: 2, ArrowUp: 2, PageDown: -10, PageUp: 10, Home: -100, End: 100 };
const within = (share) => Math.min(Math.max(share, 0), 100);

export function Split({ size, left, right }) {
  const [share, setShare] = useState(50);
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setShare(within((100 * (event.clientX - box.left)) / box.width));
  };
  const grab = (event) => {
    event.preventDefault(); // no text or picture is selected
    event.currentTarget.setPointerCapture(event.pointerId);
    event.currentTarget.querySelector(".handle").focus({ preventScroll: true });
    follow(event);
  };
  const pressed = (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    setShare(within(share + STEPS[event.key]));
  };
  return html`
    <${Frame} size=${size} class="frame split" onPointerDown=${grab} onPointerMove=${(event) => event.currentTarget.hasPointerCapture(event.pointerId) && follow(event)}>
      <img src=${source(right.b64)} alt=${right.label} draggable=${false} />
      <img class="above" src=${source(left.b64)} alt=${left.label} draggable=${false} style=${{ clipPath: `inset(0 ${100 - share}% 0 0)` }} />
      <span class="tag left">${left.label}</span><span class="tag right">${right.label}</span>
      <div class="handle" role="slider" tabindex="0" aria-label="Divider" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share)} aria-valuetext=${`${Math.round(share)} % ${left.label}`} style=${{ left: `${share}%` }} onKeyDown=${pressed}><i>‹ ›</i></div>
    <//>
  `;
}
