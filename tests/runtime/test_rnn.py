"""The recurrent ops compute what nn.LSTM and nn.GRU compute, whatever the chunks, and their gradients are right."""

import copy

import pytest
import torch
from torch import Tensor, nn

from baechi_runtime.models.torch import rnn
from baechi_runtime.models.torch.rnn import Recurrent

UNITS, BATCH = 4, 2
UNIT_TYPES = ("lstm", "gru")
ORDER = {"lstm": (3, 0, 1, 2), "gru": (0, 1, 2)}
"""The gates of nn.LSTM (i, f, g, o) and nn.GRU (r, z, n) in the order of this project's weights."""


def as_weight(layer: nn.LSTM | nn.GRU, suffix: str) -> Tensor:
    """A torch layer's parameters as one weight of `Recurrent`."""
    unit_type = "lstm" if isinstance(layer, nn.LSTM) else "gru"
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    inputs, recurrent, bias, recurrent_bias = (
        torch.cat([getattr(layer, f"{name}_{suffix}").unflatten(0, (-1, UNITS))[g] for g in ORDER[unit_type]]) for name in names
    )
    biases = [bias + recurrent_bias] if unit_type == "lstm" else [bias, recurrent_bias]
    return torch.cat([inputs.t(), recurrent.t(), *(b.unsqueeze(0) for b in biases)])


