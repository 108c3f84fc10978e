// Elements are made with text nodes only: nothing that a sample contains is ever parsed as HTML.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Control characters are shown as symbols, direction marks and lone surrogates by their code.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\u2028\u2029]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, (one) => {
    const code = one.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return code === 127 ? "\u2421" : "\u27e8" + code.toString(16).padStart(4, "0") + "\u27e9";
  });
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

let pending = new Map();

// Requests of the same kind replace each other: only the newest answer is shown.
export async function ask(path, parameters = {}, kind = null) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  let signal;
  if (kind) {
    pending.get(kind)?.abort();
    const controller = new AbortController();
    pending.set(kind, controller);
    signal = controller.signal;
  }
  const answer = await fetch(`api/${path}?${query}`, { signal });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

export const RUN_COLOURS = 8;
