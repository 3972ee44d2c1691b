"use strict";
// The graph of groups and ops: a click opens a group or selects an op, and what is too small to read is shown as what it is part of.

const MOST_EDGES = 1500, FEW_EDGES = 150;
/* In pixels: the width of a letter of a group's name, about; the least height of a group that is named, and width of an op that is seen. */
const LETTER = 6.5, ROOM = 26, SPECK = 6;

class GraphView {
  constructor(way, height) {
    this.surface = new Surface(this, "The graph of ops in groups", height);
    this.surface.canvas.classList.add("free");
    this.focus = null;
    this.regroup(way);
    colours.listeners.push(() => this.surface.redraw());
  }

  regroup(way) {
    if (this.focus?.op === undefined) this.focus = null;
    Object.assign(this, treeBy(way));
    this.root.open = true;
    this.openSome();
    this.layout();
    this.fit();
  }

  /* Opens groups from the largest on while there is little to see. */
  openSome() {
    const closed = [...this.root.groups.values()];
    let shown = this.root.items().length;
    while (closed.length && shown < 14) {
      const next = closed.sort((a, b) => a.depth - b.depth || b.all.length - a.all.length).shift();
      if (shown + next.items().length > 75) continue;
      next.open = true;
      shown += next.items().length;
      closed.push(...next.groups.values());
    }
  }

  /* Places everything that is shown: `boxes` with x and y in the whole drawing, groups before what is in them. */
  layout() {
    arrange(this.root, this.links);
    this.boxes = [];
    const place = (group, x, y) => {
      for (const box of group.boxes) {
        box.X = x + box.x;
        box.Y = y + box.y;
        this.boxes.push(box);
        if (box.open) place(box, box.X, box.Y);
      }
    };
    place(this.root, 0, -TITLE);
    this.root.h -= TITLE;
    this.boxOfOp = new Map(this.boxes.filter((box) => box.op !== undefined).map((box) => [box.op, box]));
    this.edges = this.shownEdges();
    this.focus = this.focus && this.boxNow(this.focus);
  }

  /* Where a box of an earlier layout is seen now: itself, or the outermost closed group that it is in. */
  boxNow(box) {
    if (box.op !== undefined) return this.boxOf(box.op);
    let seen = box;
    for (let group = box.parent; group.parent; group = group.parent) if (!group.open) seen = group;
    return seen;
  }

  /* The box in which an op is seen: its own, or that of the outermost closed group. */
  boxOf(op) {
    let box = this.boxOfOp.get(op) ?? null;
    for (let group = this.home[op]; group.parent; group = group.parent) if (!group.open) box = group;
    return box;
  }

  shownEdges() {
    const seen = new Map(), boxes = ops.id.map((_, v) => this.boxOf(v)), numbers = new Map(this.boxes.map((box, i) => [box, i]));
    tensors.producer.forEach((v, t) => {
      const a = boxes[v];
      for (const w of readers[t]) {
        const b = boxes[w];
        if (a === b) continue;
        const key = numbers.get(a) * this.boxes.length + numbers.get(b);
        if (!seen.has(key)) seen.set(key, { a, b, moved: 0 });
        if (placement[v] !== placement[w]) seen.get(key).moved += tensors.bytes[t];
      }
    });
    return [...seen.values()];
  }

  resized(width, height) {
    const first = this.width === undefined;
    Object.assign(this, { width, tall: height });
    if (first) this.fit();
  }

  fit() {
    if (this.width === undefined) return;
    this.scale = Math.min(this.width / this.root.w, this.tall / this.root.h, 1.2);
    this.dx = (this.width - this.root.w * this.scale) / 2;
    this.dy = Math.max(0, (this.tall - this.root.h * this.scale) / 2);
  }

  pan(dx, dy) { this.dx += dx; this.dy += dy; }

  zoom(factor, x, y) {
    const scale = Math.min(4, Math.max(0.01, this.scale * factor));
    this.dx = x - ((x - this.dx) * scale) / this.scale;
    this.dy = y - ((y - this.dy) * scale) / this.scale;
    this.scale = scale;
  }

  inSight(box) {
    const x = box.X * this.scale + this.dx, y = box.Y * this.scale + this.dy;
    return x < this.width && y < this.tall && x + box.w * this.scale > 0 && y + box.h * this.scale > 0;
  }

