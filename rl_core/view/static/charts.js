// Small line charts of several runs: hover shows values, a click chooses the step.
import { el, number, svg, RUN_COLOURS } from "./dom.js";

const WIDTH = 320, HEIGHT = 132, LEFT = 44, RIGHT = 14, TOP = 8, BOTTOM = 18;

function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-9; at += unit) found.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
  return found;
}

// `runs`: [{index, points: [[x, y, step]], events: [{x, kind, text}]}]
export function chart(name, runs, { axis, chosen, onpick, onclose }) {
  const all = runs.flatMap((run) => run.points);
  const caption = el("figcaption", {}, el("span", { title: name }, name),
    el("output", {}), el("button", { type: "button", title: "Remove", "aria-label": `Remove ${name}`, onclick: onclose }, "×"));
  if (!all.length) return el("figure", { class: "chart" }, caption, el("p", { class: "empty" }, "no values"));
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of all) {
    x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
  }
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  if (x0 === x1) x1 = x0 + 1;
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => TOP + ((y1 - y) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name, tabindex: -1 });
  for (const y of ticks(y0, y1, 4)) {
    plot.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }));
    plot.append(svg("text", { class: "tick end", x: LEFT - 5, y: py(y) + 3 }, number(y, 3)));
  }
  for (const x of ticks(x0, x1, 5)) plot.append(svg("text", { class: "tick middle", x: px(x), y: HEIGHT - 5 }, number(x, 3)));
  for (const run of runs) {
    for (const event of run.events) {
      if (event.x < x0 || event.x > x1) continue;
      const mark = svg("line", { class: `event ${event.kind}`, x1: px(event.x), x2: px(event.x), y1: TOP, y2: HEIGHT - BOTTOM });
      mark.append(svg("title", {}, event.text));
      plot.append(mark);
    }
  }
  for (const run of runs) {
    if (!run.points.length) continue;
    const path = run.points.map(([x, y], at) => `${at ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    plot.append(svg("path", { class: `line run${run.index % RUN_COLOURS}`, d: path }));
    if (run.points.length === 1) plot.append(svg("circle", { class: `dot run${run.index % RUN_COLOURS}`, cx: px(run.points[0][0]), cy: py(run.points[0][1]), r: 2.5 }));
    const here = run.points.find((point) => run.index === chosen.run && point[2] === chosen.step);
    if (here) plot.append(svg("circle", { class: `dot chosen run${run.index % RUN_COLOURS}`, cx: px(here[0]), cy: py(here[1]), r: 4 }));
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const dot = svg("circle", { class: "dot", r: 3.5, visibility: "hidden" });
  plot.append(cross, dot);
  const output = caption.querySelector("output");
  const value = (run, text) => (runs.length > 1 ? el("b", { class: `run${run.index % RUN_COLOURS}` }, text) : text);
  const showLast = () => output.replaceChildren(...runs.filter((run) => run.points.length).flatMap((run) => [value(run, number(run.points.at(-1)[1])), "  "]));
  showLast();
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * HEIGHT;
    let best = null, least = Infinity;
    for (const run of runs) for (const point of run.points) {
      const distance = Math.abs(px(point[0]) - x) + 0.05 * Math.abs(py(point[1]) - y);
      if (distance < least) { least = distance; best = { run, point }; }
    }
    return best;
  };
  plot.addEventListener("pointermove", (event) => {
    const { run, point } = nearest(event);
    for (const [node, at] of [[cross, { x1: px(point[0]), x2: px(point[0]) }], [dot, { cx: px(point[0]), cy: py(point[1]) }]]) {
      for (const [key, value] of Object.entries(at)) node.setAttribute(key, value);
      node.setAttribute("visibility", "visible");
    }
    dot.setAttribute("class", `dot run${run.index % RUN_COLOURS}`);
    output.replaceChildren(`${axis === "step" ? "step " : ""}${number(point[0])}${axis === "hours" ? " h" : ""}: `, value(run, number(point[1])));
  });
  plot.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    dot.setAttribute("visibility", "hidden");
    showLast();
  });
  plot.addEventListener("click", (event) => {
    const { run, point } = nearest(event);
    onpick(run.index, point[2]);
  });
  return el("figure", { class: "chart" }, caption, plot);
}
