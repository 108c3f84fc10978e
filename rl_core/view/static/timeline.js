// Who did what and who waited in a step: one lane per process, one row per slot.
import { ask, el, number, svg } from "./dom.js";

const KINDS = { generate: "work", train: "work", env: "env", step: "frame", lease: "wait", siblings: "wait", hold: "wait", put: "wait", admit: "wait", rollout: "wait", sync: "sync", validation: "work", checkpoint: "sync", inference: "work", score: "work", check: "sync" };
const ROW = 9, MOST_ROWS = 16, LEFT = 84, WIDTH = 1000;

export async function timelineView(run, step) {
  const found = await ask("timeline", { run, step }, "timeline");
  if (!found.lanes.length) return el("p", { class: "empty" }, "no trace of this step is kept");
  const span = found.ended - found.began || 1;
  const px = (time) => LEFT + ((time - found.began) / span) * (WIDTH - LEFT - 4);
  const output = el("output", { class: "facts" }, `${number(span, 3)} s in all; point at a part`);
  let y = 4;
  const parts = [];
  for (const lane of found.lanes) {
    parts.push(svg("text", { class: "tick", x: 2, y: y + 8 }, lane.name));
    const rows = lane.rows.slice(0, MOST_ROWS);
    for (const row of rows) {
      for (const [name, began, ended, args] of [...row].sort((one, two) => (two[2] - two[1]) - (one[2] - one[1]))) {
        const group = args.group !== undefined;
        const bar = svg("rect", { class: `span ${group ? "frame" : KINDS[name] ?? "work"}`, x: px(began), y, width: Math.max(px(ended) - px(began), 0.7), height: ROW - 2 });
        bar.addEventListener("pointerover", () => { output.textContent = `${lane.name}: ${name}, ${number(ended - began, 3)} s from ${number(began - found.began, 3)} s`; });
        parts.push(bar);
      }
      y += ROW;
    }
    if (lane.rows.length > MOST_ROWS) { parts.push(svg("text", { class: "tick", x: LEFT, y: y + 8 }, `${lane.rows.length - MOST_ROWS} more`)); y += ROW + 2; }
    y += 6;
  }
  const legend = ["work", "env", "wait", "sync"].map((kind) => el("span", { class: `key ${kind}` }, { work: "computes", env: "environment", wait: "waits", sync: "weights, checkpoint" }[kind]));
  return el("div", {}, el("div", { class: "bar" }, legend, output), svg("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${y}` }, ...parts));
}
