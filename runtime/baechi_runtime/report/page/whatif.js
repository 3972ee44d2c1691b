"use strict";
// What if: the step with modules on other devices and other links, simulated here as baechi simulate does, and the plan of it as a file.

/* The ops that a name is of - a module, a colocation group or an op - with what has to share their device; those pinned elsewhere stay. */
function membersOf(name, device) {
  const asked = [...ops.id.keys()].filter((v) =>
    [ops.id[v], ops.module[v], ops.colocation[v]].includes(name) || ops.module[v]?.startsWith(name + "."));
  const all = together(asked), bound = new Set(all.filter((v) => ops.pin[v] !== null && ops.pin[v] !== device));
  const groups = new Set([...bound].map((v) => ops.colocation[v]).filter((group) => group !== null));
  return { all, moved: all.filter((v) => !bound.has(v) && !groups.has(ops.colocation[v])) };
}

/* A bound that holds whatever the links are: the longest chain or heaviest group on the fastest device, all work on all devices, and the
   host's time for all ops. */
function computeBound() {
  const sum = (list) => list.reduce((us, v) => us + ops.compute_us[v], 0), speeds = devices.map(({ speed }) => speed);
  const longest = [flow.tail_us, [...colocated.values()].map(sum)].flat().reduce((a, b) => Math.max(a, b), 0);
  return Math.max(longest / Math.max(...speeds), sum([...ops.id.keys()]) / speeds.reduce((a, b) => a + b), flow.issue_us);
}

/* True if a link costs less of anything in another cluster than it does in this one. */
function someFaster(here, there) {
  const [before, after] = [here, there].map(linkCosts), costs = Object.keys(FREE);
  return devices.some((_, i) => devices.some((_, j) => i !== j && costs.some((cost) => after(i, j)[cost] < before(i, j)[cost])));
}

/* The changes, in order, and what comes of them: placement, cluster, the step, and its bound. */
const whatIf = {
  changes: [],
  suggest() {},  // names what may be moved next
  applied() {
    const state = { placement: [...placement], cluster: structuredClone(cluster) };
    for (const { apply } of this.changes) apply(state);
    return state;
  },
  simulated() {
    const state = this.applied(), faster = someFaster(cluster, state.cluster);
    const step = simulate(flow, state.cluster, state.placement, priority);
    return { ...state, step, bound_us: faster ? computeBound() : data.plan.lower_bound_us, faster };
  },
  move(name, device) {
    const { all, moved } = membersOf(name, device), stay = all.length - moved.length;
    const pinned = stay ? `; ${stay} stay, as pins have it` : "";
    const text = `${called(name)} to ${devices[device].name}: ${plural(moved.length, "op")}${pinned}`;
    if (moved.length) this.changes.push({ text, apply: (state) => moved.forEach((v) => { state.placement[v] = device; }) });
    return moved.length;
  },
  /* `costs` replaces costs of the links from a device to another; of all links where there are none. */
  link(source, target, costs) {
    const name = (d) => devices[d].name, where = source === null ? "every link" : `${name(source)} to ${name(target)}`;
    const text = `${where}: ` + Object.entries(costs).map(([cost, value]) => `${cost} ${value}`).join(", ");
    this.changes.push({ text, apply: ({ cluster: { links } }) => {
      if (source === null) for (const link of [links.default, ...links.pairs]) Object.assign(link, costs);
      else {
        const ends = { source: name(source), target: name(target) };
        const same = links.pairs.find((pair) => pair.source === ends.source && pair.target === ends.target);
        if (same) Object.assign(same, costs);
        else links.pairs.push({ ...links.default, ...ends, ...costs });
      }
    } });
  },
  /* The plan file of the changes (docs/files.md). */
  file({ placement: place, cluster: changed, step, bound_us }) {
    const byId = (values) => Object.fromEntries(ops.id.map((id, v) => [id, values[v]]));
    return {
      ...data.plan, method: data.plan.method + " what-if", status: "feasible", cluster: changed, placement: byId(place),
      priority: priority ? byId(priority) : undefined,
      predicted_step_us: step.step_us, lower_bound_us: bound_us, peak_memory_bytes: step.peaks,
    };
  },
};

function whatIfSection() {
  if (devices.length < 2) return;
  const result = el("div", { "aria-live": "polite" });
  const update = () => {
    const state = whatIf.changes.length ? whatIf.simulated() : null;
    showChanged(state && state.step);
    timeline.surface.height = timeline.placed();
    timeline.surface.redraw();
    result.replaceChildren(...(state ? changed(state, update) : []));
  };
  section("whatif", "What if",
    el("p", { class: "note" }, "Moves a module, an op or a colocation group, with what has to share its device, or changes a link, and " +
      "simulates the step again. Order and all else stay as the plan has them."),
    moveForm(update), linkForm(update), result);
}

