const DATA = JSON.parse(document.getElementById("data").textContent);
const SHAPES = { // for marks beside text, in a box of 14 by 14
  circle: "M7 2.5a4.5 4.5 0 1 0 .01 0z",
  square: "M3 3h8v8h-8z",
  diamond: "M7 1.5L12.5 7L7 12.5L1.5 7z",
  "triangle-up": "M7 2L12.5 11.5H1.5z",
  cross: "M5 1.5h4v3.5h3.500v4h-3.500v3.500h-4v-3.500h-3.500v-4h3.500z",
  "triangle-down": "M7 12L1.500 2.500H12.500z",
  "triangle-right": "M12 7L2.500 1.500V12.500z",
  "triangle-left": "M2 7L11.500 1.500V12.500z",
};
const OWN_SHAPES = { // of Vega's none: in a box from -1 to 1
  star: "M0,-1L.25,-.34L.95,-.31L.4,.13L.59,.81L0,.42L-.59,.81L-.4,.13L-.95,-.31L-.25,-.34Z",
  x: "M.47,-.94L.94,-.47L.47,0L.94,.47L.47,.94L0,.47L-.47,.94L-.94,.47L-.47,0L-.94,-.47L-.47,-.94L0,-.47Z",
};

/** A new element; what a run wrote is only ever set as text, never as markup. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function theme() { return document.documentElement.dataset.theme; }

/** Every method has its own colour, the same in every figure. */
function colour(method) { return DATA.palette[method][theme() === "dark" ? 1 : 0]; }

function mark(method, shape) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  svg.setAttribute("viewBox", "0 0 14 14");
  svg.setAttribute("class", "mark");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", SHAPES[shape] ?? OWN_SHAPES[shape]);
  if (!SHAPES[shape]) path.setAttribute("transform", "translate(7 7) scale(6)");
  path.setAttribute("fill", colour(method));
  svg.append(path);
  return svg;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Few digits for what is large: costs, not scores. */
function amount(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return number(value, Number.isInteger(value) || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.01 ? 2 : 4);
}

/** A score with its errors; one above 10 has fewer decimals. */
function withErrors(entry, most = 3) {
  if (!entry) return "–";
  const size = Math.abs(entry.value), digits = Math.min(most, size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
  const out = el("span", {}, number(entry.value, digits));
  const errors = [entry.se, entry.se_seeds].filter((e) => e !== null && e !== undefined);
  for (const error of errors) out.append(el("span", { class: "pm" }, ` ±${number(error, digits)}`));
  return out;
}

/** A name that may go on in the next line behind a sign that joins its parts. */
function breakable(name) {
  return el("span", {}, ...name.split(/(?<=[_=/])/).flatMap((part, at) => (at ? [el("wbr"), part] : [part])));
}

function words(name) { return DATA.words[name] ?? name.replaceAll("_", " "); }

function plural(count, one, many = one + "s") { return `${amount(count)} ${count === 1 ? one : many}`; }

function span(range) { return range.map(amount).join(" to "); }

function remember(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(`kvexp-${key}`);
    localStorage.setItem(`kvexp-${key}`, value);
  } catch { /* a browser may forbid storage to files */ }
  return null;
}
