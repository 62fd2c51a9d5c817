const COSTS = {
  kv_tokens: "storage, KV-token equivalents", mib: "storage, MiB", peak_rows: "peak rows per layer and head",
};
const TIMES = {
  token_ms: "decoding, ms per token", encode_s: "encoding a context, s", first_token_s: "first token, s",
  prepare_s: "preparing, s", total_s: "whole run, s",
};

function showCompare(place, at) {
  const group = DATA.groups[at];
  if (!group) {
    place.replaceChildren(el("p", { class: "empty" }, "No run has a result yet; see what there is under Runs."));
    return;
  }
  const content = el("div");
  place.replaceChildren(el("div", {}, sideList(at), pickList(at)), content);
  const state = { metric: group.metrics[0], hidden: new Set(), memory: null, latency: null };
  const refresh = () => fill(content, group, state, refresh);
  refresh();
}

function sideList(at) {
  const list = el("ul");
  DATA.groups.forEach((group, place) => {
    const task = `${group.task} · ${group.model}`, before = DATA.groups[place - 1];
    const alone = DATA.groups.filter((g) => `${g.task} · ${g.model}` === task).length === 1;
    if (!alone && (!before || `${before.task} · ${before.model}` !== task)) list.append(el("li", { class: "task" }, task));
    list.append(el("li", {}, el("a", { href: `#compare/${place}`, "aria-current": place === at ? "page" : null }, alone ? task : group.setting || "default")));
  });
  return el("nav", { class: "side", "aria-label": "Comparisons" }, list);
}

function pickList(at) {
  const options = DATA.groups.map((group, place) => el("option", { value: place, selected: place === at }, group.title));
  return el("select", { class: "pick", "aria-label": "Comparison", onchange: (event) => { location.hash = `compare/${event.target.value}`; } }, ...options);
}

function fill(content, group, state, refresh) {
  const facts = [
    group.items.length ? `${span(group.items)} items` : null, group.context.length ? `context ${span(group.context)} tokens` : null,
    group.full_mib.length ? `whole cache ${span(group.full_mib)} MiB` : null,
    `${group.seeds.length > 1 ? "seeds" : "seed"} ${group.seeds.join(", ")}`, plural(group.rows.length, "row"),
  ].filter(Boolean);
  content.replaceChildren(
    el("h1", {}, group.task), el("p", { class: "facts" }, [group.model, group.setting].filter(Boolean).join(" · "), el("br"), facts.join(" · ")),
  );
  if (group.metrics.length) {
    content.append(controls(group, state, refresh), verdictLine(group, state), legend(group, state, refresh), figures(group, state, refresh));
    content.append(el("h2", {}, "Results"), resultTable(group));
  } else content.append(el("p", {}, "No run of this group is complete."));
  const parts = [differenceTable, calibrationTable, paperTable].map((make) => make(group, state)).filter(Boolean);
  content.append(...parts.flat());
}

function choice(label, options, chosen, change) {
  const select = el("select", { onchange: (event) => change(event.target.value) });
  select.append(...Object.entries(options).map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  return label ? el("label", {}, label, select) : (select.setAttribute("aria-label", "What the horizontal axis shows"), select);
}

function controls(group, state, refresh) {
  const metrics = Object.fromEntries(group.metrics.map((name) => [name, words(name)]));
  return el("div", { class: "controls" }, choice("Score", metrics, state.metric, (value) => { state.metric = value; refresh(); }));
}

/** What may be said in one sentence of all rows against full, for the chosen score. */
function verdictLine(group, state) {
  const rows = group.differences.filter((row) => row.metric === state.metric);
  if (!rows.length) return "";
  const count = (verdict) => rows.filter((row) => row.verdict === verdict).length;
  return el("p", {}, `Against full, on the same items: ${count("better")} of ${plural(rows.length, "row")} better, ${count("worse")} worse, ${count("not shown")} without a difference shown (5\u00a0% level, Holm's correction).`);
}

function legend(group, state, refresh) {
  const seen = new Map(group.rows.map((row) => [row.label, row.method]));
  const items = [...seen].map(([label, method]) => el("li", {}, el("button", {
    type: "button", "aria-pressed": String(!state.hidden.has(label)), title: "Show or hide in the figures",
    onclick: () => { state.hidden.has(label) ? state.hidden.delete(label) : state.hidden.add(label); refresh(); focusAgain(label); },
    "data-label": label,
  }, mark(method, group.shapes[label]), label)));
  const all = state.hidden.size < seen.size / 2;
  const every = el("button", { type: "button", "data-label": "", onclick: () => { state.hidden = new Set(all ? seen.keys() : []); refresh(); focusAgain(""); } }, all ? "Hide all" : "Show all");
  if (seen.size > 3) items.push(el("li", {}, every));
  return el("ul", { class: "legend", "aria-label": "Methods" }, ...items);
}

function focusAgain(label) { document.querySelector(`.legend [data-label="${CSS.escape(label)}"]`)?.focus(); }

function figure(title, caption, spec, { wide = false, side = null } = {}) {
  const plot = el("div", { class: "plot" });
  const box = el("figure", { class: wide ? "figure wide" : "figure" }, el("header", {}, el("h3", {}, title), side), plot, caption ? el("figcaption", {}, caption) : null);
  pending.set(plot, [spec, title]);
  eye.observe(plot);
  return box;
}

const pending = new Map();
const eye = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) {
    if (!isIntersecting || !pending.has(target)) continue;
    const [spec, title] = pending.get(target);
    pending.delete(target);
    eye.unobserve(target);
    draw(target, spec, title).catch((error) => { console.error(error); target.replaceChildren(el("p", { class: "empty" }, "This figure could not be drawn.")); });
  }
}, { rootMargin: "300px" });

