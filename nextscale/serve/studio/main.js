// The page: an address per view, the settings that views share, and the work that they start.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Ballot, BlindView, useBlind } from "./blind.js";
import { CompareView, useComparison } from "./compare.js";
import { Door } from "./door.js";
import { useDrop } from "./drop.js";
import { EditView, useEdit } from "./edit.js";
import { namedMethods } from "./fields.js";
import { fieldOf, Form } from "./form.js";
import { GenerateView, useGeneration } from "./generate.js";
import { GridView, useGrid } from "./grid.js";
import { HistoryView } from "./history.js";
import { html } from "./html.js";
import { useReferences } from "./measure.js";
import { addressOf, go, useView, VIEWS } from "./route.js";
import { firstSettings, keepSettings, lost, restored } from "./settings.js";
import { DENSE, methodsOf, nameOf, recommended, speedsOf } from "./speeds.js";
import { addPicture, clearPictures, KEPT, readPictures } from "./store.js";
import { ThemeButton } from "./theme.js";
import { useWork } from "./work.js";

function Studio({ options }) {
  const [settings, setSettings] = useState(() => firstSettings(options));
  const [masked, setMasked] = useState(false);
  const [pictures, setPictures] = useState([]);
  const [rows, setRows] = useState(null); // methods of the grid, once they are chosen
  const [count, setCount] = useState(3);
  const view = useView();
  const work = useWork();
  const references = useReferences();
  const remember = async (b64) => {
    const entry = await addPicture(b64);
    setPictures((before) => [entry, ...before].slice(0, KEPT));
  };
  const generation = useGeneration(work.run, remember, references);
  const edit = useEdit(work.run, remember, work.say, ({ width, height }) => model.sizes.some(({ size }) => size === `${width}x${height}`) && change({ size: `${width}x${height}` }));
  const comparison = useComparison(work.run, remember, references);
  const grid = useGrid(work.run, remember);
  const blind = useBlind(work.run, work.stop);

  const model = options.models.find((one) => one.id === settings.model) || options.models[0];
  const speeds = speedsOf(model, settings.size);
  const methods = namedMethods(speeds, methodsOf(model, settings.size));
  const first = recommended(model, settings.size);
  const compared = { ...settings, method: settings.method === DENSE ? first : settings.method };
  const label = nameOf(compared.method, model, settings.size);
  const chosen = rows || [DENSE, ...speeds.slice(-2).map(({ method }) => method)];
  const labelOf = (found) => nameOf(found.method, options.models.find((one) => one.id === found.model && one.sizes.some(({ size }) => size === found.size)), found.size);

  const change = (changes) => {
    if (fieldOf(work.error) in changes) work.say(""); // the complaint is about the value before
    setSettings((before) => ({ ...before, ...changes }));
  };
  const restore = (found, b64) => {
    const next = restored(found, settings, options);
    const names = lost(found, next);
    setSettings(next);
    work.say(names.length ? `Not restored, so that the next picture will differ: ${names.join(", ")}` : "");
    generation.restore(b64, next);
    go("generate");
  };

  useEffect(() => void readPictures().then(setPictures), []);
  useEffect(() => keepSettings(settings), [settings]);
  useEffect(() => {
    const pressed = (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && work.stop();
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  useDrop(restore, work.say, view === "edit" ? edit.open : null);

  if (view === "blind" && blind.round) return html`<${Ballot} blind=${blind} error=${work.error} retry=${work.retry} />`;
  const choose = (prompt) => {
    change({ prompt });
    views[view].submit({ ...views[view].settings, prompt });
  };
  const shared = { settings, classes: model.classes, choose, busy: work.busy };
  // A view that starts work from the form has its settings, what it submits them to, and the label of the button.
  const views = {
    generate: {
      settings,
      submit: (given) => generation.generate(given, masked),
      label: "Generate",
      content: () => html`<${GenerateView} ...${shared} generation=${generation} change=${(b64) => (edit.reuse(b64), go("edit"))} masked=${masked} setMasked=${setMasked} references=${references} />`,
    },
    edit: {
      settings: edit.sized(settings, model),
      submit: (given) => (edit.picture ? edit.start(given, model) : work.say("Choose a picture first.")),
      label: "Edit",
      content: () => html`<${EditView} edit=${edit} settings=${edit.sized(settings, model)} model=${model} busy=${work.busy} pictures=${pictures} />`,
    },
    compare: {
      settings: compared,
      submit: (given) => comparison.start(given, label),
      label: "Compare",
      content: () => html`<${CompareView} ...${shared} comparison=${comparison} label=${label} />`,
    },
    grid: {
      settings,
      submit: (given) => grid.start(given, Object.entries(methods).filter(([, text]) => chosen.includes(text)).map(([name, text]) => ({ name, text })), count),
      label: "Generate grid",
      content: () => html`<${GridView} grid=${grid} methods=${methods} chosen=${chosen} setChosen=${setRows} count=${count} setCount=${setCount} most=${options.most_images} busy=${work.busy} restore=${(b64) => restore(pictures.find((one) => one.b64 === b64)?.settings || {}, b64)} />`,
    },
    blind: { content: () => html`<${BlindView} blind=${blind} settings=${settings} methods=${methods} first=${first} busy=${work.busy} />` },
    history: { content: () => html`<${HistoryView} pictures=${pictures} restore=${restore} labelOf=${labelOf} clear=${async () => { await clearPictures(); setPictures([]); }} />` },
  };
  const { submit, label: start, settings: sent, content } = views[view];
  const beside = submit && fieldOf(work.error); // the form shows that error
  return html`
    <header>
      <a class="brand" href=${addressOf("generate")}><i></i><h1>nextscale <span>studio</span></h1></a>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([name, [title, about]]) => html`<a id=${`tab-${name}`} href=${addressOf(name)} title=${about} aria-current=${view === name ? "page" : undefined}>${title}</a>`)}</nav>
      <${ThemeButton} />
    </header>
    <main class=${`page ${view}`}>
      ${submit && html`<${Form} options=${options} settings=${sent} change=${change} busy=${work.busy} stop=${work.stop} submit=${() => submit(sent)} label=${start} error=${work.error} view=${view} />`}
      ${work.error && !beside && html`<p class="banner" role="alert"><span>${work.error.message}</span>${work.error.retryable && html`<button type="button" id="retry" onClick=${work.retry}>Retry</button>`}</p>`}
      ${work.note && html`<p class="banner note" role="status"><span>${work.note}</span><button type="button" class="quiet" aria-label="Close" onClick=${() => work.say("")}>×</button></p>`}
      ${content()}
    </main>
  `;
}

render(html`<${Door} inside=${(options) => html`<${Studio} options=${options} />`} />`, document.getElementById("app"));
