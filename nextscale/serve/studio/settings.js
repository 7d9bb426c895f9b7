// Settings of an image: defaults, the request they make, and how they come back from a PNG or the last visit.

export const MOST_PARTIALS = 32; // every stage
const KEPT = "nextscale.settings";
const CARRIED = ["temperature", "top_k", "top_p", "greedy", "stop_after_stage"]; // what a PNG may hold and the form has no field for

/** JSON whose seeds become text: they have up to 63 bits, and a number in JavaScript has 53. */
export const parsed = (text) => JSON.parse(text.replace(/"seed":\s*(\d+)(?=\s*[,}])/g, '"seed":"$1"'));

/** JSON in which seeds that are kept as text are numbers. */
export const written = (body) => JSON.stringify(body).replace(/"seed":"0*(\d+)"/g, '"seed":$1');

export const defaults = (options) => ({
  model: options.models[0].id,
  prompt: "",
  negative_prompt: "",
  seed: "7",
  size: options.models[0].size,
  method: options.method,
  guidance_scale: "",
  lora: [], // {name, scale} of the adapters that are applied
  carried: {},
});

export const keepSettings = (settings) => localStorage.setItem(KEPT, JSON.stringify(settings));

/** Settings of the last visit, as far as this server has the model and the size. */
export function firstSettings(options) {
  const fresh = defaults(options);
  try {
    const last = JSON.parse(localStorage.getItem(KEPT));
    const model = options.models.find((one) => one.id === last.model);
    return model?.sizes.some(({ size }) => size === last.size) ? { ...fresh, ...last, lora: servedOf(model, last.lora) } : fresh;
  } catch {
    return fresh;
  }
}

/** Adapters that a model has. */
const servedOf = (model, lora) => (Array.isArray(lora) ? lora.filter(({ name }) => model?.adapters.includes(name)) : []);

/** The fields of a request; those that are empty are left to the server. */
export function requestOf(settings) {
  const body = { ...settings.carried, model: settings.model, prompt: settings.prompt, size: settings.size, method: settings.method };
  if (settings.lora.length) body.lora = settings.lora;
  if (settings.negative_prompt.trim()) body.negative_prompt = settings.negative_prompt;
  if (String(settings.seed).trim() !== "") body.seed = String(settings.seed).trim();
  if (settings.guidance_scale.trim()) body.guidance_scale = scales(settings.guidance_scale);
  return body;
}

/** A number, or one per stage; the text itself where it is neither, so that the server refuses it. */
function scales(text) {
  const numbers = text.split(",").map((one) => (one.trim() ? Number(one) : NaN));
  if (!numbers.every(Number.isFinite)) return text;
  return numbers.length > 1 ? numbers : numbers[0];
}

const textOf = (value) => (typeof value === "string" ? value : Array.isArray(value) ? value.map(textOf).join(", ") : JSON.stringify(value));

/** Settings as the form has them, from those that a PNG holds. */
export function restored(found, current, options) {
  const served = options.models.find((one) => one.id === found.model);
  const model = served || options.models.find((one) => one.id === current.model);
  const offered = model?.sizes.some(({ size }) => size === found.size);
  const text = (name, fallback) => (found[name] === undefined ? fallback : textOf(found[name]));
  return {
    model: served ? found.model : current.model,
    prompt: text("prompt", current.prompt),
    negative_prompt: text("negative_prompt", ""),
    seed: text("seed", current.seed),
    size: offered ? found.size : served ? served.size : current.size,
    method: text("method", "dense"),
    guidance_scale: text("guidance_scale", ""),
    lora: servedOf(model, found.lora),
    carried: Object.fromEntries(CARRIED.filter((name) => name in found).map((name) => [name, found[name]])),
  };
}

/** Names of the settings in a PNG that differ from the restored ones: what this server or this page does not know. */
export const lost = (found, settings) =>
  Object.keys(found).filter((name) => !name.endsWith("_sha256") && textOf(found[name]) !== textOf({ ...settings.carried, ...settings }[name]));

export const randomSeed = () => Math.floor(Math.random() * 2 ** 31);
