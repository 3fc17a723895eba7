// ---- completions ---------------------------------------------------------------------------------------------------
const ITEM = 52;
const COLOURINGS = ["log-probability", "entropy", "gap", "teacher", "advantage", "none"];
const KEY = {
  "log-probability": "the redder, the less probable; full colour at -4.5 nats and below",
  entropy: "the stronger, the less sure the policy was; full colour at 1.9 nats and above",
  gap: "red where the token is more probable in the trainer than in the sampler, blue where less; full colour at 0.23 nats",
  teacher: "red where the token is more probable for the teacher than for the policy, blue where less; full colour at 1.5 nats",
  advantage: "red where the whole completion is encouraged, blue where it is discouraged; full colour at 1.5",
  none: "",
};
const rows = [];
let shown = [], chosen = -1, colouring = 0;
function addBlock(block) {
  const pieces = block.pieces || null;
  for (const row of block.rows) {
    rows.push({ ...row, run: block.run, stage: block.stage, step: block.step, pieces, order: rows.length,
      all: [row.p, row.c, row.a, ...Object.values(row.y)].join("\n").toLowerCase() });
  }
}
function options(select, values, label) {
  const old = select.value;
  select.replaceChildren(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, label(value))));
  select.value = values.map(String).includes(old) ? old : "";
}
function stepsOf() {
  return [...new Set(rows.filter((row) => row.stage === ($("stage").value || row.stage)).map((row) => row.step))].sort((a, b) => a - b);
}
function showFilters() {
  options($("run"), summary.runs.map((_, at) => at), (at) => summary.runs[at].name);
  options($("stage"), [...new Set(rows.map((row) => row.stage))], (stage) => stage);
  $("step").max = stepsOf().length - 1;
}
function filter() {
  const text = $("search").value.toLowerCase(), run = $("run").value, stage = $("stage").value;
  const steps = stepsOf(), at = Number($("step").value), step = at >= 0 ? steps[at] : null;
  $("stepname").textContent = step === null || step === undefined ? "all" : String(step);
  $("list").scrollTop = 0;
  shown = rows.filter((row) => (run === "" || row.run === Number(run)) && (stage === "" || row.stage === stage) &&
    (at < 0 || row.step === step) && (!text || row.all.includes(text)));
  const [key, way] = $("sort").value.split("-");
  if (key !== "order") {
    const field = { reward: "w", advantage: "v", length: "n" }[key], sign = way === "up" ? 1 : -1;
    const value = (row) => row[field] ?? null;  // rows without the number come last
    shown.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)) || a.order - b.order);
  }
  const scored = shown.filter((row) => row.w !== null);
  $("count").textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions` +
    (scored.length ? `, mean reward ${number(mean(scored.map((row) => row.w)), 3)}` : "") +
    (summary.note ? `. ${summary.note}` : "");
  $("spacer").style.height = `${shown.length * ITEM}px`;
  chosen = shown.length ? 0 : -1;
  drawList();
  drawDetail();
}
function drawList() {
  const list = $("list"), from = Math.max(0, Math.floor(list.scrollTop / ITEM) - 5);
  const to = Math.min(shown.length, from + Math.ceil(list.clientHeight / ITEM) + 10);
  $("spacer").replaceChildren(...shown.slice(from, to).map((row, offset) => {
    const at = from + offset;
    const reward = row.w === null ? "not scored" : `reward ${number(row.w, 3)}`;
    const advantage = row.v === undefined ? "" : ` · advantage ${number(row.v, 3)}`;
    const item = make("div", { class: "item", role: "option", id: `item-${at}`, "aria-selected": at === chosen },
      make("div", {}, `${row.stage} ${row.step} · ${reward}${advantage} · ${row.n} tokens${row.f ? "" : " · cut off"}`),
      make("div", {}, row.c.slice(0, 160)));
    item.style.top = `${at * ITEM}px`;
    item.onclick = () => choose(at);
    return item;
  }));
  if (chosen >= 0) list.setAttribute("aria-activedescendant", `item-${chosen}`);
}
function choose(at) {
  if (!shown.length) return;
  chosen = Math.min(shown.length - 1, Math.max(0, at));
  const list = $("list"), top = chosen * ITEM;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ITEM > list.scrollTop + list.clientHeight) list.scrollTop = top + ITEM - list.clientHeight;
  drawList();
  drawDetail();
}
function decode(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Kind(bytes.buffer);
}
function background(kind, value) {
  const mix = (name, share) => `rgba(var(--${name}), ${Math.min(0.75, Math.max(0, share)).toFixed(3)})`;
  if (kind === "log-probability") return mix("hot", -value / 6);
  if (kind === "entropy") return mix("plain", value / 2.5);
  return value < 0 ? mix("cold", -value / (kind === "gap" ? 0.3 : 2)) : mix("hot", value / (kind === "gap" ? 0.3 : 2));
}
function tokens(row) {
  const kind = COLOURINGS[colouring];
  const text = make("div", { class: "text" });
  if (!row.t) { text.append(row.c); return text; }
  const ids = decode(row.t, Uint32Array), numbers = ["l", "e", "g", "q"].map((key) => row[key] && decode(row[key], Int16Array));
  ids.forEach((id, at) => {
    const [l, e, g, q] = numbers.map((values) => values && values[at] / 1000);
    const value = { "log-probability": l, entropy: e, gap: g, teacher: q, advantage: row.v }[kind];
    const title = `log-probability ${l}, entropy ${e}, gap ${g}${q === undefined ? "" : `, teacher ${q}`} nats`;
    const span = make("span", { title }, row.pieces[id]);
    if (value !== undefined) span.style.background = background(kind, value);
    text.append(span);
  });
  return text;
}
const has = (row, name) => name !== "teacher" || row.q !== undefined;
function drawDetail() {
  const row = shown[chosen];
  if (!row) { $("detail").replaceChildren(make("p", {}, rows.length ? "No completion matches." : "This run has no files of completions.")); return; }
  const buttons = make("div", { class: "tools" }, "colour of tokens:", ...COLOURINGS.map((name, at) => {
    if (!has(row, name)) return "";
    const button = make("button", { type: "button", "aria-pressed": at === colouring }, name);
    button.disabled = !row.t;
    button.onclick = () => { colouring = at; drawDetail(); };
    if (at === colouring && row.t) button.style.borderColor = "var(--accent)";
    return button;
  }));
  const rewards = Object.entries(row.s).map(([name, score]) => [name, number(score), make("span", {}, row.y[name] || "")]);
  $("detail").replaceChildren(
    make("div", {}, `${summary.runs[row.run].name}, ${row.stage} ${row.step}: reward ${number(row.w)}` +
      (row.v === undefined ? "" : `, advantage ${number(row.v)}`) + `, ${row.n} tokens${row.f ? "" : ", cut off at the limit"}`),
    table(["reward", "score", make("span", {}, "reason")], rewards),
    make("h3", {}, "Prompt"), make("div", { class: "text" }, row.p), make("h3", {}, "Completion"),
    row.t ? buttons : make("p", { class: "hint" }, "Values of single tokens were not written for this completion."),
    make("p", { class: "hint key" }, row.t ? KEY[COLOURINGS[colouring]] : ""), tokens(row),
    make("h3", {}, "Known answer"), make("div", { class: "text" }, row.a));
}

// ---- events --------------------------------------------------------------------------------------------------------
let waiting = 0;
$("search").oninput = () => { clearTimeout(waiting); waiting = setTimeout(() => filter(), 60); };
for (const id of ["run", "sort", "step"]) $(id).oninput = () => filter();
$("stage").oninput = () => { $("step").value = -1; showFilters(); filter(); };
$("list").onscroll = () => requestAnimationFrame(drawList);
addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName);
  if (event.key === "Escape") document.activeElement.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const inList = document.activeElement === $("list");
  if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  else if (event.key === "j" || (inList && event.key === "ArrowDown")) { event.preventDefault(); choose(chosen + 1); }
  else if (event.key === "k" || (inList && event.key === "ArrowUp")) { event.preventDefault(); choose(chosen - 1); }
  else if (event.key === "c" && chosen >= 0) {
    do colouring = (colouring + 1) % COLOURINGS.length; while (!has(shown[chosen], COLOURINGS[colouring]));
    drawDetail();
  }
});
addEventListener("DOMContentLoaded", () => setTimeout(() => {
  for (const node of document.querySelectorAll("script.completions")) { addBlock(JSON.parse(node.textContent)); node.remove(); }
  showFilters();
  filter();
  document.body.dataset.ready = "yes";
}, 0));