const field = (text, input) => el("label", {}, text + " ", input);
const deviceOptions = () => devices.map(({ name }, d) => el("option", { value: d }, name));
const deviceChoice = (label) => el("select", { "aria-label": label }, deviceOptions());
const form = (act, ...children) => el("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); act(); } }, ...children);

function moveForm(update) {
  const names = new Set(around.flatMap((parts) => parts.map((_, i) => parts.slice(0, i + 1).join("."))));
  const movable = [...names, ...colocated.keys()].map((value) => el("option", { value }, classOf(value)));
  const options = el("datalist", { id: "movable" }, movable), to = deviceChoice("to the device");
  const name = el("input", { type: "search", list: "movable", required: true, placeholder: "module, op or group" });
  for (const node of [name, to]) node.addEventListener("input", () => name.setCustomValidity(""));
  whatIf.suggest = (value) => {
    name.value = value;
    name.setCustomValidity("");
  };
  selection.listeners.push((op) => { if (op !== null) whatIf.suggest(ops.module[op] || ops.id[op]); });
  return form(() => {
    if (whatIf.move(name.value, Number(to.value))) return update();
    name.setCustomValidity("nothing is called so that may move there");
    name.reportValidity();
  }, field("Move", name), field("to", to), options, el("button", {}, "Move"));
}

/* A list for each end of the link, as hundreds of devices have too many pairs for one. */
function linkForm(update) {
  const from = el("select", { "aria-label": "from the device" }, el("option", { value: "" }, "every link"), deviceOptions());
  const to = deviceChoice("to the other device");
  const costs = [["latency_us", "latency, us"], ["us_per_byte", "us per byte"]].map(([cost, text]) =>
    [cost, el("input", { type: "number", min: 0, step: "any", required: true }), text]);
  const ends = () => (from.value ? [Number(from.value), Number(to.value)] : [null, null]);
  const showCosts = () => {
    to.disabled = !from.value;
    for (const option of to.options) option.disabled = option.value === from.value;
    if (to.value === from.value) to.value = from.value === "0" ? "1" : "0";
    const [i, j] = ends(), now = whatIf.applied().cluster, link = i === null ? now.links.default : linkCosts(now)(i, j);
    for (const [cost, input] of costs) input.value = input.defaultValue = Number(link[cost].toPrecision(6));
  };
  for (const end of [from, to]) end.addEventListener("change", showCosts);
  showCosts();
  return form(() => {
    const others = costs.filter(([, input]) => input.value !== input.defaultValue);
    if (others.length) whatIf.link(...ends(), Object.fromEntries(others.map(([cost, input]) => [cost, Number(input.value)])));
    update();
    showCosts();
  }, field("Link from", from), field("to", to), costs.map(([, input, text]) => field(text, input)), el("button", {}, "Change"));
}

/* The list of changes, what they do, and the plan to save. */
function changed(state, update) {
  const { step, bound_us, faster } = state, number = { number: true };
  const takeBack = (i) => { whatIf.changes.splice(i, 1); update(); };
  const drop = (text, i) => el("button", { type: "button", "aria-label": "take back: " + text, onclick: () => takeBack(i) }, "\u2715");
  const sent = (one) => one.transfers.reduce((bytes, [t]) => bytes + tensors.bytes[t], 0);
  const rows = [
    ["step", time(predicted.step_us), time(step.step_us), difference(step.step_us - predicted.step_us)],
    ["lower bound", bound(data.plan.lower_bound_us), bound(bound_us),
      faster ? "of compute alone, as a link is faster" : data.plan.lower_bound_us ? "the same" : ""],
    ["moved", size(sent(predicted)), size(sent(step)), unlike(sent(step) - sent(predicted))],
    ...devices.map(({ name, memory_bytes: limit }, d) => [
      [swatch(d), " ", name, " memory"], size(predicted.peaks[d]), size(step.peaks[d]),
      [unlike(step.peaks[d] - predicted.peaks[d]),
        limit !== null && step.peaks[d] > limit ? el("strong", {}, ` over its ${size(limit)}`) : ""]]),
  ];
  const save = el("button", { type: "button", onclick: () => {
    const url = URL.createObjectURL(new Blob([JSON.stringify(whatIf.file(state), null, 1)], { type: "application/json" }));
    el("a", { href: url, download: "plan_what_if.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } }, "Save the plan");
  return [
    el("ul", { class: "changes" }, whatIf.changes.map(({ text }, i) => el("li", {}, drop(text, i), " ", text))),
    table([{ title: "" }, { title: "plan", ...number }, { title: "what if", ...number }, { title: "difference", ...number }], rows),
    data.plan.graph_fingerprint
      ? el("div", { class: "bar" }, save, el("span", { class: "note" }, "baechi simulate graph.json plan_what_if.json says the same"))
      : el("p", { class: "note" }, "The plan is one of groups of devices, which cannot be saved from here."),
  ];
}

const bound = (us) => (us ? time(us) : "none");
const unlike = (bytes) => (bytes === 0 ? "the same" : (bytes > 0 ? "+" : "\u2212") + size(Math.abs(bytes)));
