// Images of this browser: PNGs whose metadata hold their settings.
import { html } from "./html.js";
import { bytesOf, download, settingsOf, source } from "./png.js";

const [DATABASE, STORE] = ["nextscale", "images"];
export const KEPT = 60;

function opened() {
  return new Promise((done, failed) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { autoIncrement: true });
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
}

async function transaction(mode, work) {
  const database = await opened();
  return new Promise((done, failed) => {
    const store = database.transaction(STORE, mode).objectStore(STORE);
    const request = work(store);
    request.transaction.oncomplete = () => done(request.result);
    request.transaction.onerror = () => failed(request.error);
  });
}

/** An image with the settings inside it, which are read when they are first asked for. */
function entryOf(b64) {
  let settings;
  return {
    b64,
    get settings() {
      return (settings ??= settingsOf(bytesOf(b64)) || {});
    },
  };
}

/** All images, the latest first. Older ones than the last few dozen are forgotten. */
export async function readHistory() {
  return (await transaction("readonly", (store) => store.getAll())).reverse().map(entryOf);
}

/** The entry of a new image. */
export async function addToHistory(b64) {
  await transaction("readwrite", (store) => store.add(b64));
  const keys = await transaction("readonly", (store) => store.getAllKeys());
  for (const key of keys.slice(0, Math.max(keys.length - KEPT, 0))) await transaction("readwrite", (store) => store.delete(key));
  return entryOf(b64);
}

export const clearHistory = () => transaction("readwrite", (store) => store.clear());

export function HistoryView({ images, restore, clear }) {
  return html`
    <section class="view column" aria-label="history">
      <p class="facts">A click restores the settings of an image; so does a PNG of this server that is dropped anywhere on the page.</p>
      <div class="history">
        ${images.map(({ b64, settings }) => {
          const about = `${settings.prompt}, seed ${settings.seed}, ${settings.method}`;
          return html`
            <figure>
              <button type="button" title=${about} onClick=${() => restore(settings, b64)}><img src=${source(b64)} alt=${about} /></button>
              <figcaption>${settings.method} <button type="button" class="small" onClick=${() => download(`nextscale-${settings.seed}.png`, bytesOf(b64), "image/png")}>save</button></figcaption>
            </figure>`;
        })}
      </div>
      ${images.length > 0 ? html`<div class="actions"><button type="button" onClick=${clear}>Forget all</button></div>` : html`<div class="canvas empty">nothing yet</div>`}
    </section>
  `;
}
