// The sizes of a model, as shapes and a scale.

const WIDE = { "1:1": 1, "5:4": 5 / 4, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "2:1": 2, "5:2": 5 / 2, "3:1": 3 };
const TALL = Object.entries(WIDE).slice(1).map(([name, ratio]) => [name.split(":").reverse().join(":"), 1 / ratio]);
const RATIOS = [...Object.entries(WIDE), ...TALL];
const USUAL = ["1:1", "4:3", "3:4", "16:9", "9:16"];

export const sidesOf = (size) => size.split("x").map(Number);
const areaOf = (size) => sidesOf(size).reduce((width, height) => width * height);
const distance = (one, other) => Math.abs(Math.log(one / other));
const nearest = (items, value, of) => items.reduce((best, item) => (distance(of(item), value) < distance(of(best), value) ? item : best));

/** The name of the usual ratio that a size comes closest to. */
export function aspectOf(size) {
  const [width, height] = sidesOf(size);
  return nearest(RATIOS, width / height, ([, ratio]) => ratio)[0];
}

/** Shapes of a model, the usual ones first, each with its sizes from small to large. */
export function aspectsOf(model) {
  const found = Object.fromEntries([...USUAL, ...RATIOS.map(([name]) => name)].map((name) => [name, []]));
  for (const { size } of model.sizes) found[aspectOf(size)].push(size);
  return Object.entries(found)
    .filter(([, sizes]) => sizes.length)
    .map(([name, sizes]) => ({ name, usual: USUAL.includes(name), sizes: sizes.sort((one, other) => areaOf(one) - areaOf(other)) }));
}

/** The size of a shape with about as many pixels. */
export const resized = (sizes, size) => nearest(sizes, areaOf(size), areaOf);

export const stagesOf = (model, size) => model.sizes.find((one) => one.size === size)?.stages ?? model.stages;

/** The offered size for a picture that is extended by `sides`: of its shape, with about as many pixels as `size`. */
export function fittingSize(model, picture, sides, size) {
  const [width, height] = [picture.width + sides.left + sides.right, picture.height + sides.top + sides.bottom];
  const ratio = (one) => sidesOf(one.size).reduce((across, down) => across / down);
  const shape = ratio(nearest(model.sizes, width / height, ratio));
  return resized(model.sizes.filter((one) => ratio(one) === shape).map((one) => one.size), size);
}

export const spelled = (size) => size.replace("x", " × ");
