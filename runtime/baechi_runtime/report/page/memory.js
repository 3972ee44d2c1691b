"use strict";
// What each device holds over time, against its limit: predicted as an area, measured as a line where somebody looked.

class MemoryView {
  constructor() {
    Object.assign(this, timeAxis);
    this.each = devices.length > 8 ? 54 : 92;
    this.surface = new Surface(this, "Memory of each device over the step, against its limit", this.each * devices.length + 24);
    span.surfaces.push(this.surface);
    this.tops = devices.map((device, d) => {
      const seen = data.measured?.memory?.[d][1].reduce((a, b) => Math.max(a, b), 0) ?? 0;
      const peak = Math.max(predicted.peaks[d], device.peak_measured_bytes ?? 0, seen, 1);
      const near = device.memory_bytes !== null && device.memory_bytes < 3 * peak;
      return (near ? Math.max(device.memory_bytes, peak) : peak) * 1.08;
    });
  }

  draw(context) {
    const bottom = this.each * devices.length;
    this.drawAxis(context, 4, bottom);
    devices.forEach((device, d) => {
      context.save();
      context.beginPath();
      context.rect(this.left, this.each * d, this.width - this.left, this.each + 1);
      context.clip();
      context.fillStyle = context.strokeStyle = device.colour;
      this.curve(context, d, predicted.memory[d]);
      const measured = data.measured?.memory?.[d];
      if (measured) this.line(context, d, measured, data.measured.step_us);
      if (device.memory_bytes !== null && device.memory_bytes <= this.tops[d]) this.level(context, d, device.memory_bytes, ink("limit"), [8, 4]);
      if (device.peak_measured_bytes !== null) this.level(context, d, device.peak_measured_bytes, ink("ink"), [2, 3]);
      context.restore();
      this.label(context, d);
    });
  }

  y(d, bytes) { return this.each * (d + 1) - (bytes / this.tops[d]) * (this.each - 18); }

  trace(context, d, [at, held], end) {
    const last = this.x(Math.max(end, at[at.length - 1] ?? 0));
    context.beginPath();
    at.forEach((us, i) => {
      const x = this.x(us);
      if (i > 0) context.lineTo(x, this.y(d, held[i - 1]));
      context.lineTo(x, this.y(d, held[i]));
    });
    context.lineTo(last, this.y(d, held[held.length - 1]));
    return last;
  }

  curve(context, d, memory) {
    const last = this.trace(context, d, memory, predicted.step_us);
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(last, this.y(d, 0));
    context.lineTo(this.x(0), this.y(d, 0));
    context.globalAlpha = 0.22;
    context.fill();
    context.globalAlpha = 1;
  }

  line(context, d, memory, end) {
    if (!memory[0].length) return;
    this.trace(context, d, memory, end);
    context.strokeStyle = ink("ink");
    context.lineWidth = 1;
    context.stroke();
  }

  level(context, d, bytes, colour, dashes) {
    const y = Math.round(this.y(d, bytes)) + 0.5;
    context.strokeStyle = colour;
    context.lineWidth = 1.2;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(this.left, y);
    context.lineTo(this.width, y);
    context.stroke();
    context.setLineDash([]);
  }

  label(context, d) {
    const { name, colour } = devices[d], y = this.each * d + 20;
    context.textAlign = "left";
    context.fillStyle = colour;
    context.fillRect(8, y - 5, 4, 10);
    context.fillStyle = ink("muted");
    context.fillText(clipped(context, name, this.left - 24, true), 17, y);
    if (this.each > 60 && this.left > 100) context.fillText(clipped(context, size(predicted.peaks[d]), this.left - 12), 8, y + 18);
  }

  pick(x, y) {
    const d = Math.floor(y / this.each);
    if (d < 0 || d >= devices.length || x < this.left) return null;
    const us = this.at(x), [at, held] = predicted.memory[d];
    let i = at.findIndex((instant) => instant > us);
    if (i < 0) i = at.length;
    return { d, us, bytes: held[Math.max(0, i - 1)] };
  }

  describe({ d, us, bytes }) { return `${devices[d].name} at ${time(Math.max(0, us))}\n${size(bytes)}, predicted`; }
  choose() {}
}

const memory = new MemoryView();

function memorySection() {
  const counted = data.peaks_found, line = data.measured?.memory ? data.measured.memory_found : null;
  const computed = line === "computed" || (data.peaks.length && counted === "computed");
  const cell = (bytes) => el("td", { class: "number" }, bytes === null ? "-" : size(bytes));
  const rows = devices.map((device, d) => el("tr", {},
    el("td", { class: "name" }, swatch(d), " ", device.name), cell(predicted.peaks[d]),
    data.peaks.length ? cell(device.peak_measured_bytes) : null,
    el("td", { class: "number" }, device.memory_bytes === null ? "none" : size(device.memory_bytes)),
    el("td", { class: "number" }, device.memory_bytes === null ? "-" : share(predicted.peaks[d], device.memory_bytes))));
  const head = ["device", "peak predicted", ...(data.peaks.length ? ["peak " + counted] : []), "limit", "of the limit"];
  section("memory", "Memory",
    el("p", { class: "note" }, "The area is what is predicted" + (line ? `, the thin line what was ${line} of the recorded step` : "") +
      (data.peaks.length ? `, the dotted line the ${counted} peak` : "") + ". A limit is drawn, as a dashed line, where it is within three times the peak." +
      (computed ? " Computed is what live tensors sum up to." : "")),
    memory.surface.canvas,
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((text, i) => el("th", i ? { class: "number", scope: "col" } : { scope: "col" }, text)))),
      el("tbody", {}, rows))));
}
