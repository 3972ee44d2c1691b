"""Hostile training loops: a sample under a backend that changes nothing, and wrappers that do each of the wrong things."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baechi_ext.ir.files import read_json
from benchmarks.hostile.__main__ import compare, main
from benchmarks.hostile.observed import difference, leaves
from benchmarks.hostile.processes import Limits, Outcome, Raised, run_all
from benchmarks.hostile.suite import SUBJECTS, Case, all_cases
from benchmarks.hostile.verdicts import verdict

SAMPLE = (
    "attributes.number_doubles_each_step", "containers.long_list_one_entry_changes", "functions.closure_is_rebound",
    "hooks.forward_hook_counts_and_collects", "generators.dropout", "exceptions.stop_iteration", "inputs.last_batch_is_smaller",
    "gradients.double_backward", "parameters.layers_are_frozen_and_thawed", "layers.lstm_carries_its_state",
)  # fmt: skip
VICTIM = "attributes.number_doubles_each_step"
RESULT = Path(__file__).parents[2] / "benchmarks/results/hostile_loops.json"
HERE = "tests.benchmarks.test_hostile"


def chosen(*names: str) -> list[Case]:
    return [all_cases()[name] for name in names]


# Wrappers, started in a process of their own by name


def frozen() -> Any:
    """Answers each call as it answered the first one."""

    def wrap(module: nn.Module) -> nn.Module:
        kept: list[Tensor] = []
        ordinary = module.forward

        def forward(*args: Any) -> Any:
            kept.append(ordinary(*args) if not kept else kept[0].detach().requires_grad_())
            return kept[-1]

        module.forward = forward
        return module

    return wrap, dict


def dying() -> Any:
    return lambda module: os._exit(3), dict


def sleeping() -> Any:
    return lambda module: time.sleep(600), dict


def refusing() -> Any:
    def wrap(module: nn.Module) -> nn.Module:
        from baechi_ext.errors import CaptureError

        raise CaptureError("none of this")

    return wrap, lambda: {"asked": 1}


def rounding() -> Any:
    def wrap(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda m, args, out: out * (1 + 1e-7))
        return module

    return wrap, dict


def drawing() -> Any:
    """Changes nothing but the state of the global generator."""
    return lambda module: (torch.rand(1), module)[1], dict


def test_there_are_cases_of_each_subject() -> None:
    count = Counter(case.subject for case in all_cases().values())
    assert set(count) == set(SUBJECTS)
    assert min(count.values()) >= 10
    assert set(all_cases()) == {row["case"] for row in read_json(RESULT, "result")["rows"]}


def test_a_sample_under_dynamo() -> None:
    rows = compare(chosen(*SAMPLE), ["aot_eager"], Limits(jobs=2))
    found = {row["case"]: row["verdict"] for row in rows}
    assert found.pop("gradients.double_backward") == "refused"
    assert found.pop("exceptions.stop_iteration") == "same exception"
    assert set(found.values()) == {"equal"}, rows
    assert rows[0]["stats"]["graph_runs"] >= 1


def test_batches_in_parts() -> None:
    """Under autocast what is allowed follows the type that sums are taken in."""
    rows = compare(chosen("functions.class_of_a_layer_is_switched", "modes.autocast_is_entered_later"), ["baechi@2"], Limits(jobs=2))
    assert [row["verdict"] for row in rows] == ["rounding", "rounding"], rows
    assert [row["stats"]["modules"][0]["microbatches"] for row in rows] == [[4, 4]] * 2
    assert [row["stats"]["tolerance"] for row in rows] == [1e-4, pytest.approx(0.0195, rel=0.01)]


def test_what_a_run_allows_is_rounding() -> None:
    leaf, other = (("x", np.array([1.0, 2.0])),), (("x", np.array([1.0, 2.01])),)
    assert verdict(Outcome(leaf), Outcome(other))[0] == "WRONG"
    assert verdict(Outcome(leaf), Outcome(other, stats={"tolerance": 0.02}))[0] == "rounding"
    assert verdict(Outcome(leaf), Outcome(other, stats={"tolerance": 0.002}))[0] == "WRONG"


def test_wrong_wrappers_are_found_out() -> None:
    names = ("frozen", "dying", "refusing", "rounding", "drawing")
    rows = compare(chosen(VICTIM), [f"{HERE}:{name}" for name in names], Limits(jobs=2))
    assert [row["verdict"] for row in rows] == ["WRONG", "crash", "refused", "rounding", "WRONG"]
    assert rows[0]["detail"].startswith("result.losses[1]: ")
    assert rows[1]["detail"].startswith("exit 3")
    assert rows[2]["stats"] == {"asked": 1}
    assert rows[4]["detail"].startswith("torch: ")


def test_a_run_out_of_time_is_a_hang() -> None:
    fast = Outcome()
    assert verdict(fast, Outcome(ended="hang")) == ("hang", "")
    ((_, outcome),) = run_all([(all_cases()[VICTIM], f"{HERE}:sleeping")], Limits(jobs=1, seconds=3.0))
    assert outcome.ended == "hang"


def test_the_command_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "loops.json"
    main(["--backend=plain", "--microbatches=2", f"--only={VICTIM},exceptions.missing_key", f"--out={out}"])
    result = read_json(out, "result")
    assert result["counts"] == {"plain": {"equal": 1, "same exception": 1}}
    assert [row["case"] for row in result["rows"]] == [VICTIM, "exceptions.missing_key"]
    assert result["command"].startswith("python -m benchmarks.hostile --backend=plain --microbatches=2")
    assert result["options"]["microbatches"] == 2
    assert "same exception" in capsys.readouterr().out


def test_an_unknown_backend_is_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--backend=none"])
    assert "unknown backend 'none'" in capsys.readouterr().err


# Comparing


def test_exceptions_are_compared_by_type_and_text() -> None:
    one = Outcome(raised=Raised(("builtins.KeyError", "builtins.Exception"), "'a'", ""))
    other = Outcome(raised=Raised(("builtins.KeyError", "builtins.Exception"), "'b'", ""))
    assert verdict(one, one) == ("same exception", "")
    assert verdict(one, other)[0] == verdict(one, Outcome())[0] == verdict(Outcome(), one)[0] == "WRONG"
    dynamo = Outcome(raised=Raised(("torch._dynamo.exc.Unsupported",), "no", ""))
    broken = Outcome(raised=Raised(("torch._dynamo.exc.BackendCompilerFailed", "torch._dynamo.exc.TorchDynamoException"), "no", ""))
    assert verdict(Outcome(), dynamo)[0] == "refused"
    assert verdict(Outcome(), broken)[0] == "WRONG"


@pytest.mark.parametrize(
    ("plain", "wrapped", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), "equal"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001]), "rounding"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "WRONG"),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), "equal"),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), "WRONG"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "rounding"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), "WRONG"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "WRONG"),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), "equal"),
        ([1, None, "a"], [1, None, "a"], "equal"),
        ([1], (1,), "WRONG"),
        ([1], [1, 2], "WRONG"),
        ({"a": 1}, {"b": 1}, "WRONG"),
        (1, True, "WRONG"),
        (1.0, 1.0 + 1e-9, "rounding"),
        (torch.ones(1) * 1j, torch.ones(1) * 2j, "WRONG"),
    ],
)
def test_structures_are_compared(plain: Any, wrapped: Any, expected: str) -> None:
    assert verdict(Outcome(tuple(leaves(plain))), Outcome(tuple(leaves(wrapped))))[0] == expected


def test_what_has_no_digits_is_an_error() -> None:
    with pytest.raises(TypeError, match="a object has no digits"):
        list(leaves([object()]))


def test_a_difference_says_what_became_of_what() -> None:
    assert difference("x", np.array([1.0, 2.0]), np.array([1.0, 4.0])) == (True, "x: 2.0 became 4.0 (1 of 2 differ)")
    assert difference("x", "a", "b") == (True, "x: 'a' became 'b'")
