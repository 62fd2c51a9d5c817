// What a glance needs, so that a table fits its page; a cell that is opened tells all that it cost.
const COST_COLUMNS = [["kv_tokens", "KV tokens"], ["mib", "MiB"], ["encode_s", "encode s"], ["token_ms", "ms / token"]];
const text = (name, title, more = {}) => ({ name, title, left: true, value: (row) => row[name], show: (row) => row[name] ?? "", ...more });
const nameOf = (name, title, more = {}) => text(name, title, { wide: true, show: (row) => breakable(row[name]), ...more });

/** The columns that have a value in some row. */
function withValues(columns, rows) { return columns.filter(({ value }) => rows.some((row) => value(row) !== null && value(row) !== undefined)); }

function budgetColumn() {
  const value = (row) => (row.budget === "full" ? Infinity : Number(row.budget));
  return { name: "budget", title: "budget", value, show: (row) => (row.budget === "full" ? "–" : amount(Number(row.budget))) };
}

function resultTable(group) {
  const shown = group.metrics.slice(0, 4);
  const method = { name: "label", title: "method", left: true, wide: true, value: (row) => row.label, show: (row) => {
    const name = el("span", { class: "named" }, mark(row.method, group.shapes[row.label]), row.cells.length ? opener(row.cells[0], breakable(row.label)) : breakable(row.label));
    if (row.failed.length) name.append(el("span", { class: "tag bad", title: row.failed.join("\n") }, `${row.failed.length} failed`));
    return name;
  } };
  const scores = shown.map((name) => ({ name, title: words(name), value: (row) => row.metrics[name]?.value ?? null, show: (row) => withErrors(row.metrics[name]) }));
  const costs = withValues(COST_COLUMNS.map(([name, title]) => ({ name, title, value: (row) => row.cost[name], show: (row) => amount(row.cost[name]) })), group.rows);
  const seeds = group.seeds.length > 1 ? [{ name: "seeds", title: "seeds", value: (row) => row.seeds.length, show: (row) => row.seeds.length }] : [];
  const found = table([method, budgetColumn(), ...seeds, ...scores, ...costs], group.rows, { caption: "Results" });
  const note = `± is the standard error over items${group.seeds.length > 1 ? ", then that over seeds" : ""}. ${group.rows.some((row) => row.cells.length) ? "KV tokens: bytes held, over those of one token. A name opens its first run, with all that it cost." : "The mean is unweighted over tasks, of each task's first score."}`;
  return el("div", {}, found.whole, el("p", { class: "soft small" }, note));
}

function differenceTable(group, state) {
  const rows = group.differences.filter((row) => row.metric === state.metric);
  if (!rows.length) return null;
  const p = (value) => (value < 0.001 ? "< 0.001" : number(value));
  const verdicts = { better: ["good", "better"], worse: ["bad", "worse"], "not shown": ["soft", "not shown"] };
  const columns = [
    nameOf("label", "method"), budgetColumn(),
    { name: "items", title: "items", value: (row) => row.items, show: (row) => amount(row.items) },
    { name: "value", title: "difference", value: (row) => row.value, show: (row) => withErrors(row) },
    { name: "low", title: "95 % interval", value: (row) => row.low, show: (row) => `${number(row.low)} to ${number(row.high)}` },
    { name: "wins", title: "wins / losses", value: (row) => row.wins - row.losses, show: (row) => `${row.wins} / ${row.losses}` },
    { name: "holm", title: "p (Holm)", value: (row) => row.holm, show: (row) => p(row.holm) },
    { name: "verdict", title: "against full", left: true, value: (row) => row.verdict, show: (row) => el("span", { class: verdicts[row.verdict][0] }, verdicts[row.verdict][1]) },
  ];
  const note = "Each row minus full on the same items. p is exact and two-sided, of wins against losses, after Holm's correction over all rows of this score. A difference is called better or worse only where it is below 5\u00a0% and the interval leaves out 0.";
  return [el("h2", {}, `Differences to full in ${words(state.metric)}`), table(columns, rows, { caption: "Differences to full" }).whole, el("p", { class: "soft small" }, note)];
}

const FEW = 8; // as many rows of what is beside the point stand open

/** A table under a heading that folds it away. */
function folded(title, open, ...content) { return el("details", { open }, el("summary", {}, title), ...content); }

function calibrationTable(group) {
  if (!group.calibration.length) return null;
  const skip = new Set(["label", "method", "budget", "cell", "seed"]);
  const keys = [...new Set(group.calibration.flatMap((row) => Object.keys(row)))].filter((key) => !skip.has(key));
  const columns = [text("label", "method", { wide: true, show: (row) => opener(row.cell, breakable(row.label)) }), budgetColumn(), { name: "seed", title: "seed", value: (row) => row.seed, show: (row) => row.seed }];
  columns.push(...keys.map((name) => ({ name, title: words(name), value: (row) => row[name], show: (row) => amount(row[name]) })));
  return [folded(`Calibration (${plural(group.calibration.length, "run")})`, group.calibration.length <= FEW, table(columns, group.calibration, { caption: "Calibration" }).whole)];
}

