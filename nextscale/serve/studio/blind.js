// A blind comparison: two methods, the same prompt and seed, left and right by chance, one vote.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";
import { sideBySide } from "./compare.js";
import { MethodInput } from "./fields.js";
import { Frame } from "./frame.js";
import { source } from "./png.js";
import { ScoreView } from "./score.js";
import { randomSeed } from "./settings.js";
import { DENSE } from "./speeds.js";
import { keepVotes, readVotes } from "./votes.js";

const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie" };

export function useBlind(run, stop) {
  const [round, setRound] = useState(null); // {settings, a, b, prompts} while votes are taken
  const [last, setLast] = useState({}); // the round before
  const [trial, setTrial] = useState(null); // {left, right, a, b, swapped, seed, prompt}
  const [votes, setVotes] = useState(readVotes);
  const next = (about) =>
    run(async (signal) => {
      const { settings, a, b, prompts } = about;
      const [seed, swapped] = [randomSeed(), Math.random() < 0.5];
      const prompt = prompts[Math.floor(Math.random() * prompts.length)];
      const images = await sideBySide({ ...settings, prompt, seed }, [a, b], signal);
      const [left, right] = (swapped ? images.reverse() : images).map((image) => image.b64_json);
      setTrial({ left, right, a, b, swapped, seed, prompt, model: settings.model, size: settings.size });
    });
  const begin = (about) => {
    setRound(about);
    setLast(about);
    setTrial(null);
    next(about);
  };
  const vote = (side) => {
    const { left, right, swapped, ...about } = trial;
    const choice = side === "tie" ? "tie" : (side === "left") === swapped ? "b" : "a";
    const all = [...votes, { ...about, choice, swapped, when: new Date().toISOString() }];
    keepVotes(all);
    setVotes(all);
    setTrial(null);
    next(round);
  };
  const end = () => {
    stop();
    setRound(null);
  };
  const clear = () => {
    keepVotes([]);
    setVotes([]);
  };
  return { round, last, trial, votes, begin, vote, end, clear };
}

/** Two large pictures and nothing else. */
export function Ballot({ blind, error, retry }) {
  const { round, trial, vote, end } = blind;
  useEffect(() => {
    const pressed = (event) => {
      if (event.key === "Escape") end();
      if (!trial || !KEYS[event.key]) return;
      event.preventDefault();
      vote(KEYS[event.key]);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  const side = (name, title) => html`
    <button type="button" class="bare" disabled=${!trial} aria-label=${`${title} is better`} onClick=${() => vote(name)}>
      <${Frame} size=${round.settings.size}>${trial ? html`<img src=${source(trial[name])} alt="" />` : !error && html`<p class="waiting"><i class="spinner"></i></p>`}<//>
      <b>${title}</b>
    </button>`;
  return html`
    <main class="ballot" aria-label="Blind A/B">
      <h1>${trial ? html`Which is better: “${trial.prompt}”?` : error ? "No new pair" : "Generating the next pair"}</h1>
      ${error && html`<p class="banner" role="alert"><span>${error.message}</span>${error.retryable && html`<button type="button" onClick=${retry}>Retry</button>`}</p>`}
      <div class="pair">${side("left", "Picture 1")}${side("right", "Picture 2")}</div>
      <div class="buttons"><button type="button" disabled=${!trial} onClick=${() => vote("tie")}>No difference</button><button type="button" onClick=${end}>Finish</button></div>
      <p class="keys"><kbd>←</kbd> picture 1, <kbd>→</kbd> picture 2, <kbd>↓</kbd> no difference, <kbd>Esc</kbd> finishes</p>
    </main>
  `;
}

export function BlindView({ blind, settings, methods, first, busy }) {
  const { votes, last, begin, clear } = blind;
  const [a, setA] = useState(last.a || DENSE);
  const [b, setB] = useState(last.b || first);
  const [prompts, setPrompts] = useState(last.prompts?.join("\n") || settings.prompt || "a 3D icon of a red apple\na green frog\na flat icon of a red car");
  const [score, setScore] = useState(false);
  const start = (event) => {
    event.preventDefault();
    begin({ settings, a, b, prompts: prompts.split("\n").filter((line) => line.trim()) });
  };
  return html`
    <section class="narrow-view" aria-label="Blind A/B">
      <h2>Which one do people prefer?</h2>
      <p class="soft">Two pictures of the same prompt and seed, one with each method, left and right by chance. You see neither names nor scores while you vote.</p>
      <form class="panel options" onSubmit=${start}>
        <div class="two">
          <${MethodInput} id="blind-a" label="Method A" methods=${methods} value=${a} onChoose=${setA} />
          <${MethodInput} id="blind-b" label="Method B" methods=${methods} value=${b} onChoose=${setB} />
        </div>
        <div class="field"><label for="blind-prompts">Prompts, one per line. Each pair takes one by chance.</label><textarea id="blind-prompts" rows="4" required value=${prompts} onInput=${(event) => setPrompts(event.target.value)}></textarea></div>
        <button class="primary" disabled=${busy}>Start voting</button>
      </form>
      ${votes.length > 0 && html`
        <button type="button" id="score" aria-expanded=${score} onClick=${() => setScore(!score)}>${score ? "Hide score" : `Show score of ${votes.length} vote${votes.length > 1 ? "s" : ""}`}</button>
        ${score && html`<${ScoreView} votes=${votes} clear=${clear} nameOf=${(method) => Object.keys(methods).find((name) => methods[name] === method) || method} />`}`}
    </section>
  `;
}
