"use strict";
// What a reader wants to know first: the headline, and how busy the devices are.

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

function devicesSection() {
  const counts = devices.map((_, d) => placement.filter((p) => p === d).length);
  const steps = [["predicted", data.predicted], ...(data.measured ? [["measured", data.measured]] : [])];
  const rows = devices.flatMap((device, d) => steps.map(([kind, step], i) => {
    const busy = step.busy_us[d], idle = step.step_us - busy < 0.01 ? 0 : step.step_us - busy;
    const part = step.step_us > 0 ? Math.min(1, busy / step.step_us) : 0;
    return el("div", { class: "row" },
      el("span", {}, swatch(d), " ", device.name, " ", el("span", { class: "kind" }, kind)),
      bar(part, device.colour, i > 0, `${device.name}, ${kind}: busy ${share(busy, step.step_us)}`),
      el("span", { class: "value" }, `${share(busy, step.step_us)} busy, ${time(idle)} idle` +
        (i === 0 ? ", " + plural(counts[d], "op") : "")));
  }));
  section("devices", "Busy and idle",
    el("div", { class: "shares" }, rows));
}

function bar(part, colour, pale, label) {
  const box = el("span", { class: "track", role: "img", "aria-label": label });
  const style = { display: "block", height: "100%", width: 100 * part + "%", background: colour, opacity: pale ? "0.6" : "1" };
  box.append(el("span", { style }));
  return box;
}
