"use strict";
// The simulator: what a plan is worth, by the rules of docs/simulator.md. The tests hold every time and byte of it to baechi_ext.simulate.

/* Entries are lists of numbers, compared from the left; the least comes first. */
class Heap {
  entries = [];
  get first() { return this.entries[0]; }
  push(entry) {
    const heap = this.entries;
    let i = heap.length;
    for (let above = (i - 1) >> 1; i > 0 && isBefore(entry, heap[above]); above = (i - 1) >> 1) {
      heap[i] = heap[above];
      i = above;
    }
    heap[i] = entry;
  }
  pop() {
    const heap = this.entries, least = heap[0], last = heap.pop();
    let i = 0;
    for (let child = 1; child < heap.length; child = 2 * i + 1) {
      if (child + 1 < heap.length && isBefore(heap[child + 1], heap[child])) child++;
      if (!isBefore(heap[child], last)) break;
      heap[i] = heap[child];
      i = child;
    }
    if (heap.length) heap[i] = last;
    return least;
  }
}

function isBefore(a, b) {
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
}

/* The ops and tensors of a graph, in columns, and what follows from them: `made` and `readers` of ops and tensors, `order`, in which
   all inputs come before what reads them, `tail_us`, the longest compute-only path to the end, and
   `issue_us`, the time that all ops take the host. */
class Flow {
  constructor(ops, tensors) {
    const read = ops.inputs, lists = ({ length }) => Array.from({ length }, () => []);
    Object.assign(this, { ops, tensors, read, made: lists(read), readers: lists(tensors.producer) });
    tensors.producer.forEach((v, t) => this.made[v].push(t));
    read.forEach((inputs, v) => { for (const t of inputs) this.readers[t].push(v); });
    this.issue_us = ops.issue_us.reduce((a, b) => a + b, 0);
    this.order = this.ordered();
    this.tail_us = [...ops.compute_us];
    for (const v of [...this.order].reverse()) {
      const after = this.made[v].flatMap((t) => this.readers[t]).reduce((most, w) => Math.max(most, this.tail_us[w]), 0);
      this.tail_us[v] = ops.compute_us[v] + after;
    }
    const resident = new Set(ops.resident);
    this.home_bytes = tensors.bytes.map((bytes, t) => (resident.has(tensors.producer[t]) ? 0 : bytes));
    this.working_bytes = this.made.map((outputs, v) =>
      ops.temporary_bytes[v] + Math.max(0, outputs.reduce((beyond, t) => beyond - tensors.bytes[t], ops.output_bytes[v])));
    this.nameRank = tensors.name.map(() => 0);
    for (const outputs of this.made.filter(({ length }) => length > 1)) {
      [...outputs].sort((a, b) => byCodePoints(tensors.name[a], tensors.name[b])).forEach((t, i) => { this.nameRank[t] = i; });
    }
  }

  ordered() {
    const missing = this.read.map((inputs) => inputs.length), order = [...missing.keys()].filter((v) => missing[v] === 0);
    for (let i = 0; i < order.length; i++) {
      for (const t of this.made[order[i]]) for (const w of this.readers[t]) if (--missing[w] === 0) order.push(w);
    }
    return order;
  }
}

/* As Python compares text. */
function byCodePoints(a, b) {
  const [x, y] = [a, b].map((text) => [...Array.from(text, (letter) => letter.codePointAt(0)), -1]);
  return isBefore(x, y) ? -1 : 1;
}

const FREE = { us_per_byte: 0, latency_us: 0, send_us: 0, send_us_per_byte: 0, receive_us: 0, receive_us_per_byte: 0, issue_us: 0 };

/* The costs of links, as a function of source and target. `cluster` is that of a plan file; hundreds of devices have so many pairs that
   they are looked through but once. */
function linkCosts({ devices, links }) {
  if (!tables.has(links)) tables.set(links, linkTable(devices, links));
  const { usual, own } = tables.get(links), count = devices.length;
  return (source, target) => own.get(source * count + target) ?? usual;
}

const tables = new WeakMap();

function linkTable(devices, { default: usual, pairs }) {
  const index = new Map(devices.map(({ name }, d) => [name, d])), own = new Map();
  for (const { source, target, ...costs } of pairs) own.set(index.get(source) * devices.length + index.get(target), { ...FREE, ...costs });
  return { usual: { ...FREE, ...usual }, own };
}

