"""Capture of TensorFlow steps: the cleaned graph computes what tf.function computes, and its bytes, groups and phases are right."""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function
from baechi_ext.errors import CaptureError
from tests.tensorflow_steps import Step, dense_step, image_step, keras, nested_step, run_as_function, run_in_session, tf, words_step

STEPS = {
    "dense": dense_step,
    "image": image_step,
    "unrolled": partial(words_step, unroll=True),
    "loops": partial(words_step, unroll=False),
    "nested": nested_step,
}


@pytest.fixture(scope="module")
def captured() -> dict[str, tuple[Step, CapturedFunction]]:
    found = {}
    for name, make in STEPS.items():
        step = make()
        found[name] = step, step.capture(name=name)
    return found


def wait_free(reference: str) -> str:
    return reference.removeprefix("^").partition(":")[0]


@pytest.mark.parametrize("name", STEPS)
def test_a_session_of_the_cleaned_graph_computes_what_the_function_computes_bit_for_bit(name: str) -> None:
    step = STEPS[name]()
    captured = step.capture()
    returned, variables = run_in_session(captured, step.inputs, 3)
    expected = run_as_function(step, 3)
    assert [float(outputs[0]) for outputs in returned] == [float(e) for e in expected]
    assert len({float(e) for e in expected}) == 3, "the steps train"
    for variable in captured.variables:
        np.testing.assert_array_equal(variables[variable.shared_name], variable.variable.numpy(), err_msg=variable.shared_name)


