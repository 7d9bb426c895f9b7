// A blind comparison: two methods, the same prompt and seed, left and right by chance, one vote.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";
import { MethodInput } from "./form.js";
import { sideBySide } from "./compare.js";
import { download, source } from "./png.js";
import { randomSeed } from "./settings.js";
import { exported, keepVotes, readVotes, tally } from "./votes.js";

const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie" };

export function useBlind(run) {
  const [trial, setTrial] = useState(null); // {left, right, a, b, swapped, seed, prompt}
  const [votes, setVotes] = useState(readVotes);
  const next = (settings, a, b, prompts) =>
    run(async (signal) => {
      setTrial(null);
      const [seed, swapped] = [randomSeed(), Math.random() < 0.5];
      const prompt = prompts[Math.floor(Math.random() * prompts.length)] || settings.prompt;
      const images = await sideBySide({ ...settings, prompt, seed }, [a, b], signal);
      const [left, right] = (swapped ? images.reverse() : images).map((image) => image.b64_json);
      setTrial({ left, right, a, b, swapped, seed, prompt, model: settings.model, size: settings.size });
    });
  const vote = (side) => {
    const { left, right, swapped, ...about } = trial;
    const choice = side === "tie" ? "tie" : (side === "left") === swapped ? "b" : "a";
    const all = [...votes, { ...about, choice, swapped, when: new Date().toISOString() }];
    keepVotes(all);
    setVotes(all);
    setTrial(null);
  };
  const clear = () => {
    keepVotes([]);
    setVotes([]);
  };
  return { trial, votes, next, vote, clear };
}

export function BlindView({ blind, settings, methods, busy }) {
  const { trial, votes, next, vote, clear } = blind;
  const [a, setA] = useState("dense");
  const [b, setB] = useState(settings.method === "dense" ? Object.values(methods)[1] || "dense" : settings.method);
  const [prompts, setPrompts] = useState(settings.prompt);
  const start = () => next(settings, a, b, prompts.split("\n").filter((line) => line.trim()));
  const decide = (side) => {
    vote(side);
    start();
  };
  useEffect(() => {
    const pressed = (event) => {
      if (trial && !busy && KEYS[event.key] && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
        event.preventDefault();
        decide(KEYS[event.key]);
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  return html`
    <section class="view column" aria-label="blind comparison">
      <div class="settings">
        <label for="blind-a">One <${MethodInput} id="blind-a" methods=${methods} value=${a} onInput=${(event) => setA(event.target.value)} /></label>
        <label for="blind-b">Other <${MethodInput} id="blind-b" methods=${methods} value=${b} onInput=${(event) => setB(event.target.value)} /></label>
        <label class="wide" for="blind-prompts">Prompts, one per line; each pair takes one by chance <textarea id="blind-prompts" rows="3" value=${prompts} onInput=${(event) => setPrompts(event.target.value)}></textarea></label>
        <div class="wide actions"><button class="primary" type="button" disabled=${busy || trial} onClick=${start}>${busy ? "generating a pair" : "Next pair"}</button>
        <span class="hint"><kbd>←</kbd> <kbd>→</kbd> vote, <kbd>↓</kbd> is a tie</span></div>
      </div>
      ${trial && html`
        <p class="facts">Which is the better picture of “${trial.prompt}”?</p>
        <div class="pair">
          <button type="button" onClick=${() => decide("left")}><img src=${source(trial.left)} alt="left picture" /></button>
          <button type="button" onClick=${() => decide("right")}><img src=${source(trial.right)} alt="right picture" /></button>
        </div>
        <button type="button" onClick=${() => decide("tie")}>No difference</button>`}
      ${votes.length > 0 && html`
        <table class="tally">
          <thead><tr><th>one</th><th>other</th><th>wins of one</th><th>of other</th><th>ties</th><th>share of one, 95 % interval</th></tr></thead>
          <tbody>${tally(votes).map((line) => html`
            <tr><td>${line.a}</td><td>${line.b}</td><td>${line.winsA}</td><td>${line.winsB}</td><td>${line.ties}</td>
            <td>${line.share === null ? "no decided vote" : `${(100 * line.share).toFixed(0)} % (${line.interval.map((bound) => (100 * bound).toFixed(0)).join(" to ")})`}</td></tr>`)}
          </tbody>
        </table>
        <div class="actions"><button type="button" onClick=${() => download("votes.json", exported(votes), "application/json")}>Export votes</button>
        <button type="button" onClick=${clear}>Clear votes</button></div>`}
    </section>
  `;
}
