"use strict";
// The page of the report: plain DOM, charts by uPlot. Text from runs is only ever set as textContent.

const COLORS = ["#2563c9", "#d4552a", "#1a8a5a", "#8a4fc4", "#b07c00", "#c0387a", "#0f8a99", "#6b7280"];
// Beyond these, hues a golden angle apart, with dashed lines.
const colorOf = (i) => COLORS[i] || `hsl(${((i * 137.508) % 360).toFixed(0)}, 62%, 47%)`;
const PAGE_OF_GROUPS = 50;
const KEY_METRICS = [
  "reward/mean", "evaluate/accuracy", "evaluate/reward", "loss/total", "loss/sft", "loss/reward_model", "actor/entropy", "actor/approx_kl",
  "kl/mean", "rollout/response_length_mean", "rollout/truncated_fraction", "actor/grad_norm", "rollout/logprob_diff_mean", "timing/step_s",
];
const NOT_PHASES = new Set(["timing/step_s", "timing/tokens_per_s", "timing/unix_time"]);
const STATES = { good: "✓ good", watch: "! watch", bad: "✗ bad", unknown: "– not reported" };

let data = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(data.runs.map((_, i) => i));
const view = { tab: "Health", smoothing: 0, axis: "step", metric: "", config: "", all: false, seeds: data.seeds.length > 0 };
const wanted = { colour: "", run: 0, from: "", to: "", least: "", most: "", shortest: "", longest: "", text: "", order: "newest first", failed: false };
let limit = PAGE_OF_GROUPS;

// ---- small tools
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}
function table(head, rows) {
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => {
    const found = cell instanceof Node && cell.tagName === "TD" ? cell : make("td", {}, cell);
    found.dataset.label = head[i];  // what a narrow screen shows in the place of the head
    return found;
  })));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))), make("tbody", {}, ...body)));
}
const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
const amount = (text) => make("td", { class: "number" }, text);
const empty = (text) => make("p", { class: "empty" }, text);
const chosen = () => data.runs.map((run, i) => ({ run, color: colorOf(i), dash: i < COLORS.length ? undefined : [8, 4], i })).filter(({ i }) => shown.has(i));

