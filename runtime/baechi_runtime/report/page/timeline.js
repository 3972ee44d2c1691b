"use strict";
// The timeline: a lane of ops and a lane of sent tensors for every device of every step, and what they say.

/* How high the line under backward ops is, where colours are those of modules or parts. */
const BACKWARD = 4;
/* An op or block whose name is to be read is this wide, on average; ops are drawn one by one where they are that wide. */
const NAMED = 60, SEEN = 4;
/* More arrows than these hide what they point at. */
const MOST_ARROWS = 200;

class TimelineView {
  constructor() {
    Object.assign(this, timeAxis);
    this.withPath = !hasParts;  // what is not on the path is pale, which hides the parts
    const many = devices.length > 8;
    [this.lane, this.copies] = many ? [12, 4] : [26, 8];
    this.row = this.lane + this.copies + (many ? 3 : 8);
    this.surface = new Surface(this, "Timeline of the step by device: predicted" + (data.measured ? " above measured" : ""), this.placed());
    span.surfaces.push(this.surface);
    colours.listeners.push(() => this.surface.redraw());
  }

  /* Puts the steps below each other and returns how high all are. */
  placed() {
    let top = 0;
    for (const t of tracks) {
      t.top = top + 26;
      t.bottom = t.top + this.row * devices.length;
      top = t.bottom + 20;
    }
    return top + 4;
  }

