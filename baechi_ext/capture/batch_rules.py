"""The rules by which ops treat the rows of a batch: the proof that a graph computes the same over parts of it as over the whole.

A tensor of the graph is whole, or split: along one dimension the examples stand in order, each with as many rows. A rule says of an op
with a split argument what it makes of the rows, for all numbers that may stand there: each row of its result comes from the same
example's rows alone (the result is split), or it is a sum, or a mean, over the examples (parts of it are added up). An op that has no
rule, or whose rule sees examples mixed, is refused. Where a rule needs the rows of a whole tensor, they are cut out of it.
"""

from collections.abc import Sequence
from typing import Any

from baechi_ext.capture import batch_layers as layers
from baechi_ext.capture import batch_shapes as shapes
from baechi_ext.capture.batch_rows import FIRST, MEAN, OWN, SUM, Call, Kind, Rule, mixed


def judged(call: Call) -> Sequence[Kind]:
    """The kind of each result of the op. Raises MixedError where rows of examples are, or may be, mixed."""
    import torch

    target: Any = call.node.target
    space, _, name = target._schema.name.partition("::")
    rule = _RULES.get(name) if space in ("aten", "baechi") else None
    if rule is None and space == "aten" and torch.Tag.pointwise in target.tags:
        rule = shapes.elementwise
    if rule is None:
        mixed("is not known to keep the rows of examples apart")
    keepers = ("rnn_layer", "batch_norm_backward", "attention", "nll_loss")
    if not any(keeper in name for keeper in keepers) and any(call.split(read) == OWN for read in call.tensors()):
        mixed("reads the working memory of another op")
    if any(0 in shape for shape in call.results()) and not ("batch_norm" in name or "rnn_layer" in name):
        mixed("makes a tensor of no numbers")
    return rule(call)


_ELEMENTWISE = (
    "_to_copy copy elu_backward softplus_backward leaky_relu_backward hardtanh_backward hardswish hardswish_backward hardsigmoid_backward "
    "mish_backward softshrink_backward hardshrink_backward log_sigmoid_forward log_sigmoid_backward native_dropout _prelu_kernel "
    "_prelu_kernel_backward"
)
_SAME = "alias detach lift_fresh_copy full_like zeros_like ones_like empty_like fill"
_POOLS = "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool3d max_pool3d_with_indices"
_LOSSES = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
_PLANES = "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d replication_pad2d tril triu"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), shapes.elementwise),
    **dict.fromkeys(_SAME.split(), shapes.same),
    **{f"{name}{way}": shapes.on_last(count=3 if "3d" in name else 2) for name in _POOLS.split() for way in ("", "_backward")},
    **{f"{name}{way}": shapes.on_last(count=2) for name in _PLANES.split() for way in ("", "_backward")},
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), shapes.on_last(count=3)),
    **{name: shapes.viewed("size") for name in ("view", "_unsafe_view")},
    "reshape": shapes.viewed("shape"),
    "expand": shapes.expanded,
    **dict.fromkeys(("permute", "transpose", "t"), shapes.permuted),
    "unsqueeze": shapes.unsqueezed,
    "squeeze": shapes.squeezed,
    **dict.fromkeys(("select", "unbind"), shapes.selected),
    "slice": shapes.sliced,
    "select_backward": shapes.spread(kept=False),
    "slice_backward": shapes.spread(kept=True),
    "cat": shapes.joined_along(new=False),
    "stack": shapes.joined_along(new=True),
    "constant_pad_nd": shapes.padded,
    "mm": layers.product("ij", self="ik", mat2="kj"),
    "addmm": layers.product("ij", mat1="ik", mat2="kj"),
    "bmm": layers.product("bij", self="bik", mat2="bkj"),
    "baddbmm": layers.product("bij", batch1="bik", batch2="bkj"),
    "mv": layers.product("i", self="ik", vec="k"),
    "sum": shapes.reduced(SUM),
    "mean": shapes.reduced(MEAN),
    **dict.fromkeys(("amax", "amin", "any", "all", "argmax", "argmin", "var", "var_mean", "std", "logsumexp"), shapes.reduced(None)),
    **dict.fromkeys(("linalg_vector_norm", "norm", "median", "mode"), shapes.reduced(None)),
    **dict.fromkeys(("max", "min"), shapes.extreme),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), shapes.first),
    "repeat": shapes.repeated,
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "glu", "_safe_softmax"), shapes.along("dim", "self")),
    **dict.fromkeys(("split", "split_copy", "split_with_sizes", "unsafe_split", "logcumsumexp"), shapes.along("dim", "self")),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), shapes.along("dim", "grad_output", "output")),
    "glu_backward": shapes.along("dim", "grad_output", "self"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "slice_scatter"), shapes.along("dim")),
    **dict.fromkeys(("flip", "roll"), shapes.along("dims", "self")),
    "select_scatter": shapes.put_at,
    "index_select": shapes.along("dim", "self"),
    **dict.fromkeys(("index", "_unsafe_index"), shapes.indexed),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), shapes.put),
    "embedding": layers.embedding,
    "embedding_dense_backward": layers.embedding_gradient,
    "convolution": layers.by_example("weight", "bias"),
    "convolution_backward": layers.by_example("weight", kinds=(SUM, SUM)),
    "native_group_norm": layers.by_example("weight", "bias", count="N"),
    "native_group_norm_backward": layers.by_example("weight", kinds=(SUM, SUM), count="N"),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), layers.normalised(gradient=False)),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), layers.normalised(gradient=True)),
    "native_batch_norm": layers.batch_norm("training"),
    **{f"_native_batch_norm_legit{way}": layers.batch_norm("training") for way in ("", "_functional")},
    "_native_batch_norm_legit_no_training": layers.by_example("weight", "bias", "running_mean", "running_var", kinds=(FIRST, FIRST)),
    "native_batch_norm_backward": layers.batch_norm("train"),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_with_update_functional"), layers.refused(layers.NORMALISES)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), layers.nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), layers.nll_gradient),
    **{f"mkldnn_rnn_layer{way}": layers.recurrent for way in ("", "_backward")},
    "binary_cross_entropy_with_logits": layers.loss_of_pairs,
    **dict.fromkeys(_LOSSES.split(), layers.loss_of_pairs),
    **{f"{name}_backward": layers.gradient_of_pairs for name in _LOSSES.split()},
    **{f"{name}{way}": layers.attention for name in _ATTENTION.split() for way in ("", "_backward")},
    **dict.fromkeys(("lstm", "lstm_backward", "gru", "gru_backward", "rnn_weight_gradient"), layers.recurrent_chunk),
}
