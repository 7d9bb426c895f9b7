// Time and tokens of every stage, beside those at best quality.
import { html } from "./html.js";

const width = (part, whole) => ({ width: `${whole ? (100 * part) / whole : 0}%` });
const time = (ms) => (ms < 10 ? ms.toFixed(1) : ms.toFixed(0));

/** `dense`: the report of a picture of the same size at best quality, if there is one. */
export function Bars({ report, dense }) {
  const largest = Math.max(...report.stages.map((stage) => stage.ms), ...(dense ? dense.stages.map((stage) => stage.ms) : []));
  const branches = Math.max(...report.stages.map((stage) => stage.cfg_branches)); // with guidance, the network runs twice
  const all = (stage) => stage.height * stage.width * branches;
  const ran = (stage) => stage.tokens * stage.cfg_branches;
  const most = Math.max(...report.stages.map(all));
  return html`
    <table class="bars">
      <caption>Per stage <span class="soft">${dense || report.cost_share < 1 ? "light bar: best quality" : ""}</span></caption>
      <thead><tr><th scope="col">Cells</th><th scope="col" colspan="2">Time, ms</th><th scope="col" colspan="2">Tokens</th></tr></thead>
      <tbody>
        ${report.stages.map((stage, index) => html`
          <tr class=${stage.skipped ? "skipped" : ""} title=${stage.skipped ? "skipped" : ""}>
            <td>${stage.width}×${stage.height}</td>
            <td class="bar"><span>${dense && html`<i class="pale" style=${width(dense.stages[index]?.ms, largest)}></i>`}<i style=${width(stage.ms, largest)}></i></span></td>
            <td class="number">${stage.skipped ? "–" : time(stage.ms)}</td>
            <td class="bar"><span><i class="pale" style=${width(all(stage), most)}></i><i style=${width(ran(stage), most)}></i></span></td>
            <td class="number">${stage.skipped ? "–" : Math.round(ran(stage))}</td>
          </tr>`)}
      </tbody>
    </table>
  `;
}

/** What ran, and where the time went. */
export function Facts({ report }) {
  const facts = {
    Computed: `${(100 * report.cost_share).toFixed(0)} % of best quality`,
    Prompt: `${time(report.condition_ms)} ms`,
    Decoding: `${time(report.decode_ms)} ms`,
    Queue: `${time(report.queue_ms)} ms`,
    Batch: report.batch,
    Engine: `${report.engine}, ${report.device}`,
    Ran: report.method,
  };
  return html`<details class="facts"><summary>Details</summary><dl>${Object.entries(facts).map(([name, fact]) => html`<dt>${name}</dt><dd>${fact}</dd>`)}</dl></details>`;
}
