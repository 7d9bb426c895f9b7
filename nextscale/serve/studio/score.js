// The score of blind votes.
import { html } from "./html.js";
import { download } from "./png.js";
import { exported, tally } from "./votes.js";

const share = (line) => (line.share === null ? "no decided vote" : `${(100 * line.share).toFixed(0)} % (${line.interval.map((bound) => (100 * bound).toFixed(0)).join(" to ")})`);

/** `nameOf`: the name of a method. */
export const ScoreView = ({ votes, clear, nameOf }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label="Score">
    <table class="tally">
      <thead><tr>${["Method A", "Method B", "A wins", "B wins", "No difference", "Share of A (95 % interval)"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${tally(votes).map((line) => html`<tr>${[nameOf(line.a), nameOf(line.b), line.winsA, line.winsB, line.ties, share(line)].map((value) => html`<td>${value}</td>`)}</tr>`)}</tbody>
    </table>
  </div>
  <div class="buttons"><button type="button" onClick=${() => download("votes.json", exported(votes), "application/json")}>Export votes</button><button type="button" onClick=${clear}>Clear votes</button></div>
`;
