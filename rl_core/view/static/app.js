// The page: its state is the fragment of the address, so that a link shows the same.
import { chart } from "./charts.js";
import { ask, el, number, RUN_COLOURS, visible } from "./dom.js";
import { FILTERED, groupList, groupView, sampleView } from "./samples.js";
import { timelineView } from "./timeline.js";
import { COLOURS } from "./tokens.js";

const ACCURACY = "val/accuracy";
const PREFERRED = ["reward/mean", "val/reward_mean", ACCURACY, "train/policy_loss", "train/entropy", "rollout/gen_tokens_per_sample/mean",
  "train/grad_norm", "time/step", "perf/tokens_per_second", "train/staleness_mean"];
const FIRST_CHARTS = 8, REFRESH_MS = 5000;
const FILTERS = ["text", "reason", "order", "min_reward", "max_reward", "min_tokens", "max_tokens"];
const $ = (id) => document.getElementById(id);
const data = { runs: [], curves: [], steps: { train: [], validation: [] }, list: { samples: [], more: 0, reasons: [] } };
let shown = "";

function state() {
  const query = new URLSearchParams(location.hash.slice(1));
  const whole = (name) => (/^\d+$/.test(query.get(name) ?? "") ? Number(query.get(name)) : null);
  const found = {
    run: Math.min(whole("run") ?? 0, Math.max(data.runs.length - 1, 0)), step: whole("step"), split: query.get("split") === "validation" ? "validation" : "train",
    group: query.get("group"), sample: whole("sample"), tab: query.get("tab") === "tokens" ? "tokens" : "conversation",
    colour: COLOURS.includes(query.get("colour")) ? query.get("colour") : "engine", axis: query.get("axis") === "hours" ? "hours" : "step",
    metrics: query.get("metrics")?.split(",").filter(Boolean) ?? null, time: query.get("time") === "1",
  };
  for (const name of FILTERS) found[name] = query.get(name) ?? "";
  return found;
}

function go(changes, replace = false) {
  const query = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "" || value === false) query.delete(name);
    else query.set(name, Array.isArray(value) ? value.join(",") : value === true ? "1" : value);
  }
  const hash = `#${query}`;
  if (hash === location.hash) return;
  if (replace) { history.replaceState(null, "", hash); show(); } else location.hash = hash;
}

function names() { return [...new Set(data.curves.flatMap((run) => run.names))].sort(); }
function chosenMetrics(now) {
  if (now.metrics) return now.metrics;
  const known = new Set(names());
  const judged = data.runs.some((run) => run.measured === ACCURACY);    // a reward of another scale has no accuracy
  return PREFERRED.filter((name) => known.has(name) && (name !== ACCURACY || judged)).slice(0, FIRST_CHARTS);
}

async function loadCurves(now) {
  const wanted = now.metrics ?? PREFERRED;
  data.curves = await Promise.all(data.runs.map((_, run) => ask("curves", { run, name: wanted })));
}

function drawRuns(now) {
  const failure = data.runs[now.run]?.failure;
  $("failure").hidden = !failure;
  $("failure").textContent = failure ? `${visible(data.runs[now.run].name)} failed: ${visible(failure)}` : "";
  $("runs").replaceChildren(...data.runs.map((run, at) => el("button", {
    type: "button", class: "run", "aria-pressed": String(at === now.run), title: visible(run.folder),
    onclick: () => go({ run: at, group: null, sample: null }),
  }, el("i", { class: `run${at % RUN_COLOURS}` }), visible(run.name), el("span", { class: `phase ${run.phase.toLowerCase().replace(/[^a-z]/g, "")}` }, run.phase === "Unknown" ? "never started" : visible(run.phase)),
  el("span", { class: "dim" }, run.step === null ? "" : `${run.step}/${run.total ?? "?"}`))));
}

