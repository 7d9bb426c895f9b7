// A PNG of this server that is dropped on the page restores its settings; `open` takes any picture instead.
import { useEffect } from "preact/hooks";
import { settingsOf } from "./png.js";

export function useDrop(restore, fail, open) {
  useEffect(() => {
    const over = (event) => event.preventDefault();
    const drop = async (event) => {
      event.preventDefault();
      const file = event.dataTransfer?.files[0];
      if (!file) return;
      if (open) return open(file);
      const bytes = new Uint8Array(await file.arrayBuffer());
      const found = settingsOf(bytes);
      if (!found) return fail(`${file.name} holds no settings. Drop a PNG that this server has generated.`);
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
