// Methods by what they are for: best quality, then what was measured to be faster, then all others by name.
import { percent } from "./figures.js";
import { stagesOf } from "./sizes.js";

export const DENSE = "dense";
const MEASURED = { "Nearly equal": "auto:lpips=0.05", "2x faster": "auto:speedup=2", "3x faster": "auto:speedup=3" };
const SKIPS = { "Skip 1 stage": "skip:last=1", "Skip 2 stages": "skip:last=2", "Skip 3 stages": "skip:last=3" };

/** Named methods that fit the stages of a size. */
export const methodsOf = (model, size) => model.methods[stagesOf(model, size)];

/** Choices by purpose. A size without a profile leaves out stages. */
export function speedsOf(model, size) {
  const points = model.points[stagesOf(model, size)];
  const methods = Object.values(methodsOf(model, size));
  const measured = Object.entries(MEASURED).filter(([, method]) => points[method]);
  const chosen = measured.length ? measured : Object.entries(SKIPS).filter(([, method]) => methods.includes(method));
  const about = (method) => {
    const point = points[method];
    return point ? `Measured: ${point.speedup.toFixed(2)} times faster, ${percent(point.lpips)} likeness.` : "Leaves out the last stages. No method was measured for this size yet.";
  };
  return [{ name: "Best quality", method: DENSE, about: "Computes everything." }, ...chosen.map(([name, method]) => ({ name, method, about: about(method), source: points[method]?.profile }))];
}

/** The method that is worth trying first. */
export function recommended(model, size) {
  const speeds = speedsOf(model, size);
  return (speeds.find(({ method }) => method === MEASURED["2x faster"]) || speeds[1] || speeds[0]).method;
}

/** The same choice at another size: points of `auto` exist for some sizes only. */
export function carriedOver(method, before, after) {
  const place = before.findIndex((one) => one.method === method);
  return place < 0 ? method : (after[place] || after.at(-1)).method;
}

export function nameOf(method, model, size) {
  const named = model && Object.entries(methodsOf(model, size)).find(([, text]) => text === method);
  return (model && speedsOf(model, size).find((one) => one.method === method)?.name) || named?.[0] || method;
}
