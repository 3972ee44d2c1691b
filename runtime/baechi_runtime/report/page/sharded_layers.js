"use strict";
// The layers of the network: how each is split, what it costs, and what it would with its other splits.

const layers = { plan: 0, order: "run", all: false, text: "", selected: null };
const SMALL = 0.001;
const splitText = (pairs) => pairs.map(([axis, parts]) => `${axis} ${parts}`).join(" \u00d7 ") || "not split";
const splitOf = (layer) => splitText(layer.sizes.filter(([, , parts]) => parts > 1).map(([axis, , parts]) => [axis, parts]));
const costOf = (layer) => total(layer.costs_us);
const layersOf = () => plans[layers.plan].layers;

function layersSection() {
  if (!plans.length) return;
  const choice = (label, options, change) => el("label", {}, label + " ",
    el("select", { onchange: (event) => { change(event.target.value); showLayers(); showLayer(); } },
      options.map(([value, text]) => el("option", { value }, text))));
  const field = el("input", { type: "search", placeholder: "Find a layer", "aria-label": "Find a layer by its name or op" });
  field.addEventListener("input", () => { layers.text = field.value.trim().toLowerCase(); showLayers(); });
  const every = el("button", { type: "button", id: "all-layers", "aria-pressed": "false", onclick: () => {
    layers.all = !layers.all;
    every.setAttribute("aria-pressed", String(layers.all));
    showLayers();
  } }, "Show all");
  section("layers", "Layers",
    el("div", { class: "bar" },
      choice("Plan", plans.map((plan, i) => [i, plan.name]), (value) => { layers.plan = Number(value); layers.selected = null; }),
      choice("Order", [["run", "as they run"], ["cost", "costliest first"]], (value) => { layers.order = value; }), every, field),
    legend(kinds.map((kind) => [kind.name, kind.colour])),
    el("p", { class: "note", id: "layers-note" }),
    el("div", { id: "layers-table" }));
  addEventListener("keydown", ({ key }) => { if (key === "Escape" && layers.selected !== null) selectLayer(null); });
  showLayers();
  showLayer();
}

function shownLayers() {
  const found = layersOf().filter((layer) => [layer.name, layer.op].some((name) => name.toLowerCase().includes(layers.text)));
  const most = plans[layers.plan].step_us * SMALL;
  const shown = layers.all || layers.text ? found : found.filter((layer) => costOf(layer) >= most);
  return layers.order === "cost" ? [...shown].sort((a, b) => costOf(b) - costOf(a)) : shown;
}

function showLayers() {
  const shown = shownLayers(), step = plans[layers.plan].step_us, count = layersOf().length, most = Math.max(...layersOf().map(costOf));
  document.getElementById("layers-note").textContent = shown.length === count ? `All ${plural(count, "layer")}.`
    : `${shown.length} of ${plural(count, "layer")}` + (layers.text ? "." : "; the others take less than 0.1% of the step each.");
  const rows = shown.map((layer) => [
    [el("button", { class: "link", type: "button", onclick: () => selectLayer(layer) }, layer.name),
      el("div", { class: "note" }, layer.op)],
    layer.sizes.map(([axis, length, parts]) => el("span", { class: parts > 1 ? "loop split" : "loop" },
      parts > 1 ? `${axis} ${length} / ${parts}` : `${axis} ${length}`)),
    stacked(coloured(layer.costs_us), most, `${layer.name}: ${time(costOf(layer))}`),
    time(costOf(layer)), share(costOf(layer), step), size(layer.held_bytes)]);
  document.getElementById("layers-table").replaceChildren(table([{ title: "layer" }, { title: "loops / parts" }, { title: "cost" },
    ...numbers("in all", "of the step", "holds")], rows));
}

function selectLayer(layer) {
  layers.selected = layer;
  showLayer();
}

function showLayer() {
  const panel = document.getElementById("details"), layer = layers.selected;
  panel.replaceChildren(layer === null ? el("div", { class: "card empty" },
    el("p", { class: "note" }, "Click a layer to see what it costs and why it is split as it is.")) : layerCard(layer));
}

function layerCard(layer) {
  const step = plans[layers.plan].step_us;
  const close = el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => selectLayer(null) }, "\u2715");
  const costs = kinds.map((kind, k) => [kind.name, layer.costs_us[k]]).filter(([, us]) => us).map(([name, us]) => [name, signed(us)]);
  return el("div", { class: "card" }, close, el("h3", { id: "layer-name" }, layer.name),
    definitions([["op", layer.op || "-"], ...layer.sizes.map(([axis, length, parts]) => [axis, parts > 1 ? `${length} in ${parts} parts` : String(length)]),
      ["adds to the step", `${time(costOf(layer))}, ${share(costOf(layer), step)}`], ...costs, ["holds", size(layer.held_bytes)]]),
    el("h3", {}, "Why it is split so"), whySplit(layer, step));
}

function whySplit(layer, step) {
  if (!layer.others.length) return el("p", {}, "There is no other way to split it, or the plan does not say what it would cost.");
  const percent = (us) => (us >= 0 ? "+" : "\u2212") + Math.abs((100 * us) / step).toFixed(1) + "%";
  const rows = [[splitOf(layer), time(step), "(here)"], ...layer.others.map(([pairs, change]) => [splitText(pairs), time(step + change), percent(change)])];
  const best = Math.min(...layer.others.map(([, change]) => change));
  return el("div", { id: "others" },
    el("p", {}, best >= -1e-9 * step ? "No other split of it would make the step shorter, all other layers as they are; calls of one layer that are split alike change together."
      : "Another split of it alone would make the step shorter by these costs: a memory limit, calls of one layer that are split alike, a strategy of " +
        "people, or a search by other costs can keep a plan from that."),
    table([{ title: "split" }, ...numbers("step", "change")], rows));
}
