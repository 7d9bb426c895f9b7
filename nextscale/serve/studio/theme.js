// Light, dark, or as the system says.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";

const KEPT = "nextscale.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

export function ThemeButton() {
  const [theme, setTheme] = useState(localStorage.getItem(KEPT) || "system");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(KEPT, theme);
  }, [theme]);
  return html`<button type="button" class="quiet" id="theme" title=${`Colors: ${theme}`} aria-label=${`Colors: ${theme}`} onClick=${() => setTheme(NEXT[theme])}>${SIGNS[theme]}</button>`;
}
