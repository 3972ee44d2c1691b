"use strict";
// What a comparison of methods found.

function methodsSection() {
  const { methods } = data, number = { number: true }, known = (us) => (us === null ? "-" : time(us));
  if (!methods.length) return;
  const rows = methods.map(({ name, predicted_us, median_us, gain, note }) => [
    name + (name === data.recommended ? " (recommended)" : ""), known(predicted_us), known(median_us),
    gain ? `${gain.median.toFixed(2)} (${gain.low.toFixed(2)} to ${gain.high.toFixed(2)})` : "-", note]);
  const numbers = ["predicted", "measured", "against one device"].map((title) => ({ title, ...number }));
  const columns = [{ title: "method" }, ...numbers, { title: "" }];
  section("methods", "Methods", data.recommendation ? el("p", {}, data.recommendation) : null, methodsPlot(methods), table(columns, rows));
}

/* Every sample as a dot, the median as a line, the prediction as a ring. */
function methodsPlot(methods) {
  const most = Math.max(1, ...methods.flatMap((method) => [...method.samples_us, method.predicted_us ?? 0])) * 1.04;
  const narrow = innerWidth < 600, [left, width] = narrow ? [92, 358] : [130, 800], line = 26, height = line * methods.length + 30;
  const x = (us) => left + ((width - left - 16) * us) / most, letters = Math.floor(left / 7.2);
  const rows = methods.map(({ name, predicted_us, median_us, samples_us }, i) => {
    const y = line * i + 16;
    return el("g", {},
      el("text", { x: 0, y: y + 4 }, name.length > letters ? name.slice(0, letters - 1) + "\u2026" : name, el("title", {}, name)),
      el("line", { class: "axis", x1: left, x2: width - 16, y1: y, y2: y }),
      samples_us.map((us) => el("circle", { cx: x(us), cy: y, r: 3, fill: "var(--accent)", opacity: 0.4 })),
      median_us === null ? null : el("rect", { x: x(median_us) - 1, y: y - 8, width: 2, height: 16, fill: "var(--ink)" }),
      predicted_us === null ? null : el("circle", { cx: x(predicted_us), cy: y, r: 5, fill: "none", stroke: "var(--muted)" }));
  });
  const axis = ticks(0, most, narrow ? 3 : 6).map((us) =>
    el("text", { class: "muted", x: x(us), y: height - 4, "text-anchor": "middle" }, us ? time(us) : "0"));
  return el("div", {},
    el("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "Measured steps of each method" }, rows, axis),
    el("p", { class: "note" }, "Dots are measured steps, the line is their median, the ring is the prediction."));
}