/* Ops by the device that they are on. */
function byDevice(ops, placement) {
  const found = new Map();
  for (const v of ops) {
    if (!found.has(placement[v])) found.set(placement[v], []);
    found.get(placement[v]).push(v);
  }
  return found;
}

class Simulation {
  constructor(flow, cluster, placement, priority) {
    const { devices } = cluster, count = placement.length, each = (value) => devices.map(() => value);
    Object.assign(this, { flow, cluster, placement, priority, devices: devices.length, link: linkCosts(cluster), events: new Heap() });
    this.start_us = new Array(count).fill(0);
    this.end_us = new Array(count).fill(0);
    this.transfers = [];
    this.missing = flow.read.map((inputs) => inputs.length);
    this.unread = new Int32Array(flow.readers.length * devices.length);  // by tensor and device; at home with the transfers to others
    this.takenIn = new Uint8Array(this.unread.length);
    this.readersOn = flow.readers.map((readers) => byDevice(readers, placement));
    const home = flow.tensors.producer.map((v) => placement[v]);
    this.targets = this.readersOn.map((on, t) => [...on.keys()].filter((d) => d !== home[t]).sort((a, b) => a - b));
    this.ready = devices.map(() => new Heap());
    [this.leaving, this.coming] = [devices.map(() => new Map()), devices.map(() => new Map())];  // requested transfers, by the other device
    [this.running, this.sending, this.receiving] = [each(false), each(false), each(false)];
    [this.freeToSend, this.freeToReceive] = [new Set(), new Set()];  // whose channels became free, or were asked for, at this instant
    this.busy_us = each(0);
    const base = each(0);
    placement.forEach((d, v) => { base[d] += flow.ops.persistent_bytes[v]; });
    this.memory = base.map((bytes) => [[0], [bytes]]);  // for each device: from when, and what it holds from then on
  }

  run() {
    const { events, placement } = this;
    let now = 0;
    this.missing.forEach((count, v) => { if (count === 0) this.enqueue(v, 0); });
    for (;;) {
      while (events.first?.[0] === now) {
        const item = events.pop()[1];
        if (item < placement.length) this.endOp(item, now);
        else this.endTransfer(this.transfers[item - placement.length], now);
      }
      while (this.startTransfer(now));
      this.ready.forEach((heap, d) => { if (!this.running[d] && heap.first) this.startOp(heap.pop().at(-1), d, now); });
      if (!events.first) return this.finished(now);
      now = events.first[0];
    }
  }

  finished(now) {
    const { start_us, end_us, transfers, busy_us, memory, placement, cluster } = this;
    const issued = new Map(), D = this.devices;
    for (const { source, target } of transfers) issued.set(source * D + target, (issued.get(source * D + target) ?? 0) + 1);
    const pairs = [...issued.keys()].sort((a, b) => a - b);
    const issue_us = (pair) => issued.get(pair) * this.link(Math.floor(pair / D), pair % D).issue_us;
    const host_us = pairs.reduce((us, pair) => us + issue_us(pair), this.flow.issue_us);
    const peaks = memory.map(([, held]) => held.reduce((a, b) => Math.max(a, b)));
    const sent = transfers.map((x) => [x.tensor, x.source, x.target, x.start_us, x.end_us]);
    return { step_us: Math.max(now, host_us), start_us, end_us, transfers: sent, busy_us, memory, peaks, placement, cluster };
  }

  hold(d, bytes, now) {
    const [at_us, held] = this.memory[d], last = held.length - 1;
    if (at_us[last] === now) held[last] += bytes;
    else if (bytes) { at_us.push(now); held.push(held[last] + bytes); }
  }

  enqueue(v, now) {
    this.ready[this.placement[v]].push(this.priority ? [this.priority[v], now, v] : [now, -this.flow.tail_us[v], v]);
  }

  startOp(v, d, now) {
    const { ops, made, read, tensors, home_bytes, working_bytes } = this.flow;
    let duration = ops.compute_us[v] / this.cluster.devices[d].speed, sending = 0;
    for (const t of read[v]) {
      const source = this.placement[tensors.producer[t]], copy = t * this.devices + d;
      if (source === d || this.takenIn[copy]) continue;
      this.takenIn[copy] = 1;
      const { receive_us, receive_us_per_byte } = this.link(source, d);
      duration += receive_us + tensors.bytes[t] * receive_us_per_byte;
    }
    for (const t of made[v]) {
      for (const { send_us, send_us_per_byte } of this.targets[t].map((target) => this.link(d, target))) {
        sending += send_us + tensors.bytes[t] * send_us_per_byte;
      }
      this.unread[t * this.devices + d] = (this.readersOn[t].get(d)?.length ?? 0) + this.targets[t].length;
    }
    duration += sending;
    this.running[d] = true;
    this.busy_us[d] += duration;
    this.start_us[v] = now;
    this.hold(d, made[v].reduce((bytes, t) => bytes + home_bytes[t], working_bytes[v]), now);
    this.events.push([now + duration, v]);
  }

