// What a brush paints over a picture: the mask of an edit, in pixels of the picture.
import { html } from "./html.js";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { sidesOf } from "./sizes.js";

export const NO_SIDES = { left: 0, top: 0, right: 0, bottom: 0 };
const STEP = 16; // pixels of the picture, of an arrow key at an edge

/** Where a picture that is extended by `sides` lies on a canvas of `size`: it covers the canvas, and is cropped to the center. */
export function placed(picture, sides, size) {
  const [width, height] = sidesOf(size);
  const [across, down] = [picture.width + sides.left + sides.right, picture.height + sides.top + sides.bottom];
  const scale = Math.max(width / across, height / down);
  return { width, height, scale, x: (width - across * scale) / 2 + sides.left * scale, y: (height - down * scale) / 2 + sides.top * scale };
}

function canvasOf({ width, height }) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  return [canvas, canvas.getContext("2d")];
}

/** Stripes of two colors, which are seen on any picture. */
function stripes(context, width) {
  const side = Math.max(4, 2 * Math.round(width / 80));
  const [tile, ink] = canvasOf({ width: side, height: side });
  ink.fillStyle = "#fff";
  ink.fillRect(0, 0, side, side);
  ink.fillStyle = "#c2127f";
  for (let row = 0; row < side; row++) for (const start of [row - side, row]) ink.fillRect(start, row, side / 2, 1);
  return context.createPattern(tile, "repeat");
}

/** Paints the strokes: {points, size, erase}, {invert} or {clear}, one after the other. */
function paint(context, place, picture, strokes) {
  const { x, y, scale, width, height } = place;
  context.clearRect(0, 0, width, height);
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = context.fillStyle = stripes(context, width);
  for (const { points, size, erase, invert, clear } of strokes) {
    context.globalCompositeOperation = invert ? "xor" : erase ? "destination-out" : "source-over";
    if (clear) context.clearRect(0, 0, width, height);
    if (invert) context.fillRect(x, y, picture.width * scale, picture.height * scale);
    if (!points) continue;
    context.lineWidth = size * scale;
    context.beginPath();
    points.forEach(([left, top], number) => context[number ? "lineTo" : "moveTo"](x + left * scale, y + top * scale));
    if (points.length === 1) context.lineTo(x + points[0][0] * scale + 0.1, y + points[0][1] * scale);
    context.stroke();
  }
  context.globalCompositeOperation = "source-over";
}

/** PNGs in data URLs: the picture on its canvas, and the mask, which is transparent where it changes; null if nothing is marked. */
export function pngsOf(picture, sides, strokes, size) {
  const place = placed(picture, sides, size);
  const [image, drawn] = canvasOf(place);
  drawn.drawImage(picture, place.x, place.y, picture.width * place.scale, picture.height * place.scale);
  const [brush, painted] = canvasOf(place);
  paint(painted, place, picture, strokes);
  const [mask, cut] = canvasOf(place);
  const [right, bottom] = [place.x + picture.width * place.scale, place.y + picture.height * place.scale];
  const [left, top] = [sides.left ? Math.ceil(place.x) : 0, sides.top ? Math.ceil(place.y) : 0];
  cut.fillRect(left, top, (sides.right ? Math.floor(right) : place.width) - left, (sides.bottom ? Math.floor(bottom) : place.height) - top);
  cut.globalCompositeOperation = "destination-out";
  cut.drawImage(brush, 0, 0);
  const alpha = cut.getImageData(0, 0, place.width, place.height).data.some((level, index) => index % 4 === 3 && level < 255);
  return { image: image.toDataURL(), mask: alpha ? mask.toDataURL() : null };
}

/** The picture with the painted mask over it. A pointer paints; the edges can be dragged outward. */
export function Board({ picture, sides, setSides, strokes, setStrokes, brush, size }) {
  const [image, mask, line] = [useRef(null), useRef(null), useRef(null)];
  const place = placed(picture, sides, size);
  const [, redraw] = useState(0);
  useLayoutEffect(() => {
    const context = image.current.getContext("2d");
    context.clearRect(0, 0, place.width, place.height);
    context.drawImage(picture, place.x, place.y, picture.width * place.scale, picture.height * place.scale);
  }, [picture, sides, size]);
  useLayoutEffect(() => paint(mask.current.getContext("2d"), place, picture, line.current ? [...strokes, line.current] : strokes));
  const point = (event) => {
    const box = mask.current.getBoundingClientRect();
    const [left, top] = [((event.clientX - box.left) * place.width) / box.width, ((event.clientY - box.top) * place.height) / box.height];
    return [(left - place.x) / place.scale, (top - place.y) / place.scale];
  };
  const begin = (event) => {
    if (event.button) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    line.current = { points: [point(event)], size: brush.size / place.scale, erase: brush.erase };
    redraw((count) => count + 1);
  };
  const move = (event) => {
    if (!line.current) return;
    line.current.points.push(point(event));
    redraw((count) => count + 1);
  };
  const end = () => {
    if (line.current) setStrokes([...strokes, line.current]);
    line.current = null;
  };
  return html`
    <canvas class="layer" ref=${image} width=${place.width} height=${place.height}></canvas>
    <canvas class="layer brush" id="mask" ref=${mask} width=${place.width} height=${place.height} role="img" aria-label="Picture. Paint over what should change" onPointerDown=${begin} onPointerMove=${move} onPointerUp=${end} onPointerCancel=${end}></canvas>
    ${Object.keys(sides).map((side) => html`<${Edge} side=${side} sides=${sides} setSides=${setSides} scale=${() => (place.scale * mask.current.getBoundingClientRect().width) / place.width} most=${Math.max(picture.width, picture.height)} />`)}
  `;
}

/** A handle that extends the picture at one side. */
function Edge({ side, sides, setSides, scale, most }) {
  const start = useRef(null);
  const sign = side === "left" || side === "top" ? -1 : 1;
  const along = (event) => (side === "left" || side === "right" ? event.clientX : event.clientY);
  const set = (pixels) => setSides({ ...sides, [side]: Math.min(Math.max(Math.round(pixels), 0), most) });
  const grab = (event) => {
    event.currentTarget.setPointerCapture(event.pointerId);
    start.current = { at: along(event), pixels: sides[side], scale: scale() };
  };
  const move = (event) => start.current && set(start.current.pixels + (sign * (along(event) - start.current.at)) / start.current.scale);
  const pressed = (event) => {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    set(sides[side] + sign * by * STEP);
  };
  return html`<button type="button" class=${`edge ${side}`} role="slider" aria-label=${`Extend ${side}`} aria-valuemin="0" aria-valuemax=${most} aria-valuenow=${sides[side]} aria-valuetext=${`${sides[side]} pixels`} title="Drag outward to paint beyond the edge" onPointerDown=${grab} onPointerMove=${move} onPointerUp=${() => (start.current = null)} onKeyDown=${pressed}></button>`;
}
