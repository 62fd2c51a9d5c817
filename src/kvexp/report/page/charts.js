function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function config() {
  const soft = css("--soft"), line = css("--line"), ink = css("--ink");
  const font = 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';
  return {
    background: "transparent", font,
    axis: {
      labelColor: soft, titleColor: soft, titleFontWeight: 500, titleFontSize: 11.5, labelFontSize: 11.5,
      gridColor: line, domainColor: line, tickColor: line, titlePadding: 8, labelLimit: 330, labelPadding: 5,
    },
    axisY: { domain: false, ticks: false }, view: { stroke: null },
    text: { color: ink, font }, legend: { disable: true },
    header: { labelColor: ink, title: null, labelFontWeight: 600 },
  };
}

/** Draw `spec` into `place`; the same place may be drawn again. */
async function draw(place, spec, description) {
  const whole = {
    $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height: 250,
    autosize: { type: "fit-x", contains: "padding" }, config: config(), description, ...spec,
  };
  const options = { actions: false, renderer: "svg", tooltip: { theme: theme(), disableDefaultStyle: false } };
  place.vegaView?.finalize();
  place.vegaView = (await vegaEmbed(place, whole, options)).view;
}

const DASHES = { circle: [1, 0], square: [7, 3], diamond: [2, 2] };

/** The channels that give a method its colour, and a row its shape and the dashes of its line. */
function looks(group) {
  const labels = [...new Set(group.rows.map((row) => row.label))], shape = labels.map((label) => group.shapes[label]);
  const method = Object.fromEntries(group.rows.map((row) => [row.label, row.method]));
  const by = (range) => ({ field: "label", scale: { domain: labels, range } });
  return {
    color: by(labels.map((label) => colour(method[label]))), shape: by(shape.map((name) => OWN_SHAPES[name] ?? name)),
    strokeDash: by(shape.map((name) => DASHES[name] ?? [8, 3, 2, 3])),
  };
}

function points(group, metric, hidden) {
  const rows = group.rows.filter((row) => row.metrics[metric] && !hidden.has(row.label));
  return rows.map((row) => {
    const { value, low, high, n } = row.metrics[metric];
    return {
      label: row.label, budget: row.budget, rows: Number(row.budget) || null, value, low, high, n, ...row.cost,
      is: rowName(row), said: `${number(value)} (${number(low)} to ${number(high)})`,
    };
  });
}

function rowName(row) { return row.budget === "full" ? row.label : `${row.label}, ${amount(Number(row.budget))}`; }

/** A narrow screen has no room for long names beside a figure: they stand in several lines. */
function names(rows) {
  const narrow = innerWidth < 620, lines = narrow ? Math.max(1, ...rows.map((row) => row.is.split(" ").length)) : 1;
  const axis = narrow ? { labelExpr: "split(datum.label, ' ')", labelLineHeight: 12, labelFontSize: 10.5, labelLimit: 130 } : {};
  const count = new Set(rows.map((row) => row.is)).size;
  return { axis, height: Math.max(24, 12 * lines + 8) * count };
}

/** 1, 2 and 5 of every decade that a logarithmic axis shows: lines without a number say nothing. */
function decades(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const found = Array.from({ length: to - from + 1 }, (_, at) => [1, 2, 5].map((digit) => Number(`${digit}e${from + at}`))).flat();
  return found.filter((value) => value >= low / 1.3 && value <= high * 1.3);
}

/** Scores that are better low (KL, NLL) may span decades; then their axis is logarithmic. */
function scoreAxis(metric, data, higher) {
  const values = data.map((point) => point.value), low = Math.min(...values);
  const wide = !higher && low > 0 && Math.max(...values) > 8 * low;
  if (wide) for (const point of data) point.low = Math.max(point.low, point.value / 2);
  return { field: "value", type: "quantitative", title: words(metric), scale: wide ? { type: "log", nice: false, padding: 8 } : { zero: false, nice: true }, axis: wide ? { format: "~g", values: decades(Math.min(...data.map((point) => point.low)), Math.max(...data.map((point) => point.high))) } : { tickCount: 6 } };
}

const TIP = [
  { field: "label", title: "method" }, { field: "budget", title: "budget" },
  { field: "said", title: "value (95 %)" }, { field: "n", title: "items" },
];
const POINT = { type: "point", filled: true, size: 70, opacity: 1 };

