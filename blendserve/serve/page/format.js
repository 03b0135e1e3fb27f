// Numbers as text.

const COUNT = new Intl.NumberFormat("en");

export function count(n) {
  return COUNT.format(n);
}

export function ms(seconds) {
  const value = seconds * 1e3;
  if (value >= 999.5) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return `${value.toFixed(value >= 9.95 ? 0 : 1)} ms`;
}

/** An estimate: two digits. */
export function about(seconds) {
  const value = seconds < 0.995 ? seconds * 1e3 : seconds;
  return `${COUNT.format(Number(value.toPrecision(2)))} ${seconds < 0.995 ? "ms" : "s"}`;
}

export function bytes(n) {
  if (n < 1000) return `${n} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = n / 1000;
  let unit = 0;
  for (; value >= 999.5 && unit < units.length - 1; unit++) value /= 1000;
  return `${value.toFixed(value < 9.95 ? 1 : 0)} ${units[unit]}`;
}

export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 0.05) return "<0.1%";
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)}%`;
}

export function times(x) {
  return `${x.toFixed(x < 9.95 ? 1 : 0)}×`;
}

export function several(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
