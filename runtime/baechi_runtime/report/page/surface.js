"use strict";
// A canvas that is sharp on every screen, draws itself when it has to, and tells where it was clicked, dragged and zoomed.

const tip = el("div", { class: "tip", hidden: true, role: "status" });
const spoken = el("div", { class: "spoken", role: "status" });
document.body.append(tip, spoken);

/* Tells those who do not see a canvas what a key brought them to. */
function say(text) { spoken.textContent = text; }

/* The height of a canvas that every browser has, in pixels of the screen: higher ones would stay empty, and are drawn more coarsely. */
const MOST_PIXELS = 32000;

class Surface {
  /* `view` has draw(context, width, height), pick(x, y) -> thing or null, describe(thing), choose(thing), pan(dx, dy),
     zoom(factor, x, y) and fit(). */
  constructor(view, label, height) {
    this.view = view;
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": label });
    this.height = height;
    this.waiting = false;
    this.pointers = new Map();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    selection.listeners.push(() => this.redraw());
    for (const event of ["beforeprint", "afterprint"]) addEventListener(event, () => this.draw());
    this.listen();
  }

  set height(height) {
    this.canvas.style.height = height + "px";
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas, ratio = Math.min(window.devicePixelRatio || 1, MOST_PIXELS / clientHeight);
    if (clientWidth === 0 || (clientWidth === this.width && clientHeight === this.tall)) return;
    this.width = clientWidth;
    this.tall = clientHeight;
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
    this.view.resized?.(clientWidth, clientHeight);
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.width) return;
    this.waiting = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.waiting = false;
    if (!this.width) return;
    const context = this.canvas.getContext("2d"), ratio = this.canvas.width / this.width;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.tall);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.view.draw(context, this.width, this.tall);
  }

  listen() {
    const canvas = this.canvas, at = (event) => [event.offsetX, event.offsetY];
    let moved = 0, spread = 0;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return; // the menu that another button opens takes its release
      this.pointers.set(event.pointerId, at(event));
      if (this.pointers.size === 1) moved = 0;
      spread = this.spread();
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = this.pointers.get(event.pointerId), [x, y] = at(event);
      if (!before) return this.hover(event, x, y);
      this.pointers.set(event.pointerId, [x, y]);
      if (this.pointers.size === 2) {
        const now = this.spread();
        if (spread > 0 && now > 0) this.view.zoom(now / spread, x, y);
        spread = now;
        moved = Infinity;
      } else {
        moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
        if (moved > 4) {
          canvas.setPointerCapture(event.pointerId);
          this.view.pan(x - before[0], y - before[1]);
        }
      }
      tip.hidden = true;
      this.redraw();
    });
    const release = (event) => {
      const was = this.pointers.delete(event.pointerId);
      if (was && moved <= 4 && event.type === "pointerup") this.click(...at(event));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.view.zoom(Math.exp(-event.deltaY / 300), ...at(event));
      this.redraw();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => { this.view.zoom(2, ...at(event)); this.redraw(); });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  spread() {
    const [a, b] = [...this.pointers.values()];
    return b ? Math.hypot(a[0] - b[0], a[1] - b[1]) : 0;
  }

  hover(event, x, y) {
    const thing = this.view.pick(x, y);
    tip.hidden = thing === null;
    if (thing === null) return;
    tip.textContent = this.view.describe(thing);
    // It stays off the panel, which is beside the canvas or, on small screens, below it.
    const panel = document.getElementById("details").getBoundingClientRect(), isBeside = panel.left > event.clientX;
    const right = isBeside ? Math.min(innerWidth, panel.left) : innerWidth;
    const bottom = isBeside || !panel.height ? innerHeight : Math.min(innerHeight, panel.top);
    const left = Math.min(event.clientX + 14, right - tip.offsetWidth - 6);
    const top = event.clientY + 18 + tip.offsetHeight > bottom ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    Object.assign(tip.style, { left: Math.max(4, left) + "px", top: top + "px" });
  }

  click(x, y) {
    const thing = this.view.pick(x, y);
    if (thing !== null) this.view.choose(thing);
    this.redraw();
  }

  key(event) {
    const step = 60, moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = moves[event.key];
    if (move?.[1] && !this.canvas.classList.contains("free")) return; // the page scrolls
    if (move) this.view.pan(...move);
    else if (event.key === "+" || event.key === "=") this.view.zoom(1.5, this.width / 2, this.tall / 2);
    else if (event.key === "-") this.view.zoom(1 / 1.5, this.width / 2, this.tall / 2);
    else if (event.key === "0") this.view.fit();
    else if (!this.view.key?.(event.key)) return;
    event.preventDefault();
    this.redraw();
  }

  /* Buttons that do what the keys do. */
  buttons() {
    const button = (text, label, act) =>
      el("button", { type: "button", "aria-label": label, title: label, onclick: () => { act(); this.redraw(); } }, text);
    return [
      button("+", "zoom in", () => this.view.zoom(1.5, this.width / 2, this.tall / 2)),
      button("\u2212", "zoom out", () => this.view.zoom(1 / 1.5, this.width / 2, this.tall / 2)),
      button("Fit", "show everything", () => this.view.fit()),
    ];
  }
}

/* A name and its class, or as much of the name's end as there is room for. */
function fitted(context, name, kind, width) {
  const whole = kind ? `${name} ${kind}` : name;
  return context.measureText(whole).width <= width ? whole : clipped(context, name, width, true);
}

/* `text` shortened to a width in pixels, at its end or, as names of devices differ there, at its beginning. */
function clipped(context, text, width, keepsEnd = false) {
  if (context.measureText(text).width <= width) return text;
  const cut = (length) => (keepsEnd ? "\u2026" + text.slice(text.length - length) : text.slice(0, length) + "\u2026");
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(cut(middle)).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? cut(low) : "";
}
