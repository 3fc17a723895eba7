"use strict";
// The page of one or more runs. Text of models and data is only ever put into text nodes.
const $ = (id) => document.getElementById(id);
const COLOURS = ["#1a6fdf", "#d1680c", "#2a9d4a", "#a347ba", "#c43d5b", "#0e95a5", "#7a6a2f", "#6b6f76"];
const NAMES = {  // of the curves that are shown first
  "train/reward": "reward of the rollouts", "val/accuracy": "accuracy on held-out problems",
  "policy/entropy": "entropy (nats per token)", "gap/mean_abs": "sampler-trainer gap (nats)",
  "val/reward": "reward on held-out problems", "aqn/sigma": "noise sigma",
  "rollout/completion_tokens": "tokens per completion", "train/grad_norm": "norm of the gradient",
};
const summary = JSON.parse($("summary").textContent);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text"].includes(tag);
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
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
function table(head, rows) {
  const cells = (tag, row) => row.map((cell, at) => make(tag, at && typeof cell !== "object" ? { class: "number" } : {}, cell));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
}
function show(section, part) {
  document.querySelector(`#${section} .body`).replaceChildren(...summary.runs.flatMap((run) => [make("h3", {}, run.name), ...part(run)]));
}

// ---- head, checks, cost, settings ----------------------------------------------------------------------------------
function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
$("state").textContent = summary.runs
  .map((run) => `${run.name}: ${(run.curves["train/reward"] || [[]])[0].length} rollouts in ${duration(run.seconds)}${run.running ? ", running" : ""}`)
  .join(" · ");
show("verdicts", (run) => [
  make("table", {}, ...run.verdicts.map((one) => make("tr", {}, make("th", {}, one.check),
    make("td", { class: one.good === null ? "none" : one.good ? "good" : "bad" }, one.text)))),
  table(["in numbers", ""], Object.entries(run.summary).map(([name, value]) => [name, number(value)])),
  ...(run.teacher ? [
    table(["log policy / teacher, nats per token", ...run.teacher.rollouts.map((rollout) => `rollout ${rollout}`)],
      run.teacher.positions.map(([where, ...values]) => [where, ...values.map((value) => number(value, 3))])),
    table([`tokens of rollout ${run.teacher.rollouts.at(-1)}`, "number", "log policy / teacher"],
      run.teacher.tokens.map(([piece, ...values]) => [JSON.stringify(piece), ...values.map((value) => number(value, 3))]))] : [])]);
show("cost", (run) => {
  const tags = Object.entries(run.curves);
  const phases = tags.filter(([tag]) => tag.startsWith("time/") && tag !== "time/step_s")
    .map(([tag, [, values]]) => [tag.slice(5).replace(/_s$/, ""), mean(values)]).filter(([, value]) => value)
    .sort((a, b) => b[1] - a[1]);
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  const most = Object.fromEntries(tags.filter(([tag]) => tag.startsWith("memory/"))
    .map(([tag, [, values]]) => [tag.slice(7), Math.max(...values) / (tag.endsWith("_bytes") ? 2 ** 30 : 1)]));
  const memory = Object.entries(most).filter(([name]) => !name.startsWith("predicted_")).map(([name, measured]) => {
    const planned = most[`predicted_${name}`];
    return [name.replace(/_(gib|bytes)$/, "").replace(/_/g, " "), planned ? `${number(planned, 4)} GiB` : "–",
      `${number(measured, 4)} GiB`, planned ? `${number(100 * (measured / planned - 1), 2)} %` : "–"];
  });
  return [table(["phase", "seconds per step", "share"], phases.map(([name, value]) =>
    [name, number(value, 3), `${number((100 * value) / total, 3)} %`])),
    ...(memory.length ? [table(["largest memory", "planned", "measured", "more than planned"], memory)] : [])];
});
show("settings", (run) => [
  ...run.changes.flatMap((change) => [make("p", {}, `Changed when the run went on (settings before: ${change.file})`),
    make("ul", {}, ...change.settings.map((line) => make("li", {}, line)))]),
  make("details", summary.runs.length === 1 ? { open: "" } : {}, make("summary", {}, "config.yaml"),
    make("pre", { tabindex: "0" }, run.config || "no config.yaml was found"))]);

// ---- curves --------------------------------------------------------------------------------------------------------
function chart(tag) {
  const lines = summary.runs.map((run, at) => ({ name: run.name, colour: COLOURS[at % COLOURS.length], points: run.curves[tag] }))
    .filter((line) => line.points).map(({ points: [x, y], ...line }) => ({ ...line, x, y }));
  const known = lines.flatMap((line) => line.y).filter((value) => value !== null);
  const log = tag.startsWith("gap/") && known.some((value) => value > 0);
  const scale = (value) => (log ? Math.log10(Math.max(value, 1e-12)) : value);
  const W = 360, H = 190, left = 44, right = 6, top = 8, bottom = 20;
  const usable = (log ? known.filter((value) => value > 0) : known).map(scale);
  let [low, high] = [Math.min(...usable), Math.max(...usable)];
  if (!(high > low)) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const steps = lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const px = (x) => left + ((x - first) / (last - first)) * (W - left - right);
  const py = (y) => H - bottom - ((scale(y) - low) / (high - low)) * (H - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${NAMES[tag] || tag}: ` +
    lines.map((line) => `${line.name} from ${number(line.y[0], 3)} to ${number(line.y[line.y.length - 1], 3)}`).join(", ") });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const value = low + share * (high - low), y = H - bottom - share * (H - top - bottom);
    svg.append(make("line", { class: "grid", x1: left, x2: W - right, y1: y, y2: y }),
      make("text", { x: left - 4, y: y + 3, "text-anchor": "end" }, number(log ? 10 ** value : value, 3)));
  }
  for (const step of [first, Math.round((first + last) / 2), last]) {
    svg.append(make("text", { x: px(step), y: H - 6, "text-anchor": step === last ? "end" : "middle" }, number(step)));
  }
  for (const line of lines) {
    let path = "", pen = "M";
    line.x.forEach((x, at) => {
      if (line.y[at] === null) { pen = "M"; return; }
      path += `${pen}${px(x).toFixed(1)} ${py(line.y[at]).toFixed(1)}`;
      pen = "L";
    });
    const dot = line.x.length === 1 ? "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0" : "";
    svg.append(make("path", { class: "line", d: path + dot, stroke: line.colour }));
  }
  const readout = make("output", {});
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * W - left) / (W - left - right) * (last - first);
    const near = lines[0].x.reduce((best, x) => (Math.abs(x - at) < Math.abs(best - at) ? x : best));
    readout.textContent = `${near}: ${lines.map((line) => number(line.y[line.x.indexOf(near)], 4)).join(", ")}`;
  };
  return make("figure", {}, make("figcaption", {}, make("span", { title: tag }, NAMES[tag] || tag), readout), svg);
}
function showCurves() {
  const wanted = $("tags").value.trim().toLowerCase();
  const known = [...new Set(summary.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const tags = wanted ? known.filter((tag) => tag.toLowerCase().includes(wanted)) : Object.keys(NAMES).filter((tag) => known.includes(tag));
  document.querySelector("#curves .charts").replaceChildren(...tags.map(chart));
  $("tags").placeholder = `all of ${known.length} curves whose name has ...`;
  $("legend").replaceChildren(...summary.runs.map((run, at) => {
    const mark = make("i", { class: "mark" });
    mark.style.background = COLOURS[at % COLOURS.length];
    return make("span", {}, mark, run.name);
  }));
  if (!tags.length) $("legend").append(`no curve has "${wanted}" in its name`);
}
