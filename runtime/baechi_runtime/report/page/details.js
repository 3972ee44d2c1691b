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
  const device = placement[v], predicted = data.predicted, measured = data.measured;
  const when = (step) => `${time(step.end_us[v] - step.start_us[v])}, from ${time(step.start_us[v])}`;
  const costs = [
    ["kind", ops.op[v] || "-"], ["phase", data.phases[ops.phase[v]]], ["part", ops.part[v] === null ? null : String(ops.part[v])],
    ["module", ops.module[v] || null], ["colocation", ops.colocation[v]],
    ["device", devices[device].name + (ops.pin[v] === null ? "" : ", pinned")],
    ["cost", time(ops.compute_us[v])],
    ["predicted", when(predicted)], ["measured", measured && measured.start_us[v] !== null ? when(measured) : null],
    ["persistent", size(ops.persistent_bytes[v])], ["outputs", size(ops.output_bytes[v])], ["temporary", size(ops.temporary_bytes[v])],
    ["critical path", critical.has(v) ? "yes" : "no"],
  ].filter(([, value]) => value !== null);
  const inputs = [...new Set(read[v].map((t) => tensors.producer[t]))], readers = [...new Set(made[v].flatMap((t) => tensors.readers[t]))];
  const goTo = (id, text, show) =>
    el("button", { type: "button", onclick: () => { show(); document.getElementById(id).scrollIntoView(); } }, text);
  const reveal = goTo("graph", "Show in graph", () => graph.reveal(v));
  const zoom = goTo("timeline", "Show in timeline", () => {
    const start = predicted.start_us[v], end = predicted.end_us[v], width = Math.max((end - start) * 12, span.whole / 200);
    span.show((start + end - width) / 2, (start + end + width) / 2);
  });
  const close = el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => select(null) }, "\u2715");
  return el("div", { class: "card" }, close, el("h3", { id: "op-name" }, swatch(device), " ", ops.id[v]), definitions(costs), choicesOf(v),
    neighbours("Reads from", inputs), neighbours("Read by", readers), el("div", { class: "bar" }, zoom, reveal));
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

/* Why an op is where it is: the predicted step with it, and what has to be with it, on every device. */
function choicesOf(v) {
  const { of, found, shown } = data.choices, choices = of[v] === null ? null : found[of[v]];
  const title = el("h3", {}, "Why it is here");
  if (!choices) return el("div", { id: "choices" }, title, el("p", { class: "note" }, shown));
  const others = choices.moved - 1;
  const rows = choices.choices.map((choice) => [
    [swatch(choice.device), " ", devices[choice.device].name, choice.device === placement[v] ? " (here)" : "",
      choice.fits ? "" : ", no room"],
    time(choice.step_us), choice.device === placement[v] ? "" : difference(choice.step_us - choices.step_us)]);
  return el("div", { id: "choices" }, title, el("p", {}, WHY[choices.verdict] ?? choices.verdict),
    table([{ title: "on" }, { title: "step", number: true }, { title: "", number: true }], rows),
    others > 0 ? el("p", { class: "note" }, `With ${plural(others, "op")} of its colocation group, which moves along.`) : null);
}
