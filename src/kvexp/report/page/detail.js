function pairs(values) {
  const list = el("dl", { class: "pairs" });
  for (const [key, value] of flat(values)) list.append(el("dt", {}, key), el("dd", {}, value));
  return list;
}

function flat(values, prefix = "") {
  return Object.entries(values ?? {}).flatMap(([key, value]) => {
    if (value === null || value === undefined) return [];
    if (typeof value === "object" && !Array.isArray(value)) return flat(value, `${prefix}${key}.`);
    return [[prefix + key, typeof value === "number" ? plainNumber(value) : Array.isArray(value) ? value.join(", ") : String(value)]];
  });
}

function plainNumber(value) { return Number.isInteger(value) ? amount(value) : String(Number(value.toPrecision(5))); }

function scoreNumbers(metrics) {
  const list = el("dl", { class: "numbers" });
  for (const [name, one] of Object.entries(metrics)) {
    if (name.includes("[")) continue;
    const error = one.stderr === null ? null : el("span", {}, ` ±${number(one.stderr)}`);
    list.append(el("div", {}, el("dt", {}, words(name)), el("dd", {}, number(one.value), error)));
  }
  return list;
}

function sampleCard(sample) {
  const scores = Object.entries(sample.scores ?? {}).map(([name, value]) => `${words(name)} ${value === 1 ? "✓" : value === 0 ? "✗" : plainNumber(value)}`).join(" · ");
  const list = el("dl"), row = (term, value) => value !== undefined && value !== "" && list.append(el("dt", {}, term), el("dd", {}, value));
  row("Asked", sample.query);
  for (const [name, value] of Object.entries(sample)) if (name.startsWith("answer")) row(name === "answer" ? "Answered" : words(name.replace("answer_", "")), value);
  row("Expected", sample.expected);
  return el("article", { class: "sample" }, el("header", {}, el("span", {}, [sample.id, sample.group].filter(Boolean).join(" · ")), el("span", {}, scores)), list);
}

function fileLinks(files) {
  return el("ul", { class: "files" }, ...Object.entries(files).map(([name, path]) => el("li", {}, el("a", { href: path }, name))));
}

function openCell(cell) {
  const at = DATA.cells.findIndex((one) => one.cell === cell);
  if (at < 0) return;
  const facts = DATA.cells[at], more = JSON.parse(document.getElementById(`detail-${at}`).textContent);
  const dialog = document.getElementById("cell"), order = cellOrder(), place = order.findIndex((one) => one.cell === cell);
  const step = (by, label, key) => el("button", { type: "button", class: "quiet", "aria-label": label, title: `${label} (${key})`, "data-step": by, disabled: !order[place + by], onclick: () => openCell(order[place + by].cell) }, by < 0 ? "←" : "→");
  const title = el("div", {}, el("h1", { id: "cell-title", tabindex: -1 }, `${facts.label}${facts.budget === "full" ? "" : `, ${amount(Number(facts.budget))}`}`),
    el("span", { class: "soft" }, [facts.task, facts.model, `seed ${facts.seed}`, facts.setting, facts.cell].filter(Boolean).join(" · ")));
  const close = el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => dialog.close() }, "✕");
  const sheet = el("div", { class: "sheet" }, el("header", {}, title, step(-1, "Previous cell", "←"), step(1, "Next cell", "→"), close));
  if (facts.error) sheet.append(el("p", {}, el("span", { class: "tag bad" }, "failed"), " ", facts.error));
  sheet.append(scoreNumbers(more.metrics), ...sampleList(more), el("h2", {}, "Where it comes from"));
  if (more.provenance.command) sheet.append(el("pre", { tabindex: 0 }, more.provenance.command));
  const { command, ...origin } = more.provenance;
  sheet.append(pairs(origin), fileLinks(more.files), el("h2", {}, "What it cost"), pairs({ ...more.cache, ...more.timing }));
  for (const [name, values] of [["Fidelity", more.fidelity], ["Scores by part", parts(more.metrics)], ["Calibration", more.memory], ["Every setting", more.identity]])
    if (flat(values).length) sheet.append(el("details", {}, el("summary", {}, name), pairs(values)));
  dialog.replaceChildren(sheet);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  document.getElementById("cell-title").focus({ preventScroll: true });
}

function parts(metrics) {
  const found = Object.entries(metrics).filter(([name]) => name.includes("["));
  return Object.fromEntries(found.map(([name, one]) => [name, one.value]));
}

function sampleList(more) {
  if (!more.samples.length) return [el("h2", {}, "Samples"), el("p", { class: "soft" }, "No sample can be read.")];
  const rest = more.total - more.samples.length, link = more.files["samples.jsonl"];
  const note = el("p", { class: "soft small" }, `The first ${more.samples.length} of ${amount(more.total)}, long texts cut. `);
  if (link) note.append(el("a", { href: link }, rest > 0 ? `All ${amount(more.total)} in samples.jsonl` : "samples.jsonl"));
  return [el("h2", {}, "Samples"), note, ...more.samples.map(sampleCard)];
}
