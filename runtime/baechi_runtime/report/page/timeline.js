"use strict";
// The predicted and the measured step on one time axis: a lane of ops and a lane of sent tensors for every device.

/* The part of the step that is shown, shared by all that have a time axis. */
const span = {
  whole: Math.max(data.predicted.step_us, data.measured ? data.measured.step_us : 0) || 1,
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
span.from = 0;
span.to = span.whole;

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

/* Ops and transfers of one step in the order of their starts, by device, and the chain that ends it. */
function track(title, step) {
  const byStart = (a, b) => step.start_us[a] - step.start_us[b] || step.end_us[a] - step.end_us[b];
  const ran = [...ops.id.keys()].filter((v) => step.start_us[v] !== null);
  const lanes = devices.map((_, d) => ran.filter((v) => placement[v] === d).sort(byStart));
  const sent = devices.map((_, d) => step.transfers.filter((t) => t[1] === d).sort((a, b) => a[3] - b[3]));
  const path = step.critical ?? chain(step, lanes);
  return { title, step, lanes, sent, critical: new Set(path), hops: hops(path) };
}

/* The transfers between the ops of a path, as "tensor>device". */
function hops(path) {
  const found = new Set();
  for (let i = 1; i < path.length; i++) {
    const [a, b] = [path[i - 1], path[i]];
    const tensor = placement[a] === placement[b] ? undefined : made[a].find((t) => tensors.readers[t].includes(b));
    if (tensor !== undefined) found.add(tensor + ">" + placement[b]);
  }
  return found;
}

/* Ops of a measured step that held each other up, from the last one back: what came last of its inputs and of its device. */
function chain(step, lanes) {
  const arrival = new Map(step.transfers.map((t) => [t[0] + ">" + t[2], t[4]])), before = new Map();
  for (const lane of lanes) lane.forEach((v, i) => before.set(v, i ? lane[i - 1] : null));
  const path = new Set();
  let v = lanes.flat().reduce((a, b) => (a === null || step.end_us[b] > step.end_us[a] ? b : a), null);
  while (v !== null && !path.has(v)) {
    path.add(v);
    let cause = before.get(v) ?? null, latest = cause === null ? -1 : step.end_us[cause];
    for (const t of read[v]) {
      const producer = tensors.producer[t], there = arrival.get(t + ">" + placement[v]) ?? step.end_us[producer];
      if (there !== null && there > latest) [cause, latest] = [producer, there];
    }
    v = cause;
  }
  return [...path].reverse();
}

const tracks = [track("predicted", data.predicted), ...(data.measured ? [track("measured", data.measured)] : [])];

/* How high the line under backward ops is, where colours are those of parts. */
const BACKWARD = 4;

class TimelineView {
  constructor() {
    Object.assign(this, timeAxis);
    this.byPart = data.parts.length > 0;
    this.withPath = !this.byPart;  // what is not on the path is pale, which hides the parts
    const many = devices.length > 8;
    const between = many ? 3 : 8;
    [this.lane, this.copies] = many ? [12, 4] : [26, 8];
    const device = this.lane + this.copies + between;
    let top = 0;
    for (const t of tracks) {
      t.top = top + 26;
      t.bottom = t.top + device * devices.length;
      top = t.bottom + 20;
    }
    this.row = device;
    this.surface = new Surface(this, "Timeline of the step by device: predicted" + (data.measured ? " above measured" : ""), top + 4);
    span.surfaces.push(this.surface);
  }

  draw(context) {
    this.colours = Object.fromEntries(["critical", "transfer", "accent", "muted", "paper", "ink"].map((name) => [name, ink(name)]));
    for (const t of tracks) {
      this.drawAxis(context, t.top - 4, t.bottom);
      context.save();
      context.beginPath();
      context.rect(this.left, t.top - 6, this.width - this.left, t.bottom - t.top + 8);
      context.clip();
      devices.forEach((_, d) => this.drawDevice(context, t, d));
      if (this.withPath) this.drawPath(context, t);
      if (selection.op !== null) this.drawSelected(context, t);
      context.restore();
      this.drawLabels(context, t);
    }
  }

  drawLabels(context, t) {
    context.textAlign = "left";
    context.fillStyle = ink("ink");
    context.font = "600 12px system-ui, sans-serif";
    context.fillText(`${t.title}  ${time(t.step.step_us)}${t.title === "measured" ? ", one step recorded op by op" : ""}`, 8, t.top - 14);
    context.font = "12px system-ui, sans-serif";
    devices.forEach((device, d) => {
      const y = this.y(t, d) + this.lane / 2;
      context.fillStyle = device.colour;
      context.fillRect(8, y - 5, 4, 10);
      context.fillStyle = this.colours.muted;
      context.fillText(clipped(context, device.name, this.left - 24, true), 17, y);
    });
  }

  /* The colour of an op, and of text on it: that of its part of the batch, or of its device. */
  paint(v) {
    if (!this.byPart) return devices[placement[v]];
    return ops.part[v] === null ? { colour: this.colours.transfer, text: this.colours.paper } : data.parts[ops.part[v]];
  }

  y(t, device) { return t.top + device * this.row; }

  drawDevice(context, t, d) {
    const y = this.y(t, d), { start_us, end_us } = t.step;
    context.textAlign = "left";
    let drawn = -Infinity;
    for (let i = firstAfter(t.lanes[d], end_us, span.from); i < t.lanes[d].length; i++) {
      const v = t.lanes[d][i];
      if (start_us[v] > span.to) break;
      const x = this.x(start_us[v]), w = this.x(end_us[v]) - x, onPath = t.critical.has(v);
      if (w < 0.7 && x - drawn < 0.7 && !onPath) continue;
      drawn = x;
      const { colour, text } = this.paint(v);
      context.globalAlpha = this.withPath && !onPath ? 0.42 : 1;
      context.fillStyle = colour;
      context.fillRect(x, y, Math.max(0.7, w > 4 ? w - 0.8 : w), this.lane);
      context.globalAlpha = 1;
      if (this.byPart && ops.part[v] !== null && data.phases[ops.phase[v]] === "backward") {
        context.fillStyle = this.colours.ink;
        context.fillRect(x, y + this.lane - BACKWARD, Math.max(0.7, w > 4 ? w - 0.8 : w), BACKWARD);
      }
      if (onPath && this.withPath) {
        context.fillStyle = this.colours.critical;
        context.fillRect(x, y - 3, Math.max(0.7, w), 3);
      }
      if (w > 34 && this.lane > 14) {
        context.fillStyle = this.withPath && !onPath ? ink("ink") : text;
        const from = Math.max(x, this.left);
        context.fillText(clipped(context, ops.id[v], x + w - from - 9), from + 4, y + this.lane / 2);
      }
    }
    context.fillStyle = this.colours.transfer;
    for (const [, , target, start, end] of t.sent[d]) {
      if (end < span.from || start > span.to) continue;
      const x = this.x(start), w = Math.max(0.8, this.x(end) - x);
      context.fillStyle = this.colours.transfer;
      context.fillRect(x, y + this.lane + 1, w, this.copies - 2);
      if (w > 5) {
        context.fillStyle = devices[target].colour;
        context.fillRect(x + w - 3, y + this.lane + 1, 3, this.copies - 2);
      }
    }
  }

  /* Lines where the critical path changes devices: along the transfer it waits for. */
  drawPath(context, t) {
    context.strokeStyle = this.colours.critical;
    context.lineWidth = 1.2;
    for (let d = 0; d < devices.length; d++) {
      for (const [tensor, , target, start, end] of t.sent[d]) {
        if (end >= span.from && start <= span.to && t.hops.has(tensor + ">" + target)) this.arrow(context, t, tensor, target, start, end);
      }
    }
  }

  arrow(context, t, tensor, target, start, end) {
    const source = placement[tensors.producer[tensor]], down = target > source;
    const from = this.y(t, source) + this.lane + this.copies / 2, to = this.y(t, target) + (down ? 0 : this.lane);
    context.beginPath();
    context.moveTo(this.x(start), from);
    context.lineTo(this.x(end), to);
    context.stroke();
  }

  drawSelected(context, t) {
    const v = selection.op, { start_us, end_us, transfers } = t.step;
    if (start_us[v] === null) return;
    context.strokeStyle = this.colours.accent;
    context.lineWidth = 1.2;
    for (const [tensor, , target, start, end] of transfers) {
      const goes = tensors.producer[tensor] === v, comes = target === placement[v] && tensors.readers[tensor].includes(v);
      if (goes || comes) this.arrow(context, t, tensor, target, start, end);
    }
    const x = this.x(start_us[v]), w = Math.max(3, this.x(end_us[v]) - x), y = this.y(t, placement[v]);
    context.lineWidth = 4;
    context.strokeStyle = this.colours.paper;
    context.strokeRect(x, y, w, this.lane);
    context.lineWidth = 2;
    context.strokeStyle = this.colours.accent;
    context.strokeRect(x, y, w, this.lane);
  }

  pick(x, y) {
    const t = tracks.find((one) => y >= one.top && y < one.bottom);
    if (!t || x < this.left) return null;
    const d = Math.floor((y - t.top) / this.row), within = y - this.y(t, d), us = this.at(x), near = this.at(x + 2) - us;
    if (within <= this.lane) {
      const v = closest(t.lanes[d], t.step.start_us, t.step.end_us, us, near);
      return v === null ? this.gap(t, d, us) : { op: v, track: t };
    }
    const sent = t.sent[d].find((one) => one[3] - near <= us && us <= one[4] + near);
    return sent && within <= this.lane + this.copies + 2 ? { sent, op: tensors.producer[sent[0]], track: t } : null;
  }

  /* When a device is predicted to be idle: the gap, and the op that ends it. */
  gap(t, d, us) {
    const gap = t === tracks[0] ? data.explanation.idle[d].gaps.find((one) => one.start_us <= us && us <= one.end_us) : undefined;
    return gap ? { gap, op: gap.op === null ? null : positions.get(gap.op), track: t } : null;
  }

  describe({ op, sent, gap, track: t }) {
    if (gap) return this.describeGap(gap);
    if (sent) {
      const [tensor, source, target, start, end] = sent, named = tensors.name[tensor];
      return `${ops.id[op]}${named ? " (" + named + ")" : ""}\n${devices[source].name} to ${devices[target].name}: ` +
        `${size(tensors.bytes[tensor])} in ${time(end - start)}`;
    }
    const took = t.step.end_us[op] - t.step.start_us[op];
    return `${ops.id[op]}\n${ops.op[op]}\n${t.title} ${time(took)} on ${devices[placement[op]].name}, from ${time(t.step.start_us[op])}` +
      (t.critical.has(op) ? "\non the critical path" : "");
  }

  describeGap(gap) {
    const idle = `${devices[gap.device].name} is idle for ${time(gap.end_us - gap.start_us)}`;
    if (gap.op === null) return idle + ": there is nothing left to do";
    const waits = [
      [`${devices[gap.producer_device].name} computing ${gap.producer}`, gap.producer_us],
      ["a free link", gap.queue_us], ["the transfer", gap.transfer_us],
    ].filter(([, us]) => us > 0);
    return [idle + ", until " + gap.op + " can start; it waits for", ...waits.map(([what, us]) => `${what}: ${time(us)}`)].join("\n");
  }

  choose({ op }) { if (op !== null) select(op); }

  /* n and p: the next and the previous op of the device. */
  key(key) {
    if (key !== "n" && key !== "p") return false;
    const lane = tracks[0].lanes[selection.op === null ? 0 : placement[selection.op]];
    const at = lane.indexOf(selection.op), next = lane[at < 0 ? 0 : at + (key === "n" ? 1 : -1)];
    if (next !== undefined) { select(next); this.reveal(next); }
    return true;
  }

  /* Moves what is shown so that an op is in it. */
  reveal(op) {
    const start = data.predicted.start_us[op], end = data.predicted.end_us[op], width = span.to - span.from;
    const from = Math.max(0, (start + end - width) / 2);
    if (start < span.from || end > span.to) span.show(from, from + width);
  }

  /* The middle of an op in the canvas, in CSS pixels. */
  centre(op) {
    const { start_us, end_us } = data.predicted;
    return [this.x((start_us[op] + end_us[op]) / 2), this.y(tracks[0], placement[op]) + this.lane / 2];
  }
}

/* The first of a lane that ends after a time; ends are in order, since a device runs one op at a time. */
function firstAfter(lane, end_us, us) {
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end_us[lane[middle]] < us) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The op of a lane that runs at a time, or else the nearest within `near`. */
function closest(lane, start_us, end_us, us, near) {
  let best = null, distance = near;
  for (let i = firstAfter(lane, end_us, us - near); i < lane.length && start_us[lane[i]] <= us + near; i++) {
    const off = Math.max(start_us[lane[i]] - us, us - end_us[lane[i]], 0);
    const longer = best !== null && off === distance && end_us[lane[i]] - start_us[lane[i]] > end_us[best] - start_us[best];
    if (off < distance || best === null || longer) [best, distance] = [lane[i], off];
  }
  return best;
}

const timeline = new TimelineView();

/* What the colours mean. */
const deviceNames = () => devices.map((device, d) => el("span", {}, swatch(d), device.name));
function partNames() {
  const named = ({ colour }, k) => el("span", {}, el("span", { class: "swatch", style: { background: colour } }), "part " + k);
  return [...data.parts.map(named), el("span", {}, el("span", { class: "swatch shared" }), "all parts"),
    el("span", {}, el("span", { class: "swatch backward" }), "a line under it: backward")];
}

function timelineSection() {
  const path = el("button", { type: "button", "aria-pressed": String(timeline.withPath) }, "Critical path");
  path.addEventListener("click", () => {
    timeline.withPath = !timeline.withPath;
    path.setAttribute("aria-pressed", String(timeline.withPath));
    timeline.surface.redraw();
  });
  const own = data.measured ? tracks.map(({ title, step }) =>
    el("button", { type: "button", onclick: () => span.show(0, step.step_us) }, "Fit " + title)) : [];
  const parts = data.parts.length ? el("button", { type: "button", "aria-pressed": "true" }, "Parts of the batch") : null;
  const colours = el("span", { class: "colours" });
  const name = () => colours.replaceChildren(...(timeline.byPart ? partNames() : deviceNames()));
  parts?.addEventListener("click", () => {
    timeline.byPart = !timeline.byPart;
    parts.setAttribute("aria-pressed", String(timeline.byPart));
    name();
    timeline.surface.redraw();
  });
  name();
  const names = el("div", { class: "legend" }, colours,
    el("span", {}, el("span", { class: "swatch transfer" }), "sent tensor, its end in the receiver's colour"),
    el("span", {}, el("span", { class: "swatch critical" }), "critical path"));
  section("timeline", "Timeline",
    el("p", { class: "note" }, "The critical path is a chain of ops, each held up by the one before it; what is not on it is pale. " +
      "Drag to move, ctrl and wheel, double click or + and \u2212 to zoom, 0 for the whole step, n and p for the next and previous op."),
    el("div", { class: "bar" }, timeline.surface.buttons(), own, path, parts), timeline.surface.canvas, names);
}
