"""Numbers of pages other than docs/speed.md (test_speed.py) are those of the committed results: tables are computed anew."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from baechi_ext.cost.hardware import COUNTED, OF_OPS, SCALED, START_US, Spread
from baechi_ext.place.placeto.checkpoint import SHIPPED, parameters_sha256
from baechi_runtime.report.tables import as_time
from benchmarks.pase import PUBLISHED, Cell
from tests.docs.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FAMILIES = ("cifar10", "ptb", "nmt")
GRAPHS = ("gnmt_v2", "inception_v3", "nasnet")


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def page(name: str) -> str:
    """A page in one line, as a sentence is looked for."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def table(name: str, head: str) -> list[list[str]]:
    """The rows of a page's table whose first line begins so, without the backticks of their first cells."""
    lines = iter((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(head) for line in lines), f"no table {head!r}"
    next(lines)
    found: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found.append([first.replace("`", ""), *cells])
    return found


def interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def test_the_readmes_steps() -> None:
    for model, *cells in table("README.md", "| model | whole batch"):
        rows = {row["method"]: row for row in read(f"engines_{model.partition(',')[0]}.json")["methods"]}
        found = map(rows.get, ("auto", "auto_2_parts", "ddp", "pase"))
        assert cells == [f"{row['ratio']['median']:.2f}" if row and row["ratio"] else "-" for row in found], model


def test_steps_beside_torch_compile() -> None:
    for model, *cells in table("docs/run.md", "| model | eager PyTorch"):
        found = read(f"compiled_{model}.json")
        rows = {"eager": found["unplaced"], **{row["method"]: row for row in found["methods"]}}
        times = [f"{rows[name]['measured_step_us']['median'] / 1000:.3g} ms" for name in ("eager", "single", "torch.compile", "auto")]
        assert [cell.strip("`") for cell in cells] == [*times, found["recommended"]], model


def test_predictions_for_other_hardware() -> None:
    found = read("hardware.json")
    cells = []
    for row in found["rows"]:
        of_ops = [f"{row[f'ops_{what}_error']:.0%}" if "ops" in row else "" for what in ("median", "90")]
        ms = [f"{row[f'{what}_us'] / 1e3:.4g}" for what in ("predicted", "measured")]
        cells.append([row["model"], row["setting"], *ms, f"{row['ratio']:.2f}", *of_ops, f"{row['load_of_others']:.0%}"])
    assert table("docs/hardware.md", "| model") == cells
    counted, scaled, ops = (found[f"spread_{name}"] for name in ("counted", "scaled", "of_ops"))
    assert Spread(*(round(counted[name], 2) for name in ("middle", "low", "high"))) == COUNTED
    assert Spread(1.0, *(round(scaled[name], 2) for name in ("low", "high"))) == SCALED
    assert Spread(COUNTED.middle, *(round(ops[name], 2) for name in ("low", "high"))) == OF_OPS
    assert START_US / 1.5 <= found["small_op_us"] <= START_US
    assert f"takes {found['small_op_us']:.0f} us in the middle" in page("docs/hardware.md")


class TestPase:
    NAMES = ("alexnet", "resnet101", "inception3", "rnnlm", "transformer")

    def rows(self, model: str) -> dict[tuple[str, int, int], dict[str, Any]]:
        return {(r["graph"], r["devices"], r["depth"]): r for r in read("pase.json")["rows"] if r["cost_model"] == model}

    def test_searches(self) -> None:
        original, default = self.rows("original"), self.rows("default")
        expected = []
        for name in self.NAMES:
            published = [seconds and float(f"{seconds:.3f}") for seconds in PUBLISHED.get(name, {}).get(64, (None, None))]
            cells = [name, *("-" if s is None else f"{s:.0f} s" if s > 1 else f"{s:.3f} s" for s in published)]
            for row in (original[name, 64, 0], default[name, 64, 0]):
                low, middle, high = (in_ms(of(row["seconds"])) for of in (min, statistics.median, max))
                cells += [f"{middle} ms ({low} to {high})", f"{max(row['peak_bytes']) / 1e6:.0f} MB"]
            expected.append(cells)
        assert table("docs/pase.md", "| 64 devices") == expected

    def test_costs_are_those_of_now(self) -> None:
        short = [row for row in read("pase.json")["rows"] if row["graph"] in ("alexnet", "rnnlm")]
        assert len(short) == 20
        for row in short:
            found = Cell(row["graph"], row["devices"], row["cost_model"], row["depth"]).searched()
            assert (found.cost, found.status, sum(found.tables.sizes)) == (row["cost_flop"], row["status"], row["configurations"])

    def test_searches_by_devices_and_depth(self) -> None:
        rows = {key: f"{in_ms(statistics.median(row['seconds']))} ms" for key, row in self.rows("original").items()}
        by_devices = [[name, *(rows[name, count, 0] for count in (4, 8, 16, 32, 64))] for name in self.NAMES]
        assert table("docs/pase.md", "| | 4 | 8 |") == by_devices
        depths = ", ".join(f"{depth} + {depth} layers {rows['transformer', 16, depth]}" for depth in (3, 6, 12, 24, 48))
        assert depths in page("docs/pase.md")

    def test_other_strategies(self) -> None:
        rows = [row for row in read("pase.json")["others"] if (row["devices"], row["cost_model"]) == (64, "default")]
        expected = [[row["graph"], *(f"{times:.2f}" for times in row["others"].values())] for row in rows]
        assert table("docs/pase.md", "| | data parallel") == expected

    def test_captured_models(self) -> None:
        found = read("pase_captured.json")["models"]
        expected = []
        for model in found:
            times = [1000 * statistics.median(row["cpu_seconds"]) for row in model["rows"]]
            beside = ", ".join(f"{row['data_parallel']:.2f}" for row in model["rows"])
            expected.append([model["model"], str(model["calls"]), *(f"{ms:.{int(ms < 9.95)}f} ms" for ms in times), beside])
        assert table("docs/pase.md", "| | calls | 2") == expected
        rows = [row for model in found for row in model["rows"]]
        assert {row["status"] for row in rows} == {"optimal"}
        assert f"no table is over {max(row['largest_table_bytes'] for row in rows) / 2**20:.1f} MiB" in page("docs/pase.md")

    def test_limits(self) -> None:
        found = read("pase_limits.json")
        free, *limited = found["memory"]
        losses = ", ".join(f"{row['cost_flop'] / row['lower_bound_flop'] - 1:.2%}"[:-1] for row in limited)
        assert f"holds {free['held_bytes'] / 2**20:.0f} MiB where" in page("docs/pase.md")
        assert f"within {losses[: losses.rindex(', ')]} and {losses.rpartition(', ')[2]}% of the bound" in page("docs/pase.md")
        assert f"in {found['beam']['cpu_seconds']:.2f} s of the processor's time" in page("docs/pase.md")
        assert found["beam"]["cost_flop"] == found["beam"]["lower_bound_flop"]

    def test_measured_steps(self) -> None:
        shown = table("docs/pase.md", "| model | whole")
        assert {path.name for path in RESULTS.glob("sharded_*.json")} == {f"sharded_{model}.json" for model, *_ in shown}
        for model, *cells in shown:
            report = read(f"sharded_{model}.json")
            expected = [self.time(report["single_step_us"]["median"])]
            for run in report["strategies"]:
                took = run["measured_step_us"]["median"]
                whole = ", not split" if run["note"].startswith("nothing is split") else ""
                expected.append(f"{self.time(took)} ({run['predicted_step_us'] / took - 1:+.0%}){whole}")
            assert cells == [*expected, f"{report['kendall_tau']:.1f}"], model
        loads = [read(f"sharded_{model}.json")["load_of_others"] for model, *_ in shown]
        assert f"others had {min(loads):.1%} to {max(loads):.1%} of the cores" in page("docs/pase.md")

    @staticmethod
    def time(us: float) -> str:
        return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1000:.0f} ms"


