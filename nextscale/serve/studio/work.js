// One piece of work at a time, which can be stopped, fails with a reason, and can be tried again.
import { useRef, useState } from "preact/hooks";

export function useWork() {
  const [state, setState] = useState({ busy: false, error: null, note: "" });
  const controller = useRef(null);
  const latest = useRef(null);
  const run = async (work) => {
    controller.current?.abort();
    const mine = (controller.current = new AbortController());
    latest.current = work;
    setState({ busy: true, error: null, note: "" });
    let [error, note] = [null, ""];
    try {
      await work(mine.signal);
    } catch (failure) {
      if (failure.name === "AbortError") note = "Stopped.";
      else error = failure;
    }
    if (controller.current === mine) setState({ busy: false, error, note });
  };
  return {
    ...state,
    run,
    stop: () => controller.current?.abort(),
    retry: () => run(latest.current),
    say: (note) => setState((before) => ({ ...before, error: null, note })),
  };
}
