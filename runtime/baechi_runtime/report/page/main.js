"use strict";
// Puts the page together, from the top down.

headerPanel();
timelineSection();
devicesSection();
memorySection();
graphSection();
methodsSection();
explanationSection();
detailsPanel();
