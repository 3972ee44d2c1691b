"""docs/speed.md, and the times in docs/tensorflow.md and docs/parts.md, say what the committed results say: the tables are computed anew,
the commands are those of the results they name."""

import json
import re
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baechi_runtime.report.tables import as_time

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("speed", "tensorflow", "parts")
PAGE, TENSORFLOW_PAGE, PARTS_PAGE = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)
MODELS = ("wide_towers", "inception_v3", "gnmt_v2", "nasnet", "transformer", "gpt2", "resnet101", "alexnet", "rnnlm")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(heading: str, page: str = PAGE) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell without what follows a comma."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {cells[0].partition(",")[0].strip("`"): cells[1:] for cells in rows[2:]}


TENSORFLOW, PIPELINES = table("Step times", TENSORFLOW_PAGE), table("Beside a pipeline")


def test_the_table_of_steps_has_all_models() -> None:
    assert tuple(table("What a placed step gains")) == MODELS


def compared(model: str, kind: str = "engines") -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The comparison of a model's steps in worker processes, by `baechi compare`, and its rows by name."""
    found = read(f"{kind}_{model}.json")
    return found, {row["method"]: row for row in found["methods"]}


def interval(ratio: dict[str, float]) -> str:
    return "{median:.2f} ({low:.2f} to {high:.2f})".format_map(ratio)


def gained(row: dict[str, Any] | None) -> str:
    """The speed-up over one device's program, with the interval for all pairs, and the prediction's error."""
    if row is None or row["measured_step_us"] is None:
        return "-"
    return f"{interval(row['ratio'])}, {row['predicted_step_us'] / row['measured_step_us']['median'] - 1:+.1%}"


@pytest.mark.parametrize("model", MODELS)
def test_steps(model: str) -> None:
    found, rows = compared(model)
    assert table("What a placed step gains")[model] == [
        as_time(found["unplaced"]["measured_step_us"]["median"]),
        as_time(rows["single"]["measured_step_us"]["median"]),
        *(gained(rows.get(name)) for name in ("m_sct", "auto", "auto_2_parts", "ddp", "fsdp2", "pase")),
    ]


def test_predictions_of_steps() -> None:
    """The page says between what the errors are, and how many are within a tenth."""
    by_model = {model: [row for row in compared(model)[1].values() if row["measured_step_us"] is not None] for model in MODELS}
    seen = [row for rows in by_model.values() for row in rows if row["method"] != "single"]
    errors = [row["predicted_step_us"] / row["measured_step_us"]["median"] - 1 for row in seen]
    within = sum(abs(error) <= 0.1 for error in errors)
    assert f"{within} of {len(errors)} predictions are within 10%, all between {min(errors):+.1%} and {max(errors):+.1%}" in PAGE
    fastest = [max(rows, key=lambda row: row["ratio"]["median"]) for rows in by_model.values()]
    gains = [row["ratio"]["median"] for row in fastest]
    mean, count = statistics.geometric_mean(gains), Counter(row["method"] for row in fastest)
    assert f"is {mean:.2f} times as fast as one device's program in the geometric mean, from {min(gains):.2f} to {max(gains):.2f}" in PAGE
    assert (count["auto"], count["auto_2_parts"], count["ddp"], count["pase"]) == (4, 3, 1, 1)
    assert [chosen(compared(model)[1], "auto_2_parts") for model in MODELS] == fastest
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{mean:.2f} in the geometric mean" in readme
    assert f"Of {len(errors)} predictions {within} are within 10%" in readme
    single = [found["unplaced"]["measured_step_us"]["median"] / took(rows["single"]) for found, rows in map(compared, MODELS)]
    assert f"runs at {min(single):.2f} to {max(single):.2f} of eager's speed" in PAGE


HALVES = "Four half cores"


def took(row: dict[str, Any]) -> float:
    return row["measured_step_us"]["median"]


def chosen(by_name: dict[str, dict[str, Any]], parts: str) -> dict[str, Any]:
    """The row that `auto` chooses by its rules, had its few real steps taken what the medians are."""
    rows = {name: row for name, row in by_name.items() if row["measured_step_us"] is not None}
    plans = sorted((rows[name] for name in ("auto", parts) if name in rows), key=lambda row: row["predicted_step_us"])
    if len(plans) == 2 and plans[1]["predicted_step_us"] < 1.25 * plans[0]["predicted_step_us"]:
        plans = sorted(plans, key=took) if min(map(took, plans)) < 0.95 * max(map(took, plans)) else plans
    engines = sorted((rows[name] for name in ("ddp", "fsdp2", "pase") if name in rows), key=lambda row: row["predicted_step_us"])
    ahead = bool(engines) and engines[0]["predicted_step_us"] < 0.95 * took(plans[0])
    return engines[0] if ahead else plans[0]


@pytest.mark.parametrize("model", table(HALVES))
def test_steps_on_four_half_cores(model: str) -> None:
    found, rows = compared(model, "four_halves")
    assert table(HALVES)[model] == [
        as_time(found["unplaced"]["measured_step_us"]["median"]),
        as_time(rows["single"]["measured_step_us"]["median"]),
        *(gained(rows.get(name)) for name in ("auto", "auto_4_parts", "ddp", "fsdp2", "pase")),
    ]


def test_the_fastest_on_four_half_cores() -> None:
    """The page says how much faster than the whole batch's plan the best is, and the one with the least prediction; and how far predictions
    are off."""
    text = PAGE.partition(f"## {HALVES}\n")[2].partition("\n## ")[0]
    shown = table(HALVES)
    assert {path.name for path in RESULTS.glob("four_halves_*.json")} == {f"four_halves_{model}.json" for model in shown}
    found = [compared(model, "four_halves") for model in shown]
    rows = [[row for row in by_name.values() if row["measured_step_us"] is not None] for _, by_name in found]
    times: dict[str, list[float]] = {"whole": [], "best": [], "predicted": [], "chosen": []}
    for measured, (_, by_name) in zip(rows, found, strict=True):
        times["whole"].append(took(by_name["auto"]))
        times["best"].append(min(map(took, measured)))
        times["predicted"].append(took(min(measured, key=lambda row: row["predicted_step_us"])))
        times["chosen"].append(took(chosen(by_name, "auto_4_parts")))
    gain = {name: statistics.geometric_mean(a / b for a, b in zip(times["whole"], us, strict=True)) for name, us in times.items()}
    assert f"is {gain['best']:.2f} times as fast as the plan of the whole batch in the geometric mean" in text
    assert f"is predicted to be the fastest is {gain['predicted']:.2f} times as fast" in text
    assert f"by real steps ([parts.md](parts.md#which-parts)), {gain['chosen']:.2f} times" in text
    assert [a == b for a, b in zip(times["best"], times["chosen"], strict=True)].count(False) == 1
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in (row for measured in rows for row in measured):
        errors[row["method"] == "single"].append(row["predicted_step_us"] / row["measured_step_us"]["median"] - 1)
        assert row["method"] != "ddp" or abs(errors[False][-1]) <= 0.1
    within = sum(abs(error) <= 0.1 for error in errors[False])
    of_one, of_splits = (f"between {min(off):+.1%} and {max(off):+.1%}" for off in errors.values())
    assert f"{within} of {len(errors[False])} predictions of splits are within 10%, all {of_splits}" in text
    assert f"of one device's program are {of_one}" in text
    shares = [file["share_of_a_core"] for file, _ in found]
    assert f"{min(shares):.3f} to {max(shares):.3f} of a core" in text
    assert f"at most {max(file['load_of_others'] for file, _ in found):.0%} of the cores" in text


@pytest.mark.parametrize("model", TENSORFLOW)
def test_steps_of_tensorflow(model: str) -> None:
    found, rows = compared(model, "tensorflow")
    assert TENSORFLOW[model] == [
        as_time(found["unplaced"]["measured_step_us"]["median"]),
        as_time(rows["single"]["measured_step_us"]["median"]),
        *(gained(rows.get(name)) for name in ("expert", "m_etf", "auto")),
    ]


@pytest.mark.parametrize("model", PIPELINES)
def test_pipelines(model: str) -> None:
    found, rows = compared(model, "pipelining")
    assert PIPELINES[model] == [
        as_time(rows["single"]["measured_step_us"]["median"]),
        *(gained(rows[name]) for name in ("auto", "auto_2_parts")),
        interval(rows["1F1B"]["ratio"]),
    ]
    assert found["losses"]["1F1B"] == pytest.approx(found["losses"]["eager"], rel=1e-2)


@pytest.mark.parametrize(("kind", "page", "shown"), [("tensorflow", TENSORFLOW_PAGE, TENSORFLOW), ("pipelining", PAGE, PIPELINES)])
def test_all_results_are_shown_with_what_others_took(kind: str, page: str, shown: dict[str, list[str]]) -> None:
    found = {path.name: read(path.name)["load_of_others"] for path in RESULTS.glob(f"{kind}_*.json")}
    assert set(found) == {f"{kind}_{model}.json" for model in shown}
    assert f"others had {min(found.values()):.1%} to {max(found.values()):.1%} of the cores" in " ".join(page.split())


def test_steps_over_parts() -> None:
    """The page says how often two parts are faster than the whole batch, and how the one that is predicted to be does beside the other and
    beside DistributedDataParallel."""
    found = [rows for rows in (compared(model)[1] for model in MODELS) if "auto_2_parts" in rows]
    measured = [{name: row["measured_step_us"]["median"] for name, row in rows.items() if row["measured_step_us"]} for rows in found]
    chosen = [min(("auto", "auto_2_parts"), key=lambda name: rows[name]["predicted_step_us"]) for rows in found]
    assert chosen == [min(("auto", "auto_2_parts"), key=times.__getitem__) for times in measured]
    beside = [times[name] < times["ddp"] for times, name in zip(measured, chosen, strict=True) if "ddp" in times]
    assert all("1.5 times" in rows["ddp"]["note"] for rows, times in zip(found, measured, strict=True) if "ddp" not in times)
    text = " ".join(PARTS_PAGE.split())
    assert f"Of the other {len(found)}, two parts are faster than the whole batch in {chosen.count('auto_2_parts')}, and" in text
    assert f"in {sum(beside)} of {len(beside)}, and behind it for `nasnet`; in the other {len(found) - len(beside)} that" in text


def test_quality_of_plans() -> None:
    text = (RESULTS / "quality.md").read_text(encoding="utf-8")
    lines = text.split("Geometric means over the cases with a plan", 1)[1].splitlines()
    means = {cells[0]: cells[1:] for line in lines if len(cells := [c.strip() for c in line.strip("|").split("|")]) > 5}
    columns = [means["method"].index(name) for name in ("plans", "over bound", "over annealing", "median s")]
    found = table("How good the plans are")
    assert len(found) >= 8
    for method, cells in found.items():
        assert cells == [means[method][c] for c in columns], method


def test_the_first_plan() -> None:
    result = read("cold_start.json")
    for task, cells in table("The first plan").items():
        assert cells == [f"{result['median_seconds'][f'{method}, {task}']:#.2g} s".replace(". ", " ") for method in ("m_sct", "auto")], task
    compiling = [row for row in result["rows"] if row["task"] == "compile all"]
    processor, clock = (statistics.median(row[key] for row in compiling) for key in ("processor_seconds", "seconds"))
    assert f"{processor:.0f} s of processor time and {clock:.0f} s there" in PAGE
    assert f"`auto` searches for {result['search_seconds']} s" in PAGE
    assert f"They take {compiling[0]['bytes'] / 1e6:.0f} MB" in PAGE


def test_seconds_to_place() -> None:
    rows = {(row["task"], row["ops"]): statistics.median(row["seconds"]) for row in read("placers.json")["rows"]}
    for ops, cells in table("How long placing takes").items():
        expected = [f"{rows[m, int(ops)]:.2g} s" if (m, int(ops)) in rows else "" for m in ("m_etf", "m_sct")]
        assert cells == expected, ops
    cases = [row for number in (1, 2) for row in read(f"quality_{number}.json")["cases"].values()]
    assert f"the longest takes `m_etf` {max(row['cells']['m_etf']['placement_seconds'] for row in cases):.1f} s" in PAGE


def test_a_model_that_fits_on_no_single_device() -> None:
    found = read("fits_nowhere_transformer.json")
    rows = {row["method"]: row for row in found["methods"]}
    text = PAGE.partition("fits on no single device.**")[2].partition("\n## ")[0]
    measured = {name: row["measured_step_us"]["median"] for name, row in rows.items() if row["measured_step_us"]}
    assert sorted(measured) == ["auto", "auto_2_parts", "contiguous", "m_sct", "m_topo"]
    assert min(measured, key=measured.__getitem__) == "auto"
    assert all(as_time(us) in text for us in measured.values())
    needed = [re.search(r"(?:hold|needs) ([\d.]+)( MiB)?", rows[name]["note"]).groups() for name in ("single", "ddp", "fsdp2", "pase")]
    assert all(f"{float(number) / (1 if unit else 2**20):.1f} MiB" in text for number, unit in needed)
    assert shlex.join(found["command"]) in text and f"Others had {found['load_of_others']:.0%}" in text


def test_public_scripts() -> None:
    rows = [row for number in (1, 2) for row in read(f"public_scripts_{number}.json")["rows"]]
    text = PAGE.partition("## Public scripts")[2].partition("\n## ")[0]
    same = [row["name"] for row in rows if row["same"]]
    assert f"{len(rows)} public training scripts" in text
    assert f"and {len(same)} print the same digits" in text
    assert {run["exit_code"] for row in rows for run in row["placed"]} == {0}
    for number, name in enumerate(("first run, set-up included", "second run")):
        ratios = [row["placed"][number]["ratio"] for row in rows]
        cells = [statistics.geometric_mean(ratios), min(ratios), max(ratios)]
        line = f"| {name} | {' | '.join(f'{r:.2f}' for r in cells)} | {sum(r <= 1.05 for r in ratios)} |"
        assert line in text
    placed = [row["name"] for row in rows if "steps placed" in row["placed"][1]["said"][-1]]
    assert ("in the second run one is placed" in text) == (len(placed) == 1)
    aside, waiting = (
        statistics.geometric_mean(row["placed"][0]["ratio"] for row in read(f"public_scripts_{number}.json")["rows"]) for number in (3, 4)
    )
    assert f"four scripts' first runs took {aside:.2f} times plain, and {waiting:.2f} where they waited" in text
    seconds = [run["seconds"] for row in rows for run in row["plain"]]
    assert f"{min(seconds):.0f} to {max(seconds):.0f} seconds" in text
    for found in (read(f"public_scripts_{number}.json") for number in (1, 2, 3, 4)):
        asked, names = set(re.findall(r"--only=(\S+)", found["command"])[0].split(",")), {row["name"] for row in found["rows"]}
        assert names <= asked and all(f"also names `{name}`" in text for name in asked - names)


def test_why_there_are_no_more_parts_than_devices() -> None:
    """The table is that of the file, and in none of its rows twice as many parts could be 2% ahead, however well they were placed."""
    found = read("more_parts.json")
    assert f"    {found['command']}\n" in PARTS_PAGE
    rows = [line for line in PARTS_PAGE.splitlines() if re.match(r"\| `\w+` \| [24] \|", line)]
    assert len(rows) == len(found["rows"]) > 0
    for row, line in zip(found["rows"], rows, strict=True):
        one, two = str(row["devices"]), str(2 * row["devices"])
        times_us = row["step_us"]["1"], row["step_us"][one], row["step_us"][two], row["least_us"][two]
        assert line == f"| `{row['model']}` | {one} | {' | '.join(map(as_time, times_us))} | {row['seconds'][two]:.0f} s |"
        assert row["gain_at_most"] < 1.02


@pytest.mark.parametrize("name", ["speed", "parts", "pase"])  # the others' have placeholders for folders
def test_every_command_is_that_of_a_committed_result(name: str) -> None:
    commands = set()
    for path in (*RESULTS.glob("*.json"), *(RESULTS / "gpu").glob("loop_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        command = result.get("command")
        commands |= set(command) if isinstance(command, list) else {command}
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    said = re.findall(r"^    ((?:git checkout \w+ && )?python -m benchmarks\..*)$", page, re.MULTILINE)
    assert said
    for line in said:
        assert line in commands, line


@pytest.mark.parametrize("name", ["speed", "tensorflow", "pase"])
def test_every_command_makes_the_file_it_names(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    said = re.findall(r"^    (baechi [^|>]*) (?:\| python -m json.tool --compact )?> benchmarks/results/(.*)$", page, re.MULTILINE)
    assert said
    for command, file in said:
        assert shlex.join(read(file)["command"]) == command
