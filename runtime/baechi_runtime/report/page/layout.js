"use strict";
// The graph as a tree of groups, and where the open ones put what is in them: layers from top to bottom, in columns like a newspaper's.

const ROW_GAP = 22, ITEM_GAP = 14, COLUMN_GAP = 46, PADDING = 14, TITLE = 24, LEAST_WIDTH = 900, MOST_OPS = 120;
/* How wide drawings should be for their height. */
const SHAPE = innerWidth < 600 ? 0.8 : 1.7;
const SIZES = { op: [150, 36], group: [186, 56] };

/* A group: `groups` by name and `ops` in it, `all` ops below it, whether it shows what is in it, and which module it is, if one. */
class Group {
  constructor(name, parent) {
    Object.assign(this, { name, parent, groups: new Map(), ops: [], all: [], open: false, depth: parent ? parent.depth + 1 : 0 });
  }
  child(name) {
    if (!this.groups.has(name)) this.groups.set(name, new Group(name, this));
    return this.groups.get(name);
  }
  items() { return [...this.groups.values(), ...this.ops]; }
}

const inModules = (v) => [data.phases[ops.phase[v]], ...around[v]];
const WAYS = {
  module: inModules,
  colocation: (v) => (ops.colocation[v] === null ? ["not colocated"] : [ops.colocation[v]]),
  device: (v) => [devices[placement[v]].name, ...inModules(v)],
  part: (v) => [ops.part[v] === null ? "all parts" : "part " + ops.part[v], ...inModules(v)],
};

/* Each op's position in an order in which all its inputs come before it. */
const rank = new Array(opCount);
flow.order.forEach((v, i) => { rank[v] = i; });

/* The tree of groups of one way to group; `home[v]` is the group that op v stands in. */
function treeBy(way) {
  const root = new Group("", null), home = new Array(opCount);
  for (let v = 0; v < opCount; v++) {
    const names = WAYS[way](v), before = names.length - (way === "colocation" ? 0 : around[v].length);
    let group = root;
    names.forEach((name, i) => {
      group = group.child(name);
      if (i >= before) group.module ??= around[v].slice(0, i + 1 - before).join(".");
    });
    group.ops.push(v);
  }
  tidy(root);
  const settle = (group) => {
    for (const child of group.groups.values()) settle(child);
    for (const v of group.ops) home[v] = group;
    group.all = [...group.ops, ...[...group.groups.values()].flatMap((child) => child.all)];
    group.rank = group.all.reduce((sum, v) => sum + rank[v], 0) / (group.all.length || 1);
    summarize(group);
  };
  settle(root);
  return { root, home, links: linksOf(home) };
}

/* Groups with one group alone in them become one; more ops than a person can look at are parted, in topological order. */
function tidy(group) {
  for (const child of group.groups.values()) tidy(child);
  for (const [key, child] of group.groups) {
    if (child.ops.length || child.groups.size !== 1) continue;
    const [only] = child.groups.values();
    group.groups.set(key, Object.assign(only, { name: child.name + "." + only.name, parent: group }));
  }
  if (group.ops.length > MOST_OPS) {
    const sorted = [...group.ops].sort((a, b) => rank[a] - rank[b]), parts = Math.ceil(sorted.length / Math.ceil(sorted.length / MOST_OPS));
    for (let i = 0; i < sorted.length; i += parts) {
      const name = `ops ${i + 1} to ${Math.min(i + parts, sorted.length)}`;
      group.child(name).ops = sorted.slice(i, i + parts);
    }
    group.ops = [];
  }
  const deepen = (one, depth) => { one.depth = depth; for (const child of one.groups.values()) deepen(child, depth + 1); };
  deepen(group, group.depth);
}

function summarize(group) {
  group.us = 0;
  group.counts = devices.map(() => 0);
  for (const v of group.all) {
    group.us += ops.compute_us[v];
    group.counts[placement[v]]++;
  }
}

/* For every group, which of its items feed which: `links.get(group)` maps item -> set of items. */
function linksOf(home) {
  const links = new Map();
  const add = (group, a, b) => {
    if (!links.has(group)) links.set(group, new Map());
    const from = links.get(group);
    if (!from.has(a)) from.set(a, new Set());
    from.get(a).add(b);
  };
  tensors.producer.forEach((v, t) => {
    for (const w of readers[t]) {
      let [a, b, A, B] = [v, w, home[v], home[w]];
      while (A !== B) {
        if (A.depth >= B.depth) [a, A] = [A, A.parent];
        else [b, B] = [B, B.parent];
      }
      if (a !== b) add(A, a, b);
    }
  });
  return links;
}

