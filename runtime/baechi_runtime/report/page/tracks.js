"use strict";
// The steps that are shown - predicted, changed by the reader, measured - on one axis of time: each device's ops and what it sends.

/* The part of the step that is shown, shared by all that have a time axis. */
const span = {
  surfaces: [],
  pan(us) {
    const width = this.to - this.from;
    this.from = Math.min(Math.max(0, this.from + us), this.whole - width);
    this.to = this.from + width;
    this.redraw();
  },
  zoom(factor, at) {
    const width = Math.min(this.whole, Math.max(this.whole / 1e5, (this.to - this.from) / factor));
    const part = (at - this.from) / (this.to - this.from);
    this.from = Math.min(Math.max(0, at - part * width), this.whole - width);
    this.to = this.from + width;
    this.redraw();
  },
  show(from, to) {
    this.from = Math.max(0, from);
    this.to = Math.min(this.whole, Math.max(to, this.from + this.whole / 1e5));
    this.redraw();
  },
  redraw() { for (const surface of this.surfaces) surface.redraw(); },
};

/* What all views with a time axis do; they have `left`, where the axis begins, and `width`, where it ends. */
const timeAxis = {
  x(us) { return this.left + ((us - span.from) / (span.to - span.from)) * (this.width - this.left); },
  at(x) { return span.from + ((x - this.left) / (this.width - this.left)) * (span.to - span.from); },
  pan(dx) { span.pan((-dx / (this.width - this.left)) * (span.to - span.from)); },
  zoom(factor, x) { span.zoom(factor, Math.min(span.to, Math.max(span.from, this.at(x)))); },
  fit() { span.show(0, span.whole); },
  resized(width) { this.width = width - 1; this.left = width < 600 ? 80 : 110; },
  drawAxis(context, top, bottom) {
    context.fillStyle = ink("muted");
    context.strokeStyle = ink("line");
    context.textAlign = "center";
    context.lineWidth = 1;
    for (const us of ticks(span.from, span.to, (this.width - this.left) / (this.width < 600 ? 75 : 110))) {
      const x = Math.round(this.x(us)) + 0.5;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, bottom);
      context.stroke();
      if (x > this.left + 16 && x < this.width - 20) context.fillText(us === 0 ? "0" : time(us), x, bottom + 10);
    }
  },
};

/* Ops and transfers of one step in the order of their starts, by device, and the chain that ends it: of the predicted one, `path` and its
   `sends` by tensor and target are known. */
function track(title, step, path = null, sends = null) {
  const byStart = (a, b) => step.start_us[a] - step.start_us[b] || step.end_us[a] - step.end_us[b];
  const ran = [...ops.id.keys()].filter((v) => step.start_us[v] !== null);
  const lanes = devices.map((_, d) => ran.filter((v) => step.placement[v] === d).sort(byStart));
  const sent = devices.map((_, d) => step.transfers.filter((t) => t[1] === d).sort((a, b) => a[3] - b[3]));
  const found = path ?? chain(step, lanes), hops = (sends ?? sendsOf(found, step.placement)).map(([t, target]) => t + ">" + target);
  return { title, step, lanes, sent, critical: new Set(found), hops: new Set(hops), levels: devices.map(() => []) };
}

/* The transfers between the ops of a path, by tensor and target. */
function sendsOf(path, place) {
  const found = [];
  for (let i = 1; i < path.length; i++) {
    const [a, b] = [path[i - 1], path[i]];
    const tensor = place[a] === place[b] ? undefined : made[a].find((t) => readers[t].includes(b));
    if (tensor !== undefined) found.push([tensor, place[b]]);
  }
  return found;
}

/* Ops of a step that held each other up, from the last one back: what came last of its inputs and of its device. */
function chain(step, lanes) {
  const arrival = new Map(step.transfers.map((t) => [t[0] + ">" + t[2], t[4]])), before = new Map();
  for (const lane of lanes) lane.forEach((v, i) => before.set(v, i ? lane[i - 1] : null));
  const path = new Set();
  let v = lanes.flat().reduce((a, b) => (a === null || step.end_us[b] > step.end_us[a] ? b : a), null);
  while (v !== null && !path.has(v)) {
    path.add(v);
    let cause = before.get(v) ?? null, latest = cause === null ? -1 : step.end_us[cause];
    for (const t of read[v]) {
      const producer = tensors.producer[t], there = arrival.get(t + ">" + step.placement[v]) ?? step.end_us[producer];
      if (there !== null && there > latest) [cause, latest] = [producer, there];
    }
    v = cause;
  }
  return [...path].reverse();
}

