"use strict";
// What every part of a placed run's page uses: its ops, the predicted step, which op is selected, and what colours show.

const { ops, tensors, placement } = data, { cluster, priority } = data.plan, opCount = ops.id.length;
const devices = cluster.devices.map((device, d) =>
  ({ ...device, ...data.palette[d % data.palette.length], peak_measured_bytes: data.peaks[d] ?? null }));
const flow = new Flow(ops, tensors), { made, read, readers } = flow;
const predicted = simulate(flow, cluster, placement, priority);
const critical = new Set(data.predicted.critical);
const swatch = (device) => el("span", { class: "swatch", style: { background: devices[device].colour } });

/* The selected op, and who wants to know of it. */
const selection = { op: null, listeners: [] };
function select(op) {
  selection.op = op;
  for (const listener of selection.listeners) listener(op);
}
const opLink = (op) => el("button", { class: "link", type: "button", onclick: () => select(op) }, ops.id[op]);

/* Ops by their names. */
const positions = new Map(ops.id.map((id, v) => [id, v]));
const idLink = (id) => (positions.has(id) ? opLink(positions.get(id)) : id);

/* The names of the modules around each op, from the outermost in; and a module as it is called, with its class. */
const around = ops.module.map((name) => (name ? name.split(".") : []));
const classes = new Map(Object.entries(data.classes)), classOf = (name) => classes.get(name) ?? "";
const called = (name) => (classes.has(name) ? `${name} (${classOf(name)})` : name);

/* The ops of each colocation group; and ops with all that has to share their device. */
const colocated = new Map();
ops.colocation.forEach((group, v) => {
  if (group !== null && !colocated.has(group)) colocated.set(group, []);
  colocated.get(group)?.push(v);
});
function together(asked) {
  const groups = new Set(asked.map((v) => ops.colocation[v]));
  return [...new Set([...asked, ...[...groups].flatMap((group) => colocated.get(group) ?? [])])];
}

/* For each op its outer modules, by as many of their names as it takes to tell some apart. */
const deepest = around.reduce((most, names) => Math.max(most, names.length), 0);
function areas() {
  for (let depth = 1; ; depth++) {
    const found = around.map((names) => names.slice(0, depth).join(".") || "no module");
    if (new Set(found).size > 3 || depth >= deepest) return found;
  }
}

const hasParts = ops.part.some((part) => part !== null), hasModules = around.some((names) => names.length);
const SHOWN = {
  device: () => placement.map((d) => devices[d].name),
  phase: () => ops.phase.map((phase) => data.phases[phase]),
  module: areas,
  part: () => ops.part.map((part) => (part === null ? "all parts" : "part " + part)),
};
const NEUTRAL = ["no module", "all parts"];

/* What colours show, and who wants to know when that changes: `names` has the name of each colour, `of[v]` is the number of an op's. */
const colours = {
  listeners: [],
  show(by) {
    const found = SHOWN[by](), last = (name) => NEUTRAL.includes(name);
    this.by = by;
    this.names = by === "device" ? devices.map(({ name }) => name) : by === "phase" ? data.phases
      : [...new Set(found)].sort((a, b) => last(a) - last(b) || a.localeCompare(b, "en", { numeric: true }));
    const number = new Map(this.names.map((name, i) => [name, i]));
    this.of = found.map((name) => number.get(name));
    for (const listener of this.listeners) listener();
  },
  get markBackward() { return this.by === "part" || this.by === "module"; },
  /* Those of light or dark, before something is drawn. */
  refresh() { this.neutral = { colour: ink("transfer"), text: ink("paper") }; },
  /* A colour, and that of text on it. */
  entry(i) { return NEUTRAL.includes(this.names[i]) ? this.neutral : data.palette[i % data.palette.length]; },
  /* Those of an op, by the device that it is on in a step. */
  paint(v, place) { return this.entry(this.by === "device" ? place[v] : this.of[v]); },
  chooser() {
    const ways = ["device", "phase", ...(hasModules ? ["module"] : []), ...(hasParts ? ["part"] : [])];
    const chosen = el("select", { "aria-label": "what colours show", onchange: () => this.show(chosen.value) },
      ways.map((by) => el("option", { value: by }, "colour by " + (by === "part" ? "part of the batch" : by))));
    return this.follow(chosen, () => { chosen.value = this.by; });
  },
  /* As many names as there are colours, and those that have none of these. */
  legend() {
    const legend = el("span", { class: "colours" }), square = (i) => (NEUTRAL.includes(this.names[i])
      ? el("span", { class: "swatch shared" }) : el("span", { class: "swatch", style: { background: this.entry(i).colour } }));
    return this.follow(legend, () => {
      const own = this.names.filter((name) => !NEUTRAL.includes(name)).length, more = own - data.palette.length;
      const entries = this.names.map((name, i) => el("span", {}, square(i), this.by === "module" ? called(name) : name));
      legend.replaceChildren(
        ...entries.slice(0, Math.min(own, data.palette.length)),
        more > 0 ? `and ${more} more, in the same colours again` : "",
        ...entries.slice(own),
        this.markBackward ? el("span", {}, el("span", { class: "swatch backward" }), "a line under it: backward") : "");
    });
  },
  follow(node, update) {
    this.listeners.push(update);
    update();
    return node;
  },
};
colours.show(hasParts ? "part" : "device");
