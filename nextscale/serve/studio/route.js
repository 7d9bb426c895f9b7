// The address, title and purpose of each view, such as #/compare.
import { useEffect, useState } from "preact/hooks";

export const VIEWS = {
  generate: ["Generate", "One picture, stage by stage."],
  edit: ["Edit", "Change a part of a picture, or paint beyond its edges."],
  compare: ["Compare", "One seed at best quality and with a method, one picture over the other."],
  grid: ["Grid", "Several methods and seeds at once."],
  blind: ["Blind A/B", "Vote between two methods without knowing which is which."],
  history: ["History", "Your last pictures, with their settings."],
};

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
  useEffect(() => void (document.title = `${VIEWS[view][0]} · nextscale studio`), [view]);
  return view;
}
