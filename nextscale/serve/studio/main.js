// The page: settings on the left, one of five views on the right.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { apiKey, options as readOptions } from "./api.js";
import { BlindView, useBlind } from "./blind.js";
import { CompareView, useComparison } from "./compare.js";
import { Form } from "./form.js";
import { GenerateView, useGeneration } from "./generate.js";
import { GridView, useGrid } from "./grid.js";
import { addToHistory, clearHistory, HistoryView, KEPT, readHistory } from "./history.js";
import { html } from "./html.js";
import { settingsOf } from "./png.js";
import { defaults, lost, methodsOf, restored } from "./settings.js";

const VIEWS = { generate: "Generate", compare: "Compare", grid: "Grid", blind: "Blind A/B", history: "History" };
const LABELS = { compare: "Compare with dense", grid: "Generate the grid" };

/** One piece of work at a time, that can be stopped; its error is shown. */
function useWork() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const controller = useRef(null);
  const run = async (work) => {
    controller.current?.abort();
    const mine = (controller.current = new AbortController());
    setBusy(true);
    setError("");
    try {
      await work(mine.signal);
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure.message);
    } finally {
      if (controller.current === mine) setBusy(false);
    }
  };
  return { busy, error, setError, run, stop: () => controller.current?.abort() };
}

function Studio({ options }) {
  const [settings, setSettings] = useState(() => defaults(options));
  const [view, setView] = useState("generate");
  const [masks, setMasks] = useState(true);
  const [denseReports, setDenseReports] = useState({});
  const [history, setHistory] = useState([]);
  const [chosen, setChosen] = useState(["dense"]);
  const [seeds, setSeeds] = useState(3);
  const work = useWork();
  const kind = `${settings.model} ${settings.size}`;
  const methods = methodsOf(options.models.find((one) => one.id === settings.model), settings.size);

  const remember = async (b64, report) => {
    if (report.method === "dense") setDenseReports((before) => ({ ...before, [kind]: report }));
    const entry = await addToHistory(b64);
    setHistory((before) => [entry, ...before].slice(0, KEPT));
  };
  const generation = useGeneration(work.run, remember);
  const comparison = useComparison(work.run, remember);
  const grid = useGrid(work.run);
  const blind = useBlind(work.run);

  const change = (changes) => setSettings((before) => ({ ...before, ...changes }));
  const restore = (found, b64) => {
    const next = restored(found, settings, options);
    const names = lost(found, next);
    setSettings(next);
    work.setError(names.length ? `Not restored, so that the next image will differ: ${names.join(", ")}` : "");
    generation.restore(b64);
    setView("generate");
  };
  const submit = {
    generate: () => generation.generate(settings, masks),
    compare: () => comparison.start(settings),
    grid: () => grid.start(settings, chosen.filter((name) => methods[name]).map((name) => ({ name, text: methods[name] })), seeds),
  };

  useEffect(() => {
    readHistory().then(setHistory);
    const pressed = (event) => event.key === "Escape" && work.stop();
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  useDrop(restore, work.setError);

  return html`
    <header><h1>nextscale studio</h1>
      <nav role="tablist">${Object.entries(VIEWS).map(([name, title]) => html`
        <button role="tab" id=${`tab-${name}`} aria-selected=${view === name} onClick=${() => setView(name)}>${title}</button>`)}
      </nav>
    </header>
    ${work.error && html`<p class="error" role="alert">${work.error}</p>`}
    <div class="columns">
      <aside><${Form} options=${options} settings=${settings} change=${change} busy=${work.busy} stop=${work.stop}
        submit=${submit[view] || (() => { setView("generate"); submit.generate(); })} label=${LABELS[view]} /></aside>
      ${view === "generate" && html`<${GenerateView} generation=${generation} busy=${work.busy} masks=${masks} setMasks=${setMasks} dense=${denseReports[kind]} />`}
      ${view === "compare" && html`<${CompareView} pair=${comparison.pair} busy=${work.busy} />`}
      ${view === "grid" && html`<${GridView} rows=${grid.rows} methods=${methods} chosen=${chosen} setChosen=${setChosen} seeds=${seeds} setSeeds=${setSeeds} most=${options.most_images} busy=${work.busy} />`}
      ${view === "blind" && html`<${BlindView} blind=${blind} settings=${settings} methods=${methods} busy=${work.busy} />`}
      ${view === "history" && html`<${HistoryView} images=${history} restore=${restore} clear=${async () => { await clearHistory(); setHistory([]); }} />`}
    </div>
  `;
}

/** A PNG of this server that is dropped on the page restores its settings. */
function useDrop(restore, fail) {
  useEffect(() => {
    const over = (event) => event.preventDefault();
    const drop = async (event) => {
      event.preventDefault();
      const file = event.dataTransfer?.files[0];
      if (!file) return;
      const bytes = new Uint8Array(await file.arrayBuffer());
      const found = settingsOf(bytes);
      if (!found) return fail(`${file.name} holds no settings: drop a PNG that this server has generated`);
      let text = "";
      for (const byte of bytes) text += String.fromCharCode(byte);
      restore(found, btoa(text));
    };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("drop", drop);
    };
  });
}

/** Asks for a key where the server wants one, and waits while it loads. */
function Door() {
  const [options, setOptions] = useState(null);
  const [error, setError] = useState(null);
  const enter = () =>
    readOptions().then(setOptions, (failure) => {
      setError(failure);
      if (failure.status === 503) setTimeout(enter, 1000 * Math.max(failure.retryAfter, 1));
    });
  useEffect(() => void enter(), []);
  if (options) return html`<${Studio} options=${options} />`;
  if (error?.status !== 401) return html`<p class="error">${error ? error.message : "asking the server"}</p>`;
  const send = (event) => {
    event.preventDefault();
    apiKey.set(new FormData(event.target).get("key"));
    enter();
  };
  return html`<form class="settings" onSubmit=${send}><label class="wide">API key <input name="key" type="password" autofocus /></label><button class="primary">Enter</button></form>`;
}

render(html`<${Door} />`, document.getElementById("app"));
