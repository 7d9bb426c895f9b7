// Settings inside a PNG: the text chunk that the server writes.

import { parsed } from "./settings.js";

const CHUNK = "nextscale";
const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

/** The settings with which an image was generated; null where the bytes are no such PNG. */
export function settingsOf(bytes) {
  if (SIGNATURE.some((byte, place) => bytes[place] !== byte)) return null;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  for (let place = 8; place + 12 <= bytes.length; ) {
    const length = view.getUint32(place);
    const kind = String.fromCharCode(...bytes.subarray(place + 4, place + 8));
    if (kind === "tEXt") {
      const text = new TextDecoder("latin1").decode(bytes.subarray(place + 8, place + 8 + length));
      const [name, content] = [text.slice(0, text.indexOf("\0")), text.slice(text.indexOf("\0") + 1)];
      if (name === CHUNK) return objectIn(content);
    }
    place += 12 + length;
  }
  return null;
}

function objectIn(text) {
  try {
    const found = parsed(text);
    return found instanceof Object ? found : null;
  } catch {
    return null;
  }
}

export const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));

export const source = (base64) => `data:image/png;base64,${base64}`;

export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const savePicture = (b64, seed) => download(`nextscale-${seed}.png`, bytesOf(b64), "image/png");