  /* The boxes that are drawn: of open groups those in them, as long as an op could be seen there; and which of the groups have their names
     written over them: the innermost with room for it, where titles can't be read. */
  shown() {
    const boxes = new Set(), named = new Set(), specks = SIZES.op[0] * this.scale < SPECK;
    const visit = (group) => {
      for (const box of group.boxes) {
        if (!this.inSight(box)) continue;
        boxes.add(box);
        if (!box.open) continue;
        const isSeen = (child) => child.w * this.scale >= SPECK && child.h * this.scale >= SPECK;
        const hasRoom = box.w * this.scale >= LETTER * (this.nameOf(box).length + 2) && box.h * this.scale >= ROOM;
        const before = named.size;
        box.folded = specks && !(hasRoom && [...box.groups.values()].some(isSeen));
        if (!box.folded) visit(box);
        if (hasRoom && named.size === before && !this.legible()) named.add(box);
      }
    };
    visit(this.root);
    return [boxes, named];
  }

  draw(context) {
    colours.refresh();
    this.colours = Object.fromEntries(["paper", "card", "line", "ink", "muted", "accent", "faint"].map((name) => [name, ink(name)]));
    context.translate(this.dx, this.dy);
    context.scale(this.scale, this.scale);
    const [seen, named] = this.shown();
    for (const box of seen) if (box.open && !box.folded) this.drawOpen(context, box);
    const selected = selection.op === null ? null : this.boxOf(selection.op);
    this.drawEdges(context, this.edges.filter(({ a, b }) => seen.has(a) || seen.has(b)), selected);
    for (const box of seen) {
      if (box.op !== undefined) this.drawOp(context, box);
      else if (!box.open) this.drawClosed(context, box);
      else if (box.folded) this.drawShares(context, box, box.X, box.Y, box.w, box.h);
    }
    for (const box of named) this.drawName(context, box);
    if (selected) this.outline(context, selected, this.colours.accent, 3 / this.scale);
    if (this.focus) this.outline(context, this.focus, this.colours.ink, 2 / this.scale);
  }

  outline(context, box, colour, width) {
    context.strokeStyle = colour;
    context.lineWidth = Math.max(2, width);
    context.strokeRect(box.X - 2, box.Y - 2, box.w + 4, box.h + 4);
  }

  legible() { return this.scale * 12 >= 5; }

  drawOpen(context, box) {
    context.fillStyle = box.depth % 2 ? this.colours.card : this.colours.paper;
    context.strokeStyle = this.colours.line;
    context.lineWidth = 1;
    rounded(context, box, 8);
    context.fill();
    context.stroke();
    if (!this.legible()) return;
    context.fillStyle = this.colours.muted;
    context.textAlign = "left";
    this.write(context, "\u2212 " + box.name, box, 10, 15);
  }

  /* A group's name, and beside it the class of its module. */
  write(context, name, box, dx, dy) {
    const room = box.w - 2 * dx, shown = clipped(context, name, room), width = context.measureText(shown + " ").width;
    context.fillText(shown, box.X + dx, box.Y + dy);
    context.fillStyle = this.colours.muted;
    context.fillText(clipped(context, classOf(box.module), room - width), box.X + dx + width, box.Y + dy);
  }

  nameOf(box) { return box.depth === 1 ? box.name : box.module || box.name; }

  /* A name over a group whose own title is too small to read. */
  drawName(context, box) {
    const letters = 11 / this.scale;
    context.font = `${letters}px system-ui, sans-serif`;
    const shown = fitted(context, this.nameOf(box), classOf(box.module), box.w - letters);
    context.fillStyle = this.colours.paper;
    context.globalAlpha = 0.85;
    context.fillRect(box.X, box.Y, context.measureText(shown).width + letters, letters * 1.5);
    context.globalAlpha = 1;
    context.fillStyle = this.colours.ink;
    context.textAlign = "left";
    context.fillText(shown, box.X + letters / 2, box.Y + letters * 0.8);
    context.font = "12px system-ui, sans-serif";
  }

  /* The colours of a group's ops, each as wide as its part of their time. */
  drawShares(context, box, x, y, width, height) {
    const sums = new Map();
    for (const v of box.all) {
      const { colour } = colours.paint(v, placement);
      sums.set(colour, (sums.get(colour) ?? 0) + (box.us ? ops.compute_us[v] : 1));
    }
    for (const [colour, sum] of [...sums].sort()) {
      const part = (width * sum) / (box.us || box.all.length);
      context.fillStyle = colour;
      context.fillRect(x, y, part, height);
      x += part;
    }
  }

