const VIEWS = { compare: "Compare", cells: "Cells", runs: "Runs", notes: "Notes" };

function showRuns(place) {
  const columns = [
    text("kind", "state", { show: (row) => el("span", { class: `tag ${row.kind === "failed" || row.kind === "broken" ? "bad" : "soft"}` }, row.kind) }),
    nameOf("folder", "folder"), text("reason", "why", { wide: true }),
  ];
  const said = Object.entries(DATA.kinds).filter(([kind]) => DATA.problems.some((one) => one.kind === kind));
  place.replaceChildren(
    el("h1", {}, "Runs"), el("p", { class: "facts" }, DATA.summary),
    ...DATA.missing.length ? [el("h2", {}, `Cells of ${DATA.experiment} without a run`), el("ul", {}, ...DATA.missing.map((one) => el("li", {}, one)))] : [],
    el("h2", {}, "Runs that are not, or not wholly, part of this report"),
    DATA.problems.length ? table(columns, DATA.problems, { caption: "Runs that are not part of this report" }).whole : el("p", { class: "soft" }, "None: every run that was found is complete."),
    el("dl", { class: "pairs" }, ...said.flatMap(([kind, meaning]) => [el("dt", {}, kind), el("dd", {}, meaning)])),
    el("h2", {}, "Read from"), el("ul", {}, ...DATA.folders.map((one) => el("li", {}, el("code", {}, one)))),
  );
}

function navigate() {
  const [name, rest] = location.hash.slice(1).split("/"), view = VIEWS[name] ? name : "compare";
  for (const other of Object.keys(VIEWS)) document.getElementById(`view-${other}`).hidden = other !== view;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const place = document.getElementById(`view-${view}`);
  if (view === "compare") showCompare(place, Math.min(Number(rest) || 0, DATA.groups.length - 1));
  else if (!place.childElementCount) ({ cells: showCells, runs: showRuns })[view](place);
  window.scrollTo(0, 0);
  if (name === "cell") openCell(rest);
}

function applyTheme() {
  const chosen = remember("theme") ?? "auto", dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen === "auto" ? (dark ? "dark" : "light") : chosen;
  const button = document.getElementById("theme");
  button.textContent = `Theme: ${chosen}`;
  button.title = "Light, dark, or as the system has it (auto)";
}

function start() {
  document.title = DATA.title;
  const count = { cells: DATA.cells.length, runs: DATA.problems.length || null };
  document.getElementById("views").append(...Object.entries(VIEWS).map(([name, title]) => el("a", { href: `#${name}` }, title, count[name] ? el("span", { class: "count" }, amount(count[name])) : null)));
  document.getElementById("theme").addEventListener("click", () => {
    const order = ["auto", "light", "dark"], chosen = remember("theme") ?? "auto";
    remember("theme", order[(order.indexOf(chosen) + 1) % 3]);
    applyTheme();
    navigate();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); navigate(); });
  document.getElementById("view-notes").append(el("p", { class: "soft small" }, `Made by kvexp ${DATA.version}, ${DATA.made}. Drawn with Vega-Lite; nothing on this page is loaded from elsewhere.`));
  window.addEventListener("hashchange", navigate);
  document.addEventListener("keydown", keys);
  document.getElementById("cell").addEventListener("click", (event) => { if (event.target.id === "cell") event.target.close(); });
  applyTheme();
  navigate();
}

function keys(event) {
  const dialog = document.getElementById("cell"), typing = event.target.closest?.("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  if (dialog.open && (event.key === "ArrowLeft" || event.key === "ArrowRight"))
    dialog.querySelector(`[data-step="${event.key === "ArrowLeft" ? -1 : 1}"]:not([disabled])`)?.click();
  else if (event.key === "/" && !dialog.open) {
    event.preventDefault();
    location.hash = "cells";
    setTimeout(() => document.getElementById("search")?.focus());
  }
}

start();
