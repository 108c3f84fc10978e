// The samples of a step: groups, one group side by side, one sample.
import { ask, el, number, visible } from "./dom.js";
import { tokenView } from "./tokens.js";

const LONG = 60000;
export const FILTERED = "filtered";  // the reason of samples of groups that dynamic sampling discarded

function rewardClass(reward, low, high) {
  if (reward === null) return "reward none";
  const share = high > low ? (reward - low) / (high - low) : 0.5;  // equal rewards have no colour
  return `reward r${Math.round(share * 4)}`;
}

function text(content, limit = LONG) {
  const shown = visible(content.length > limit ? content.slice(0, limit) : content);
  const body = el("pre", { class: "text", dir: "auto" }, shown);
  if (content.length <= limit) return body;
  const more = el("button", { type: "button", onclick: () => { body.textContent = visible(content); more.remove(); } }, `show all ${content.length.toLocaleString("en")} characters`);
  return el("div", {}, body, more);
}

export function range(samples) {
  const rewards = samples.map((one) => one.reward).filter((one) => one !== null);
  return [Math.min(...rewards), Math.max(...rewards)];
}

export function groupList(samples, open) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.step}/${sample.group}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  const [low, high] = range(samples);
  return el("div", { class: "groups" }, [...groups.values()].map((members) => {
    const first = members[0];
    const rewards = members.map((one) => one.reward).filter((reward) => reward != null);  // a failed sample has none
    const mean = rewards.length ? number(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length, 3) : "-";
    return el("article", { class: "group" },
      el("header", {}, el("a", { href: "#", class: "name", onclick: (event) => { event.preventDefault(); open(first, null); } }, `group ${first.group}`),
        el("span", { class: "dim" }, `${members.length} sample${members.length > 1 ? "s" : ""} · mean ${mean}${first.reason === FILTERED ? " · filtered, not trained" : ""}`)),
      el("pre", { class: "text preview", dir: "auto" }, visible(first.prompt)),
      el("div", { class: "chips" }, members.map((one) => el("button", {
        type: "button", class: rewardClass(one.reward, low, high), title: `${one.reason}, ${one.tokens} tokens`, onclick: () => open(one, one.sample),
      }, one.reward === null ? one.reason : number(one.reward, 3)))));
  }));
}

function facts(sample) {
  const parts = Object.entries(sample.parts).map(([name, value]) => `${visible(name)} ${number(value, 3)}`);
  const shaped = sample.shaped_reward !== null && sample.shaped_reward !== sample.reward ? `, shaped ${number(sample.shaped_reward, 3)}` : "";
  const rows = [
    ["reward", number(sample.reward) + shaped + (parts.length ? ` (${parts.join(", ")})` : "")],
    ["ended", visible(sample.reason)],
    ...(sample.filtered ? [["filtered", visible(sample.filtered)]] : []),
    ...(sample.error ? [["error", visible(sample.error)]] : []),
    ["tokens", `${sample.prompt_tokens} + ${sample.response_tokens}`],
    ["version", sample.versions[0] === sample.versions[1] ? `${sample.versions[0]}` : `${sample.versions[0]} to ${sample.versions[1]}`],
    ...Object.entries(sample.info).map(([name, value]) => [visible(name), visible(JSON.stringify(value)).slice(0, 400)]),
  ];
  return el("dl", { class: "facts" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { dir: "auto" }, value)]));
}

function conversation(sample, from = 0) {
  const shown = sample.messages.slice(from).filter((message) => message.content !== "" || message.role === "assistant");
  const why = sample.explanation ? [{ role: "explanation of the reward", content: sample.explanation }] : [];
  return [...shown, ...why].map((message) =>
    el("div", { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : "other"}` }, el("span", { class: "role" }, visible(message.role)), text(message.content)));
}

export async function groupView(members, { run, split, open }) {
  const samples = await Promise.all(members.slice(0, 16).map((one) => ask("sample", { run, split, step: one.step, group: one.group, sample: one.sample })));
  const [low, high] = range(members);
  const prompts = samples.map((sample) => sample.messages.slice(0, sample.prompt_messages));
  const shared = prompts.every((prompt) => JSON.stringify(prompt) === JSON.stringify(prompts[0]));  // programs may begin each sample differently
  return el("div", {}, shared ? el("div", { class: "prompt" }, conversation({ messages: prompts[0] })) : null,
    el("div", { class: "side" }, samples.map((sample, at) => el("article", { class: "column" },
      el("header", {}, el("button", { type: "button", class: rewardClass(sample.reward, low, high), onclick: () => open(members[at], members[at].sample) }, number(sample.reward, 3)),
        el("span", { class: "dim" }, `${visible(sample.reason)} · ${sample.response_tokens} tokens${sample.filtered ? " · filtered, not trained" : ""}`)),
      conversation(sample, shared ? sample.prompt_messages : 0)))));
}

export async function sampleView(one, { run, split, tab, colour, choose }) {
  const sample = await ask("sample", { run, split, step: one.step, group: one.group, sample: one.sample }, "sample");
  const tabs = ["conversation", "tokens"].map((name) => el("button", { type: "button", role: "tab", "aria-selected": String(tab === name), onclick: () => choose({ tab: name }) }, name));
  return el("div", { class: "sample" }, facts(sample), el("div", { class: "tabs", role: "tablist" }, tabs),
    tab === "tokens" ? tokenView(sample, colour, (value) => choose({ colour: value })) : el("div", {}, conversation(sample)));
}
