"use strict";
// Why the step takes as long as it does, what would change that, and where the prediction is off.

const MOST_PARTS = 12;

function explanationSection() {
  const said = data.explanation;
  const name = (d) => devices[d]?.name ?? String(d), numbers = (...titles) => titles.map((title) => ({ title, number: true }));
  const way = (from, to) => name(from) + (to === null ? "" : " to " + name(to));
  const where = (part) => way(part.device, part.target) + (part.phase ? ", " + part.phase : "");
  const path = said.critical_path.parts, further = path.slice(MOST_PARTS), all = (key) => further.reduce((sum, part) => sum + part[key], 0);
  const parts = path.slice(0, MOST_PARTS).map((part) => [part.kind, where(part), time(part.us), share(part.share, 1)]);
  if (further.length) parts.push([plural(further.length, "further part"), "", time(all("us")), share(all("share"), 1)]);
  const gains = said.transfers.by_gain.map((sent) => [
    idLink(sent.op), way(sent.source, sent.target), size(sent.bytes), time(sent.us), sent.gain_us === null ? "-" : signed(sent.gain_us)]);
  const { tried, count } = said.transfers;
  const idle = said.idle.map((one) => [
    name(one.device), ...[one.idle_us, one.producer_us, one.queue_us, one.transfer_us, one.tail_us].map(time)]);
  const changes = said.what_ifs.map((one) => [one.change, time(one.step_us), signed(one.gain_us)]);
  section("explanation", "Why it takes so long",
    el("h3", {}, "The critical path"),
    table([{ title: "what" }, { title: "where" }, ...numbers("time", "of the step")], parts),
    el("h3", {}, "Idle devices wait for"),
    table([{ title: "device" }, ...numbers("idle", "another device's op", "a busy link", "a transfer", "nothing more to do")], idle),
    gains.length ? [el("h3", {}, `The costliest of ${tried === count ? "" : tried + " tried of "}${plural(count, "transfer")}`), table(
      [{ title: "tensor of" }, { title: "way" }, ...numbers("size", "time", "gain without it")], gains)] : [],
    changes.length ? [el("h3", {}, "What would change the step"), table(
      [{ title: "if" }, ...numbers("step", "gain")], changes)] : [],
    surprises());
}

/* The ops whose measured time is furthest from the predicted one. */
function surprises() {
  if (!data.measured) return [];
  const took = (step, v) => step.end_us[v] - step.start_us[v], number = { number: true };
  const off = [...ops.id.keys()].filter((v) => data.measured.start_us[v] !== null)
    .map((v) => ({ v, predicted: took(predicted, v), measured: took(data.measured, v) }))
    .sort((a, b) => Math.abs(b.measured - b.predicted) - Math.abs(a.measured - a.predicted)).slice(0, 10);
  const rows = off.map((one) => [
    opLink(one.v), devices[placement[one.v]].name, time(one.predicted), time(one.measured), difference(one.measured - one.predicted)]);
  return [el("h3", {}, "Where the prediction is furthest off"), table(
    [{ title: "op" }, { title: "device" }, ...["predicted", "measured", "difference"].map((title) => ({ title, ...number }))], rows)];
}