function drawCurves(now) {
  $("axis").value = now.axis;
  $("metrics").replaceChildren(...names().map((name) => el("option", { value: name })));
  const metrics = chosenMetrics(now);
  const lines = data.curves.map((run, index) => {
    const hours = new Map(run.hours);
    const x = (step) => (now.axis === "hours" ? hours.get(step) ?? 0 : step);
    const name = data.runs.length > 1 ? `${visible(data.runs[index].name)}, ` : "";
    return { index, x, series: run.series, events: run.events.map((event) => ({ ...event, run: index, x: x(event.step), text: `${name}step ${event.step}: ${visible(event.text)}` })) };
  });
  const events = lines.flatMap((run) => run.events).sort((one, other) => one.step - other.step);
  $("events").replaceChildren(...events.slice(-6).map((event) => el("button", { type: "button", class: `mark ${event.kind}`, onclick: () => go({ run: event.run, step: event.step, group: null, sample: null }) },
    data.runs.length > 1 ? el("i", { class: `run${event.run % RUN_COLOURS}` }) : null, event.text)));
  if (!metrics.length) return $("charts").replaceChildren(el("p", { class: "empty" }, "This run has no metrics yet."));
  $("charts").replaceChildren(...metrics.map((name) => chart(name,
    lines.map((run) => ({ index: run.index, events: run.events, points: (run.series[name] ?? []).map(([step, value]) => [run.x(step), value, step]) })),
    { axis: now.axis, chosen: { run: now.run, step: currentStep(now) }, onpick: (run, step) => pick(run, step), onclose: () => go({ metrics: metrics.filter((one) => one !== name) }) })));
}

// Only some steps have samples: the nearest of them is shown.
async function pick(run, step) {
  if (run !== state().run) data.steps = await ask("steps", { run });
  const kept = data.steps[state().split];
  const nearest = kept.reduce((best, one) => (best === null || Math.abs(one - step) < Math.abs(best - step) ? one : best), null);
  go({ run, step: nearest ?? step, group: null, sample: null });
}

function currentStep(now) { return now.step ?? data.steps[now.split].at(-1) ?? null; }

function move(by) {
  const now = state(), kept = data.steps[now.split], at = kept.indexOf(currentStep(now));
  const next = kept[at < 0 ? kept.length - 1 : at + by];
  if (next !== undefined) go({ step: next, group: null, sample: null });
}

function moveSample(by) {
  const now = state(), list = data.list.samples;
  const at = list.findIndex((one) => one.group === now.group && one.sample === now.sample);
  const next = list[at < 0 ? 0 : at + by];
  if (next) go({ step: next.step, group: next.group, sample: next.sample });
}

function filters(now) {
  const field = (name, label, attributes = {}) => el("label", {}, label, el("input", {
    name, value: now[name], autocomplete: "off", spellcheck: "false", ...attributes, onchange: (event) => go({ [name]: event.target.value, group: null, sample: null }) }));
  const choice = (name, label, options) => el("label", {}, label, el("select", { name, onchange: (event) => go({ [name]: event.target.value }) },
    options.map(([value, text]) => el("option", { value, selected: now[name] === value }, text))));
  return el("div", { class: "bar filters" }, field("text", "text ", { type: "search", id: "search" }),
    field("min_reward", "reward ", { class: "small", inputmode: "decimal" }), field("max_reward", "to ", { class: "small", inputmode: "decimal" }),
    field("min_tokens", "tokens ", { class: "small", inputmode: "numeric" }), field("max_tokens", "to ", { class: "small", inputmode: "numeric" }),
    choice("reason", "ended ", [["", "any"], ...data.list.reasons.map((one) => [one, visible(one)])]),
    choice("order", "order ", [["", "groups"], ["worst", "worst first"], ["best", "best first"], ["longest", "longest first"], ["shortest", "shortest first"]]));
}

// A run keeps some groups of each training step: the line says how many of how many.
function keptGroups(now) {
  const trained = data.runs[now.run]?.groups;
  const kept = new Set(data.list.samples.filter((one) => one.reason !== "error" && one.reason !== FILTERED).map((one) => one.group)).size;
  if (now.split !== "train" || !trained || kept >= trained || data.list.more || FILTERS.some((name) => name !== "order" && now[name] !== "")) return null;
  return el("p", { class: "dim" }, `${kept} of ${trained} groups are kept (samples.groups)`);
}