  /* Of more edges than an eye can follow only those of the selected box and, where boxes can be read, those that move most. */
  drawEdges(context, edges, selected) {
    const isSelected = ({ a, b }) => a === selected || b === selected, strength = edges.length > FEW_EDGES ? 0.5 : 1;
    let shown = edges;
    if (edges.length > FEW_EDGES && !this.legible()) shown = edges.filter(isSelected);
    else if (edges.length > MOST_EDGES) {
      const moving = edges.filter((edge) => edge.moved && !isSelected(edge)).sort((x, y) => y.moved - x.moved);
      shown = [...moving.slice(0, MOST_EDGES), ...edges.filter(isSelected)];
    }
    for (const edge of shown) this.drawEdge(context, edge, isSelected(edge), strength);
  }

  drawEdge(context, { a, b, moved }, isSelected, strength) {
    context.strokeStyle = isSelected ? this.colours.accent : moved ? this.colours.muted : this.colours.faint;
    context.globalAlpha = isSelected ? 1 : strength * (moved ? 0.9 : 0.45);
    context.lineWidth = (moved ? 1.8 : 1) / Math.max(0.6, Math.min(1, this.scale));
    context.setLineDash(moved && this.legible() ? [5, 3] : []);
    context.beginPath();
    if (b.Y >= a.Y + a.h) this.downwards(context, a, b);
    else this.sideways(context, a, b);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  downwards(context, a, b) {
    const from = [a.X + a.w / 2, a.Y + a.h], to = [b.X + b.w / 2, b.Y], bend = Math.max(10, (to[1] - from[1]) / 2.2);
    context.moveTo(...from);
    context.bezierCurveTo(from[0], from[1] + bend, to[0], to[1] - bend, ...to);
  }

  /* To a box in another column, or back. */
  sideways(context, a, b) {
    const right = b.X + b.w / 2 >= a.X + a.w / 2;
    const from = [right ? a.X + a.w : a.X, a.Y + a.h / 2], to = [right ? b.X : b.X + b.w, b.Y + b.h / 2];
    const bend = Math.max(24, Math.abs(to[0] - from[0]) / 2.2) * (right ? 1 : -1);
    context.moveTo(...from);
    context.bezierCurveTo(from[0] + bend, from[1], to[0] - bend, to[1], ...to);
  }

  drawClosed(context, box) {
    context.fillStyle = this.colours.paper;
    context.strokeStyle = this.colours.faint;
    context.lineWidth = 1;
    rounded(context, box, 6);
    context.fill();
    context.stroke();
    this.drawShares(context, box, box.X + 8, box.Y + box.h - 12, box.w - 16, 6);
    if (!this.legible()) return;
    const used = box.counts.map((count, d) => (count ? devices[d].name : null)).filter(Boolean);
    context.textAlign = "left";
    context.fillStyle = this.colours.ink;
    this.write(context, "+ " + box.name, box, 8, 14);
    context.fillStyle = this.colours.muted;
    context.font = "11px system-ui, sans-serif";
    const where = used.length === 1 ? used[0] : used.length + " devices";
    context.fillText(clipped(context, `${plural(box.all.length, "op")}, ${time(box.us)}, ${where}`, box.w - 16), box.X + 8, box.Y + 30);
    context.font = "12px system-ui, sans-serif";
  }

  drawOp(context, box) {
    const device = devices[placement[box.op]], { colour, text } = colours.paint(box.op, placement);
    context.fillStyle = colour;
    if (!this.legible()) {
      context.fillRect(box.X, box.Y, box.w, box.h);
      return;
    }
    rounded(context, box, 4);
    context.fill();
    if (critical.has(box.op)) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.stroke();
    }
    context.textAlign = "left";
    context.fillStyle = text;
    context.fillText(clipped(context, ops.id[box.op], box.w - 14), box.X + 7, box.Y + 12);
    context.font = "11px system-ui, sans-serif";
    const cost = time(ops.compute_us[box.op]) + ", ";
    context.fillText(cost + clipped(context, device.name, box.w - 14 - context.measureText(cost).width, true), box.X + 7, box.Y + 26);
    context.font = "12px system-ui, sans-serif";
  }

  pick(x, y) {
    const X = (x - this.dx) / this.scale, Y = (y - this.dy) / this.scale;
    const title = Math.max(TITLE, this.legible() ? 0 : 16 / this.scale);
    return [...this.shown()[0]].findLast((box) => X >= box.X && X <= box.X + box.w && Y >= box.Y && Y <= box.Y + box.h &&
      (!box.open || box.folded || Y <= box.Y + title)) ?? null;
  }

  describe(box) {
    const { op } = box;
    if (op !== undefined) return `${ops.id[op]}\n${ops.op[op]}\n${time(ops.compute_us[op])} on ${devices[placement[op]].name}`;
    const on = devices.map((device, d) => (box.counts[d] ? `${device.name}: ${plural(box.counts[d], "op")}` : null)).filter(Boolean);
    return `${box.module ? called(box.module) : box.name}\n${plural(box.all.length, "op")}, ${time(box.us)}\n${on.join("\n")}`;
  }

