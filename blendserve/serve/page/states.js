// The states of prompt tokens: where the KV of each came from. style.css has their colours and lines.

/** state -> what it is called, a note that qualifies it, and what it means */
export const STATES = {
  exact: ["exact", "", "Its cached KV equals that of full prefill."],
  kept: ["kept", "from the last turn", "Its KV was kept from the prompt of the last turn, where some of it was reused."],
  reused: ["reused", "", "Its cached KV is used, rotated to its new position."],
  corrected: ["reused", "adjusted", "Its cached KV is used, rotated to its new position and adjusted."],
  near_duplicate: ["reused", "from similar text", "Its KV comes from identical text in another cached passage, rotated and adjusted."],
  recomputed: ["recomputed", "", "It was cached, and selected: its KV was computed again for this prompt."],
  computed: ["new", "", "It was not cached: its KV was computed."],
};

/** States whose tokens ran through the model for this prompt. */
export const IS_COMPUTED = new Set(["recomputed", "computed"]);

/** Runs of [state, number of tokens] -> the state of each token. */
export function statesOf(runs) {
  return runs.flatMap(([state, n]) => Array(n).fill(state));
}

/** The number of tokens by state, in the order of STATES. */
export function countStates(states) {
  const sums = new Map(Object.keys(STATES).map((state) => [state, 0]));
  for (const state of states) sums.set(state, sums.get(state) + 1);
  return new Map([...sums].filter(([, n]) => n));
}