@pytest.mark.parametrize("name", STEPS)
def test_every_node_stands_behind_what_it_reads_and_is_in_one_op(name: str, captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured[name][1]
    seen: set[str] = set()
    for node in found.graph_def.node:
        assert {wait_free(i) for i in node.input} <= seen, node.name
        assert not node.device
        assert "_class" not in node.attr
        seen.add(node.name)
    members = Counter(member for nodes in found.nodes.values() for member in nodes)
    assert set(members.values()) == {1}
    assert set(members) == seen - {v.placeholder for v in found.variables}
    assert tuple(found.nodes) == tuple(op.id for op in found.graph.ops)
    assert list(found.graph.index.values()) == sorted(found.graph.index.values())
    for op in found.graph.ops:
        assert all(found.graph.index[p] < found.graph.index[op.id] for p in before(found, op.id))


def before(found: CapturedFunction, op: str) -> list[str]:
    graph = found.graph
    return [graph.ops[p].id for p in graph.predecessors[graph.index[op]]]


@pytest.mark.parametrize("name", STEPS)
def test_the_edges_are_those_of_the_nodes(name: str, captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured[name][1]
    home = {node: op for op, nodes in found.nodes.items() for node in nodes}
    wanted = {op: set() for op in found.nodes}
    for node in found.graph_def.node:
        for source in map(wait_free, node.input):
            if source in home and node.name in home and home[source] != home[node.name]:
                wanted[home[node.name]].add(home[source])
    assert {op: set(before(found, op)) for op in found.nodes} == wanted


def test_bytes_by_hand(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    step, found = captured["dense"]
    graph = found.graph
    sizes = {(graph.ops[t.producer].op, t.bytes) for t in graph.tensors}
    hidden, out = 2 * 8 * 4, 2 * 3 * 4
    assert {("input", 2 * 4 * 4), ("input", 2 * 4), ("MatMul", hidden), ("BiasAdd", hidden), ("Relu", hidden), ("MatMul", out)} <= sizes
    assert {("MatMul", 4 * 8 * 4), ("MatMul", 8 * 3 * 4), ("BiasAddGrad", 8 * 4), ("BiasAddGrad", 3 * 4)} <= sizes
    by_op = Counter(op.op for op in graph.ops)
    assert by_op["MatMul"] == 2 + 3, "forward, and backward without the gradient of the input"
    weights = sum(int(np.prod(v.shape)) * 4 for v in step.model.trainable_variables)
    counters = 4 + 8
    """The learning rate and the number of steps."""
    assert sum(op.persistent_bytes for op in graph.ops) == weights + counters
    assert found.graph.framework == "tensorflow"


def test_a_read_variable_moves_nothing_and_a_small_one_its_bytes(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    graph = captured["image"][1].graph
    read = [t for t in graph.tensors if graph.ops[t.producer].op == "ReadVariableOp" and t.bytes]
    sizes = {re.sub(r"_\d+", "", graph.ops[t.producer].colocation or ""): t.bytes for t in read}
    assert sizes == {"adam/learning_rate": 4, "adam/iteration": 8, "seed_generator/seed_generator_state": 16}


@pytest.mark.parametrize("name", STEPS)
def test_a_variable_its_reads_and_its_writes_share_a_group(name: str, captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured[name][1]
    home = {node: op for op, nodes in found.nodes.items() for node in nodes}
    groups: dict[str, set[str | None]] = {v.placeholder: set() for v in found.variables}
    for node in found.graph_def.node:
        for source in map(wait_free, node.input):
            if source in groups:
                groups[source].add(found.graph.ops[found.graph.index[home[node.name]]].colocation)
    assert all(len(labels) <= 1 and None not in labels for labels in groups.values()), groups
    assert sum(map(bool, groups.values())) > 0.8 * len(groups)


def test_what_an_optimizer_keeps_lives_with_its_variable_and_others_apart(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    graph = captured["image"][1].graph
    labels = set(graph.groups)
    assert "image/conv2d/kernel" in labels
    assert not [label for label in labels if "momentum" in label or "velocity" in label]
    of_kernel = {graph.ops[v].op for v in graph.groups["image/conv2d/kernel"]}
    assert {"Conv2D", "ReadVariableOp", "AssignSubVariableOp", "AssignAddVariableOp"} <= of_kernel
    kernels = {label for label in labels if label.endswith("kernel")}
    assert kernels == {"image/conv2d/kernel", "image/dense/kernel"}
    assert len(graph.groups["adam/learning_rate"]) == 1


def test_phases(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured["image"][1]
    graph = found.graph
    phase = {op.id: op.phase for op in graph.ops}
    kinds = {p: {op.op for op in graph.ops if op.phase == p} for p in ("forward", "backward", "update")}
    assert {"Conv2D", "input", "SparseSoftmaxCrossEntropyWithLogits", "Relu", "StatelessRandomUniformV2"} <= kinds["forward"]
    assert {"Conv2DBackpropFilter", "ReluGrad", "AddN", "BiasAddGrad"} <= kinds["backward"]
    assert {"AssignSubVariableOp", "AssignAddVariableOp", "Square"} <= kinds["update"]
    assert "Assign" not in " ".join(kinds["backward"])
    averages = [op for op in graph.ops if op.colocation and "moving" in op.colocation and op.op == "AssignVariableOp"]
    assert [op.phase for op in averages] == ["forward", "forward"]
    assert {op.phase for op in graph.ops if op.colocation == "adam/iteration"} == {"update"}
    rank = {"forward": 0, "backward": 1, "update": 2}
    for v, op in enumerate(graph.ops):
        assert all(rank[graph.ops[p].phase] <= rank[op.phase] for p in graph.predecessors[v]), op.id
        if op.forward_op is not None:
            assert phase[op.forward_op] == "forward"
    with_forward = {op.op: op.forward_op for op in graph.ops if op.phase == "backward"}
    assert with_forward["Conv2DBackpropFilter"] == next(op.id for op in graph.ops if op.op == "Conv2D")
    assert with_forward["ReluGrad"] == next(op.id for op in graph.ops if op.op == "Relu")


def test_sums_of_gradients_are_backward_and_clipping_is_of_the_optimizer(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    graph = captured["unrolled"][1].graph
    sums = [op for op in graph.ops if op.op == "AddN" and "/" not in op.id]
    assert len(sums) > 10
    assert {op.phase for op in sums} == {"backward"}
    norm = [op for op in graph.ops if op.op == "Minimum" or op.op == "Pack" and op.id.startswith("adam/")]
    assert [op.phase for op in norm] == ["update"] * 2
    assert sum(op.op == "MatMul" and op.phase == "forward" for op in graph.ops) == 3 * 3 * 2 + 1, "steps, cells, products"


def test_nothing_waits_at_the_exit_and_no_read_is_done_twice(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured["image"][1]
    kinds = Counter(node.op for node in found.graph_def.node)
    assert not {"NoOp", "Identity", "IdentityN", "StopGradient", "Shape", "ShapeN"} & set(kinds)
    reads = Counter((n.input[0], *sorted(n.input[1:])) for n in found.graph_def.node if n.op == "ReadVariableOp")
    assert set(reads.values()) == {1}
    assert kinds["Pow"] == 2, "the step size of Adam is worked out once, not once a variable"
    assert {n.op for n in found.graph_def.node if n.name in found.targets} == {
        "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"
    }


@pytest.mark.parametrize("name", STEPS)
def test_small_constants_stand_beside_their_one_reader(name: str, captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured[name][1]
    readers = Counter(wait_free(i) for node in found.graph_def.node for i in set(node.input))
    constants = [node.name for node in found.graph_def.node if node.op == "Const"]
    assert constants
    assert {readers[c] for c in constants} == {1}
    assert not {op.op for op in found.graph.ops} & {"Const"}


def test_loops_are_one_op_each_and_said(captured: dict[str, tuple[Step, CapturedFunction]]) -> None:
    found = captured["loops"][1]
    loops = [op for op in found.graph.ops if "While" in op.op]
    assert len(loops) == 6
    assert any("6 loops are one op each" in note and "unroll=True" in note for note in found.notes)
    assert captured["unrolled"][1].notes == ()


def test_a_value_is_read_again_after_a_write() -> None:
    state = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        first, again = state * x, state + x
        state.assign_add(x)
        return first, again, state * 10.0

    found = capture_function(step, [np.float32(2.0)])
    assert sum(node.op == "ReadVariableOp" for node in found.graph_def.node) == 2
    returned, variables = run_in_session(found, [np.float32(2.0)], 2)
    assert returned == [[2.0, 3.0, 30.0], [6.0, 5.0, 50.0]]
    assert list(variables.values()) == [5.0]


def test_a_call_that_waits_uses_the_variables_themselves() -> None:
    """A call that is inlined hands the variables on behind what it waits for."""
    state, weights = tf.Variable(1.0), tf.Variable(tf.fill([40, 50], 0.5))

    @tf.function
    def scaled(x: tf.Tensor) -> tf.Tensor:
        before = tf.reduce_sum(x @ weights) * state
        state.assign_add(1.0)
        return before

    def step(x: tf.Tensor) -> tf.Tensor:
        state.assign(state * 2.0)
        with tf.GradientTape() as tape:
            loss = scaled(x * 2.0)
        weights.assign_sub(tape.gradient(loss, weights))
        return loss, scaled(x), state.read_value()

    x = np.ones((2, 40), np.float32)
    found = capture_function(step, [x])
    assert not any(node.attr["T"].type == tf.resource.as_datatype_enum for node in found.graph_def.node if node.op == "Identity")
    returned, variables = run_in_session(found, [x], 2)
    assert returned == [[8000.0, -90000.0, 4.0], [-480000.0, -1422000.0, 10.0]]
    ordinary = tf.function(step)
    assert [[float(r) for r in ordinary(x)] for _ in range(2)] == returned
    for variable in found.variables:
        np.testing.assert_array_equal(variables[variable.shared_name], variable.variable.numpy())


def test_what_is_computed_again_to_save_memory_stays_so() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        large, again = tf.exp(x), tf.exp(x)
        small = tf.reduce_sum(x) * tf.reduce_sum(x)
        return tf.reduce_sum(large * again) + small

    found = capture_function(step, [tf.TensorSpec((64, 64))])
    kinds = Counter(node.op for node in found.graph_def.node)
    assert kinds["Exp"] == 2
    assert kinds["Sum"] == 2


def test_results_inputs_and_tensors_of_the_surroundings() -> None:
    table = tf.constant(np.arange(1000, dtype=np.float32))
    unused = np.float32(0)

    def step(x: tf.Tensor, spare: tf.Tensor) -> dict[str, Any]:
        return {"b": (x, None), "a": tf.reduce_sum(table) * x, "c": 7}

    found = capture_function(step, [tf.TensorSpec(()), unused], name="plain")
    returned, _ = run_in_session(found, [np.float32(2.0), unused], 1)
    assert tf.nest.map_structure(lambda x: x is not None, found.structured_outputs) == {"a": True, "b": (True, False), "c": True}
    assert [float(x) for x in returned[0]] == [999000.0, 2.0, 7.0]
    assert found.variables == ()
    assert found.graph.name == "plain"
    assert {op.phase for op in found.graph.ops} == {"forward"}


def test_the_fingerprint_is_that_of_the_step() -> None:
    step = dense_step()
    assert step.capture().graph.fingerprint == step.capture().graph.fingerprint


def test_a_compiled_model_trains_by_its_own_step() -> None:
    step = dense_step()
    step.model.compile(step.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    found = capture_function(lambda x, y: step.model.train_step((x, y)), step.inputs)
    assert set(found.structured_outputs) == {"loss", "accuracy"}
    returned, _ = run_in_session(found, step.inputs, 2)
    expected = step.model.train_on_batch(*step.inputs, return_dict=True)
    assert dict(zip(sorted(expected), returned[0], strict=True)) == expected


def test_expert_hints_go_by_the_variables_names() -> None:
    graph = dense_step().capture(expert=lambda name: 1 if name.startswith("dense/narrow") else 0 if "wide" in name else None).graph
    counting = {"ReadVariableOp", "AddV2", "AssignVariableOp"}
    assert {op.op for op in graph.ops if op.expert is None} == counting, "of the number of steps"
    assert [op.expert for op in graph.ops if op.op == "MatMul" and op.phase == "forward"] == [0, 1]
    assert {op.module for op in graph.ops if op.op == "Relu"} == {next(m for m in graph.modules if "wide" in m)}


variable = tf.Variable(tf.ones((2,)))
calls: list[int] = []


def returns_nothing(x: tf.Tensor) -> None:
    tf.square(x) + variable


def counts_calls(x: tf.Tensor) -> tf.Tensor:
    calls.append(1)
    return x * variable


def makes_a_variable(x: tf.Tensor) -> tf.Tensor:
    scale = tf.Variable(3.0)  # here
    return x * scale


def prints(x: tf.Tensor) -> tf.Tensor:
    tf.print("x is", x)  # here
    return x * variable


def prints_at_times(x: tf.Tensor) -> tf.Tensor:
    if x[0] > 0:
        tf.print("more than 0")
    return x * variable


def writes_text(x: tf.Tensor) -> tf.Tensor:
    return tf.strings.length(tf.strings.as_string(x))  # here


def writes_a_summary(x: tf.Tensor) -> tf.Tensor:
    with writer.as_default(step=0):
        tf.summary.scalar("x", x[0])  # here
    return x


def runs_python(x: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(np.sin, [x], tf.float32)  # here


def takes_a_number(x: tf.Tensor) -> tf.Tensor:
    return x * math.sqrt(x[0])  # here


def asks_numpy(x: tf.Tensor) -> tf.Tensor:
    return x * x.numpy()  # here


def makes_an_array(x: tf.Tensor) -> tf.Tensor:
    return x * np.asarray(x)  # here


def needs_a_gpu(x: tf.Tensor) -> tf.Tensor:
    y = tf.raw_ops.NcclBroadcast(input=x, shape=[2])  # here
    return y + 1.0


def reads_an_iterator(x: tf.Tensor) -> tf.Tensor:
    return x + next(iterator)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (returns_nothing, "returns no tensor and changes no variable.*let it return the loss"),
    (counts_calls, "Python variable 'calls'.*tf.Variable"),
    (makes_a_variable, "scale = tf.Variable.*make it once, before the step"),
    (prints, "works on text.*tf.print\\(\"x is\".*print what it returns"),
    (prints_at_times, "of 'cond_true.*works on text \\(.*print what it returns"),
    (writes_text, "works on text \\(AsString\\)"),
    (writes_a_summary, "writes a summary.*tf.summary.scalar"),
    (runs_python, "runs Python code.*numpy_function"),
    (takes_a_number, "math.sqrt\\(x\\[0\\]\\).*number or truth is taken out of a tensor"),
    (asks_numpy, "x.numpy\\(\\).*no NumPy value"),
    (makes_an_array, "np.asarray\\(x\\).*no NumPy value"),
    (needs_a_gpu, "NcclBroadcast has no kernel for a CPU.*another op"),
    (reads_an_iterator, "not a variable.*iterator"),
]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> None:
    global writer, iterator
    writer = tf.summary.create_file_writer(str(tmp_path_factory.mktemp("summaries")))
    iterator = iter(tf.data.Dataset.from_tensors(tf.ones((2,))).repeat())


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_what_cannot_be_placed_is_refused_in_one_line(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture_function(function, [tf.TensorSpec((2,))])
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    source = re.search(r"test_tensorflow_graph.py:\d+ in (\w+)", text)
    if source:
        assert source.group(1) == function.__name__


def test_unknown_shapes_are_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match=r"\(None, 4\).*drop_remainder=True"):
        capture_function(lambda x: x, [tf.TensorSpec((None, 4))])


def test_shapes_that_depend_on_values_are_said() -> None:
    found = capture_function(lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)), [tf.TensorSpec((4,))])
    assert any("known only when the step runs" in note for note in found.notes)


def test_what_a_loop_keeps_for_its_gradients_is_said_to_count_as_nothing() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.while_loop(lambda i, _: i < 5, lambda i, p: (i + 1, tf.tanh(p)), (0, x))[1]
        return tape.gradient(loss, x)

    found = capture_function(step, [tf.TensorSpec((4,))])
    assert any("make are known only when the step runs, such as" in note and "count as 0 bytes" in note for note in found.notes)
