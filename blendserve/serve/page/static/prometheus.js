// Prometheus' text format, and what is read out of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name: [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : line.match(LINE);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The sum over the samples of a name that have these labels. */
export function sum(samples, name, labels = {}) {
  return (samples.get(name) ?? [])
    .filter((sample) => Object.entries(labels).every(([key, value]) => sample.labels[key] === value))
    .reduce((total, sample) => total + sample.value, 0);
}

/** A quantile of what a histogram has seen between two looks, within its bucket by proportion; null for nothing. */
export function quantile(before, after, name, q) {
  const seen = (samples) => {
    const buckets = new Map();
    for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
      const le = labels.le === "+Inf" ? Infinity : Number(labels.le);
      buckets.set(le, (buckets.get(le) ?? 0) + value);
    }
    return buckets;
  };
  const old = seen(before);
  const counts = [...seen(after)].sort(([a], [b]) => a - b).map(([le, n]) => [le, n - (old.get(le) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let [low, below] = [0, 0];
  for (const [le, n] of counts) {
    if (n >= q * all) return le === Infinity ? low : low + ((le - low) * (q * all - below)) / (n - below);
    [low, below] = [le, n];
  }
  return low;
}
