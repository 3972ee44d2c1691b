"use strict";
// What every part of a placed run's page uses: its ops, and which of them is selected.

const ops = data.ops, tensors = data.tensors, placement = data.placement, devices = data.devices;
const opCount = ops.id.length;

/* Tensors that an op makes and reads. */
const made = Array.from({ length: opCount }, () => []), read = Array.from({ length: opCount }, () => []);
tensors.producer.forEach((v, t) => {
  made[v].push(t);
  for (const w of tensors.readers[t]) read[w].push(t);
});
const critical = new Set(data.predicted.critical);
const swatch = (device) => el("span", { class: "swatch", style: { background: devices[device].colour } });

/* The selected op, and who wants to know of it. */
const selection = { op: null, listeners: [] };
function select(op) {
  selection.op = op;
  for (const listener of selection.listeners) listener(op);
}
const opLink = (op) => el("button", { class: "link", type: "button", onclick: () => select(op) }, ops.id[op]);

/* Ops by their names. */
const positions = new Map(ops.id.map((id, v) => [id, v]));
const idLink = (id) => (positions.has(id) ? opLink(positions.get(id)) : id);