def a_layer(unit_type: str, *, reverse: bool = False, sizes: tuple[int, ...] = (3,)) -> Recurrent:
    """One in float64 whose biases are not zero."""
    torch.manual_seed(3)
    layer = Recurrent(sizes, UNITS, unit_type, reverse=reverse).double()
    nn.init.uniform_(layer.weight, -0.7, 0.7)
    return layer


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("chunk", [7, 3, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_values_and_gradients_are_those_of_torch(unit_type: str, reverse: bool, chunk: int) -> None:
    """A bidirectional torch layer has a forward and a backward direction to compare with; the state is given from outside."""
    torch.manual_seed(1)
    theirs = (nn.LSTM if unit_type == "lstm" else nn.GRU)(3, UNITS, bidirectional=True).double()
    ours = a_layer(unit_type, reverse=reverse)
    suffix, direction = ("l0_reverse", 1) if reverse else ("l0", 0)
    weight = as_weight(theirs, suffix)
    with torch.no_grad():
        ours.weight.copy_(weight)
    x, states = leaf(7, BATCH, 3), [leaf(2, BATCH, UNITS) for _ in range(2 if unit_type == "lstm" else 1)]
    expected, last = theirs(x, tuple(states) if unit_type == "lstm" else states[0])
    last = last if unit_type == "lstm" else (last,)
    expected = expected.unflatten(-1, (2, UNITS))[:, :, direction]
    wanted = [expected, *(h[direction] for h in last)]
    outputs, state = ours([[c] for c in x.split(chunk)], tuple(h[direction] for h in states))
    found = [torch.cat(outputs), *state]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    seeds = [torch.randn_like(w) for w in wanted]
    parameters = [p for n, p in theirs.named_parameters() if n.endswith(suffix)]
    *theirs_by_parameter, dx, dh = torch.autograd.grad(wanted, [*parameters, x, states[0]], seeds)
    by_weight, our_dx, our_dh = torch.autograd.grad(found, [ours.weight, x, states[0]], seeds)
    torch.testing.assert_close(our_dx, dx)
    torch.testing.assert_close(our_dh, dh)
    for name, gradient in zip([n for n, _ in theirs.named_parameters() if n.endswith(suffix)], theirs_by_parameter, strict=True):
        setattr(theirs, name, nn.Parameter(gradient))
    # Both biases of nn.LSTM have the gradient of their sum, which is one bias here.
    if unit_type == "lstm":
        nn.init.zeros_(getattr(theirs, f"bias_hh_{suffix}"))
    torch.testing.assert_close(by_weight, as_weight(theirs, suffix))


@pytest.mark.parametrize("sizes", [(3,), (3, 2)])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_gradients_by_finite_differences(unit_type: str, reverse: bool, with_state: bool, sizes: tuple[int, ...]) -> None:
    layer = a_layer(unit_type, reverse=reverse, sizes=sizes)
    inputs = [leaf(steps, BATCH, size) for steps in (2, 3) for size in sizes]
    state = [leaf(BATCH, UNITS) for _ in range((2 if unit_type == "lstm" else 1) * with_state)]

    def run(weight: Tensor, *tensors: Tensor) -> list[Tensor]:
        count = len(sizes)
        chunks = [tensors[:count], tensors[count : 2 * count]]
        outputs, last = torch.func.functional_call(layer, {"weight": weight}, (chunks, tensors[2 * count :]))
        return [*outputs, *last]

    assert torch.autograd.gradcheck(run, (layer.weight, *inputs, *state))


@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_the_state_alone_can_lead_to_the_loss(unit_type: str) -> None:
    """A decoder may read only the encoder's last state: the outputs then have no gradient of their own."""
    layer, x = a_layer(unit_type), leaf(4, BATCH, 3)
    _, state = layer([[c] for c in x.split(2)])
    by_state = torch.autograd.grad(state[0].sum(), [x, layer.weight])
    outputs, _ = layer([[x]])
    by_output = torch.autograd.grad(outputs[0][-1].sum(), [x, layer.weight])
    for a, b in zip(by_state, by_output, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_inputs_count_as_one_with_their_features_side_by_side(unit_type: str) -> None:
    x = leaf(5, BATCH, 5)
    two, one = a_layer(unit_type, sizes=(3, 2)), a_layer(unit_type, sizes=(5,))
    assert torch.equal(two.weight, one.weight)
    torch.testing.assert_close(two([[x[..., :3], x[..., 3:]]])[0][0], one([[x]])[0][0])


@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_the_ops_keep_the_rules_of_custom_ops(unit_type: str) -> None:
    """They change no input, return nothing that shares memory with it, and their fake versions have the right shapes."""
    kind = rnn._KINDS[unit_type]
    layer = a_layer(unit_type, sizes=(3, 2))
    weight, inputs = layer.weight.detach(), [leaf(3, BATCH, size).detach() for size in (3, 2)]
    for state in ([], [leaf(BATCH, UNITS).detach() for _ in range(2 if unit_type == "lstm" else 1)]):
        y, *last, a, b = kind.forward(inputs, state, weight, False)
        found = kind.backward([3, 2], state, weight, [y, a, b], [torch.ones_like(y), *([None] * len(last))], False)
        assert len(found) == kind.copies + 2 + len(state)
        ds, kept = found[:1], found[1 : kind.copies]
        calls = [
            (kind.forward, (inputs, state, weight, False)),
            (kind.backward, ([3, 2], state, weight, [y, a, b], [torch.ones_like(y), *last], True)),
            (rnn._weight_gradient, (inputs, state[:1], [y], ds, kept, True)),
        ]
        for op, arguments in calls:
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("unit_type", UNIT_TYPES)
def test_a_layer_can_be_copied(unit_type: str) -> None:
    """Devices with memory of their own get a copy of the model."""
    layer, x = a_layer(unit_type), leaf(4, BATCH, 3)
    expected = layer([[x]])[0][0]
    other = copy.deepcopy(layer)
    assert other.weight is not layer.weight
    assert torch.equal(other([[x]])[0][0], expected)


def test_fresh_weights() -> None:
    weight = Recurrent([3], UNITS).weight
    assert weight.shape == (3 + UNITS + 1, 4 * UNITS)
    assert weight[-1].tolist() == [0] * 2 * UNITS + [1] * UNITS + [0] * UNITS  # the forget gate is open
    assert weight[:-1].abs().max() <= UNITS**-0.5
    assert weight[:-1].std() > 0.2
    gru = Recurrent([3, 2], UNITS, "gru").weight
    assert gru.shape == (5 + UNITS + 2, 3 * UNITS)
    assert not gru[-2:].any()
