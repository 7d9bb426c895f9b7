// Votes of blind pairs: kept in the browser, counted, with an interval, exported.

const KEPT = "nextscale.votes";
const NORMAL = 1.959964; // of 95 %

export const readVotes = () => JSON.parse(localStorage.getItem(KEPT) || "[]");
export const keepVotes = (votes) => localStorage.setItem(KEPT, JSON.stringify(votes));

/** Wilson's interval of a share. */
export function wilson(wins, votes) {
  if (!votes) return [0, 1];
  const share = wins / votes;
  const square = NORMAL ** 2;
  const middle = (share + square / (2 * votes)) / (1 + square / votes);
  const half = (NORMAL / (1 + square / votes)) * Math.sqrt((share * (1 - share)) / votes + square / (4 * votes ** 2));
  return [Math.max(middle - half, 0), Math.min(middle + half, 1)];
}

/** One line per pair of methods. Ties are counted apart and not in the share. */
export function tally(votes) {
  const pairs = new Map();
  for (const { a, b, choice } of votes) {
    const key = `${a} | ${b}`;
    const line = pairs.get(key) || { a, b, winsA: 0, winsB: 0, ties: 0 };
    if (choice === "a") line.winsA++;
    else if (choice === "b") line.winsB++;
    else line.ties++;
    pairs.set(key, line);
  }
  return [...pairs.values()].map((line) => {
    const decided = line.winsA + line.winsB;
    return { ...line, share: decided ? line.winsA / decided : null, interval: wilson(line.winsA, decided) };
  });
}

export const exported = (votes) => JSON.stringify({ votes, tally: tally(votes) }, null, 2);