const tracks = [
  track("predicted", predicted, data.predicted.critical, data.predicted.hops),
  ...(data.measured ? [track("measured", { ...data.measured, placement })] : []),
];
const trackOf = (title) => tracks.find((t) => t.title === title);

/* Shows a step beside the predicted one, or none. */
function showChanged(step) {
  const others = tracks.filter(({ title }) => title !== "what if");
  tracks.splice(0, tracks.length, others[0], ...(step ? [track("what if", step)] : []), ...others.slice(1));
  spanTracks();
}

function spanTracks() {
  span.whole = Math.max(...tracks.map(({ step }) => step.step_us)) || 1;
  [span.from, span.to] = [0, span.whole];
}
spanTracks();

/* The first of a lane's ops, or blocks, that ends after a time; ends are in order, since a device runs one op at a time. */
function firstAfter(lane, end, us) {
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(lane[middle]) < us) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The op of a lane that runs at a time, or else the nearest within `near`. */
function closest(lane, { start_us, end_us }, us, near) {
  let best = null, distance = near;
  for (let i = firstAfter(lane, (v) => end_us[v], us - near); i < lane.length && start_us[lane[i]] <= us + near; i++) {
    const off = Math.max(start_us[lane[i]] - us, us - end_us[lane[i]], 0);
    const longer = best !== null && off === distance && end_us[lane[i]] - start_us[lane[i]] > end_us[best] - start_us[best];
    if (off < distance || best === null || longer) [best, distance] = [lane[i], off];
  }
  return best;
}

/* What stands for ops that are too narrow to see: those of a lane that run one after another, of one pass and one module, by the first
   `depth` parts of its name. Ops of no module go with their neighbours, updates with the backward pass. */
function blocksOf(t, d, depth) {
  return (t.levels[d][depth] ??= gathered(t.lanes[d], t.step, depth));
}

function gathered(lane, { start_us, end_us }, depth) {
  const found = [];
  let last = null;
  for (const v of lane) {
    const name = around[v].slice(0, depth).join("."), pass = ops.phase[v] === 0 ? "forward" : "backward";
    if (last?.name === "" && last.pass === pass) last.name = name;
    if (last === null || last.pass !== pass || (name !== last.name && around[v].length)) {
      found.push(last = { name, pass, start_us: start_us[v], end_us: end_us[v], busy_us: 0, ops: 0 });
    }
    last.end_us = Math.max(last.end_us, end_us[v]);
    last.busy_us += end_us[v] - start_us[v];
    last.ops++;
  }
  return found;
}

/* The blocks of a lane that can be seen, from where to where, of modules of one depth. */
function sightedBlocks(t, d, depth) {
  const blocks = blocksOf(t, d, depth), first = firstAfter(blocks, (block) => block.end_us, span.from);
  return [blocks, first, Math.max(first, firstAfter(blocks, (block) => block.start_us, span.to))];
}

/* The blocks to draw where there is room for so many names: of the deepest modules of which there are no more, or, where these leave much
   of it, of neighbours a level below; where even passes take turns too often, of both. Which of them go together depends on their places
   in the lane, and not on where the reader looks. */
function blocksInSight(t, d, room) {
  let depth = deepest, sighted = sightedBlocks(t, d, depth);
  while (depth > 0 && sighted[2] - sighted[1] > room) sighted = sightedBlocks(t, d, --depth);
  const [blocks, first, end] = sighted;
  if (end - first > room) return joined(...sighted, room, () => "");
  if (depth === deepest || 2 * (end - first) > room) return blocks.slice(first, end);
  return joined(...sightedBlocks(t, d, depth + 1), room, ({ name, pass }) => `${pass} ${cut(name, depth)}`);
}

/* Blocks put together with their neighbours, where `kind` says the same of both. */
function joined(blocks, from, to, room, kind) {
  const size = 2 ** Math.ceil(Math.log2((to - from) / room)), found = [];
  for (let i = from; i < to; i++) {
    const block = blocks[i], place = Math.floor(i / size), before = found.at(-1);
    if (before?.place === place && before.kind === kind(block)) {
      const pass = before.pass === block.pass ? block.pass : "both passes";
      const sums = { busy_us: before.busy_us + block.busy_us, ops: before.ops + block.ops };
      Object.assign(before, { to: block.name, end_us: block.end_us, pass, ...sums });
    } else found.push({ ...block, place, kind: kind(block) });
  }
  return found;
}

const cut = (name, depth) => name.split(".").slice(0, depth).join(".");
const titleOf = ({ name, pass, to = name }) => (to === name ? name || pass : `${name}\u2013${to.slice(to.lastIndexOf(".") + 1)}`);
const kindOf = ({ name, to = name }) => (classOf(name) === classOf(to) ? classOf(name) : "");