/* Gives each item of an open group x and y within it, and the group its size. Items: groups, and boxes {op, x, y, w, h}. */
function arrange(group, links) {
  const boxes = group.items().map((item) => {
    if (typeof item === "number") return { op: item, key: item, order: rank[item], w: SIZES.op[0], h: SIZES.op[1] };
    if (item.open) arrange(item, links);
    else [item.w, item.h] = SIZES.group;
    return Object.assign(item, { key: item, order: item.rank });
  }).sort((a, b) => a.order - b.order);
  const rows = rowsOf(boxes, links.get(group) ?? new Map());
  const columns = columnsOf(rows);
  let left = PADDING, tallest = 0;
  for (const column of columns) {
    const width = Math.max(...column.map((row) => row.w));
    let top = TITLE + PADDING;
    for (const row of column) {
      let x = left + (width - row.w) / 2;
      for (const box of row.boxes) {
        Object.assign(box, { x, y: top + (row.h - box.h) / 2 });
        x += box.w + ITEM_GAP;
      }
      top += row.h + ROW_GAP;
    }
    left += width + COLUMN_GAP;
    tallest = Math.max(tallest, top - ROW_GAP);
  }
  group.boxes = boxes;
  group.w = Math.max(left - COLUMN_GAP + PADDING, SIZES.group[0]);
  group.h = Math.max(tallest + PADDING, SIZES.group[1]);
}

/* Layers by longest path (links against the order of the items would close a circle and are left out), ordered by where their inputs are,
   and in several rows where they would be too wide. */
function rowsOf(boxes, links) {
  const position = new Map(boxes.map((box, i) => [box.key, i])), [layer, sum, count] = [0, 1, 2].map(() => boxes.map(() => 0));
  boxes.forEach((box, i) => {
    for (const next of links.get(box.key) ?? []) {
      const j = position.get(next);
      if (j > i) layer[j] = Math.max(layer[j], layer[i] + 1);
    }
  });
  const area = boxes.reduce((all, box) => all + (box.w + ITEM_GAP) * (box.h + ROW_GAP), 0);
  const widest = Math.max(LEAST_WIDTH, Math.sqrt(area * SHAPE));
  const layers = [];
  boxes.forEach((box, i) => (layers[layer[i]] ??= []).push(i));
  const rows = [];
  for (const members of layers.filter(Boolean)) {
    const middle = (i) => (count[i] ? sum[i] / count[i] : 0.5);
    members.sort((a, b) => middle(a) - middle(b) || a - b);
    members.forEach((i, place) => {
      for (const next of links.get(boxes[i].key) ?? []) {
        const j = position.get(next);
        if (j > i) { sum[j] += (place + 0.5) / members.length; count[j]++; }
      }
    });
    let row = null;
    for (const box of members.map((i) => boxes[i])) {
      if (row === null || row.w + ITEM_GAP + box.w > widest) rows.push(row = { boxes: [], w: -ITEM_GAP, h: 0 });
      row.boxes.push(box);
      row.w += ITEM_GAP + box.w;
      row.h = Math.max(row.h, box.h);
    }
  }
  return rows;
}

/* Rows in as many columns as come nearest to that shape. */
function columnsOf(rows) {
  const height = rows.reduce((h, row) => h + row.h + ROW_GAP, 0);
  let best = null;
  for (let wanted = 1; wanted <= Math.min(rows.length, 24); wanted += 0.5) {
    const columns = [[]];
    let tall = 0, tallest = 0, width = 0;
    for (const row of rows) {
      if (tall > 0 && tall + row.h > height / wanted + ROW_GAP) {
        columns.push([]);
        tall = 0;
      }
      columns.at(-1).push(row);
      tall += row.h + ROW_GAP;
      tallest = Math.max(tallest, tall);
    }
    width = columns.reduce((w, column) => w + Math.max(...column.map((row) => row.w)) + COLUMN_GAP, 0);
    const off = Math.abs(Math.log(width / tallest / SHAPE));
    if (best === null || off < best.off) best = { off, columns };
  }
  return best ? best.columns : [];
}
