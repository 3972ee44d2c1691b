"use strict";
// What a reader wants to know first: the headline; and bars.

function headerPanel() {
  const { title, lead, figures: cards, verdict, facts, command } = data.headline;
  fill(document.getElementById("top"),
    el("h1", {}, title),
    el("div", { class: "verdict " + verdict.tone },
      verdict.large ? el("p", { class: "large" }, verdict.large) : null, el("p", {}, verdict.text)),
    el("p", { class: "lead" }, lead),
    el("div", { class: "figures" }, cards.map((card) => el("div", { class: "figure" },
      el("div", { class: "label" }, card.label), el("div", { class: "value" }, card.value), el("div", { class: "detail" }, card.detail)))),
    command ? el("pre", {}, command) : null,
    el("details", {}, el("summary", {}, "How it was made"), definitions(facts)));
}

function bar(part, colour, pale, label) {
  const box = el("span", { class: "track", role: "img", "aria-label": label });
  const style = { display: "block", height: "100%", width: 100 * part + "%", background: colour, opacity: pale ? "0.6" : "1" };
  box.append(el("span", { style }));
  return box;
}
