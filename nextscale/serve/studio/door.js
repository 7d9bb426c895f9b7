// What comes before the studio: it asks for a key if the server wants one, and waits while it loads.
import { html } from "./html.js";
import { useEffect, useState } from "preact/hooks";
import { apiKey, options as readOptions } from "./api.js";

/** `inside`: the page, given the options of the server. */
export function Door({ inside }) {
  const [options, setOptions] = useState(null);
  const [error, setError] = useState(null);
  const enter = () =>
    readOptions().then(setOptions, (failure) => {
      setError(failure);
      if (failure.status === 503) setTimeout(enter, 1000 * Math.max(failure.retryAfter, 1));
    });
  useEffect(() => void enter(), []);
  if (options) return inside(options);
  const card = (content) => html`<main class="door"><div class="panel"><h1>nextscale studio</h1>${content}</div></main>`;
  if (!error) return card(html`<p class="waiting"><i class="spinner"></i>Asking the server</p>`);
  if (error.status === 503) return card(html`<p class="waiting" role="status"><i class="spinner"></i>The server is loading its models.</p>`);
  if (error.status !== 401) return card(html`<p role="alert">${error.message}</p><button type="button" class="primary" onClick=${enter}>Retry</button>`);
  const send = (event) => {
    event.preventDefault();
    apiKey.set(new FormData(event.target).get("key"));
    enter();
  };
  return card(html`
    <form class="options" onSubmit=${send}>
      <p>This server asks for an API key: one line of the file that it was started with as <code>--api-key-file</code>. This tab keeps it until it is closed.</p>
      <div class="field"><label for="key">API key</label><input id="key" name="key" type="password" required autofocus aria-describedby="key-problem" />
      ${apiKey.get() && html`<p class="problem" id="key-problem" role="alert">The server did not accept this key.</p>`}</div>
      <button class="primary">Enter</button>
    </form>`);
}
