// Where the network ran: a color scale over a faded picture, with its legend.
import { html } from "./html.js";
import { useEffect, useRef } from "preact/hooks";
import { bytesOf } from "./png.js";

const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis, from reused to computed

/** The color of a share, 0 to 1. */
function colorOf(share) {
  const place = share * (SCALE.length - 1);
  const low = Math.min(Math.floor(place), SCALE.length - 2);
  return SCALE[low].map((value, channel) => Math.round(value + (place - low) * (SCALE[low + 1][channel] - value)));
}

export function ComputeMap({ b64 }) {
  const canvas = useRef(null);
  useEffect(() => {
    let current = true;
    createImageBitmap(new Blob([bytesOf(b64)], { type: "image/png" })).then((bitmap) => {
      if (!current) return;
      const [node, { width, height }] = [canvas.current, bitmap];
      [node.width, node.height] = [width, height];
      const context = node.getContext("2d", { willReadFrequently: true });
      context.drawImage(bitmap, 0, 0);
      const pixels = context.getImageData(0, 0, width, height);
      for (let place = 0; place < pixels.data.length; place += 4) pixels.data.set(colorOf(pixels.data[place] / 255), place);
      context.putImageData(pixels, 0, 0);
    });
    return () => void (current = false);
  }, [b64]);
  return html`<canvas class="mask" ref=${canvas} role="img" aria-label="where the network ran in this stage"></canvas>`;
}

export const Legend = () => html`<span class="legend"><span>reused</span><i class="scale"></i><span>computed</span></span>`;
