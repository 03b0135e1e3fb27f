// The states of tokens, in words; colours and lines are in style.css.

export const STATES = {
  exact: "Its stored KV is what the model would compute in this place.",
  reused: "Its stored KV is used as it is, moved to this place.",
  corrected: "Its stored KV is used, moved to this place, and corrected by what the recomputed tokens show.",
  near: "Its stored KV comes from another chunk that has the same text here: moved to this place, and corrected like any other.",
  recomputed: "The policy chose it: its KV was computed anew.",
  fresh: "Nothing stored was used for it: its KV was computed.",
};
