"use strict";
// The page of one or more runs. Text of models and data is only ever put into text nodes.
const $ = (id) => document.getElementById(id);
const summary = JSON.parse($("summary").textContent);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
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
function drawn(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function chart(title, lines) { // lines: [name, [steps, values]]
  const steps = lines.flatMap(([, [at]]) => at), values = lines.flatMap(([, [, of]]) => of).filter((value) => value !== null);
  const first = Math.min(...steps), last = Math.max(...steps), top = Math.max(...values), low = Math.min(1, ...values);
  const x = (step) => 40 + (440 * (step - first)) / (last - first || 1), y = (value) => 150 - (140 * (value - low)) / (top - low || 1);
  const text = (at, height, words, anchor) => drawn("text", { x: at, y: height, "text-anchor": anchor }, words);
  return make("figure", { class: "chart" }, make("figcaption", {}, title),
    drawn("svg", { viewBox: "0 0 640 175", role: "img", "aria-label": title },
      drawn("path", { class: "axes", d: "M40 10V150H480" }), text(35, 15, number(top, 3), "end"), text(35, 154, number(low, 3), "end"),
      text(40, 170, `rollout ${first}`, "start"), text(480, 170, String(last), "end"),
      ...lines.flatMap(([name, [at, of]], row) => {
        const colour = `hsl(${70 * row + 210} 65% 50%)`, known = at.map((step, index) => [step, of[index]]).filter(([, value]) => value !== null);
        return [drawn("polyline", { stroke: colour, points: known.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }),
          ...known.map(([step, value]) => drawn("circle", { fill: colour, cx: x(step), cy: y(value), r: 2 })),
          drawn("path", { stroke: colour, d: `M495 ${16 + 20 * row}h14` }), text(515, 20 + 20 * row, name, "start")];
      })));
}
function speculation(curves) {
  const sum = (tag) => (curves[tag] ? curves[tag][1].reduce((a, b) => a + b, 0) : 0);
  const classes = [1, 4, 8, 16, 32].filter((most) => curves[`speculation/tokens_${most}`]);
  return classes.length ? [
    chart("tokens per sequence in a step with drafts, by sequences in the step", classes.map((most) => [`at most ${most}`, curves[`speculation/tokens_${most}`]])),
    table(["sequences in the step, at most", "drafted", "accepted", "share"], classes.map((most) => {
      const drafted = sum(`speculation/drafted_${most}`), accepted = sum(`speculation/accepted_${most}`);
      return [String(most), number(drafted, 6), number(accepted, 6), drafted ? `${number((100 * accepted) / drafted, 3)} %` : "-"];
    }))] : [];
}
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
    ...(memory.length ? [table(["largest memory", "planned", "measured", "more than planned"], memory)] : []),
    ...speculation(run.curves)];
});
show("settings", (run) => [
  ...run.changes.flatMap((change) => [make("p", {}, `Changed when the run went on (settings before: ${change.file})`),
    make("ul", {}, ...change.settings.map((line) => make("li", {}, line)))]),
  make("details", summary.runs.length === 1 ? { open: "" } : {}, make("summary", {}, "config.yaml"),
    make("pre", { tabindex: "0" }, run.config || "no config.yaml was found"))]);
