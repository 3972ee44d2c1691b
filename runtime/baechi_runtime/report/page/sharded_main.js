"use strict";
// Puts the page of a sharded run together, from the top down.

headerPanel();
strategiesSection();
partsSection();
layersSection();
messagesSection();
heldSection();
