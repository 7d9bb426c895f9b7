// What the page asks of the server.

import { parsed, written } from "./settings.js";

const KEY = "nextscale.key";
const ROOT = new URL("../..", import.meta.url).pathname.replace(/\/$/, ""); // the path under which a proxy publishes the server

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

export const COMPLETED = "image_generation.completed";
const GENERATIONS = "/v1/images/generations";
export const EDITS = "/v1/images/edits";

export class ApiError extends Error {
  constructor({ status, headers }, error) {
    super(error?.message || `The server answered ${status}.`);
    this.status = status;
    this.param = error?.param;
    this.retryable = status === 429 || status >= 500;
    this.retryAfter = Number(headers.get("retry-after-ms")) / 1000 || Number(headers.get("retry-after")) || 0; // seconds
  }
}

/** The server is gone: nothing answers, or an answer breaks off. */
export class LostError extends Error {
  retryable = true;
}

const GONE = "The server does not answer. Is `nextscale serve` still running? Start it again, then press Retry.";
const BROKEN = "The connection ended before the picture was finished. Is `nextscale serve` still running? Then press Retry.";

/** Waits for the network; what it fails with is a LostError, unless the user has stopped it. */
async function reached(promise, message) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new LostError(message);
  }
}

async function ask(path, body, signal) {
  const headers = body ? { "content-type": "application/json" } : {};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  const response = await reached(fetch(ROOT + path, { method: body ? "POST" : "GET", headers, body: body && written(body), signal }), GONE);
  if (!response.ok) throw new ApiError(response, (await response.json().catch(() => ({}))).error);
  return response;
}

/** Ends with the AbortError of the signal as soon as it is aborted. */
function pause(seconds, signal) {
  signal?.throwIfAborted();
  return new Promise((done, failed) => {
    const timer = setTimeout(done, 1000 * seconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), failed(signal.reason)), { once: true });
  });
}

/** A full queue is asked again, when the server says so or later: it empties by itself. */
async function patiently(path, body, signal) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await ask(path, body, signal);
    } catch (error) {
      if (error.status !== 429 || attempt >= 20) throw error;
      await pause(Math.max(error.retryAfter, 0.5 + attempt / 4), signal);
    }
  }
}

const textOf = async (path, body, signal) => reached((await patiently(path, body, signal)).text(), BROKEN);

export const options = async () => (await ask("/studio/options")).json();
export const compare = async (a, b, signal) => JSON.parse(await textOf("/studio/compare", { a, b }, signal));
export const generate = async (body, signal) => parsed(await textOf(GENERATIONS, body, signal));

/** Calls `onEvent` with every event of a stream; fails where the stream says so, and where it ends before the image is completed. */
export async function stream(body, onEvent, signal, path = GENERATIONS) {
  const response = await patiently(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [text, completed] = ["", false];
  for (;;) {
    const { done, value } = await reached(reader.read(), BROKEN);
    if (done && completed) return;
    if (done) throw new LostError(BROKEN);
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (!data) continue;
      const content = parsed(data.slice(6));
      if (content.error) throw new ApiError(response, content.error);
      completed ||= content.type.endsWith(".completed");
      onEvent(content);
    }
  }
}