async function drawDetail(now) {
  const step = currentStep(now), place = $("detail"), run = now.run;
  const other = now.split === "train" ? "validation" : "train";
  const head = [el("h2", {}, step === null ? "Samples" : step === 0 && now.split === "train" ? "Before step 1" : `Step ${step}`),
    el("button", { type: "button", title: "Step before (←)", onclick: () => move(-1) }, "←"), el("button", { type: "button", title: "Step after (→)", onclick: () => move(1) }, "→"),
    el("button", { type: "button", class: "split", onclick: () => go({ split: other, step: null, group: null, sample: null }) }, now.split === "train" ? "training" : "validation"),
    step === null ? null : el("button", { type: "button", "aria-pressed": String(now.time), onclick: () => go({ time: !now.time }) }, "who waited"),
    now.group === null ? null : el("button", { type: "button", onclick: () => go({ group: null, sample: null }) }, "all groups"),
    now.group === null ? null : el("button", { type: "button", "aria-pressed": String(now.sample === null), onclick: () => go({ sample: null }) }, `group ${visible(now.group)}`),
    now.sample === null ? null : el("span", { class: "dim" }, `sample ${now.sample}`)];
  const parts = [el("div", { class: "bar" }, head)];
  if (step === null) {
    parts.push(el("p", { class: "empty" }, "No samples are kept: no step has ended yet, or spec.samples keeps none."));
    return place.replaceChildren(...parts);
  }
  const wanted = { run, split: now.split, step };
  for (const name of FILTERS) wanted[name] = now[name];
  data.list = await ask("samples", wanted, "samples");
  if (now.time) parts.push(await timelineView(run, step));
  const open = (one, sample) => go({ step: one.step, group: one.group, sample });
  const members = data.list.samples.filter((one) => one.group === now.group);
  const missing = el("p", { class: "empty" }, "No sample matches. Steps without samples were deleted to make room, or the filters leave none.");
  if (now.sample === null) parts.push(filters(now));
  if (now.group === null) {
    parts.push(keptGroups(now));
    parts.push(data.list.samples.length ? groupList(data.list.samples, open) : missing);
    if (data.list.more) parts.push(el("p", { class: "dim" }, data.list.more > 0 ? `${data.list.more} more; filter to see them` : "more match; filter to see them"));
  } else if (now.sample === null) parts.push(members.length ? await groupView(members, { run, split: now.split, open }) : missing);
  else parts.push(await sampleView({ step, group: now.group, sample: now.sample }, { run, split: now.split, tab: now.tab, colour: now.colour, choose: (change) => go(change) }));
  place.replaceChildren(...parts.filter((part) => part !== null));
}

async function show() {
  const now = state();
  const focused = document.activeElement?.getAttribute?.("name");
  try {
    const key = `${now.run}/${now.metrics}`;
    if (shown !== key) {
      [data.steps] = await Promise.all([ask("steps", { run: now.run }), loadCurves(now)]);
      shown = key;
    }
    drawRuns(now);
    drawCurves(now);
    await drawDetail(now);
    if (focused) document.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
  } catch (error) {
    if (error.name === "AbortError") return;
    $("detail").replaceChildren(el("p", { class: "error", role: "alert" }, visible(String(error.message))));
  }
  document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1);
}

async function refresh() {
  if (document.hidden) return;
  try {
    const runs = await ask("runs");
    const grown = JSON.stringify(runs) !== JSON.stringify(data.runs);
    data.runs = runs;
    if (!grown) return;
    const now = state();
    [data.steps] = await Promise.all([ask("steps", { run: now.run }), loadCurves(now)]);
    drawRuns(now);
    drawCurves(now);
  } catch { /* the server is away; the next look tells */ }
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const now = state();
  const actions = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), ArrowUp: () => moveSample(-1), ArrowDown: () => moveSample(1),
    v: () => go({ split: now.split === "train" ? "validation" : "train", step: null, group: null, sample: null }),
    t: () => go({ tab: now.tab === "tokens" ? "conversation" : "tokens" }), c: () => go({ tab: "tokens", colour: COLOURS[(COLOURS.indexOf(now.colour) + 1) % COLOURS.length] }),
    "/": () => $("search")?.focus(), "?": () => $("keys").showModal(),
    Escape: () => (now.sample !== null ? go({ sample: null }) : go({ group: null })),
  };
  if (!actions[event.key] || $("keys").open) return;
  event.preventDefault();
  actions[event.key]();
});
$("help").addEventListener("click", () => $("keys").showModal());
$("axis").addEventListener("change", (event) => go({ axis: event.target.value === "step" ? null : event.target.value }));
$("metric").addEventListener("change", (event) => {
  const name = event.target.value;
  if (names().includes(name)) { event.target.value = ""; go({ metrics: [...new Set([...chosenMetrics(state()), name])] }); }
});
addEventListener("hashchange", show);

data.runs = await ask("runs").catch(() => []);
document.title = data.runs.length === 1 ? `${visible(data.runs[0].name)} · rljob` : "rljob view";
await show();
setInterval(refresh, REFRESH_MS);