// ---- charts
function smooth(values, share) {
  if (!share) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : share * mean + (1 - share) * value;
    return mean;
  });
}
function xs(run) {
  const times = run.metrics["timing/unix_time"];
  if (view.axis === "hours" && times) {
    const first = times.find((time) => time !== null);
    return times.map((time) => (time === null ? null : (time - first) / 3600));
  }
  return run.metrics.step;
}
function joined(series) {
  // One ascending x for all runs; a run has null where it has no value.
  const tables = series.map(({ x, y }) => {
    const pairs = x.map((at, i) => [at, y[i]]).filter(([at]) => at !== null).sort((a, b) => a[0] - b[0]);
    return [pairs.map((pair) => pair[0]), pairs.map((pair) => pair[1] ?? null)];
  });
  return uPlot.join(tables);
}
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function draw(box, lines, options = {}) {
  const stroke = style("--faint"), grid = { stroke: style("--line"), width: 1 };
  const width = Math.max(box.clientWidth - 18, 240);
  const whole = view.axis === "step" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] } : {};
  const axes = [{ stroke, grid, ticks: grid, ...whole }, { stroke, grid, ticks: grid, size: 62, values: (_, splits) => splits.map((v) => (v === null ? "" : number(v, 3))) }];
  const series = [{ label: view.axis }, ...lines.map(({ label, color, fill, dash, width }) => ({ label, stroke: color, fill, dash, width: width ?? 1.6, spanGaps: true, points: { show: lines[0].x.length < 3 }, value: (_, v) => number(v) }))];
  // Of values that are all the same: a share that is 0 throughout is seen just above the bottom of an axis that ends at 1.
  const flat = (value) => (value === 0 ? [-0.05, 1] : [value - Math.abs(value) / 10, value + Math.abs(value) / 10]);
  const range = (_, low, high) => (low === null ? [0, 1] : low === high ? flat(low) : uPlot.rangeNum(low, high, 0.1, true));
  return new uPlot({ width, height: options.height || 180, scales: { x: { time: false }, y: { range } }, axes, series, cursor: { sync: { key: "report" } }, bands: options.bands, legend: { live: true } }, joined(lines), box);
}
const lazily = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    lazily.unobserve(entry.target);
    entry.target.drawChart();
  }
}, { rootMargin: "300px" });
// Runs that differ in their seeds alone, as one line with a band from the lowest of them to the highest, by step.
function banded(members, name) {
  const rows = new Map();
  for (const { run } of members) {
    const values = smooth(run.metrics[name], view.smoothing);
    run.metrics.step.forEach((step, i) => { if (values[i] !== null && values[i] !== undefined) rows.set(step, [...(rows.get(step) || []), values[i]]); });
  }
  const x = [...rows.keys()].sort((a, b) => a - b), { color, dash, run } = members[0];
  const line = (label, width, of) => ({ label, color, dash, width, x, y: x.map((step) => of(rows.get(step))) });
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return [line(`${run.name}, mean of ${members.length} seeds`, 1.8, mean), line("highest", 0, (values) => Math.max(...values)), line("lowest", 0, (values) => Math.min(...values))];
}
function metricChart(name) {
  let entries = chosen().filter(({ run }) => run.metrics[name]);
  const lines = [], bands = [];
  for (const group of view.seeds && view.axis === "step" ? data.seeds : []) {
    const members = entries.filter(({ i }) => group.includes(i));
    if (members.length < 2) continue;
    entries = entries.filter((entry) => !members.includes(entry));
    const at = lines.length + 1;  // the first series is that of x
    lines.push(...banded(members, name));
    bands.push({ series: [at + 1, at + 2], fill: `color-mix(in srgb, ${members[0].color} 22%, transparent)` });
  }
  lines.push(...entries.map(({ run, color, dash }) => ({ label: run.name, color, dash, x: xs(run), y: smooth(run.metrics[name], view.smoothing) })));
  const box = make("div", { class: "chart", "data-metric": name }, make("h3", {}, name));
  box.drawChart = () => draw(box, lines, { bands });
  lazily.observe(box);
  return box;
}
function metricNames() {
  const names = new Set(chosen().flatMap(({ run }) => Object.keys(run.metrics)));
  for (const name of ["step", "timing/unix_time"]) names.delete(name);
  return [...names].sort();
}
function smoothingControls() {
  const out = make("span", {}, view.smoothing.toFixed(2));
  return [
    make("label", {}, "smoothing ", make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, id: "smoothing", oninput: (e) => { out.textContent = Number(e.target.value).toFixed(2); }, onchange: (e) => { view.smoothing = Number(e.target.value); show(); } }), out),
    make("label", {}, "over ", make("select", { id: "axis", onchange: (e) => { view.axis = e.target.value; show(); } }, ...["step", "hours"].map((name) => make("option", { value: name, selected: view.axis === name }, name)))),
    data.seeds.length ? make("label", {}, make("input", { type: "checkbox", id: "seeds", checked: view.seeds, onchange: (e) => { view.seeds = e.target.checked; show(); } }), "seeds as mean and band") : "",
  ];
}

