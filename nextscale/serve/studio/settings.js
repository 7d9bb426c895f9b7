// What an image is asked for with: defaults, the request they make, and how they come back from a PNG.

export const MOST_PARTIALS = 32; // every stage

/** Named methods that fit the stages of a size. */
export const methodsOf = (model, size) => model.methods[model.sizes.find((one) => one.size === size)?.stages ?? model.stages];

export const defaults = (options) => ({
  model: options.models[0].id,
  prompt: options.models[0].classes ? "207" : "a 3D icon of a red apple",
  negative_prompt: "",
  seed: "7",
  size: options.models[0].size,
  method: options.method,
  guidance_scale: "",
});

/** The fields of a request; those that are empty are left to the server. */
export function requestOf(settings) {
  const body = { model: settings.model, prompt: settings.prompt, size: settings.size, method: settings.method };
  if (settings.negative_prompt.trim()) body.negative_prompt = settings.negative_prompt;
  if (String(settings.seed).trim() !== "") body.seed = Number(settings.seed);
  if (String(settings.guidance_scale).trim() !== "") body.guidance_scale = Number(settings.guidance_scale);
  return body;
}

/** Settings as the form has them, from those that a PNG holds. Only what the form knows is taken over. */
export function restored(found, current, options) {
  const served = options.models.some((model) => model.id === found.model);
  const text = (name, fallback) => (found[name] === undefined ? fallback : String(found[name]));
  return {
    ...current,
    model: served ? found.model : current.model,
    prompt: text("prompt", current.prompt),
    negative_prompt: text("negative_prompt", ""),
    seed: text("seed", current.seed),
    size: text("size", current.size),
    method: text("method", "dense"),
    guidance_scale: text("guidance_scale", ""),
  };
}

export const randomSeed = () => Math.floor(Math.random() * 2 ** 31);