/** Scores over budgets; what has no budget is a level across the figure. */
function byBudget(group, metric, data) {
  const { color, shape, strokeDash } = looks(group);
  const swept = data.filter((point) => point.rows), levels = data.filter((point) => !point.rows);
  const budgets = [...new Set(swept.map((point) => point.rows))].sort((a, b) => a - b);
  const y = scoreAxis(metric, data, group.higher[metric]);
  const x = {
    field: "rows", type: "quantitative", title: "budget, rows per layer and head", scale: { type: "log", base: 2, nice: false, padding: 18 },
    axis: { values: budgets, format: ",", grid: false, labelFlush: false },
  };
  const detail = { field: "label" };
  const across = [
    { data: { values: levels }, mark: { type: "rect", opacity: 0.08 }, encoding: { y: { ...y, field: "low" }, y2: { field: "high" }, color } },
    { data: { values: levels }, mark: { type: "rule", strokeDash: [5, 4], strokeWidth: 1.5, tooltip: true }, encoding: { y, color, tooltip: TIP } },
    { data: { values: levels }, mark: { type: "text", align: "center", dy: -6, fontSize: 11 }, encoding: { y, color, text: { field: "label" }, x: { value: { expr: `width / ${2 * (budgets.length - 1)}` } } } },
  ];
  return { layer: [...levels.length ? across : [],
    ...new Set(swept.map((point) => point.label)).size > 8 ? [] : [
      { data: { values: swept }, mark: { type: "area", opacity: 0.1 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color, detail } },
    ],
    { data: { values: swept }, mark: { type: "line", strokeWidth: 1.8 }, encoding: { x, y, color, strokeDash, detail } },
    { data: { values: swept }, mark: { type: "rule", opacity: 0.6 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
    { data: { values: swept }, mark: POINT, encoding: { x, y, color, shape, tooltip: TIP } },
  ] };
}

/** One line for each row, sorted by score: for groups whose budgets do not vary. */
function byRow(group, metric, data) {
  const { color, shape } = looks(group), higher = group.higher[metric];
  const { axis, height } = names(data);
  const y = { field: "is", type: "nominal", title: null, axis, sort: { field: "value", op: "mean", order: higher ? "descending" : "ascending" } };
  const x = scoreAxis(metric, data, higher);
  return { height, data: { values: data }, layer: [
    { mark: { type: "rule", strokeWidth: 1.6 }, encoding: { y, x: { ...x, field: "low" }, x2: { field: "high" }, color } },
    { mark: POINT, encoding: { y, x, color, shape, tooltip: TIP } },
  ] };
}

/** The rows that no other beats in both score and cost, from cheap to dear. */
function front(data, cost, higher) {
  const better = (a, b) => (higher ? a > b : a < b), found = [];
  for (const point of [...data].sort((a, b) => a[cost] - b[cost] || (better(a.value, b.value) ? -1 : 1)))
    if (!found.length || better(point.value, found[found.length - 1].value)) found.push(point);
  return found;
}

function againstCost(group, metric, data, cost, title) {
  const { color, shape } = looks(group);
  const known = data.filter((point) => point[cost] !== null && point[cost] > 0);
  const values = known.map((point) => point[cost]), wide = Math.max(...values) > 8 * Math.min(...values);
  const x = {
    field: cost, type: "quantitative", title, axis: { grid: false, format: Math.max(...values) < 20000 ? ",~f" : "~s", labelOverlap: true, ...(wide ? { values: decades(Math.min(...values), Math.max(...values)) } : { tickCount: 6 }) },
    scale: wide ? { type: "log", nice: false, padding: 18 } : { zero: false, nice: true, padding: 14 },
  };
  const y = scoreAxis(metric, data, group.higher[metric]);
  const best = front(known, cost, group.higher[metric]);
  return { data: { values: known }, layer: [
    { data: { values: best }, mark: { type: "line", interpolate: "step-after", color: css("--soft"), strokeWidth: 1.2, strokeDash: [3, 3] }, encoding: { x, y, order: { field: cost } } },
    { mark: { type: "rule", opacity: 0.5 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
    { mark: POINT, encoding: { x, y, color, shape, tooltip: [...TIP, { field: cost, title, format: ",.3~s" }] } },
  ] };
}

/** Differences to full with their intervals; filled where a difference is shown. */
function forest(group, rows) {
  const { color, shape } = looks(group);
  const data = rows.map((d) => ({
    ...d, is: rowName(d), shown: d.verdict !== "not shown",
    said: `${number(d.value)} (${number(d.low)} to ${number(d.high)})`, adjusted: d.holm < 0.001 ? "< 0.001" : number(d.holm),
  }));
  const { axis, height } = names(data), y = { field: "is", type: "nominal", title: null, sort: null, axis };
  const x = { field: "value", type: "quantitative", title: `difference in ${words(rows[0].metric)}`, scale: { nice: true }, axis: { tickCount: 6, labelOverlap: true } };
  const tooltip = [
    { field: "is", title: "row" }, { field: "said", title: "difference (95 %)" }, { field: "adjusted", title: "p, Holm" },
    { field: "items", title: "items" }, { field: "verdict", title: "against full" },
  ];
  return { height, data: { values: data }, layer: [
    { data: { values: [{}] }, mark: { type: "rule", color: css("--soft"), strokeWidth: 1 }, encoding: { x: { datum: 0, type: "quantitative" } } },
    { mark: { type: "rule", strokeWidth: 1.6 }, encoding: { y, x: { ...x, field: "low" }, x2: { field: "high" }, color } },
    { mark: { type: "point", size: 75, opacity: 1, strokeWidth: 1.6 }, encoding: {
      y, x, color, shape, tooltip,
      fill: { condition: { test: "datum.shown", field: "label", scale: looks(group).color.scale }, value: css("--paper") },
    } },
  ] };
}

/** How long a decoding step takes: median to 99th percentile, and the longest. */
function steps(group, hidden) {
  const { color, shape } = looks(group);
  const rows = group.rows.filter((row) => row.steps.p50 !== null && !hidden.has(row.label));
  const data = rows.map((row) => ({ ...row.steps, label: row.label, budget: row.budget, is: rowName(row) }));
  const { axis, height } = names(data), y = { field: "is", type: "nominal", title: null, sort: null, axis };
  const x = { field: "p50", type: "quantitative", title: "one decoding step of a batch, ms", scale: { type: "log", nice: true }, axis: { format: "~s", labelOverlap: true, values: decades(Math.min(...data.map((d) => d.p50)), Math.max(...data.map((d) => d.max))) } };
  const tooltip = [{ field: "is", title: "row" }, ...["p50", "p99", "max"].map((field) => ({ field, title: `${field}, ms`, format: ",.1f" }))];
  return { height, data: { values: data }, layer: [
    { mark: { type: "rule", strokeWidth: 1.6 }, encoding: { y, x, x2: { field: "max" }, color } },
    { mark: { type: "tick", thickness: 2, size: 11 }, encoding: { y, x: { ...x, field: "p99" }, color, tooltip } },
    { mark: POINT, encoding: { y, x, color, shape, tooltip } },
  ] };
}

/** How long each step of one batch took, a line for each row, with marks where rows left. */
function everyStep(group, hidden) {
  const { color, shape } = looks(group), data = [];
  for (const row of group.rows) {
    if (hidden.has(row.label) || !row.latency) continue;
    const left = new Set(row.latency.pruned), { ms, every } = row.latency;
    ms.forEach((value, at) => data.push({ label: row.label, budget: row.budget, is: rowName(row), step: at * every, ms: value, left: left.has(at) ? "yes" : "no" }));
  }
  const x = { field: "step", type: "quantitative", title: "step of decoding", axis: { grid: false, tickMinStep: 1 }, scale: { nice: false } };
  const y = { field: "ms", type: "quantitative", title: "ms", scale: { type: "log", nice: false, padding: 8 }, axis: { format: "~s", tickCount: 5 } };
  const tooltip = [{ field: "is", title: "row" }, { field: "step" }, { field: "ms", title: "ms", format: ",.1f" }, { field: "left", title: "rows left" }];
  const opacity = fainter(data);
  const marks = { transform: [{ filter: "datum.left === 'yes'" }], mark: { type: "point", filled: true, size: 30 }, encoding: { x, y, color, shape, opacity } };
  return { data: { values: data }, layer: [
    { mark: { type: "line", strokeWidth: 1 }, encoding: { x, y, color, opacity, detail: { field: "is" } } },
    ...(data.some((point) => point.left === "yes") ? [marks] : []), // of no data Vega warns
    { mark: { type: "point", size: 40, opacity: 0 }, encoding: { x, y, color, tooltip } },
  ] };
}

/** A smaller budget is drawn paler. */
function fainter(data) {
  const budgets = [...new Set(data.map((point) => point.budget))].sort((a, b) => (Number(a) || Infinity) - (Number(b) || Infinity));
  return { field: "budget", type: "ordinal", sort: budgets, scale: { domain: budgets, range: budgets.map((_, at) => 0.55 + 0.45 * (at + 1) / budgets.length) } };
}

/** A line for each row, over positions of generated text or over layers. */
function curves(group, along, what, title, hidden) {
  const { color, shape } = looks(group), data = [];
  for (const row of group.rows) for (const name of what) {
    if (hidden.has(row.label)) continue;
    (row.curves[along][name] ?? []).forEach((value, at) => data.push({ label: row.label, budget: row.budget, name: words(name), value, at, line: `${row.label} ${row.budget} ${name}` }));
  }
  const x = { field: "at", type: "quantitative", title: along === "by_layer" ? "layer" : "generated token", axis: { grid: false, tickMinStep: 1 }, scale: { nice: false } };
  const y = { field: "value", type: "quantitative", title, scale: { zero: false, nice: true } };
  const tooltip = [{ field: "label", title: "method" }, { field: "budget" }, { field: "name", title: "what" }, { field: "at" }, { field: "value", format: ".4f" }];
  const opacity = fainter(data);
  const strokeDash = { field: "name", scale: { domain: what.map(words), range: [[1, 0], [4, 3]] } };
  return { data: { values: data }, layer: [
    { mark: { type: "line", strokeWidth: 1.8 }, encoding: { x, y, color, opacity, detail: { field: "line" }, ...(what.length > 1 ? { strokeDash } : {}) } },
    { transform: [{ filter: "datum.at % 4 === 0" }], mark: { type: "point", filled: true, size: 36 }, encoding: { x, y, color, shape, opacity } },
    { mark: { type: "point", size: 60, opacity: 0 }, encoding: { x, y, color, tooltip } },
  ] };
}

/** A metric by part of the task (category, depth, subtask): a row of squares for each method. */
function byPart(group, metric, hidden) {
  const data = [], parts = [];
  for (const row of group.rows) for (const [name, entry] of Object.entries(row.metrics)) {
    const found = name.match(/^(.*) \[(.*)\]$/);
    if (!found || found[1] !== metric || hidden.has(row.label)) continue;
    if (!parts.includes(found[2])) parts.push(found[2]);
    data.push({ part: found[2], value: entry.value, n: entry.n, said: withErrors(entry).textContent, is: rowName(row) });
  }
  const { axis, height } = names(data);
  const y = { field: "is", type: "nominal", title: null, sort: null, axis: { ...axis, domain: false, ticks: false, grid: false } };
  const x = { field: "part", type: "nominal", title: null, sort: parts, axis: { orient: "top", labelAngle: parts.length > 6 ? -35 : 0, domain: false, ticks: false, labelLimit: 130 } };
  const range = theme() === "dark" ? ["#20262d", "#5ab0e8"] : ["#f0f4f8", "#0a5c94"];
  const high = group.higher[metric] === false ? [...range].reverse() : range;
  const tooltip = [{ field: "is", title: "row" }, { field: "part" }, { field: "said", title: "value" }, { field: "n", title: "items" }];
  const middle = data.length ? (Math.max(...data.map((d) => d.value)) + Math.min(...data.map((d) => d.value))) / 2 : 0;
  const above = `datum.value ${group.higher[metric] === false ? "<" : ">"} ${middle}`;
  return { height, data: { values: data }, encoding: { x, y }, layer: [
    { mark: { type: "rect", stroke: css("--paper"), strokeWidth: 2 }, encoding: { color: { field: "value", type: "quantitative", scale: { range: high } }, tooltip } },
    ...innerWidth < 620 && parts.length > 4 ? [] : [{ mark: { type: "text", fontSize: 11 }, encoding: { text: { field: "value", format: ".2f" }, color: { condition: { test: above, value: theme() === "dark" ? "#0c1116" : "#ffffff" }, value: css("--ink") } } }],
  ] };
}