// ---- tabs
const lastOf = (run, name) => { if (name in run.not_finite) return "NaN"; const values = (run.metrics[name] || []).filter((value) => value !== null); return values.length ? number(values[values.length - 1]) : "–"; };
// All runs with their last numbers, side by side.
function runsTable() {
  const names = ["final/accuracy", ...KEY_METRICS].filter((name) => chosen().some(({ run }) => run.metrics[name]));
  const rows = chosen().map(({ run, color, i }) => {
    const worst = run.verdicts[0], link = data.links ? make("a", { href: data.links[i] }, run.name) : run.name;
    const steps = run.metrics.step;
    return [make("td", {}, make("span", { class: "swatch", style: `background:${color}` }), " ", link), amount(number(steps[steps.length - 1])), make("td", { class: `state ${worst.state}`, title: worst.rule }, STATES[worst.state]), ...names.map((name) => amount(lastOf(run, name)))];
  });
  return table(["run", "step", "health", ...names], rows);
}
function healthTab() {
  const parts = [];
  if (data.runs.length > 1) parts.push(make("h2", {}, "Runs ", make("span", { class: "faint" }, "the last number of each")), runsTable());
  for (const { run, color } of chosen()) {
    const steps = run.metrics.step;
    parts.push(make("h2", {}, make("span", { class: "swatch", style: `background:${color}` }), ` ${run.name} `, make("span", { class: "faint" }, `${steps.length ? `step ${steps[steps.length - 1]}` : "no step yet"} · ${run.path} · checkpoints: ${run.checkpoints.join(", ") || "none"}`)));
    const rows = (state) => run.verdicts.filter((v) => v.state === state).map((v) => [make("td", { class: `state ${v.state}` }, STATES[v.state]), make("td", { title: v.metric }, v.rule), v.value, make("td", { class: "faint" }, v.meaning), v.remedy]);
    const head = ["", "what", "value", "meaning", "what to do"], troubles = [...rows("bad"), ...rows("watch")], good = rows("good");
    if (troubles.length) parts.push(table(head, troubles));
    if (good.length) parts.push(make("details", { open: !troubles.length && data.runs.length === 1 }, make("summary", { class: "state good" }, `${counted(good.length, "figure")} in the healthy range`), table(head.slice(0, 4), good.map((row) => row.slice(0, 4)))));
    const rest = run.verdicts.filter((verdict) => verdict.state === "unknown").map((verdict) => verdict.rule);
    if (rest.length && data.runs.length < 4) parts.push(make("p", { class: "faint" }, `not reported by this run: ${rest.join(", ")}`));
  }
  const names = metricNames();
  parts.push(make("h2", {}, "Curves"), make("div", { class: "controls" }, ...smoothingControls()), make("div", { class: "charts" }, ...KEY_METRICS.filter((name) => names.includes(name)).map(metricChart)));
  return parts;
}
function chartsTab() {
  const box = make("div");
  const fill = () => {
    const names = metricNames().filter((name) => name.includes(view.metric.trim()));
    const groups = new Map();
    for (const name of names) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    box.replaceChildren(...[...groups].flatMap(([group, members]) => [make("h2", {}, group), make("div", { class: "charts" }, ...members.map(metricChart))]));
    if (!names.length) box.append(empty("no metric has this in its name"));
  };
  const filter = make("input", { type: "search", id: "metric-filter", placeholder: "part of a metric's name", value: view.metric, oninput: (e) => { view.metric = e.target.value; fill(); } });
  fill();
  return [make("div", { class: "controls" }, filter, ...smoothingControls()), box];
}
function phasesOf(run) {
  return Object.keys(run.metrics).filter((name) => /^timing\/.*_s$/.test(name) && !NOT_PHASES.has(name));
}
function timeTab() {
  const parts = [];
  for (const { run } of chosen()) {
    const sums = phasesOf(run).map((name) => [name, run.metrics[name].reduce((sum, value) => sum + (value || 0), 0)]).sort((a, b) => b[1] - a[1]);
    const total = sums.reduce((sum, [, seconds]) => sum + seconds, 0);
    if (!total) continue;
    const steps = run.metrics.step.length;
    const color = new Map(sums.map(([name], i) => [name, colorOf(i)]));
    parts.push(make("h2", {}, `${run.name}: where the time goes`));
    parts.push(table(["phase", "seconds a step", "share", "of the whole"], sums.map(([name, seconds]) => [name.slice(7, -2).replaceAll("_", " "), amount(number(seconds / steps, 3)), amount(`${(100 * seconds / total).toFixed(1)} %`), make("div", { class: "bar", style: `width:${(300 * seconds / total).toFixed(0)}px;background:${color.get(name)}` })])));
    const box = make("div", { class: "chart", style: "margin-top:12px" }, make("h3", {}, "seconds of a step, phases stacked"));
    const x = xs(run);
    let below = x.map(() => 0);
    const stacked = [...sums].map(([name]) => {
      below = below.map((value, i) => value + (run.metrics[name][i] || 0));
      return { label: name.slice(7, -2), color: color.get(name), fill: color.get(name), x, y: below };
    }).reverse();
    box.drawChart = () => draw(box, stacked, { height: 260 });
    lazily.observe(box);
    parts.push(box);
  }
  const others = metricNames().filter((name) => /tokens_per_s|prefix_hit|tflops|mfu|^memory\//.test(name));
  if (others.length) parts.push(make("h2", {}, "Throughput and memory"), make("div", { class: "charts" }, ...others.map(metricChart)));
  return parts.length ? parts : [empty("no times yet")];
}

// ---- rollouts
const lengthOf = (sample) => sample.num_tokens ?? 0;
function fits(sample, group) {
  const between = (value, least, most) => (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
  if (!between(sample.score ?? 0, wanted.least, wanted.most) || !between(lengthOf(sample), wanted.shortest, wanted.longest)) return false;
  if (wanted.failed && !sample.failure) return false;
  const text = wanted.text.toLowerCase();
  return !text || [sample.response, group.prompt, ...(sample.turns || []).map((turn) => turn.text), ...(sample.episode ? sample.episode.nodes : []).flatMap((node) => [node.context, node.said])].some((part) => (part || "").toLowerCase().includes(text));
}
function matching() {
  const run = data.runs[wanted.run];
  const found = [];
  for (const group of run.groups) {
    if ((wanted.from !== "" && group.step < Number(wanted.from)) || (wanted.to !== "" && group.step > Number(wanted.to))) continue;
    const samples = group.samples.filter((sample) => fits(sample, group));
    if (samples.length) found.push({ group, samples: new Set(samples), count: samples.length });
  }
  const mean = ({ group }) => group.samples.reduce((sum, sample) => sum + (sample.score || 0), 0) / group.samples.length;
  const spread = ({ group }) => Math.max(...group.samples.map((s) => s.score || 0)) - Math.min(...group.samples.map((s) => s.score || 0));
  const longest = ({ group }) => Math.max(...group.samples.map(lengthOf));
  const order = { step: null, "newest first": (a, b) => b.group.step - a.group.step, "worst reward first": (a, b) => mean(a) - mean(b), "best reward first": (a, b) => mean(b) - mean(a), "mixed groups first": (a, b) => spread(b) - spread(a), "longest first": (a, b) => longest(b) - longest(a) }[wanted.order];
  return order ? found.sort(order) : found;
}
function marked(text) {
  const node = make("div", { class: "text" });
  const part = wanted.text.toLowerCase();
  if (!part) { node.textContent = text; return node; }
  let at = 0;
  for (let next; (next = text.toLowerCase().indexOf(part, at)) >= 0; at = next + part.length) {
    node.append(text.slice(at, next), make("mark", {}, text.slice(next, next + part.length)));
  }
  node.append(text.slice(at));
  return node;
}
// The tokens that the policy sampled, over a scale of their group: red below zero, green above.
function coloured(sample, largest) {
  const node = make("div", { class: "text tokens" });
  sample.tokens.forEach((token, i) => {
    const value = sample[wanted.colour][i], share = Math.min(1, Math.abs(value ?? 0) / (largest || 1));
    const colour = value < 0 ? "214, 62, 62" : "46, 160, 87";
    node.append(make("span", { style: `background: rgba(${colour}, ${(0.75 * share).toFixed(2)})`, title: `advantage ${number(sample.advantages[i])}, logprob difference ${number(sample.logprob_differences[i])}` }, token || "\u25aa"));
  });
  return node;
}
// The turns of an episode: one after the other, and indented where the history branches.
function episodeTree(episode, turns) {
  const rewards = turns.filter((turn) => turn.writer === "policy").map((turn) => turn.reward);
  const nodes = episode.nodes, isLinear = nodes.every((node, place) => node.parent === (place ? place - 1 : null));
  const children = (parent) => nodes.map((node, place) => place).filter((place) => nodes[place].parent === parent);
  const seconds = (from, to) => (to === null || to === undefined ? "" : `${number(to - from, 2)} s`);
  const turnOf = (place) => {
    const node = nodes[place], reward = isLinear && rewards[place] ? `reward ${number(rewards[place])}` : "";
    const facts = [`turn ${place + 1}`, seconds(node.begun_s, node.ended_s), `${node.num_tokens} tokens`, node.num_cached === null ? "" : `${node.num_cached} cached`, node.finish_reason === "stop" ? "" : node.finish_reason, reward].filter(Boolean).join(" · ");
    const context = node.parent === null && isLinear || !node.context ? [] : [make("details", { class: "environment" }, make("summary", {}, `${node.num_context} tokens before`), marked(node.context))];
    const calls = node.calls.filter((call) => call.name !== "step" || call.arguments);
    return [...context, make("details", { open: true }, make("summary", {}, facts), marked(node.said), ...calls.map((call) => make("div", { class: "call" }, `${call.name} ${call.arguments}`, make("span", { class: "faint" }, ` · ${seconds(call.begun_s, call.ended_s) || "no result"}`))))];
  };
  const below = (parent) => {
    const parts = [];
    let places = children(parent);
    while (places.length === 1) {
      parts.push(...turnOf(places[0]));
      places = children(places[0]);
    }
    return [...parts, ...places.map((place, number) => make("div", { class: "branch" }, make("div", { class: "faint" }, `branch ${number + 1} of ${places.length}`), ...turnOf(place), ...below(place)))];
  };
  const spent = `${number(episode.seconds, 2)} s: engine ${number(episode.engine_s, 2)}, tools ${number(episode.tools_s, 2)}, waiting ${number(episode.waiting_s, 2)}`;
  return [make("div", { class: "faint" }, `${counted(nodes.length, "turn")} · ${spent}`), ...below(null)];
}
function sampleCard(sample, fitsFilter, largest) {
  const facts = [`${lengthOf(sample)} tokens`, sample.finish_reason, sample.failure, sample.policy_version === undefined ? null : `policy ${sample.policy_version}`].filter(Boolean).join(" · ");
  const parts = Object.entries(sample.parts || {});
  const texts = wanted.colour && sample.tokens ? [coloured(sample, largest)] : sample.episode && sample.episode.nodes.length ? episodeTree(sample.episode, sample.turns || []) : sample.turns && sample.turns.length ? sample.turns.map((turn) => make("details", { open: turn.writer === "policy", class: turn.writer === "policy" ? "" : "environment" }, make("summary", {}, turn.writer, turn.reward ? ` · reward ${number(turn.reward)}` : ""), marked(turn.text || ""))) : [marked(sample.response || "")];
  return make("div", { class: `sample${fitsFilter ? "" : " hidden-by-filter"}` }, make("div", {}, make("span", { class: "score" }, `reward ${number(sample.score)}`), make("span", { class: "faint" }, ` · ${facts}`)), parts.length > 1 ? make("div", { class: "faint" }, parts.map(([name, value]) => `${name} ${number(value)}`).join(", ")) : null, ...texts);
}
// The images of a prompt, as far as the page holds them.
function pictures(group) {
  const digests = group.images || [], held = data.runs[wanted.run].images;
  if (!digests.length) return null;
  const shown = digests.filter((digest) => held[digest]).map((digest, i) => make("img", { src: held[digest], alt: `image ${i + 1}`, title: digest }));
  const rest = digests.length - shown.length;
  return make("div", { class: "pictures" }, ...shown, rest ? make("span", { class: "faint" }, `${counted(rest, "image")} not in this page`) : null);
}
function groupRow({ group, samples, count }) {
  const scores = group.samples.map((sample) => sample.score || 0);
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  const node = make("details", { class: "group" }, make("summary", {}, make("span", { class: "faint" }, `step ${group.step}`), make("span", { class: "score" }, number(mean, 3)), make("span", { class: "prompt" }, (group.prompt || "").replaceAll("\n", " ")), make("span", { class: "faint" }, `${count} of ${group.samples.length} samples`)));
  node.addEventListener("toggle", () => {
    if (!node.open || node.children.length > 1) return;
    const gold = group.ground_truth;
    const largest = wanted.colour ? Math.max(0, ...group.samples.map((sample) => (sample[wanted.colour] || []).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0))) : 0;
    node.append(make("div", { class: "inside" }, make("div", { class: "faint" }, `prompt ${group.prompt_id}`), marked(group.prompt || ""), pictures(group), gold === null || gold === undefined ? null : make("div", {}, make("span", { class: "faint" }, "ground truth "), typeof gold === "string" ? gold : JSON.stringify(gold)), make("div", { class: "samples" }, ...group.samples.map((sample) => sampleCard(sample, samples.has(sample), largest)))));
  });
  return node;
}
function rolloutsTab() {
  const list = make("div", { id: "groups" }), count = make("p", { class: "faint", id: "count" });
  const fill = () => {
    const found = matching(), run = data.runs[wanted.run];
    const samples = found.reduce((sum, entry) => sum + entry.count, 0), held = run.groups.reduce((sum, group) => sum + group.samples.length, 0);
    count.textContent = `${counted(samples, "rollout")} in ${counted(found.length, "group")}` + (held < run.num_rollouts ? ` · this page holds ${held} of the run's ${run.num_rollouts}: those of the first and of the newest steps` : "");
    list.replaceChildren(...found.slice(0, limit).map(groupRow));
    if (found.length > limit) list.append(make("button", { class: "plain", id: "more", onclick: () => { limit += PAGE_OF_GROUPS; fill(); } }, `show more (${counted(found.length - limit, "group")})`));
    if (!found.length) list.append(empty(run.groups.length ? "nothing fits these filters" : data.links && run.num_rollouts ? "the page of this run alone has its rollouts: Health, Runs" : "this run has written no rollouts (logging.rollouts_every)"));
  };
  const field = (name, label, type = "number") => make("label", {}, label, make("input", { type, id: `filter-${name}`, step: "any", value: wanted[name], oninput: (e) => { wanted[name] = e.target.value; limit = PAGE_OF_GROUPS; fill(); } }));
  const choice = (name, label, values, texts = values) => make("label", {}, label, make("select", { id: `filter-${name}`, onchange: (e) => { wanted[name] = name === "run" ? Number(e.target.value) : e.target.value; limit = PAGE_OF_GROUPS; fill(); } }, ...values.map((value, i) => make("option", { value, selected: String(wanted[name]) === String(value) }, texts[i]))));
  const hasTokens = data.runs.some((run) => run.groups.some((group) => group.samples.some((sample) => sample.tokens)));
  const controls = make("div", { class: "controls" }, data.runs.length > 1 ? choice("run", "run ", data.runs.map((_, i) => i), data.runs.map((run) => run.name)) : null, field("text", "text ", "search"), field("from", "steps "), field("to", "to "), field("least", "reward "), field("most", "to "), field("shortest", "tokens "), field("longest", "to "), choice("order", "order ", ["newest first", "step", "worst reward first", "best reward first", "mixed groups first", "longest first"]), make("label", {}, make("input", { type: "checkbox", id: "filter-failed", checked: wanted.failed, onchange: (e) => { wanted.failed = e.target.checked; fill(); } }), "failures only"), hasTokens ? choice("colour", "colour tokens by ", ["", "advantages", "logprob_differences"], ["nothing", "advantage", "logprob difference"]) : null);
  fill();
  return [controls, count, list];
}
function configTab() {
  const runs = chosen().map(({ run }) => run), box = make("div");
  const fill = () => {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
    const part = view.config.trim();
    const rows = keys.filter((key) => (view.all || data.runs.length < 2 || data.different.includes(key)) && key.includes(part));
    const value = (run, key) => (key in run.config ? (run.config[key] === null ? "null" : String(run.config[key])) : "–");
    box.replaceChildren(rows.length ? table(["key", ...runs.map((run) => run.name)], rows.map((key) => [key, ...runs.map((run) => value(run, key))])) : empty(data.runs.length > 1 && !view.all ? "the configurations are the same" : "no such key"));
  };
  const filter = make("input", { type: "search", id: "config-filter", placeholder: "part of a key", value: view.config, oninput: (e) => { view.config = e.target.value; fill(); } });
  const all = data.runs.length > 1 ? make("label", {}, make("input", { type: "checkbox", id: "config-all", checked: view.all, onchange: (e) => { view.all = e.target.checked; fill(); } }), "also what is the same") : null;
  fill();
  const packages = [...new Set(runs.flatMap((run) => Object.keys(run.software)))];
  const software = packages.length ? [make("h2", {}, "Software, as the last checkpoint names it"), table(["package", ...runs.map((run) => run.name)], packages.map((name) => [name, ...runs.map((run) => run.software[name] || "–")]))] : [];
  return [make("div", { class: "controls" }, filter, all), box, ...software];
}

const TABS = { Health: healthTab, Charts: chartsTab, Time: timeTab, Rollouts: rolloutsTab, Configuration: configTab };
function show() {
  document.getElementById("tabs").replaceChildren(...Object.keys(TABS).map((name) => make("button", { role: "tab", "aria-selected": String(view.tab === name), onclick: () => { view.tab = name; location.hash = name; show(); } }, name)));
  document.getElementById("runs").replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map((run, i) => make("label", {}, make("input", { type: "checkbox", checked: shown.has(i), onchange: (e) => { if (e.target.checked) shown.add(i); else shown.delete(i); show(); } }), make("span", { class: "swatch", style: `background:${colorOf(i)}` }), run.name))));
  document.getElementById("main").replaceChildren(...(shown.size || view.tab === "Rollouts" ? TABS[view.tab]() : [empty("no run is chosen")]));
}
if (location.hash.slice(1) in TABS) view.tab = location.hash.slice(1);
show();

// ---- a page that is served by `rlhf-mcore watch` asks for newer data; what is being read stays as it is
if (document.body.dataset.live === "true") {
  setInterval(async () => {
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": data.tag || "" } });
      if (answer.status !== 200) return;
      const before = data.runs.length;
      data = { ...(await answer.json()), tag: answer.headers.get("ETag") };
      for (let i = before; i < data.runs.length; i++) shown.add(i);  // runs that have begun
      if (view.tab !== "Rollouts") show();
    } catch (error) {
      document.title = `(not connected) ${document.title.replace("(not connected) ", "")}`;
    }
  }, 5000);
}
