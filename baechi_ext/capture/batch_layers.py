"""Rules of the ops of layers and losses; see batch_rules."""

from collections.abc import Sequence
from math import prod

from baechi_ext.capture.batch_rows import COUNT, FIRST, MEAN, OWN, RATIO, SUM, Call, Kind, Rows, Rule, Split, broadcast_shape, mixed

NORMALISES = "normalises over the whole batch (BatchNorm in training)"


def product(result: str, **letters: str) -> Rule:
    """A product of two tensors, whose dimensions have letters; one that is in the result is kept, any other is summed over."""

    def rule(call: Call) -> Sequence[Kind]:
        found = {(names[s.dim], s.at(0)) for arg, names in letters.items() if (s := call.split(arg)) is not None}
        added = "self" if "self" not in letters and call.is_tensor("self") else ""
        ahead = len(result) - len(call.shape(added)) if added else 0
        if added and (s := call.split(added)) is not None:
            found.add((result[s.dim + ahead], s.at(0)))
        if len(found) != 1:
            mixed("multiplies rows of examples with each other")
        ((letter, split),) = found
        for arg, names in letters.items():
            if letter in names:
                call.require(call.args[arg], split.at(names.index(letter)))
        if letter not in result:
            return [SUM] if not added else mixed("adds to a sum over the examples")
        kept = split.at(result.index(letter))
        if added:
            call.require_broadcast(added, kept, len(result))
        return [kept]

    return rule


def by_example(*whole: str, kinds: Sequence[Kind] = (), count: str = "", own: Sequence[str] = ()) -> Rule:
    """Works on each of the first dimension's places by itself, with the `whole` tensors alike, and a part with its `own`. `kinds` are those
    of the results behind the first, where they are not split; `count` names an argument that has the first dimension's size."""

    def rule(call: Call) -> Sequence[Kind]:
        call.require_whole(*(n for n in whole if call.is_tensor(n)))
        names = [n for n in call.tensors() if n not in (*whole, *own)]
        split = call.the_split(*names)
        if split.dim or any(call.split(n) != OWN for n in own):
            mixed(f"works along the batch (dimension {split.dim})")
        for name in names:
            call.require(call.args[name], split)
        if count:
            if call.args[count] != call.batch * split.rows:
                mixed("has another number of rows")
            call.changed[count] = Rows(split.rows)
        results = call.results()
        for shape in results[: len(results) - len(kinds)]:
            if shape and shape[0] != call.batch * split.rows:
                mixed("makes a tensor of another number of rows")
        return [*[split] * (len(results) - len(kinds)), *kinds]

    return rule


def normalised(gradient: bool) -> Rule:
    """LayerNorm and RMSNorm: over the last dimensions."""

    def rule(call: Call) -> Sequence[Kind]:
        call.require_whole(*(n for n in ("weight", "bias") if call.is_tensor(n)))
        names = [n for n in call.tensors() if n not in ("weight", "bias")]
        split, rank = call.the_split(*names), len(call.shape("input"))
        if split.dim >= rank - len(call.args["normalized_shape"]):
            mixed(f"normalises along the batch (dimension {split.dim})")
        for name in names:
            call.require(call.args[name], split)
        others = len(call.results()) - 1
        return [split, *([SUM] if gradient else [split]) * others]

    return rule


def batch_norm(training: str) -> Rule:
    """BatchNorm by running values; in training only where each part may be normalised by itself: running values are the first part's."""

    def rule(call: Call) -> Sequence[Kind]:
        read, kept = ("weight", "bias", "running_mean", "running_var"), ("save_mean", "save_invstd", "save_var", "reserve")
        gradient, others = "grad_out" in call.args, len(call.results()) - 1
        if not call.args[training]:
            return by_example(*read, *kept, kinds=[SUM] * 2 if gradient else [FIRST] * others)(call)
        if not call.normalised:
            mixed(NORMALISES)
        if call.is_tensor("running_mean") and not gradient and others < 4:
            mixed("changes running values in place")
        own = [name for name in kept if call.is_tensor(name)]
        if gradient:  # which reads what each part normalised by
            call.changed |= {"running_mean": None, "running_var": None}
        kinds = by_example(*read, kinds=[SUM] * 2 if gradient else [OWN, OWN, *[FIRST] * (others - 2)], own=own)(call)
        rows = call.the_split("grad_out", "input")
        if rows.blocks > 1 or call.normalised * rows.rows * prod(call.shape("input")[2:]) < 2:
            mixed("would normalise over a single number, or rows that do not stand together")
        return kinds

    return rule


def embedding(call: Call) -> Sequence[Kind]:
    call.require_whole("weight")
    return [call.the_split("indices")]


def embedding_gradient(call: Call) -> Sequence[Kind]:
    if call.args["scale_grad_by_freq"]:
        mixed("counts how often words come in the whole batch (scale_grad_by_freq)")
    split = call.the_split("indices", "grad_output")
    call.require(call.args["indices"], split)
    call.require(call.args["grad_output"], split)
    return [SUM]


