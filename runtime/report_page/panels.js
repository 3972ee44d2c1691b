"use strict";
// What is said in words and tables: the headline, busy shares, methods, the explanation, and the selected op.

function headerPanel() {
  const { title, method, devices: names, ops: count, figures: cards, verdict, facts, command } = data.headline;
  const shown = names.length > 6 ? names.slice(0, 6).join(", ") + ", \u2026" : names.join(", ");
  fill(document.getElementById("top"),
    el("h1", {}, title),
    el("p", { class: "lead" }, `${method} on ${plural(names.length, "device")} (${shown}), ${plural(count, "op")}`),
    el("div", { class: "figures" }, cards.map((card) => el("div", { class: "figure" },
      el("div", { class: "label" }, card.label), el("div", { class: "value" }, card.value), el("div", { class: "detail" }, card.detail)))),
    el("p", { class: "verdict " + verdict.tone }, verdict.text),
    command ? el("pre", {}, command) : null,
    el("details", {}, el("summary", {}, "How it was made"), definitions(facts)));
}

const definitions = (pairs) => el("dl", {}, pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function table(columns, rows) {
  const cell = (tag, column, content) => el(tag, { class: column.number ? "number" : "name", scope: tag === "th" ? "col" : null }, content);
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((column) => cell("th", column, column.title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((content, i) => cell("td", columns[i], content)))))));
}

/* Busy and idle shares */

function devicesSection() {
  const counts = devices.map((_, d) => placement.filter((p) => p === d).length);
  const steps = [["predicted", data.predicted], ...(data.measured ? [["measured", data.measured]] : [])];
  const rows = devices.flatMap((device, d) => steps.map(([kind, step], i) => {
    const busy = step.busy_us[d], part = step.step_us > 0 ? Math.min(1, busy / step.step_us) : 0;
    return el("div", { class: "row" },
      el("span", {}, swatch(d), " ", device.name, " ", el("span", { class: "kind" }, kind)),
      bar(part, device.colour, i > 0, `${device.name}, ${kind}: busy ${share(busy, step.step_us)}`),
      el("span", { class: "value" }, `${share(busy, step.step_us)} busy, ${time(Math.max(0, step.step_us - busy))} idle` +
        (i === 0 ? ", " + plural(counts[d], "op") : "")));
  }));
  section("devices", "Busy and idle",
    el("div", { class: "shares" }, rows));
}

function bar(part, colour, pale, label) {
  const box = el("span", { class: "track", role: "img", "aria-label": label });
  box.append(el("span", { style: { display: "block", height: "100%", width: 100 * part + "%", background: colour, opacity: pale ? "0.6" : "1" } }));
  return box;
}

/* Methods */

function methodsSection() {
  const { methods } = data, number = { number: true }, known = (us) => (us === null ? "-" : time(us));
  if (!methods.length) return;
  const rows = methods.map(({ name, predicted_us, median_us, gain, note }) => [
    name + (name === data.recommended ? " (recommended)" : ""), known(predicted_us), known(median_us),
    gain ? `${gain.median.toFixed(2)} (${gain.low.toFixed(2)} to ${gain.high.toFixed(2)})` : "-", note]);
  const columns = [{ title: "method" }, ...["predicted", "measured", "against one device"].map((title) => ({ title, ...number })), { title: "" }];
  section("methods", "Methods", data.recommendation ? el("p", {}, data.recommendation) : null, methodsPlot(methods), table(columns, rows));
}