/** What papers print, beside ours where a row has the same method and budget; the rest is folded away. */
function paperTable(group) {
  if (!group.papers.length) return null;
  const idle = { // columns that would say the same in every row
    budget: group.papers.every((row) => row.budget === "full"), row: group.papers.every((row) => !row.ours || row.ours.label === row.method),
  };
  const columns = [
    text("paper", "paper", { show: (row) => el("span", { class: "paper", title: row.source }, `${row.paper}, ${row.table}`) }),
    text("model", "model", { narrow: true }), text("method", "method"), budgetColumn(), text("metric", "score", { show: (row) => words(row.metric) }),
    { name: "value", title: "paper", value: (row) => row.value, show: (row) => el("span", { class: "paper" }, String(row.value)) },
    { name: "ours", title: "ours", value: (row) => row.ours?.value ?? null, show: (row) => withErrors(row.ours, row.ours?.value > 1 ? 1 : 3) },
    { name: "row", title: "our row", left: true, value: (row) => row.ours?.label ?? null, show: (row) => row.ours?.label ?? "–" },
    { name: "n", title: "our items", value: (row) => row.ours?.n ?? null, show: (row) => amount(row.ours?.n) },
    text("setting", "setting and notes", { wide: true, show: (row) => el("span", { class: "small" }, [row.setting, row.note].filter(Boolean).join("; ")) }),
  ].filter(({ name }) => !idle[name]);
  const known = group.papers.filter((row) => row.ours), rest = group.papers.filter((row) => !row.ours);
  const parts = [el("h2", {}, "What papers report")];
  if (known.length) parts.push(table(columns, known, { caption: "What papers report, beside ours" }).whole);
  if (rest.length) parts.push(folded(`${plural(rest.length, "number")} of this task without a row of ours`, !known.length && rest.length <= FEW, table(columns, rest, { caption: "What papers report" }).whole));
  return [...parts, el("p", { class: "soft small" }, "Papers' numbers, in italics, are of their models and settings; ours are of the model above, where a row has the same method and budget.")];
}

function showCells(place) {
  const status = (row) => el("span", { class: row.status === "complete" ? "soft" : "tag bad" }, row.status);
  const plain = (name, title, show = (row) => amount(row[name])) => ({ name, title, value: (row) => row[name], show });
  const { columns, same } = told([
    text("cell", "cell", { show: (row) => opener(row.cell, row.cell) }), nameOf("label", "method"), budgetColumn(),
    text("task", "task", { said: true }), text("model", "model", { said: true }), { ...plain("seed", "seed", (row) => row.seed), said: true },
    text("status", "status", { show: status, said: true }), text("metric", "score", { show: (row) => (row.metric ? words(row.metric) : ""), narrow: true }),
    { name: "value", title: "value", value: (row) => row.value, show: (row) => withErrors(row.value === null ? null : row) },
    plain("n", "items"), plain("mib", "MiB"), plain("token_ms", "ms / token"), nameOf("setting", "setting", { show: (row) => el("span", { class: "small" }, row.setting) }),
  ]);
  const found = table(columns, DATA.cells, { caption: "All cells", empty: "No cell matches." });
  const count = el("span", { class: "soft", role: "status", id: "count" });
  const search = el("input", { type: "search", id: "search", placeholder: "Filter: words, all of which match", size: 28, "aria-label": "Filter the cells", "aria-keyshortcuts": "/" });
  const selects = ["task", "model", "method", "status"].map((name) => {
    const values = [...new Set(DATA.cells.map((cell) => cell[name]))].sort();
    const all = `any ${name}`, select = el("select", { "aria-label": name, id: `filter-${name}` }, el("option", { value: "" }, all), ...values.map((value) => el("option", { value }, value)));
    select.field = name;
    return select;
  });
  const apply = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = DATA.cells.filter((cell) => selects.every((s) => !s.value || cell[s.field] === s.value) && wanted.every((word) => cell.words.includes(word)));
    found.set(rows);
    count.textContent = rows.length === DATA.cells.length ? plural(rows.length, "cell") : `${amount(rows.length)} of ${plural(DATA.cells.length, "cell")}`;
  };
  for (const cell of DATA.cells) cell.words = [cell.cell, cell.task, cell.model, cell.label, cell.budget, cell.status, cell.setting, `seed=${cell.seed}`, cell.error ?? ""].join(" ").toLowerCase();
  for (const control of [search, ...selects]) control.addEventListener("input", apply);
  apply();
  place.replaceChildren(el("h1", {}, "Cells"), same.length ? el("p", { class: "facts" }, `all: ${same.join(" · ")}`) : "", el("div", { class: "controls" }, search, ...selects, count), found.whole);
  cellOrder = found.order;
}

/** The columns that tell cells apart, and in words what all cells have in those that are `said` then. */
function told(columns) {
  const shared = (column) => DATA.cells.length > 1 && new Set(DATA.cells.map(column.value)).size === 1;
  const same = columns.filter((column) => column.said && shared(column)).map((column) => `${column.title} ${column.value(DATA.cells[0])}`);
  const empty = (column) => DATA.cells.every((cell) => [null, undefined, ""].includes(column.value(cell)));
  return { columns: columns.filter((column) => !(column.said && shared(column)) && !empty(column)), same };
}

let cellOrder = () => DATA.cells;
