const AT_ONCE = 60;

/**
 * A table that sorts by its headings and adds rows as they are scrolled to.
 *
 * `columns`: {name, title, left, wide, narrow, value(row) for sorting, show(row) for display}. The first heading
 * pressed sorts numbers from large to small and text from a on; pressed again, the other way round.
 */
function table(columns, rows, { caption, sort = null, empty = "Nothing to show." } = {}) {
  const body = el("tbody"), scroll = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption });
  const state = { rows, sort, shown: 0 };
  const heads = columns.map((column) => {
    const button = el("button", { type: "button", onclick: () => press(column) }, column.title);
    return el("th", { scope: "col", class: column.left ? "left" : null, "aria-sort": "none", title: column.hint ?? null }, button);
  });
  const end = el("div");
  scroll.append(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
  const whole = el("div", {}, scroll, end);

  function press(column) {
    const first = typeof state.rows.map(column.value).find((v) => v !== null && v !== undefined) === "number" ? -1 : 1;
    const same = state.sort && state.sort.name === column.name;
    state.sort = { name: column.name, direction: same ? -state.sort.direction : first };
    refill();
  }

  function ordered() {
    if (!state.sort) return state.rows;
    const { value } = columns.find((column) => column.name === state.sort.name);
    const missing = (v) => v === null || v === undefined || v === "";
    return [...state.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return order * state.sort.direction;
    });
  }

  function more() {
    const next = state.ordered.slice(state.shown, state.shown + AT_ONCE);
    state.shown += next.length;
    body.append(...next.map((row) => el("tr", {}, ...columns.map((column) => {
      const kind = ["left", "wide", "narrow"].filter((name) => column[name]).join(" ");
      return el("td", { class: kind || null }, column.show(row));
    }))));
    const left = state.ordered.length - state.shown;
    end.replaceChildren();
    if (left > 0) end.append(el("p", {}, el("button", { type: "button", class: "quiet", onclick: more }, `Show more (${amount(left)} left)`)));
    watcher.unobserve(end);
    if (left > 0) watcher.observe(end); // anew, so that it is told again where the end still is in sight
  }

  function refill() {
    state.ordered = ordered();
    state.shown = 0;
    body.replaceChildren();
    heads.forEach((head, at) => {
      const mine = state.sort && state.sort.name === columns[at].name;
      head.setAttribute("aria-sort", mine ? (state.sort.direction < 0 ? "descending" : "ascending") : "none");
    });
    more();
    if (!state.rows.length) body.append(el("tr", {}, el("td", { class: "left empty", colspan: columns.length }, empty)));
  }

  const watcher = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) more(); }, { rootMargin: "600px" });
  refill();
  return { whole, set(changed) { state.rows = changed; refill(); }, order: () => state.ordered };
}

function opener(cell, text) {
  return el("button", { type: "button", class: "plain", "data-cell": cell, onclick: () => openCell(cell) }, text);
}
