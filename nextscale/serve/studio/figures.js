// Three large figures: seconds, times faster, likeness.
import { html } from "./html.js";

/** Seconds with two or three digits that count. */
export const seconds = (ms) => (ms < 9950 ? (ms / 1000).toFixed(ms < 995 ? 2 : 1) : (ms / 1000).toFixed(0));

/** Speedup of `other`; null if the saved work cannot explain it, so that the machine must have been busy with something else. */
export function speedup(dense, other, slack = 1) {
  const times = dense.total_ms / other.total_ms;
  const alike = dense.batch === other.batch && dense.engine === other.engine;
  return alike && times <= slack / other.cost_share ? times : null;
}

/** Likeness of an LPIPS distance. */
export const percent = (lpips) => `${(100 * Math.max(1 - lpips, 0)).toFixed(lpips < 0.0995 ? 1 : 0)} %`;

/** Likeness of a distance in percent; decibels where LPIPS is not measured. */
export function likeness(distance) {
  if (!distance) return null;
  const { lpips, psnr, ssim } = distance;
  const all = [lpips !== null && `LPIPS ${lpips.toFixed(3)}`, `PSNR ${psnr.toFixed(1)} dB`, ssim !== null && `SSIM ${ssim.toFixed(3)}`].filter(Boolean).join(", ");
  const [value, unit] = lpips === null ? [psnr.toFixed(1), "dB"] : percent(lpips).split(" ");
  return { value, unit, all, about: lpips === null ? "PSNR" : `LPIPS ${lpips.toFixed(3)}`, missing: lpips === null ? "LPIPS compares pictures of at least 31 pixels a side." : "" };
}

/** `figures`: [{id, value, unit, label, about}]. A value that is not known yet is a dash. */
export const Figures = ({ figures }) => html`
  <dl class="figures">
    ${figures.map(({ id, value, unit, label, about }) => html`
      <div><dt>${label}</dt><dd><b id=${id}>${value ?? "–"}</b>${value != null && html`<span>${unit}</span>`}</dd>${about && html`<dd class="soft">${about}</dd>`}</div>`)}
  </dl>
`;
