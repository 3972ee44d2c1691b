"use strict";
// The selected op: its costs, and why it is where it is. And how to find one.

const INVITATION = "Click an op in the timeline or the graph to see what it costs and why it is where it is.";

function detailsPanel() {
  const panel = document.getElementById("details");
  const field = el("input", { type: "search", placeholder: "Find an op", "aria-label": "Find an op by its name, kind or module" });
  const found = el("ul", { class: "found", "aria-label": "Ops found" });
  field.addEventListener("input", () => found.replaceChildren(...search(field.value).map((v) => el("li", {}, opLink(v)))));
  const bar = document.querySelector("#graph .bar");
  bar.append(field);
  bar.after(found);
  const show = (op) => panel.replaceChildren(op === null
    ? el("div", { class: "card empty" }, el("p", { class: "note" }, INVITATION))
    : opCard(op));
  selection.listeners.push(show);
  addEventListener("keydown", ({ key }) => { if (key === "Escape" && selection.op !== null) select(null); });
  show(null);
}

function search(text) {
  const wanted = text.trim().toLowerCase(), found = [];
  if (!wanted) return found;
  for (let v = 0; v < opCount && found.length < 50; v++) {
    if ([ops.id[v], ops.op[v], ops.module[v] ?? ""].some((name) => name.toLowerCase().includes(wanted))) found.push(v);
  }
  return found;
}

function opCard(v) {
  const device = placement[v], { measured } = data;
  const when = (step) => `${time(step.end_us[v] - step.start_us[v])}, from ${time(step.start_us[v])}`;
  const costs = [
    ["kind", ops.op[v] || "-"], ["phase", data.phases[ops.phase[v]]], ["part", ops.part[v] === null ? null : String(ops.part[v])],
    ["module", ops.module[v] ? called(ops.module[v]) : null], ["colocation", ops.colocation[v]],
    ["device", devices[device].name + (ops.pin[v] === null ? "" : ", pinned")],
    ["cost", time(ops.compute_us[v])],
    ["predicted", when(predicted)], ["measured", measured && measured.start_us[v] !== null ? when(measured) : null],
    ["persistent", size(ops.persistent_bytes[v])], ["outputs", size(ops.output_bytes[v])], ["temporary", size(ops.temporary_bytes[v])],
    ["critical path", critical.has(v) ? "yes" : "no"],
  ].filter(([, value]) => value !== null);
  const inputs = [...new Set(read[v].map((t) => tensors.producer[t]))], readBy = [...new Set(made[v].flatMap((t) => readers[t]))];
  const goTo = (id, text, show) =>
    el("button", { type: "button", onclick: () => { show(); document.getElementById(id).scrollIntoView(); } }, text);
  const reveal = goTo("graph", "Show in graph", () => graph.reveal(v));
  const zoom = goTo("timeline", "Show in timeline", () => {
    const start = predicted.start_us[v], end = predicted.end_us[v], width = Math.max((end - start) * 12, span.whole / 200);
    span.show((start + end - width) / 2, (start + end + width) / 2);
  });
  const move = goTo("whatif", "Move it", () => document.querySelector("#whatif input").focus({ preventScroll: true }));
  const close = el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => select(null) }, "\u2715");
  return el("div", { class: "card" }, close, el("h3", { id: "op-name" }, swatch(device), " ", ops.id[v]), definitions(costs), choicesOf(v),
    neighbours("Reads from", inputs), neighbours("Read by", readBy),
    el("div", { class: "bar" }, zoom, reveal, devices.length > 1 ? move : null));
}

function neighbours(title, found) {
  if (!found.length) return null;
  const links = found.slice(0, 8).map((v) => el("li", {}, swatch(placement[v]), " ", opLink(v)));
  const more = found.length > 8 ? el("li", { class: "note" }, `and ${found.length - 8} more`) : null;
  return el("div", {}, el("h3", {}, title), el("ul", { class: "found" }, links, more));
}

const WHY = {
  "pinned": "It is pinned to this device.",
  "no other device": "There is no other device.",
  "no room elsewhere": "It fits nowhere else.",
  "best": "The step would be longer with it on any other device that has room for it.",
  "as good": "Another device would be as good.",
  "better elsewhere": "As far as this op alone goes, the step would be shorter with it elsewhere.",
};

/* So many ops times devices are simulated for an op at once, and more when asked. */
const AT_ONCE = 40000;

/* Why an op is where it is: the predicted step with it, and what has to be with it, on every device. */
function choicesOf(v) {
  const box = el("div", { id: "choices" }), show = () => box.replaceChildren(el("h3", {}, "Why it is here"), ...choices(elsewhere(v)));
  if (opCount * devices.length <= AT_ONCE) show();
  else box.append(el("button", { type: "button", onclick: show }, "Simulate it elsewhere"));
  return box;
}

/* As baechi explain has it: the ops that move together, the steps with them on each device, which of these fit, and which of WHY it is. */
function elsewhere(v) {
  const moved = together([v]), here = placement[v], isSplit = moved.some((w) => placement[w] !== here);
  const steps = devices.map((_, d) => {
    if (d === here && !isSplit) return predicted;
    const place = [...placement];
    for (const w of moved) place[w] = d;
    return simulate(flow, cluster, place, priority);
  });
  const fits = steps.map(({ peaks }) => devices.every(({ memory_bytes: limit }, d) => limit === null || peaks[d] <= limit));
  return { here, moved, steps, fits, verdict: verdict({ here: isSplit ? null : here, moved, steps, fits }) };
}

function verdict({ here, moved, steps, fits }) {
  const best = steps.filter((_, d) => fits[d] && d !== here).reduce((least, { step_us }) => Math.min(least, step_us), Infinity);
  if (moved.some((w) => ops.pin[w] !== null)) return "pinned";
  if (devices.length === 1) return "no other device";
  if (best === Infinity) return "no room elsewhere";
  if (Math.abs(best - predicted.step_us) <= 1e-9 * predicted.step_us) return "as good";
  return best > predicted.step_us ? "best" : "better elsewhere";
}

function choices({ here, moved, steps, fits, verdict: why }) {
  const rows = devices.map(({ name }, d) => [
    [swatch(d), " ", name, d === here ? " (here)" : "", fits[d] ? "" : ", no room"],
    time(steps[d].step_us), d === here ? "" : difference(steps[d].step_us - predicted.step_us)]);
  return [
    el("p", {}, WHY[why]),
    table([{ title: "on" }, { title: "step", number: true }, { title: "", number: true }], rows),
    moved.length > 1 ? el("p", { class: "note" }, `With ${plural(moved.length - 1, "op")} of its colocation group, which moves along.`) : "",
  ];
}
