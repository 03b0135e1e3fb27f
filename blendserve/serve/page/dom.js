// Elements without markup: foreign text is only set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (`onclick`), style properties (`style`), and children: nodes or texts. */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** The same in SVG. */
export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Call after `ms` without another call: a debounce. */
export function debounced(call, ms = 250) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, ms);
  };
}
