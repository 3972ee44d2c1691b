"""Static programs keep the timeline's order and move and free every tensor exactly where they must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Link, Op, OpGraph
from baechi_ext.simulate import simulate
from baechi_runtime.torch.lowering.program import Free, Receive, Run, Send, cut


def test_a_chain_over_two_devices() -> None:
    graph = OpGraph.from_edges(
        [Op("a", compute_us=1), Op("b", compute_us=1), Op("c", compute_us=1)], [("a", "b", 4, "x"), ("b", "c", 4, "y")]
    )
    first, second = cut(simulate(graph, Cluster.uniform(2), [0, 1, 1]))
    assert first == (Run(0), Send(0, 1), Free(0))
    assert second == (Receive(0, 0), Run(1), Free(0), Run(2), Free(1))


def test_a_tensor_is_sent_once_to_a_device_and_the_urgent_reader_first() -> None:
    ops = [Op(i, compute_us=5 if i == "d" else 1) for i in "abcde"]
    graph = OpGraph.from_edges(ops, [("a", "b", 4, "x"), ("a", "c", 4, "x"), ("a", "d", 4, "y"), ("a", "e", 4, "x")])
    programs = cut(simulate(graph, Cluster.uniform(3, link=Link(0, 1)), [0, 1, 1, 2, 0], [0, 1, 2, 0, 9]))
    assert [i for i in programs[0] if isinstance(i, Send)] == [Send(1, 2), Send(0, 1)]
    assert [i for i in programs[1] if isinstance(i, Receive)] == [Receive(0, 0)]
    assert programs[1][-1] == Free(0)


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[OpGraph, int, list[int], list[int]]:
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    ops = [Op(f"o{i}", compute_us=draw(st.integers(0, 3))) for i in range(n)]
    edges = [(f"o{a}", f"o{b}", 4, draw(st.sampled_from(["x", "y"]))) for b in range(n) for a in range(b) if draw(st.integers(0, 3)) == 0]
    placement = [draw(st.integers(0, k - 1)) for _ in range(n)]
    return OpGraph.from_edges(ops, edges), k, placement, [draw(st.integers(0, 3)) for _ in range(n)]


@given(placed_graphs())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_programs_can_be_replayed(case: tuple[OpGraph, int, list[int], list[int]]) -> None:
    """An interpreter that blocks on receives finishes, every op sees its inputs, and nothing is left held."""
    graph, k, placement, priority = case
    programs = cut(simulate(graph, Cluster.uniform(k, link=Link(0, 1)), placement, priority))
    position, held, sent, ran = [0] * k, [set() for _ in range(k)], set(), []
    progressed = True
    while progressed:
        progressed = False
        for device, program in enumerate(programs):
            while position[device] < len(program):
                match program[position[device]]:
                    case Receive(tensor=t) if (t, device) not in sent:
                        break
                    case Receive(tensor=t):
                        assert t not in held[device]
                        held[device].add(t)
                    case Run(op=v):
                        assert placement[v] == device
                        assert set(graph.inputs[v]) <= held[device]
                        held[device].update(graph.outputs[v])
                        ran.append(v)
                    case Send(tensor=t, target=target):
                        assert t in held[device]
                        assert (t, target) not in sent
                        sent.add((t, target))
                    case Free(tensor=t):
                        held[device].remove(t)
                position[device] += 1
                progressed = True
    assert sorted(ran) == list(range(len(graph)))
    assert held == [set() for _ in range(k)]
