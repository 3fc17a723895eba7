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
