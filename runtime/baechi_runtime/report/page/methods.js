"use strict";
// What a comparison of methods found.

function methodsSection() {
  const { methods } = data, number = { number: true }, known = (us) => (us === null ? "-" : time(us));
  if (!methods.length) return;
  const rows = methods.map(({ name, predicted_us, median_us, gain }) => [
    name + (name === data.recommended ? " (recommended)" : ""), known(predicted_us), known(median_us),
    gain ? `${gain.median.toFixed(2)} (${gain.low.toFixed(2)} to ${gain.high.toFixed(2)})` : "-"]);
  const numbers = ["predicted", "measured", "against one device"].map((title) => ({ title, ...number }));
  section("methods", "Methods", data.recommendation ? el("p", {}, data.recommendation) : null, stepsPlot(methods, "Measured steps of each method"),
    table([{ title: "method" }, ...numbers], rows, methods.map(({ note }) => note)));
}