function figures(group, state, refresh) {
  const data = points(group, state.metric, state.hidden), made = el("div", { class: "figures" });
  if (!data.length) { made.append(el("p", { class: "empty" }, "Every row is hidden or lacks this score.")); return made; }
  const budgets = new Set(data.filter((d) => d.rows).map((d) => d.rows)), better = group.higher[state.metric] ? "higher is better" : "lower is better";
  const name = words(state.metric), bars = "Bars and bands: 95 %, from the larger error of those over items and over seeds.";
  if (budgets.size > 1) made.append(figure(`${capital(name)} by budget`, bars, byBudget(group, state.metric, data)));
  else made.append(figure(capital(name), bars, byRow(group, state.metric, data), { wide: long(data) }));
  const known = (names) => Object.fromEntries(Object.entries(names).filter(([cost]) => data.filter((d) => d[cost] > 0).length > 1));
  for (const [title, names, slot] of [["Quality and memory", known(COSTS), "memory"], ["Quality and latency", known(TIMES), "latency"]]) {
    const cost = names[state[slot]] ? state[slot] : Object.keys(names)[0];
    if (!cost) continue;
    const side = choice("", names, cost, (value) => { state[slot] = value; refresh(); });
    made.append(figure(title, `Dashed: rows that no other beats in both (${better}).`, againstCost(group, state.metric, data, cost, names[cost]), { side }));
  }
  const paired = group.differences.filter((d) => d.metric === state.metric && !state.hidden.has(d.label));
  if (paired.length) made.append(figure("Difference to full, on the same items", "Intervals: 95 %. Filled: shown at the 5 % level after Holm's correction.", forest(group, paired), { wide: long(paired) }));
  made.append(...extraFigures(group, state));
  fillRows(made);
  return made;
}

/** A figure that would stand alone in a row of two takes the whole row. */
function fillRows(made) {
  let half = null;
  for (const box of made.children) {
    if (!box.classList.contains("wide")) { half = half ? null : box; continue; }
    half?.classList.add("wide");
    half = null;
  }
  half?.classList.add("wide");
}

/** Names that a narrow figure would cut. */
function long(rows) { return rows.length > 12 || rows.some((row) => row.label.length > 22); }

function extraFigures(group, state) {
  const made = [], has = (along, name) => group.rows.some((row) => !state.hidden.has(row.label) && row.curves[along][name]?.length);
  if (group.parts.some((name) => name.startsWith(`${state.metric} [`))) made.push(figure(`${capital(words(state.metric))} by part`, null, byPart(group, state.metric, state.hidden), { wide: true }));
  if (group.rows.some((row) => row.steps.p50 !== null && !state.hidden.has(row.label))) made.push(figure("Latency of a step", "Point: median. Tick: 99th percentile. Line: to the longest step.", steps(group, state.hidden), { wide: long(group.rows) }));
  const traced = group.rows.filter((row) => row.latency && !state.hidden.has(row.label));
  if (traced.length) made.push(figure("Latency of each step", `Of one batch of each row.${marked(traced)} Paler: a smaller budget.${thinned(traced)}`, everyStep(group, state.hidden), { wide: true }));
  if (has("by_position", "kl")) made.push(figure("KL from full, by position", "In a text that full attention generated. Paler: a smaller budget.", curves(group, "by_position", ["kl"], "KL, nats", state.hidden)));
  if (has("by_position", "mass_full")) made.push(figure("Share of attention on the prefix", "Solid: the method. Dashed: full attention over the same text. Paler: a smaller budget.", curves(group, "by_position", ["mass_method", "mass_full"], "share of attention", state.hidden)));
  const layered = new Set(group.rows.flatMap((row) => Object.keys(row.curves.by_layer)));
  for (const name of layered) if (has("by_layer", name)) made.push(figure(`${capital(words(name))}, by layer`, "With exact queries, over the first queries of the task. Paler: a smaller budget.", curves(group, "by_layer", [name], words(name), state.hidden)));
  return made;
}

function marked(rows) {
  return rows.some((row) => row.latency.pruned.length) ? " Marks: rows left at this step." : "";
}

function thinned(rows) {
  return rows.some((row) => row.latency.every > 1) ? " Of a long text, a point is the longest of several steps." : "";
}

function capital(text) { return text[0].toUpperCase() + text.slice(1); }
