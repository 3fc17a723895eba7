"use strict";
// The page of one or more runs. Text of models and data is only ever put into text nodes.
const $ = (id) => document.getElementById(id);
const COLOURS = ["#1a6fdf", "#d1680c", "#2a9d4a", "#a347ba", "#c43d5b", "#0e95a5", "#7a6a2f", "#6b6f76"];
const FIRST = ["train/reward", "val/accuracy", "policy/entropy", "gap/mean_abs", "val/reward", "aqn/sigma",
  "rollout/completion_tokens", "train/grad_norm"];
const NAMES = {
  "train/reward": "reward of the rollouts", "val/accuracy": "accuracy on held-out problems",
  "policy/entropy": "entropy (nats per token)", "gap/mean_abs": "sampler-trainer gap (nats)",
  "val/reward": "reward on held-out problems", "aqn/sigma": "noise sigma",
  "rollout/completion_tokens": "tokens per completion", "train/grad_norm": "norm of the gradient",
};
let summary = JSON.parse($("summary").textContent);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size > 0 && size < 1e-3 ? Number(value).toExponential(Math.min(2, digits - 1))
    : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
}
const colour = (index) => COLOURS[index % COLOURS.length];
function mark(background) {
  const node = make("i", { class: "mark" });
  node.style.background = background;
  return node;
}

// ---- theme ---------------------------------------------------------------------------------------------------------
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };

// ---- head, checks, cost, settings ----------------------------------------------------------------------------------
function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => seconds >= size);
  if (at < 0) return "0 s";
  const [[size, unit], next] = [parts[at], parts[at + 1]];
  const rest = next ? Math.floor((seconds % size) / next[0]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${next[1]}` : ""}`;
}
function rollouts(run) { return run.curves["train/reward"] ? run.curves["train/reward"][0].length : 0; }
function showState() {
  $("state").textContent = summary.runs
    .map((run) => `${run.name}: ${rollouts(run)} rollouts in ${duration(run.seconds)}${run.running ? ", running" : ""}`)
    .join(" · ");
}
function table(head, rows) {
  const cells = (tag, row) => row.map((cell, at) => make(tag, at && typeof cell !== "object" ? { class: "number" } : {}, cell));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
}
function showChecks() {
  const blocks = summary.runs.map((run) => make("div", {}, ...(summary.runs.length > 1 ? [make("h3", {}, run.name)] : []),
    make("table", {}, ...run.verdicts.map((one) => make("tr", {}, make("th", {}, one.check),
      make("td", { class: one.good === null ? "none" : one.good ? "good" : "bad" }, one.text))))));
  const names = [...new Set(summary.runs.flatMap((run) => Object.keys(run.summary)))];
  const numbers = table(["", ...summary.runs.map((run) => run.name)],
    names.map((name) => [name, ...summary.runs.map((run) => number(run.summary[name]))]));
  document.querySelector("#verdicts .body").replaceChildren(...blocks, make("h3", {}, "In numbers"), numbers);
}
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
function showCost() {
  const body = [];
  for (const run of summary.runs) {
    const phases = Object.entries(run.curves).filter(([tag]) => tag.startsWith("time/") && tag !== "time/step_s")
      .map(([tag, [, values]]) => [tag.slice(5).replace(/_s$/, ""), mean(values)]).filter(([, value]) => value)
      .sort((a, b) => b[1] - a[1]);
    const total = phases.reduce((sum, [, value]) => sum + value, 0);
    const bar = make("div", { class: "bar", role: "img", "aria-label": "share of each phase in the time of a step" });
    phases.forEach(([name, value], at) => {
      const piece = make("span", { title: `${name}: ${number(value, 3)} s per step` });
      piece.style.cssText = `width:${(100 * value) / total}%;background:${colour(at)}`;
      bar.append(piece);
    });
    const most = Object.fromEntries(Object.entries(run.curves).filter(([tag]) => tag.startsWith("memory/"))
      .map(([tag, [, values]]) => [tag.slice(7), Math.max(...values) / (tag.endsWith("_bytes") ? 2 ** 30 : 1)]));
    const memory = Object.entries(most).filter(([name]) => !name.startsWith("predicted_")).map(([name, measured]) => {
      const planned = most[`predicted_${name}`];
      return [name.replace(/_(gib|bytes)$/, "").replace(/_/g, " "), planned ? `${number(planned, 4)} GiB` : "–",
        `${number(measured, 4)} GiB`, planned ? `${number(100 * (measured / planned - 1), 2)} %` : "–"];
    });
    body.push(make("h3", {}, run.name), bar, table(["phase", "seconds per step", "share"], phases.map(([name, value], at) =>
      [make("span", {}, mark(colour(at)), name), number(value, 3), `${number((100 * value) / total, 3)} %`])));
    if (memory.length) body.push(table(["largest memory", "planned", "measured", "more than planned"], memory));
  }
  document.querySelector("#cost .body").replaceChildren(...body);
}
function showSettings() {
  const body = [];
  for (const run of summary.runs) {
    body.push(make("h3", {}, run.name));
    for (const change of run.changes) {
      body.push(make("p", {}, `Changed when the run went on (settings before: ${change.file})`),
        make("ul", {}, ...change.settings.map((line) => make("li", {}, line))));
    }
    body.push(make("details", summary.runs.length === 1 ? { open: "" } : {}, make("summary", {}, "config.yaml"),
      make("pre", { tabindex: "0" }, run.config || "no config.yaml was found")));
  }
  document.querySelector("#settings .body").replaceChildren(...body);
}