class TestPlaceto:
    def test_families(self) -> None:
        found = [read(f"placeto/{family}.json")["summary"] for family in FAMILIES]
        for method, *cells in table("docs/placeto.md", "| method | `cifar10` | `ptb`"):
            facts = [summary[method] for summary in found]
            means = ["-" if not f["graphs"] else f"{f['mean_ratio']:.3f} ({f['wins']})" for f in facts]
            assert cells == [*means, f"{facts[-1]['median_seconds']:.2f}"], method

    def test_plans_until_near(self) -> None:
        found = [self.needs((RESULTS / "placeto" / f"{family}.md").read_text(encoding="utf-8")) for family in FAMILIES]
        for method, *cells in table("docs/placeto.md", "| method | `cifar10`: the RNN"):
            assert cells == [needs[method][goal] for goal in (1, 2) for needs in found], method

    @staticmethod
    def needs(text: str) -> dict[str, list[str]]:
        """Method -> plans until its own end, the RNN placer's and m_etf's."""
        lines = text.partition("Plans simulated until")[2].partition("Step over")[0].splitlines()
        cells = [[cell.strip().replace(" of ", "/") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
        return {method: rest for method, *rest in cells}

    def test_captured_graphs(self) -> None:
        graphs = {count: read(f"placeto/{count}_devices/graphs.json")["graphs"] for count in (2, 4)}
        found = {(graph["file"].partition(".")[0], count): graph for count in graphs for graph in graphs[count]}
        for method, *cells in table("docs/placeto.md", "| method | `gnmt_v2`, 2"):
            assert cells == [self.step(found[name, count], method) for name in GRAPHS for count in (2, 4)], method

    @staticmethod
    def step(graph: Mapping[str, Any], method: str) -> str:
        """A cell: bold within 0.1% of the least."""
        if method == "lower bound":
            return f"{graph['lower_bound_us'] / 1000:.0f}"
        steps = {name: entry["step_us"] for name, entry in graph["methods"].items() if "step_us" in entry}
        if method not in steps:
            return "-"
        shown = f"{steps[method] / 1000:.0f}"
        return f"**{shown}**" if steps[method] <= 1.001 * min(steps.values()) else shown

    def test_the_results_are_of_the_policy_that_is_shipped(self) -> None:
        results = [*(f"{family}.json" for family in FAMILIES), "2_devices/graphs.json", "4_devices/graphs.json"]
        assert {read(f"placeto/{name}")["policy_sha256"] for name in results} == {parameters_sha256(SHIPPED)}


def test_the_rules_of_traversal_orders() -> None:
    head = "| method | rule"
    assert table("docs/traversal.md", head) == table("benchmarks/results/order_rules.md", head)


def test_baechis_own_placers() -> None:
    cells = [row["cells"] for row in read("reference_comparison.json")["cases"].values()]
    found = {}
    for release in ("baechi", "torch"):
        for method in ("m_etf", "m_sct"):
            both = [(c[method], c[f"{release} {method}"]) for c in cells if {method, f"{release} {method}"} <= c.keys()]
            ratios = [a["makespan_us"] / b["makespan_us"] for a, b in both if "makespan_us" in a and "makespan_us" in b]
            found[f"{release}_{method}"] = (f"{statistics.geometric_mean(ratios):.3f} times", f"in {len(ratios)}")
    text = page("docs/baechi.md")
    said = "{} as long as those by [Baechi](https://github.com/beomyeol/baechi)'s own {} cases"
    assert said.format(*found["baechi_m_etf"]) in text
    assert "by `m_sct` {} {};".format(*found["baechi_m_sct"]) in text
    assert "{} {} and {} {} (geometric".format(*found["torch_m_etf"], *found["torch_m_sct"]) in text


def test_predicted_peaks() -> None:
    off = [row["predicted_bytes"] / row["measured_bytes"] - 1 for model in read("memory.json")["models"] for row in model["rows"]]
    near = [each for each in off if round(abs(each), 2) <= 0.08]
    assert f"within 8% in {len(near)} of {len(off)} cases" in page("docs/measure.md")
    assert f"one is {-min(off):.0%} below" in page("docs/measure.md")


def sums(rows: Sequence[Mapping[str, Any]], key: str) -> dict[float, list[Mapping[str, Any]]]:
    return {value: [row for row in rows if row[key] == value] for value in sorted({row[key] for row in rows})}


def test_searches_in_speed() -> None:
    text = page("docs/speed.md")
    first, *_, last = read("anytime.json")["rows"]
    assert f"make the plan {first['predicted_us'] / last['predicted_us'] - 1:.1%} better" in text
    parts = [read(path.name)["rows"] for path in sorted(RESULTS.glob("anytime_parts_*.json"))]
    worst, over = max(a["of_longest"] for a, _ in parts) - 1, max(a["predicted_us"] / b["lower_bound_us"] for a, b in parts) - 1
    assert f"steps of {len(parts)} built-in models over two parts" in text
    assert f"at most {worst:.1%} longer than those found in ten minutes, and at most {over:.1%} longer than the proven bound" in text
    tight = {
        slack: (sum(row["cells"]["auto"]["status"] in ("feasible", "optimal") for row in rows), len(rows))
        for slack, rows in sums(read("tight.json")["rows"], "slack").items()
    }
    assert "in 10 s in {} of {} cases".format(*tight[1.0]) in text
    assert tight[1.02][0] == tight[1.02][1] == tight[1.0][1]
    proven = {
        int(ops): (sum(int(row["proven"]) for row in rows), sum(len(row["seconds"]) for row in rows))
        for ops, rows in sums(read("exact_reach.json")["rows"], "ops").items()
    }
    easy = [sum(proven[ops][i] for ops in (8, 12, 16)) for i in (0, 1)]
    assert easy[0] == easy[1]
    said = f"all of {easy[1]} random graphs of 8, 12 and 16 ops on 2 and 3 devices, {{}} of {{}} of 20 ops, and {{}} of {{}} of 24 ops"
    assert said.format(*proven[20], *proven[24]) in text
    rates = [1 / statistics.median(row["seconds"]) for row in read("placers.json")["rows"] if row["task"] == "simulate"]
    assert "does {:,.0f} steps of 500 ops a second, and {:.0f} of 10,000 ops".format(*(float(f"{rate:.2g}") for rate in rates)) in text


def test_kept_memory() -> None:
    gains = {row["model"]: row["gain"] for row in read("kept_memory.json")["rows"] if "gain" in row}
    (most,) = {f"{gains.pop(name):.2f}" for name in ("gpt2/50257", "alexnet")}
    assert f"an eager step of `gpt2` (50,257 words) or `alexnet` is {most} times as fast" in page("docs/run.md")
    assert f"the other models' steps are {min(gains.values()):.2f} to {max(gains.values()):.2f} times as fast" in page("docs/run.md")


def test_one_gpu() -> None:
    for model, program, *cells in table("docs/speed.md", "| model | our program "):
        name = f"one_{model}{'_graphs' * (program == 'one graph')}"
        found = read(f"gpu/{name if cells[1] == '' else f'compiled_{model}'}/report.json")
        steps, slower = found["measured_step_us"], found["overhead_of_one_device_program"]
        ratio = {"median": 1 / slower["median"], "low": 1 / slower["high"], "high": 1 / slower["low"]}
        times = [as_time(steps[name]["median"]) if name in steps else "" for name in ("eager", "torch.compile", "single")]
        assert cells == [*times, interval(ratio), f"{found['predicted_step_us']['single'] / steps['single']['median']:.2f}"], model


def test_one_gpu_as_four() -> None:
    off = {}
    for model, programs, method, *cells in table("docs/speed.md", "| model | our programs "):
        found = read(f"gpu/{model}_split_gpu_4{'_no_cuda_graphs' * (programs == 'op by op')}/compare.json")
        rows = {"eager": found["unplaced"], **{row["method"]: row for row in found["methods"]}}
        placed, steps = rows[method.strip("`")], {name: row["measured_step_us"]["median"] for name, row in rows.items()}
        off[model, programs, method] = placed["predicted_step_us"] / placed["measured_step_us"]["median"] - 1
        times = [as_time(us) for us in (steps["eager"], steps["single"], placed["measured_step_us"]["median"])]
        assert cells == [str(placed["transfers"]), *times, interval(placed["ratio"]), f"{1 + off[model, programs, method]:.2f}"], model
    assert all(abs(error) < 0.15 for (_, programs, _), error in off.items() if programs == "one graph")
    assert f"by up to {-min(off.values()):.0%}" in page("docs/speed.md")


def test_a_users_loop_on_one_gpu() -> None:
    shown, worth = table("docs/speed.md", "| model | module | ms a step"), []
    for model, loss in (("gpt2", "0.0e+00"), ("wide_towers", "1.2e-04")):
        rows = read(f"gpu/loop_{model}_h200.json")["rows"]
        assert {row["model"] for row in rows} == {model}
        for row in rows:
            ms, cells = row["samples_ms"], shown.pop(0)
            assert cells[0] == model
            assert cells[2:] == [f"{statistics.median(ms):.2f}", f"{min(ms):.2f} to {max(ms):.2f}", f"{row['gain']:.2f}"], row["way"]
        found = {row["way"]: row for row in rows}
        assert f"{found['graphs']['loss']:.1e}" == f"{found['op by op']['loss']:.1e}" == loss
        worth.append(statistics.median(found["graphs"]["samples_ms"]) / statistics.median(found["reduce-overhead"]["samples_ms"]))
    assert shown == []
    compiled = "ones compiled with `mode=\"reduce-overhead\"`"
    assert "Placed graphs take {:.2f} and {:.2f} times as long as ".format(*worth) + compiled in page("docs/speed.md")


def test_a_host_that_changes_its_speed() -> None:
    found = read("gpu/wide_towers_split_gpu_4_no_cuda_graphs/compare.json")
    rows = {"eager": found["unplaced"], **{row["method"]: row for row in found["methods"]}}
    samples = {name: row["measured_step_us"]["samples"] for name, row in rows.items()}
    gains = [statistics.median(us[:12]) / statistics.median(us[-4:]) for us in samples.values()]
    assert f"were {min(gains):.1f} to {max(gains):.1f} times" in page("docs/speed.md")
    off = {name: 1 - rows[name]["predicted_step_us"] / statistics.median(samples[name][-4:]) for name in ("single", "contiguous")}
    assert f"was {off['single']:.0%} too short then, that of `contiguous` {off['contiguous']:.0%}" in page("docs/speed.md")


def test_what_was_compared_on_a_gpu() -> None:
    reports = [json.loads(path.read_text()) for path in sorted((RESULTS / "gpu").glob("*/*.json"))]
    parities = [row["parity"]["max_abs_diff"] for found in reports for row in found.get("methods", [found])]
    assert f"in all {len(parities)} comparisons" in page("docs/speed.md")
    assert set(parities) == {0.0}
    most = max(row["outside_bytes"] for row in read("gpu/memory.json")["rows"])
    assert f"up to {most / 2**20:.0f} MiB on an H100" in page("docs/run.md")
    assert most < read("gpu/memory.json")["set_aside"]["context_bytes"]


def test_a_slow_core() -> None:
    rows = {row["variant"]: row["aware_gains"] for row in read("slow_core_gpt2.json")["rows"]}
    equal, ddp = rows["auto, equal parts"], rows["ddp"]
    text = page("docs/parts.md")
    assert f"{equal['median']:.2f} times as fast as with equal parts" in text
    assert f"{ddp['median']:.2f} times as fast as DistributedDataParallel" in text
    assert f"{rows['auto, whole batch']['median']:.2f} times as fast as the whole batch" in text
    measured = rows["auto, parts by measured speed"]
    assert f"takes {measured['median']:.2f} times as long" in text
    for gains in (equal, ddp, measured):
        assert f"({gains['low']:.2f} to {gains['high']:.2f})" in text
