"use strict";
// The strategies of a sharded run: their steps, what these consist of, what is sent, and what devices hold.

const { kinds, strategies, plans } = data;
const numbers = (...titles) => titles.map((title) => ({ title, number: true }));
const known = (value, word) => (value === null ? "-" : word(value));
const total = (values) => values.reduce((sum, value) => sum + value, 0);

function strategiesSection() {
  if (!strategies.length) return;
  const rows = strategies.map((s) => [
    s.name, known(s.predicted_us, time), known(s.median_us, time),
    s.samples_us.length ? `${time(Math.min(...s.samples_us))} to ${time(Math.max(...s.samples_us))}` : "-",
    s.gain ? `${s.gain.median.toFixed(2)} (${s.gain.low.toFixed(2)} to ${s.gain.high.toFixed(2)})` : "-",
    size(total(s.messages.map(([, , counted]) => counted[1])))]);
  section("strategies", "Strategies", stepsPlot(strategies, "Measured steps of each strategy"), table([{ title: "strategy" },
    ...numbers("predicted", "measured", "min to max", "against not split", "sent by a device")], rows, strategies.map((s) => s.note)));
}

/* One bar of several parts; `most` is as long as the bar can be. */
function stacked(parts, most, label) {
  const box = el("span", { class: "track stacked", role: "img", "aria-label": label });
  return fill(box, parts.filter(([value]) => value > 0).map(([value, colour, name]) =>
    el("span", { title: name, style: { width: (100 * value) / (most || 1) + "%", background: colour } })));
}

const legend = (entries) => el("div", { class: "legend" }, entries.map(([name, colour]) =>
  el("span", {}, el("span", { class: "swatch", style: { background: colour } }), name)));
const coloured = (costs_us) => costs_us.map((us, k) => [us, kinds[k].colour, `${kinds[k].name} ${signed(us)}`]);

function partsSection() {
  const rows = [...strategies.map((s) => [s.name, s.parts_us]),
    ...plans.filter((plan) => !strategies.some((s) => s.name === plan.name))
      .map((plan) => [plan.name, kinds.map((_, k) => total(plan.layers.map((layer) => layer.costs_us[k])))])];
  const most = Math.max(...rows.map(([, parts]) => (parts === null ? 0 : total(parts.map((us) => Math.max(us, 0))))));
  if (!(most > 0)) return;
  const whole = (parts) => (parts === null ? "not predicted" : time(total(parts)));
  section("parts", "What the predicted steps consist of",
    legend(kinds.map((kind) => [kind.name, kind.colour])),
    el("div", { class: "shares" }, rows.map(([name, parts]) => el("div", { class: "row" },
      el("span", {}, name), stacked(coloured(parts ?? []), most, `${name}: ${whole(parts)}`),
      el("span", { class: "value" }, whole(parts))))),
    table([{ title: "strategy" }, ...numbers(...kinds.map((kind) => kind.name))],
      rows.map(([name, parts]) => [name, ...kinds.map((_, k) => (parts?.[k] ? `${signed(parts[k])}, ${share(parts[k], total(parts))}` : "-"))])));
}

/* What torch's collectives do in a split step: an executor moves tensors as DTensor does, everything else calls torch.distributed. */
const COLLECTIVES = {
  all_reduce: "sums of moved tensors",
  all_gather_into_tensor: "gathers of moved tensors",
  reduce_scatter_tensor: "scattered sums of moved tensors",
  all_to_all_single: "exchanges of moved tensors",
  shard_dim_alltoall: "exchanges of moved tensors",
  allreduce: "sums of weights' gradients, and inside of calls",
  allgather_base: "gathers of weights (fsdp2)",
  reduce_scatter_base: "scattered sums of weights' gradients (fsdp2)",
  broadcast: "buffers, from one process (ddp)",
};

function messagesSection() {
  const rows = strategies.flatMap((s) => s.messages.map(([kind, predicted, counted]) => [
    s.name, [COLLECTIVES[kind] ?? "other", el("div", { class: "note" }, kind)],
    known(predicted, (p) => String(p[0])), String(counted[0]), known(predicted, (p) => size(p[1])), size(counted[1])]));
  if (!rows.length) return;
  section("messages", "Messages",
    el("p", { class: "note" }, "What one process sends in a step, as a ring sends it, by what it is for and torch's name of the collective. " +
      "Moved tensors are those that a layer reads in another split than they were written in, and their gradients."),
    table([{ title: "strategy" }, { title: "messages" }, ...numbers("messages, predicted", "counted", "sent, predicted", "counted")], rows));
}

const HELD = [["weights", 0], ["gradients", 4], ["optimizer", 2], ["kept", 1]].map(([what, i]) => [what, data.palette[i]]);
const HELD_NAMES = { weights: "weights and buffers", gradients: "their gradients", optimizer: "optimizer state", kept: "kept for backward" };

function heldSection() {
  const rows = strategies.flatMap((s) => s.held.map((held, d) => ({ s, held, d })));
  if (!rows.length) return;
  const sum = (held) => total(HELD.map(([what]) => held[what]));
  const most = Math.max(...rows.map(({ held }) => sum(held)));
  section("memory", "What each device holds",
    el("p", { class: "note" }, "Counted in a step of its own; messages, and what an op needs while it runs, are not."),
    legend(HELD.map(([what, colour]) => [HELD_NAMES[what], colour])),
    el("div", { class: "shares" }, rows.map(({ s, held, d }) => el("div", { class: "row" },
      el("span", {}, s.name, " ", el("span", { class: "kind" }, `device ${d}`)),
      stacked(HELD.map(([what, colour]) => [held[what], colour, `${HELD_NAMES[what]} ${size(held[what])}`]), most,
        `${s.name}, device ${d}: ${size(sum(held))}`),
      el("span", { class: "value" }, size(sum(held)) + (s.planned_bytes === null ? "" : `, planned ${size(s.planned_bytes)}`))))));
}
