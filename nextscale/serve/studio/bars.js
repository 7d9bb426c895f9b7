// Milliseconds and tokens of every stage, run against dense.
import { html } from "./html.js";

const width = (part, whole) => ({ width: `${whole ? (100 * part) / whole : 0}%` });

/** `dense`: the report of a dense image of the same size, where there is one. */
export function Bars({ report, dense }) {
  const largest = Math.max(...report.stages.map((stage) => stage.ms), ...(dense ? dense.stages.map((stage) => stage.ms) : []));
  const cells = Math.max(...report.stages.map((stage) => stage.height * stage.width));
  return html`
    <table class="bars">
      <thead><tr><th>stage</th><th>milliseconds${dense ? ", pale: dense" : ""}</th><th></th><th>tokens, pale: dense</th><th></th></tr></thead>
      <tbody>
        ${report.stages.map((stage, index) => html`
          <tr class=${stage.skipped ? "skipped" : ""}>
            <td>${stage.height}x${stage.width}</td>
            <td class="bar">${dense && html`<i class="pale" style=${width(dense.stages[index]?.ms, largest)}></i>`}<i style=${width(stage.ms, largest)}></i></td>
            <td class="number">${stage.skipped ? "skipped" : stage.ms.toFixed(1)}</td>
            <td class="bar"><i class="pale" style=${width(stage.height * stage.width, cells)}></i><i class=${stage.cfg_branches > 1 ? "" : "half"} style=${width(stage.tokens, cells)}></i></td>
            <td class="number">${Math.round(stage.tokens)}${stage.cfg_branches > 1 ? " x 2" : ""}</td>
          </tr>`)}
      </tbody>
    </table>
    <p class="facts">
      <b>${report.total_ms.toFixed(0)} ms</b>${` (prompt ${report.condition_ms.toFixed(0)}, decoding ${report.decode_ms.toFixed(0)}, queue ${report.queue_ms.toFixed(0)}),
      ${(100 * report.cost_share).toFixed(0)} % of dense MACs, ${report.method}, ${report.engine}, batch of ${report.batch}`}
      ${dense && html`, ${"speedup"} <b>${(dense.total_ms / report.total_ms).toFixed(2)}</b>`}
    </p>
  `;
}