// ---- curves --------------------------------------------------------------------------------------------------------
function smoothed(values, width) {
  if (width < 2) return values;
  return values.map((_, at) => mean(values.slice(Math.max(0, at - width + 1), at + 1)));
}
function series(tag) {
  const width = Number($("smooth").value) || 1;
  const lines = summary.runs.map((run, at) => ({ run, at })).filter(({ run }) => run.curves[tag]).map(({ run, at }) =>
    ({ name: run.name, colour: colour(at), x: run.curves[tag][0], y: smoothed(run.curves[tag][1], width), arm: run.arm }));
  if (!$("bands").checked) return lines;
  const arms = new Map();
  for (const line of lines) arms.set(line.arm, [...(arms.get(line.arm) || []), line]);
  return [...arms.values()].map((group) => {
    const at = new Map();
    for (const line of group) line.x.forEach((x, i) => { if (line.y[i] !== null) at.set(x, [...(at.get(x) || []), line.y[i]]); });
    const x = [...at.keys()].sort((a, b) => a - b);
    return { name: group.length > 1 ? `${group[0].name} and ${group.length - 1} more` : group[0].name, colour: group[0].colour,
      x, y: x.map((step) => mean(at.get(step))), low: x.map((step) => Math.min(...at.get(step))),
      high: x.map((step) => Math.max(...at.get(step))) };
  });
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find((factor) => size * factor >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}
function chart(tag) {
  const lines = series(tag);
  const all = lines.flatMap((line) => [...(line.low || line.y), ...(line.high || [])]).filter((value) => value !== null);
  const log = tag.startsWith("gap/") && all.some((value) => value > 0);
  const scale = (value) => (log ? Math.log10(Math.max(value, 1e-12)) : value);
  const W = 360, H = 190, left = 44, right = 6, top = 8, bottom = 20;
  const usable = log ? all.filter((value) => value > 0) : all;
  let [low, high] = [Math.min(...usable.map(scale)), Math.max(...usable.map(scale))];
  if (!(high > low)) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const room = 0.04 * (high - low);  // so that no line lies on the frame
  [low, high] = [!log && low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  const steps = lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  const [first, last] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  const px = (x) => left + ((x - first) / (last - first)) * (W - left - right);
  const py = (y) => H - bottom - ((scale(y) - low) / (high - low)) * (H - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${NAMES[tag] || tag}: ` +
    lines.map((line) => `${line.name} from ${number(line.y[0], 3)} to ${number(line.y[line.y.length - 1], 3)}`).join(", ") });
  for (const value of ticks(low, high, 4)) {
    const y = H - bottom - ((value - low) / (high - low)) * (H - top - bottom);
    svg.append(make("line", { class: "grid", x1: left, x2: W - right, y1: y, y2: y }),
      make("text", { x: left - 4, y: y + 3, "text-anchor": "end" }, number(log ? 10 ** value : value, 3)));
  }
  for (const value of ticks(first, last, 5)) svg.append(make("text", { x: px(value), y: H - 6, "text-anchor": "middle" }, number(value)));
  const path = (xs, ys) => {
    let text = "", pen = "M";
    xs.forEach((x, i) => { if (ys[i] === null) { pen = "M"; } else { text += `${pen}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`; pen = "L"; } });
    return text;
  };
  for (const line of lines) {
    if (line.low) {
      const back = path([...line.x].reverse(), [...line.low].reverse()).replace("M", "L");
      svg.append(make("path", { class: "band", d: `${path(line.x, line.high)}${back}Z`, fill: line.colour }));
    }
    const dots = line.x.length === 1 ? "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0" : "";
    svg.append(make("path", { class: "line", d: path(line.x, line.y) + dots, stroke: line.colour }));
  }
  const cursor = make("line", { class: "cursor", y1: top, y2: H - bottom, visibility: "hidden" });
  const readout = make("output", {});
  svg.append(cursor);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * W - left) / (W - left - right) * (last - first);
    const xs = lines[0].x;
    const near = xs.reduce((best, x) => (Math.abs(x - at) < Math.abs(best - at) ? x : best), xs[0]);
    for (const [name, value] of [["x1", px(near)], ["x2", px(near)], ["visibility", "visible"]]) cursor.setAttribute(name, value);
    readout.textContent = `${near}: ${lines.map((line) => number(line.y[line.x.indexOf(near)], 4)).join(", ")}`;
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; };
  return make("figure", {}, make("figcaption", {}, make("span", { title: tag }, NAMES[tag] || tag), readout), svg);
}
function showCurves() {
  const wanted = $("tags").value.trim().toLowerCase();
  const known = [...new Set(summary.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const pinned = FIRST.filter((tag) => known.includes(tag));
  const found = known.filter((tag) => !pinned.includes(tag));
  const tags = wanted ? known.filter((tag) => tag.toLowerCase().includes(wanted)) : pinned;
  document.querySelector("#curves .charts").replaceChildren(...tags.map(chart));
  $("tags").placeholder = `all of ${known.length} curves whose name has ...`;
  const named = tags.length ? series(tags[0]) : [];
  $("legend").replaceChildren(...(summary.runs.length > 1 ? named.map((line) => {
    return make("span", {}, mark(line.colour), line.name);
  }) : []), ...(wanted && !tags.length ? [make("span", {}, `no curve has "${wanted}" in its name; there are ${found.length + pinned.length}`)] : []));
}