  draw(context) {
    this.colours = Object.fromEntries(["critical", "transfer", "accent", "muted", "faint", "paper", "ink"].map((name) => [name, ink(name)]));
    colours.refresh();
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

  y(t, device) { return t.top + device * this.row; }

  /* The ops of a device that can be seen, from where to where in its lane. */
  inSight(t, d) {
    const { start_us, end_us } = t.step, lane = t.lanes[d], first = firstAfter(lane, (v) => end_us[v], span.from);
    return [first, Math.max(first, firstAfter(lane, (v) => start_us[v], span.to))];
  }

  /* The blocks that are drawn instead of single ops, where these are too narrow to see; null where they are not. */
  blocks(t, d) {
    const [first, end] = this.inSight(t, d), { start_us, end_us } = t.step, lane = t.lanes[d];
    if (end === first) return null;
    const width = Math.min(this.width, this.x(end_us[lane[end - 1]])) - Math.max(this.left, this.x(start_us[lane[first]]));
    return (end - first) * SEEN <= width ? null : blocksInSight(t, d, Math.max(1, width / NAMED));
  }

  drawDevice(context, t, d) {
    const blocks = this.blocks(t, d), y = this.y(t, d) + this.lane + 1;
    if (blocks) this.drawBlocks(context, t, d, blocks);
    else this.drawOps(context, t, d);
    const sent = t.sent[d].filter(([, , , start, end]) => end >= span.from && start <= span.to);
    if (sent.length * SEEN > this.width - this.left) {
      this.profile(context, sent.map(([, , , start, end]) => [start, end, this.colours.transfer]), y, this.copies - 2);
      return;
    }
    for (const [, , target, start, end] of sent) {
      const x = this.x(start), w = Math.max(0.8, this.x(end) - x);
      context.fillStyle = this.colours.transfer;
      context.fillRect(x, y, w, this.copies - 2);
      if (w > 5) {
        context.fillStyle = devices[target].colour;
        context.fillRect(x + w - 3, y, 3, this.copies - 2);
      }
    }
  }

  drawOps(context, t, d) {
    const y = this.y(t, d), { start_us, end_us } = t.step, [first, last] = this.inSight(t, d);
    context.textAlign = "left";
    for (const v of t.lanes[d].slice(first, last)) {
      const x = this.x(start_us[v]), w = this.x(end_us[v]) - x, drawn = Math.max(0.7, w > 4 ? w - 0.8 : w), onPath = t.critical.has(v);
      const { colour, text } = colours.paint(v, t.step.placement);
      context.globalAlpha = this.withPath && !onPath ? 0.42 : 1;
      context.fillStyle = colour;
      context.fillRect(x, y, drawn, this.lane);
      context.globalAlpha = 1;
      if (colours.markBackward && data.phases[ops.phase[v]] === "backward") {
        context.fillStyle = this.colours.ink;
        context.fillRect(x, y + this.lane - BACKWARD, drawn, BACKWARD);
      }
      if (onPath && this.withPath) this.drawOnPath(context, x, w, y);
      if (w > 34 && this.lane > 14) {
        context.fillStyle = this.withPath && !onPath ? this.colours.ink : text;
        const from = Math.max(x, this.left);
        context.fillText(clipped(context, ops.id[v], x + w - from - 9), from + 4, y + this.lane / 2);
      }
    }
  }

  drawOnPath(context, x, w, y) {
    context.fillStyle = this.colours.critical;
    context.fillRect(x, y - 3, Math.max(0.7, w), 3);
  }

  /* Blocks with their modules' names, and below these how busy the device is. */
  drawBlocks(context, t, d, blocks) {
    const { start_us, end_us, placement: place } = t.step, lane = t.lanes[d].slice(...this.inSight(t, d));
    const y = this.y(t, d), title = this.lane > 14 ? 13 : 0;
    this.profile(context, lane.map((v) => [start_us[v], end_us[v], colours.paint(v, place).colour]), y + title, this.lane - title);
    for (const v of this.withPath ? lane.filter((w) => t.critical.has(w)) : []) {
      this.drawOnPath(context, this.x(start_us[v]), this.x(end_us[v]) - this.x(start_us[v]), y);
    }
    if (!title) return;
    context.textAlign = "left";
    context.font = "11px system-ui, sans-serif";
    for (const block of blocks) {
      const x = Math.max(this.left, this.x(block.start_us)), w = Math.min(this.width, this.x(block.end_us)) - x;
      context.fillStyle = this.colours.faint;
      context.globalAlpha = 0.25;
      context.fillRect(x, y, Math.max(0.7, w - 1), title);
      context.globalAlpha = 1;
      context.fillStyle = this.colours.ink;
      const names = titleOf(block).split("."), [last, two] = [1, 2].map((count) => names.slice(-count).join("."));
      const short = context.measureText(two).width <= w - 5 ? two : last;
      if (w > 20) context.fillText(fitted(context, short, kindOf(block), w - 5), x + 2, y + title / 2);
    }
    context.font = "12px system-ui, sans-serif";
  }

  /* How much of each bit of time is taken, as a height, in the colour of what takes the most of it. */
  profile(context, taken, y, height) {
    const bit = 2, sums = new Map();
    for (const [start, end, colour] of taken) {
      const from = Math.max(this.left, this.x(start)), to = Math.min(this.width, this.x(end));
      for (let i = Math.floor(from / bit); i * bit < to; i++) {
        const part = Math.min(to, (i + 1) * bit) - Math.max(from, i * bit), sum = sums.get(i) ?? { all: 0, most: 0, colour };
        sum.all += part;
        if (part > sum.most) [sum.most, sum.colour] = [part, colour];
        sums.set(i, sum);
      }
    }
    for (const [i, { all, colour }] of sums) {
      const high = height * Math.min(1, all / bit);
      context.fillStyle = colour;
      context.fillRect(i * bit, y + height - high, bit, high);
    }
  }

  /* Lines where the critical path changes devices: along the transfer it waits for. */
  drawPath(context, t) {
    const shown = t.sent.flat().filter(([tensor, , target, start, end]) =>
      end >= span.from && start <= span.to && t.hops.has(tensor + ">" + target));
    if (shown.length > MOST_ARROWS) return;
    context.strokeStyle = this.colours.critical;
    context.lineWidth = 1.2;
    for (const [tensor, , target, start, end] of shown) this.arrow(context, t, tensor, target, start, end);
  }

  arrow(context, t, tensor, target, start, end) {
    const source = t.step.placement[tensors.producer[tensor]], down = target > source;
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
      const goes = tensors.producer[tensor] === v, comes = target === t.step.placement[v] && readers[tensor].includes(v);
      if (goes || comes) this.arrow(context, t, tensor, target, start, end);
    }
    const x = this.x(start_us[v]), w = Math.max(3, this.x(end_us[v]) - x), y = this.y(t, t.step.placement[v]);
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
      const block = this.blocks(t, d)?.find((one) => one.start_us <= us && us <= one.end_us);
      if (block) return { block, op: null, track: t };
      const v = closest(t.lanes[d], t.step, us, near);
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

  describe({ op, sent, gap, block, track: t }) {
    if (block) {
      const whole = block.end_us - block.start_us;
      return `${titleOf(block)} ${kindOf(block)}\n${t.title}: ${plural(block.ops, "op")}, ${block.pass}\n` +
        `busy ${share(block.busy_us, whole)} of ${time(whole)}, from ${time(block.start_us)}\na click shows it alone`;
    }
    if (gap) return this.describeGap(gap);
    if (sent) {
      const [tensor, source, target, start, end] = sent, named = tensors.name[tensor];
      return `${ops.id[op]}${named ? " (" + named + ")" : ""}\n${devices[source].name} to ${devices[target].name}: ` +
        `${size(tensors.bytes[tensor])} in ${time(end - start)}`;
    }
    const took = t.step.end_us[op] - t.step.start_us[op];
    const where = devices[t.step.placement[op]].name;
    return `${ops.id[op]}\n${ops.op[op]}\n${t.title} ${time(took)} on ${where}, from ${time(t.step.start_us[op])}` +
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

  choose({ op, block }) {
    if (block) span.show(block.start_us, block.end_us);
    else if (op !== null) select(op);
  }

  /* n and p: the next and the previous op of the device. */
  key(key) {
    if (key !== "n" && key !== "p") return false;
    const { lanes } = tracks[0], lane = selection.op === null ? lanes.find(({ length }) => length) ?? [] : lanes[placement[selection.op]];
    const at = lane.indexOf(selection.op), next = lane[at < 0 ? 0 : at + (key === "n" ? 1 : -1)];
    if (next !== undefined) { select(next); this.reveal(next); }
    return true;
  }

  /* Moves what is shown so that an op is in it. */
  reveal(op) {
    const start = predicted.start_us[op], end = predicted.end_us[op], width = span.to - span.from;
    const from = Math.max(0, (start + end - width) / 2);
    if (start < span.from || end > span.to) span.show(from, from + width);
  }

  /* The middle of an op in the canvas, in CSS pixels. */
  centre(op) {
    const { start_us, end_us } = predicted;
    return [this.x((start_us[op] + end_us[op]) / 2), this.y(tracks[0], placement[op]) + this.lane / 2];
  }
}

const timeline = new TimelineView();

function timelineSection() {
  const path = el("button", { type: "button", "aria-pressed": String(timeline.withPath) }, "Critical path");
  path.addEventListener("click", () => {
    timeline.withPath = !timeline.withPath;
    path.setAttribute("aria-pressed", String(timeline.withPath));
    timeline.surface.redraw();
  });
  const own = data.measured ? ["predicted", "measured"].map((title) =>
    el("button", { type: "button", onclick: () => span.show(0, trackOf(title).step.step_us) }, "Fit " + title)) : [];
  const names = el("div", { class: "legend" }, colours.legend(),
    el("span", {}, el("span", { class: "swatch transfer" }), "sent tensor, its end in the receiver's colour"),
    el("span", {}, el("span", { class: "swatch critical" }), "critical path"));
  section("timeline", data.methods.length ? `Timeline of ${data.plan.method}` : "Timeline",
    el("p", { class: "note" }, "The critical path is a chain of ops, each held up by the one before it; what is not on it is pale. " +
      "Where ops are too narrow to see, there are blocks of modules instead, with how busy the device is below; a click shows one alone. " +
      "Drag to move, ctrl and wheel, double click or + and \u2212 to zoom, 0 for the whole step, n and p for the next and previous op."),
    el("div", { class: "bar" }, timeline.surface.buttons(), own, path, colours.chooser()), timeline.surface.canvas, names);
}
