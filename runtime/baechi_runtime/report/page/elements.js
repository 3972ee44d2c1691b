"use strict";
// What every page uses: the data, elements, and words for numbers.

const data = JSON.parse(document.getElementById("data").textContent);

/* Paper is light, and has room for everything. */
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printed");
  for (const closed of document.querySelectorAll("details")) closed.open = true;
});
addEventListener("afterprint", () => document.documentElement.classList.remove("printed"));

/* An element with attributes and children; text never becomes HTML. `onclick` and the like are listeners, `style` is an object. */
function el(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "circle", "text", "path", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  return fill(node, ...children);
}

/* Appends children, lists of them included; null and undefined are nothing. */
function fill(node, ...children) {
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const figures = (value) => String(Number(value.toPrecision(4)));

function time(us) {
  if (us >= 1e6) return figures(us / 1e6) + " s";
  return us >= 1e3 ? figures(us / 1e3) + " ms" : figures(us) + " us";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; bytes >= 1024 && i + 1 < units.length; i++) bytes /= 1024;
  return figures(bytes) + " " + units[i];
}

function share(part, whole) {
  if (!(whole > 0)) return "-";
  return part > 0 && part < whole / 200 ? "<1%" : Math.round((100 * part) / whole) + "%";
}
const plural = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");
/* A colour of the style sheet, which depends on light and dark. */
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

/* Evenly spaced round numbers between two times. */
function ticks(from, to, most) {
  const raw = (to - from) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
  return found;
}

/* A section of the page with a heading; empty ones are never made. */
function section(id, title, ...children) {
  document.getElementById("sections").append(el("a", { href: "#" + id }, title));
  const node = el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...children);
  document.getElementById("main").append(node);
  return node;
}

/* Names and values, side by side. */
const definitions = (pairs) => el("dl", {}, pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

/* Columns are {title, number}; a cell is text, an element, or a list of such. A row's note, where it has one, stands below it, in sight wherever
   the table is scrolled to. */
function table(columns, rows, notes = []) {
  const cell = (tag, column, content) => el(tag, { class: column.number ? "number" : "name", scope: tag === "th" ? "col" : null }, content);
  const below = (note) => (note ? el("tr", { class: "below" }, el("td", { colspan: columns.length }, el("div", { class: "note" }, note))) : null);
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((column) => cell("th", column, column.title)))),
    el("tbody", {}, rows.map((row, r) => [
      el("tr", {}, row.map((content, i) => cell("td", columns[i], content))), below(notes[r])]))));
}

/* Times with a sign. */
const signed = (us) => (us < 0 ? "\u2212" + time(-us) : time(us));
const difference = (us) => (Math.abs(us) < 0.005 ? "the same" : (us > 0 ? "+" : "\u2212") + time(Math.abs(us)));
