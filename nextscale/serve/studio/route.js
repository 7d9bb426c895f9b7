// The address of each view: #/compare.
import { useEffect, useState } from "preact/hooks";

export const VIEWS = { generate: "Generate", compare: "Compare", grid: "Grid", blind: "Blind A/B", history: "History" };

const current = () => (location.hash.slice(2) in VIEWS ? location.hash.slice(2) : "generate");

export const addressOf = (view) => `#/${view}`;

export const go = (view) => void (location.hash = addressOf(view));

export function useView() {
  const [view, setView] = useState(current);
  useEffect(() => {
    const changed = () => setView(current());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => void (document.title = `${VIEWS[view]} · nextscale studio`), [view]);
  return view;
}
