// Two answers compared word by word.

/** How many words the answers have in common at their beginning, whether they are equal, and the words of each as
 * [text with its white space, whether the other answer lacks it]. */
export function compareWords(one, other) {
  const a = one.match(/\s*\S+/g) ?? [];
  const b = other.match(/\s*\S+/g) ?? [];
  const isSame = (i, j) => a[i].trim() === b[j].trim();
  let equal = 0;
  while (equal < a.length && equal < b.length && isSame(equal, equal)) equal += 1;
  const [inA, inB] = commonWords(a, b, isSame);
  return {
    equal,
    areEqual: equal === a.length && equal === b.length,
    one: a.map((word, i) => [word, !inA.has(i)]),
    other: b.map((word, j) => [word, !inB.has(j)]),
  };
}

/** The places of a longest common subsequence in both. */
function commonWords(a, b, isSame) {
  const longest = Array.from({ length: a.length + 1 }, () => Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i][j] = isSame(i, j) ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const [inA, inB] = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (isSame(i, j)) {
      inA.add(i++);
      inB.add(j++);
    } else if (longest[i + 1][j] >= longest[i][j + 1]) i += 1;
    else j += 1;
  }
  return [inA, inB];
}
