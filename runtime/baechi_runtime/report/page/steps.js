"use strict";
// Measured and predicted steps side by side.

/* Every sample as a dot, the median as a line, the prediction as a ring. */
function stepsPlot(runs, label) {
  const most = Math.max(1, ...runs.flatMap((run) => [...run.samples_us, run.predicted_us ?? 0])) * 1.04;
  const narrow = innerWidth < 600, [left, width] = narrow ? [92, 358] : [130, 800], line = 26, height = line * runs.length + 30;
  const x = (us) => left + ((width - left - 16) * us) / most, letters = Math.floor(left / 7.2);
  const rows = runs.map(({ name, predicted_us, median_us, samples_us }, i) => {
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
    el("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": label }, rows, axis),
    el("p", { class: "note" }, "Dots are measured steps, the line is their median, the ring is the prediction."));
}
