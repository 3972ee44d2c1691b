"""The tensors that a fragment is to compute, of which no two share memory, and how what it returns is made of these."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_private import casts_kept
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch
    from torch import fx


_NEW = ("t", "transpose", "permute", "view", "unsqueeze", "select", "narrow")
"""Views that are tensors of their own, whatever they are given; `contiguous`, for one, may return what it is given."""


@dataclass(frozen=True)
class Returned:
    """A recipe for one value that a fragment returns, from the outputs of its graph and its arguments."""

    output: int | None = None
    argument: int | None = None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    """Where it looks at a part of that tensor's memory: sizes, strides, offset from where that one begins."""
    detached: bool = False

    def of(self, outputs: "Sequence[torch.Tensor]", args: "Sequence[torch.Tensor]") -> "torch.Tensor":
        """The value; a view is a view of the very tensor, to autograd as well."""
        value = args[self.argument] if self.output is None else outputs[self.output]  # type: ignore[index]
        if self.view is not None:
            sizes, strides, offset = self.view
            value = value.as_strided(sizes, strides, value.storage_offset() + offset)
        return value.detach() if self.detached else value


def flat_module(graph: "fx.GraphModule", weights: Collection[int] = ()) -> Any:
    """The graph as a module that returns each tensor's memory once; `returned` says how its values are made of that. It is to be traced;
    `weights` are the arguments that autocast casts once for all that read them."""
    import torch
    from torch import fx

    kept = torch.is_autocast_cache_enabled()

    class Flat(torch.nn.Module):
        returned: list[Returned]

        def forward(self, *args: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
            with casts_kept([args[i] for i in weights], kept=kept):
                values = fx.Interpreter(graph).run(*args)
            distinct, self.returned = _without_aliases(list(values), args)
            return tuple(distinct)

    flat = Flat()
    flat.train(graph.training)
    return flat


def computed_with(graph: "fx.GraphModule") -> frozenset[int]:
    """The numbers of the values that the graph returns and also computes others from, or that may be the very tensor of another node."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return frozenset(i for i, value in enumerate(output.args[0]) if not _is_new(value) or set(value.users) - {output})


def _is_new(value: Any) -> bool:
    """True for a node that makes a tensor which no other node has."""
    target = getattr(value, "target", None)
    return (target if isinstance(target, str) else getattr(target, "__name__", "")) in _NEW


def _without_aliases(values: "Sequence[torch.Tensor]", args: "Sequence[torch.Tensor]") -> "tuple[list[torch.Tensor], list[Returned]]":
    """The tensors to compute, of which no two share memory with each other or with an argument, and what is made of them.

    Raises CaptureError for views whose base can't be had.
    """
    argument = {a.untyped_storage()._cdata: i for i, a in reversed(list(enumerate(args)))}
    same = {id(a): i for i, a in enumerate(args)}
    distinct: list[torch.Tensor] = []
    place: dict[int, int] = {}
    returned = []
    storages = [v.untyped_storage()._cdata for v in values]
    for value, storage in zip(values, storages, strict=True):
        if id(value) in same:
            returned.append(Returned(argument=same[id(value)]))
        elif storage in argument:
            returned.append(_view_of(value, args[argument[storage]], argument=argument[storage]))
        elif storages.count(storage) == 1:
            distinct.append(value)
            returned.append(Returned(output=len(distinct) - 1))
        else:
            if storage not in place:
                place[storage] = len(distinct)
                distinct.append(_base(value, [v for v, s in zip(values, storages, strict=True) if s == storage]))
            base = distinct[place[storage]]
            whole = value is base
            returned.append(Returned(output=place[storage]) if whole else _view_of(value, base, output=place[storage]))
    return distinct, returned


def _base(value: "torch.Tensor", others: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """The tensor that those of one memory look at: one that is no view and is trained where any is."""
    base = value if value._base is None else value._base
    if base.requires_grad or not any(o.requires_grad for o in others):
        return base
    return next((o if o._base is None else o._base) for o in others if o.requires_grad)


def _view_of(value: "torch.Tensor", base: "torch.Tensor", **source: int) -> Returned:
    if value.dtype != base.dtype or value.is_conj() != base.is_conj() or value.is_neg() != base.is_neg():
        raise CaptureError(
            f"a fragment returns a {value.dtype} view of memory that it was given, or returns, as {base.dtype}; return a copy (.clone())"
        )
    view = (tuple(value.shape), tuple(value.stride()), int(value.storage_offset() - base.storage_offset()))
    return Returned(**source, view=view, detached=base.requires_grad and not value.requires_grad)


def ancestors(nodes: "Iterable[fx.Node]") -> "set[fx.Node]":
    """The nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def consumed(outputs: "Iterable[fx.Node]", state: "Mapping[fx.Node, str]", new_values: "Mapping[str, fx.Node]") -> list[str]:
    """The buffers with new values whose old or new ones outputs are made of; an old one that only a normalising op reads, to average it,
    is in no output."""
    behind = ancestors(outputs)

    def is_read(node: "fx.Node") -> bool:
        return any(reader in behind and "batch_norm" not in str(reader.target) for reader in node.users)

    old = {state[node] for node in behind if node in state and is_read(node)}
    return [name for name, value in new_values.items() if name in old or value in behind]
