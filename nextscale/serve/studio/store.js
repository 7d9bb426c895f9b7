// Pictures that this browser keeps: PNGs whose metadata hold their settings.
import { bytesOf, settingsOf } from "./png.js";

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

/** A picture with the settings inside it, which are read when they are first asked for. */
function entryOf(b64) {
  let settings;
  return {
    b64,
    get settings() {
      return (settings ??= settingsOf(bytesOf(b64)) || {});
    },
  };
}

/** All pictures, the latest first. Older ones than the last few dozen are forgotten. */
export async function readPictures() {
  return (await transaction("readonly", (store) => store.getAll())).reverse().map(entryOf);
}

/** The entry of a new picture. */
export async function addPicture(b64) {
  await transaction("readwrite", (store) => store.add(b64));
  const keys = await transaction("readonly", (store) => store.getAllKeys());
  for (const key of keys.slice(0, Math.max(keys.length - KEPT, 0))) await transaction("readwrite", (store) => store.delete(key));
  return entryOf(b64);
}

export const clearPictures = () => transaction("readwrite", (store) => store.clear());
