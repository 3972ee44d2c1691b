"use strict";
// Puts the page together, from the top down: what was compared, before any one of the plans.

headerPanel();
if (Math.abs(predicted.step_us - data.predicted.step_us) > 0.001) {
  document.getElementById("top").append(el("p", { class: "verdict bad" },
    `This page simulates a step of ${predicted.step_us} us, and baechi one of ${data.predicted.step_us} us: what it predicts is wrong. ` +
    "Please report it."));
}
methodsSection();
timelineSection();
whatIfSection();
devicesSection();
memorySection();
graphSection();
explanationSection();
detailsPanel();
