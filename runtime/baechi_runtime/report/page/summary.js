"use strict";
// How busy the devices are: what ops took of the predicted step, and of the one that was recorded.

function devicesSection() {
  const counts = devices.map((_, d) => placement.filter((p) => p === d).length);
  const steps = [["predicted", predicted], ...(data.measured ? [["recorded", data.measured]] : [])];
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