/* Every sample as a dot, the median as a line, the prediction as a ring. */
function methodsPlot(methods) {
  const most = Math.max(1, ...methods.flatMap((method) => [...method.samples_us, method.predicted_us ?? 0])) * 1.04;
  const line = 26, left = 130, width = 640, height = line * methods.length + 30, x = (us) => left + ((width - left - 16) * us) / most;
  const rows = methods.map(({ name, predicted_us, median_us, samples_us }, i) => {
    const y = line * i + 16;
    return el("g", {},
      el("text", { x: 0, y: y + 4 }, name.length > 18 ? name.slice(0, 17) + "\u2026" : name, el("title", {}, name)),
      el("line", { class: "axis", x1: left, x2: width - 16, y1: y, y2: y }),
      samples_us.map((us) => el("circle", { cx: x(us), cy: y, r: 3, fill: "var(--accent)", opacity: 0.4 })),
      median_us === null ? null : el("line", { x1: x(median_us), x2: x(median_us), y1: y - 8, y2: y + 8, stroke: "var(--ink)", "stroke-width": 2 }),
      predicted_us === null ? null : el("circle", { cx: x(predicted_us), cy: y, r: 5, fill: "none", stroke: "var(--muted)" }));
  });
  const axis = ticks(0, most, 5).map((us) => el("text", { class: "muted", x: x(us), y: height - 4, "text-anchor": "middle" }, us ? time(us) : "0"));
  return el("div", {},
    el("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "Measured steps of each method" }, rows, axis),
    el("p", { class: "note" }, "Dots are measured steps, the line is their median, the ring is the prediction."));
}

/* The explanation */

function explanationSection() {
  const said = data.explanation;
  if (!said) return;
  const name = (d) => devices[d]?.name ?? String(d), number = { number: true };
  const where = (part) => name(part.device) + (part.target === null ? "" : " to " + name(part.target)) + (part.phase ? ", " + part.phase : "");
  const parts = said.critical_path.parts.map((part) => [part.kind, where(part), time(part.us), share(part.share, 1)]);
  const gains = said.transfers.by_gain.map((sent) => [
    idLink(sent.op), `${name(sent.source)} to ${name(sent.target)}`, size(sent.bytes), time(sent.us), sent.gain_us === null ? "-" : signed(sent.gain_us)]);
  const idle = said.idle.map((one) => [name(one.device), time(one.idle_us), time(one.producer_us), time(one.queue_us), time(one.transfer_us), time(one.tail_us)]);
  const changes = said.what_ifs.map((one) => [one.change, time(one.step_us), signed(one.gain_us)]);
  section("explanation", "Why it takes so long",
    el("h3", {}, "The critical path"),
    table([{ title: "what" }, { title: "where" }, { title: "time", ...number }, { title: "of the step", ...number }], parts),
    el("h3", {}, "Idle devices wait for"),
    table([{ title: "device" }, ...["idle", "another device's op", "a busy link", "a transfer", "nothing more to do"].map((title) => ({ title, ...number }))], idle),
    gains.length ? [el("h3", {}, "The costliest transfers"), table(
      [{ title: "tensor of" }, { title: "way" }, ...["size", "time", "the step gains without it"].map((title) => ({ title, ...number }))], gains)] : [],
    changes.length ? [el("h3", {}, "What would change the step"), table(
      [{ title: "if" }, { title: "step", ...number }, { title: "gain", ...number }], changes)] : [],
    surprises());
}

/* The ops whose measured time is furthest from the predicted one. */
function surprises() {
  if (!data.measured) return [];
  const took = (step, v) => step.end_us[v] - step.start_us[v], number = { number: true };
  const off = [...ops.id.keys()].filter((v) => data.measured.start_us[v] !== null)
    .map((v) => ({ v, predicted: took(data.predicted, v), measured: took(data.measured, v) }))
    .sort((a, b) => Math.abs(b.measured - b.predicted) - Math.abs(a.measured - a.predicted)).slice(0, 10);
  const rows = off.map((one) => [
    opLink(one.v), devices[placement[one.v]].name, time(one.predicted), time(one.measured), difference(one.measured - one.predicted)]);
  return [el("h3", {}, "Where the prediction is furthest off"), table(
    [{ title: "op" }, { title: "device" }, ...["predicted", "measured", "difference"].map((title) => ({ title, ...number }))], rows)];
}

const signed = (us) => (us < 0 ? "\u2212" + time(-us) : time(us));
const positions = new Map(ops.id.map((id, v) => [id, v]));
const idLink = (id) => (positions.has(id) ? opLink(positions.get(id)) : id);

/* The selected op */

function detailsPanel() {
  const panel = document.getElementById("details");
  const field = el("input", { type: "search", placeholder: "Find an op", "aria-label": "Find an op by its name, kind or module" });
  const found = el("ul", { class: "found", "aria-label": "Ops found" });
  field.addEventListener("input", () => found.replaceChildren(...search(field.value).map((v) => el("li", {}, opLink(v)))));
  const bar = document.querySelector("#graph .bar");
  bar.append(field);
  bar.after(found);
  const show = (op) => panel.replaceChildren(op === null
    ? el("div", { class: "card empty" }, el("p", { class: "note" }, "Click an op in the timeline or the graph to see what it costs and why it is where it is."))
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
  const costs = [
    ["kind", ops.op[v] || "-"], ["phase", data.phases[ops.phase[v]]], ["module", ops.module[v] || null], ["colocation", ops.colocation[v]],
    ["device", devices[device].name + (ops.pin[v] === null ? "" : ", pinned")],
    ["cost", time(ops.compute_us[v])],
    ["predicted", `${time(predicted.end_us[v] - predicted.start_us[v])}, from ${time(predicted.start_us[v])}`],
    ["measured", measured && measured.start_us[v] !== null ? `${time(measured.end_us[v] - measured.start_us[v])}, from ${time(measured.start_us[v])}` : null],
    ["persistent", size(ops.persistent_bytes[v])], ["outputs", size(ops.output_bytes[v])], ["temporary", size(ops.temporary_bytes[v])],
    ["critical path", critical.has(v) ? "yes" : "no"],
  ].filter(([, value]) => value !== null);
  const inputs = [...new Set(read[v].map((t) => tensors.producer[t]))], readers = [...new Set(made[v].flatMap((t) => tensors.readers[t]))];
  const reveal = el("button", { type: "button", onclick: () => { graph.reveal(v); document.getElementById("graph").scrollIntoView(); } }, "Show in graph");
  const zoom = el("button", { type: "button", onclick: () => {
    const width = Math.max((predicted.end_us[v] - predicted.start_us[v]) * 12, span.whole / 200), middle = (predicted.start_us[v] + predicted.end_us[v]) / 2;
    span.show(middle - width / 2, middle + width / 2);
    document.getElementById("timeline").scrollIntoView();
  } }, "Show in timeline");
  const close = el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => select(null) }, "\u2715");
  return el("div", { class: "card" }, close, el("h3", { id: "op-name" }, swatch(device), " ", ops.id[v]), definitions(costs), choicesOf(v),
    neighbours("Reads from", inputs), neighbours("Read by", readers), el("div", { class: "bar" }, zoom, reveal));
}

function neighbours(title, found) {
  if (!found.length) return null;
  const links = found.slice(0, 8).map((v) => el("li", {}, swatch(placement[v]), " ", opLink(v)));
  return el("div", {}, el("h3", {}, title), el("ul", { class: "found" }, links, found.length > 8 ? el("li", { class: "note" }, `and ${found.length - 8} more`) : null));
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
    [swatch(choice.device), " ", devices[choice.device].name, choice.device === placement[v] ? " (here)" : "", choice.fits ? "" : ", no room"],
    time(choice.step_us), choice.device === placement[v] ? "" : difference(choice.step_us - choices.step_us)]);
  return el("div", { id: "choices" }, title, el("p", {}, WHY[choices.verdict] ?? choices.verdict),
    table([{ title: "on" }, { title: "step", number: true }, { title: "", number: true }], rows),
    others > 0 ? el("p", { class: "note" }, `With ${plural(others, "op")} of its colocation group, which moves along.`) : null);
}

const difference = (us) => (Math.abs(us) < 0.005 ? "the same" : (us > 0 ? "+" : "\u2212") + time(Math.abs(us)));