  endOp(v, now) {
    const { made, read, working_bytes } = this.flow, d = this.placement[v];
    this.running[d] = false;
    this.end_us[v] = now;
    this.hold(d, -working_bytes[v], now);
    for (const t of read[v]) this.drop(t, d, 1, now);
    for (const t of made[v]) {
      this.drop(t, d, 0, now);
      this.arrive(t, d, now);
      for (const target of this.targets[t]) this.request(t, d, target, now);
    }
  }

  /* So many who needed a device's copy of a tensor do so no longer. */
  drop(t, d, count, now) {
    const { tensors, home_bytes } = this.flow, isHome = this.placement[tensors.producer[t]] === d;
    this.unread[t * this.devices + d] -= count;
    if (this.unread[t * this.devices + d] === 0) this.hold(d, -(isHome ? home_bytes[t] : tensors.bytes[t]), now);
  }

  arrive(t, d, now) {
    for (const w of this.readersOn[t].get(d) ?? []) if (--this.missing[w] === 0) this.enqueue(w, now);
  }

  request(t, source, target, now) {
    const { tensors, tail_us, nameRank } = this.flow, link = this.link(source, target), readers = this.readersOn[t].get(target);
    const transfer = { tensor: t, source, target, us: link.latency_us + tensors.bytes[t] * link.us_per_byte };
    this.unread[t * this.devices + target] = readers.length;
    if (transfer.us === 0 || this.cluster.parallel_transfers) return this.send(transfer, now);
    const urgency = readers.reduce((most, w) => Math.max(most, tail_us[w]), 0);
    if (!this.leaving[source].has(target)) {
      const heap = new Heap();
      this.leaving[source].set(target, heap);
      this.coming[target].set(source, heap);
    }
    this.leaving[source].get(target).push([now, -urgency, tensors.producer[t], target, nameRank[t], transfer]);
    this.freeToSend.add(source);
  }

  /* Of the requested transfers whose two channels are free the first starts; false where there is none. One of its channels became free at
     this instant, or it was asked for at this instant: else it would have started before. */
  startTransfer(now) {
    let best = null;
    const consider = (heaps, busy) => heaps.forEach((heap, other) => {
      if (!busy[other] && (best === null || isBefore(heap.first, best.first))) best = heap;
    });
    for (const source of this.freeToSend) if (!this.sending[source]) consider(this.leaving[source], this.receiving);
    for (const target of this.freeToReceive) if (!this.receiving[target]) consider(this.coming[target], this.sending);
    if (best === null) {
      this.freeToSend.clear();
      this.freeToReceive.clear();
      return false;
    }
    const transfer = best.pop().at(-1), { source, target } = transfer;
    if (!best.first) {
      this.leaving[source].delete(target);
      this.coming[target].delete(source);
    }
    this.sending[source] = this.receiving[target] = true;
    this.send(transfer, now);
    return true;
  }

  send(transfer, now) {
    transfer.start_us = now;
    transfer.end_us = now + transfer.us;
    this.transfers.push(transfer);
    this.hold(transfer.target, this.flow.tensors.bytes[transfer.tensor], now);
    if (transfer.us === 0) this.deliver(transfer, now);
    else this.events.push([transfer.end_us, this.placement.length + this.transfers.length - 1]);
  }

  endTransfer(transfer, now) {
    this.sending[transfer.source] = this.receiving[transfer.target] = false;
    this.freeToSend.add(transfer.source);
    this.freeToReceive.add(transfer.target);
    this.deliver(transfer, now);
  }

  deliver({ tensor, source, target }, now) {
    this.drop(tensor, source, 1, now);
    this.arrive(tensor, target, now);
  }
}

/* A step of a placement, with priorities or null: its ops' and transfers' times, and what devices hold. */
const simulate = (flow, cluster, placement, priority) => new Simulation(flow, cluster, placement, priority).run();