  choose(box) {
    if (box.module) whatIf.suggest(box.module);
    if (box.op !== undefined) select(box.op);
    else if (box.open && !this.legible()) this.zoomTo(box);
    else this.toggle(box);
  }

  /* Shows a group alone. */
  zoomTo(box) {
    this.scale = Math.min(this.width / box.w, this.tall / box.h, 1.2) * 0.96;
    this.dx = this.width / 2 - (box.X + box.w / 2) * this.scale;
    this.dy = this.tall / 2 - (box.Y + box.h / 2) * this.scale;
    this.surface.redraw();
  }

  /* Opens or closes a group, whose corner stays where it is on the screen. */
  toggle(group) {
    const x = group.X * this.scale + this.dx, y = group.Y * this.scale + this.dy;
    group.open = !group.open;
    this.layout();
    this.dx = x - group.X * this.scale;
    this.dy = y - group.Y * this.scale;
    this.surface.redraw();
  }

  openAll(open) {
    const each = (group) => { group.open = open || !group.parent; for (const child of group.groups.values()) each(child); };
    each(this.root);
    if (!open) this.openSome();
    this.layout();
    this.fit();
    this.surface.redraw();
  }

  /* Opens what hides an op and moves it to the middle. */
  reveal(op) {
    for (let group = this.home[op]; group; group = group.parent) group.open = true;
    this.layout();
    const box = this.boxOfOp.get(op);
    this.scale = Math.max(this.scale, 0.8);
    this.dx = this.width / 2 - (box.X + box.w / 2) * this.scale;
    this.dy = this.tall / 2 - (box.Y + box.h / 2) * this.scale;
    this.surface.redraw();
  }

  /* n and p: the next and previous box; Enter: opens, closes or selects it. */
  key(key) {
    if (key === "Enter" && this.focus) {
      this.choose(this.focus);
      if (this.focus.op === undefined) this.sayFocus();  // of an op the panel tells
      return true;
    }
    if (key !== "n" && key !== "p") return false;
    const at = this.boxes.indexOf(this.focus), next = at < 0 ? 0 : at + (key === "n" ? 1 : -1);
    this.focus = this.boxes[Math.min(this.boxes.length - 1, Math.max(0, next))] ?? null;
    if (this.focus && !this.inSight(this.focus)) {
      this.dx = this.width / 2 - (this.focus.X + this.focus.w / 2) * this.scale;
      this.dy = this.tall / 2 - (this.focus.Y + TITLE) * this.scale;
    }
    this.sayFocus();
    return true;
  }

  sayFocus() {
    const { focus } = this;
    if (focus) say(this.describe(focus) + (focus.op !== undefined ? "" : focus.open ? "\nopen" : "\nclosed"));
  }

  /* The middle of a box in the canvas, in CSS pixels. */
  centre(box) { return [(box.X + box.w / 2) * this.scale + this.dx, (box.Y + Math.min(box.h, TITLE) / 2) * this.scale + this.dy]; }
}

function rounded(context, box, radius) {
  context.beginPath();
  context.roundRect(box.X, box.Y, box.w, box.h, radius);
}

const usualWay = ops.module.some((name) => name) || !ops.colocation.some((name) => name !== null) ? "module" : "colocation";
const graph = new GraphView(usualWay, 560);

function graphSection() {
  const ways = [["module", "module"], ["colocation", "colocation group"], ["device", "device"], ...(hasParts ? [["part", "part of the batch"]] : [])];
  const chosen = el("select", { "aria-label": "group by", onchange: () => { graph.regroup(chosen.value); graph.surface.redraw(); } },
    ways.map(([value, text]) => el("option", { value }, "by " + text)));
  chosen.value = usualWay;
  const all = (text, open) => el("button", { type: "button", onclick: () => graph.openAll(open) }, text);
  section("graph", "Graph",
    el("p", { class: "note" }, "A click on a group opens or closes it, one on an op selects it. Dashed lines are tensors that " +
      "change devices, where there are thousands the largest of them; ops on the critical path have a frame. " +
      "What is too small to read is named by its group, and a click on that shows it alone. " +
      "n and p go from box to box, Enter is a click."),
    el("div", { class: "bar" }, chosen, all("Open all", true), all("Close all", false), graph.surface.buttons(), colours.chooser()),
    graph.surface.canvas, el("div", { class: "legend" }, colours.legend()));
}
