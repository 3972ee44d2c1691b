"""Which rule describes the loops of which op, by the op's name."""

from collections.abc import Callable
from functools import partial

from torch import fx

from runtime.sharding import arithmetic, products, recurrent, shapes
from runtime.sharding.loops import Loops
from runtime.sharding.op_names import is_pointwise, name_of, parts_of

Rule = Callable[[Loops], None]

_SIMPLE = partial(arithmetic.elementwise, simple=True)
_RULES: dict[Rule, str] = {
    products.linear: "linear",
    products.addmm: "addmm baddbmm",
    products.matmul: "matmul mm bmm mv dot",
    products.einsum: "einsum",
    products.convolution: "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    products.attention: "scaled_dot_product_attention",
    products.embedding: "embedding",
    arithmetic.reduction: "sum mean amax amin prod var std var_mean std_mean norm linalg_vector_norm logsumexp any all argmax argmin "
    "max min count_nonzero",
    arithmetic.softmax: "softmax log_softmax _softmax _log_softmax",
    arithmetic.layer_norm: "layer_norm rms_norm",
    arithmetic.batch_norm: "batch_norm",
    arithmetic.group_norm: "group_norm",
    arithmetic.instance_norm: "instance_norm",
    arithmetic.cross_entropy: "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d",
    arithmetic.loss: "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss",
    arithmetic.pooling: "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices",
    shapes.same: "to clone contiguous alias detach lift_fresh_copy type_as",
    shapes.reshape: "view reshape flatten unflatten squeeze unsqueeze ravel _unsafe_view view_as reshape_as",
    shapes.transpose: "transpose swapaxes swapdims t",
    shapes.permute: "permute",
    shapes.expand: "expand expand_as broadcast_to",
    shapes.broadcast: "broadcast_tensors",
    shapes.part: "slice narrow split split_copy split_with_sizes split_with_sizes_copy chunk tensor_split",
    shapes.pick: "select unbind",
    shapes.concat: "cat concat concatenate",
    shapes.stack: "stack",
    shapes.along: "cumsum cumprod logcumsumexp flip roll sort argsort topk triu tril pad constant_pad_nd glu",
    shapes.resized: "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d "
    "upsample_trilinear3d pixel_shuffle pixel_unshuffle",
    shapes.gather: "gather index_select",
    _SIMPLE: "add sub rsub rand_like randn_like masked_fill where copy",
    arithmetic.elementwise: "dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu prelu gelu silu _to_copy",
}  # fmt: skip
_BY_NAME = {name: rule for rule, names in _RULES.items() for name in names.split()}
_BY_NAME |= {name: partial(recurrent.stacked, gates=gates) for name, gates in recurrent.GATES.items()}
_OWN = {name: partial(recurrent.chunk, gates=gates) for name, gates in recurrent.GATES.items() if name in ("lstm", "gru")}


def rule_of(node: fx.Node) -> Rule | None:
    """What describes the call; None where nothing does."""
    namespace, name = parts_of(node)
    if namespace == "baechi":
        return _OWN.get(name)
    if namespace != "aten":
        return None
    if name in _BY_NAME and not (name in ("max", "min") and len(node.all_input_nodes) > 1):
        return _BY_NAME[name]
    return arithmetic.elementwise if is_pointwise(node) else None


def only_shape_is_read(node: fx.Node) -> bool:
    """Whether the call makes a tensor as another is, but not of its numbers."""
    name = name_of(node)
    return name.startswith("new_") or name in ("zeros_like", "ones_like", "full_like", "empty_like")
