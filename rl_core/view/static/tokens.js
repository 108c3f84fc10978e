// A sample's tokens, coloured by one of their numbers.
import { el, number, visible } from "./dom.js";

const KINDS = { ids: Int32Array, mask: Uint8Array, engine: Float32Array, trainer: Float32Array, advantage: Float32Array, token_versions: Int32Array };
const FIRST = 4000;
const MASKS = ["given", "generated, not trained", "trained"];
export const COLOURS = ["engine", "trainer", "ratio", "advantage", "mask", "version"];
const NAMES = { engine: "log-probability, engine", trainer: "log-probability, trainer", ratio: "ratio trainer / engine", advantage: "advantage", mask: "mask", version: "version" };

export function decode(sample) {
  const found = {};
  for (const [name, Kind] of Object.entries(KINDS)) {
    if (!sample[name]) { found[name] = null; continue; }
    const text = atob(sample[name]);
    const bytes = Uint8Array.from(text, (one) => one.charCodeAt(0));
    found[name] = new Kind(bytes.buffer);
  }
  found.version = found.token_versions;
  found.ratio = found.engine && found.trainer ? found.engine.map((value, at) => Math.exp(found.trainer[at] - value)) : null;
  return found;
}

function clamp(value) { return Math.max(-1, Math.min(1, value)); }

// A number in [-1, 1] for the colour scale, null for no colour.
function scaled(kind, value, largest) {
  if (value === null || value === undefined || Number.isNaN(value)) return null;
  if (kind === "engine" || kind === "trainer") return clamp(value / 5);
  if (kind === "ratio") return clamp(Math.log(value) / Math.log(2));
  return largest ? clamp(value / largest) : 0;
}

export function tokenView(sample, kind, oncolour) {
  const numbers = decode(sample), pieces = sample.pieces, count = pieces.length;
  const facts = el("output", { class: "facts" }, "Point at a token.");
  const body = el("div", { class: "tokens", dir: "ltr" });
  const lowest = kind === "version" ? Math.min(...sample.versions) : 0;
  let largest = 0;
  if (kind === "advantage") for (const value of numbers.advantage ?? []) if (!Number.isNaN(value)) largest = Math.max(largest, Math.abs(value));
  const tell = (at) => {
    const log = (name) => number(numbers[name]?.[at], 6);
    facts.replaceChildren(el("b", {}, `#${at} ${JSON.stringify(visible(pieces[at]))}`),
      ` id ${numbers.ids[at]} · engine ${log("engine")} · trainer ${log("trainer")} · ratio ${log("ratio")} · advantage ${log("advantage")} · ` +
      `version ${numbers.version[at] < 0 ? "–" : numbers.version[at]} · ${MASKS[numbers.mask[at]]}`);
  };
  const more = el("button", { type: "button", onclick: () => add(count) });
  let shown = 0;
  const add = (until) => {
    const part = document.createDocumentFragment();
    for (; shown < Math.min(until, count); shown += 1) {
      const at = shown, given = numbers.mask[at] === 0;
      const token = el("span", { class: given ? "token given" : "token", "data-at": at, "data-value": given || !numbers[kind] ? null : number(numbers[kind][at], 7) }, visible(pieces[at]).replaceAll("\n", "⏎\n") || "∅");
      if (kind === "mask") token.classList.add(`mask${numbers.mask[at]}`);
      else if (kind === "version") { if (!given) token.classList.add(`run${(numbers.version[at] - lowest) % 8}`, "by-version"); }
      else {
        const value = given ? null : scaled(kind, numbers[kind]?.[at], largest);
        if (value !== null) { token.classList.add(value < 0 ? "low" : "high"); token.style.setProperty("--amount", `${Math.round(Math.abs(value) * 72)}%`); }
      }
      part.append(token);
    }
    body.append(part);
    more.textContent = `${count - shown} more tokens`;
    more.hidden = shown >= count;
  };
  add(FIRST);
  body.addEventListener("pointerover", (event) => { if (event.target.dataset?.at) tell(Number(event.target.dataset.at)); });
  const select = el("select", { "aria-label": "Colour", onchange: () => oncolour(select.value) },
    COLOURS.map((one) => el("option", { value: one, selected: one === kind, disabled: !numbers[one] }, NAMES[one])));
  return el("div", {}, el("div", { class: "bar" }, el("label", {}, "colour ", select), legend(kind), facts),
    numbers[kind] ? null : el("p", { class: "empty" }, `this sample has no ${NAMES[kind]}`), body, more);
}

function legend(kind) {
  const words = { engine: "0 … −5", trainer: "0 … −5", ratio: "½ … 1 … 2", advantage: "negative … positive", mask: "", version: "one colour per version" }[kind];
  if (kind === "mask") return el("span", { class: "legend" }, MASKS.map((name, at) => el("span", { class: `token mask${at}` }, name)));
  return el("span", { class: `legend scale ${kind === "engine" || kind === "trainer" ? "one-sided" : ""}` }, words);
}