def nll(call: Call) -> Sequence[Kind]:
    """The negative log-likelihood of labels: a sum, or that over the weight of all labels that count, which is the second result then."""
    if call.is_tensor("weight"):
        call.require_whole("weight")
    split = call.the_split("self", "target")
    if split.dim:
        mixed(f"works along the batch (dimension {split.dim})")
    for name in ("self", "target"):
        call.require(call.args[name], split)
    reduction = call.args["reduction"]
    if reduction == 0:
        return [split, FIRST]
    call.changed["reduction"] = 2
    return [RATIO, COUNT] if reduction == 1 else [SUM, OWN]


def nll_gradient(call: Call) -> Sequence[Kind]:
    """With the whole batch's weight of labels, each row's gradient is its own."""
    call.require_whole(*(n for n in ("weight", "total_weight") if call.is_tensor(n) and call.split(n) != OWN))
    split = call.the_split("self", "target", "grad_output")
    if split.dim:
        mixed(f"works along the batch (dimension {split.dim})")
    for name in ("self", "target"):
        call.require(call.args[name], split)
    if call.args["reduction"] == 0:
        call.require(call.args["grad_output"], split)
    else:
        call.require_whole("grad_output")
    return [split]


def _pairs(call: Call, *others: str) -> Split:
    """The split of tensors of one shape, as those that are not `others`, and of what is broadcast to them, as weights are."""
    shape = call.shape("self")
    names = [n for n in call.tensors() if n not in others]
    split = call.the_split(*(n for n in names if call.shape(n) == shape), *others)
    if call.shape("target") != shape or broadcast_shape([call.shape(n) for n in names]) != shape:
        mixed("combines tensors of different shapes")
    for name in names:
        call.require_broadcast(name, split, len(shape))
    return split


def loss_of_pairs(call: Call) -> Sequence[Kind]:
    """A loss of pairs of numbers: of each, or their sum or mean."""
    return [(_pairs(call), MEAN, SUM)[call.args["reduction"]]]


def gradient_of_pairs(call: Call) -> Sequence[Kind]:
    """A mean's gradient is a sum's by the whole batch's count of numbers."""
    reduction, split = call.args["reduction"], _pairs(call, "grad_output")
    if reduction == 0:
        call.require(call.args["grad_output"], split)
    else:
        call.require_whole("grad_output")
        call.changed["reduction"] = 2
        if reduction == 1:
            call.scaled["grad_output"] = 1 / prod(call.shape("self"))
    return [split]


def attention(call: Call) -> Sequence[Kind]:
    """Attention of examples, each to itself."""
    if call.args["dropout_p"]:
        mixed("draws random numbers for the whole batch")
    masks = ("attn_mask", "attn_bias")
    names = [n for n in call.tensors() if n not in masks and call.split(n) != OWN]
    split = call.the_split(*names)
    if split.dim:
        mixed(f"works along the batch (dimension {split.dim})")
    for name in names:
        call.require(call.args[name], split)
    for mask in (n for n in masks if call.is_tensor(n)):
        if len(shape := call.shape(mask)) == 4 and shape[0] != 1:
            call.require(call.args[mask], split)
        else:
            call.require_whole(mask)
    results = call.results()
    if any(shape and shape[0] != call.batch * split.rows for shape in results):
        mixed("makes a tensor of another number of rows")
    return [split if shape else OWN for shape in results]  # a GPU's keep what they would draw random numbers by


def recurrent(call: Call) -> Sequence[Kind]:
    """An LSTM layer over sequences of examples, which stand in the second dimension; its last result is working memory."""
    weights = [f"weight{i}" for i in range(5)]
    call.require_whole(*(n for n in weights if call.is_tensor(n)))
    names = [n for n in call.tensors() if n not in (*weights, "workspace")]
    split, gradient = call.the_split(*names), "workspace" in call.args
    if split.dim != 1 or call.args["batch_first"] or (gradient and call.split("workspace") != OWN):
        mixed("works along the batch")
    for name in names:
        call.require(call.args[name], split)
    return [split, *[SUM] * 4, split, split] if gradient else [split, split, split, OWN]


def recurrent_chunk(call: Call) -> Sequence[Kind]:
    """The ops of baechi_runtime.models.torch.rnn: sequences are (steps, batch, features), states (batch, features)."""
    if call.is_tensor("weight"):
        call.require_whole("weight")
    lists = [call.args.get(name) or () for name in ("inputs", "state", "saved", "grads", "ys", "ds", "kept")]
    for tensor in (t for tensors in lists for t in tensors if t is not None):
        call.require(tensor, Split(len(tensor.meta["val"].shape) - 2))
    return [SUM] if "ds" in call.args else [Split(len(shape) - 2) for shape in call.results()]


def refused(reason: str) -> Rule:
    def rule(call: Call) -> Sequence[Kind]:
        mixed(reason)

    return rule
