"""The built-in models by name; `make_step` builds the training step of one with fresh weights and synthetic inputs.

For TensorFlow that is baechi_runtime.tensorflow.step.build_step.
"""

from dataclasses import asdict, dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError, OptionError

if TYPE_CHECKING:
    from baechi_runtime.models.training_step import OptimizerSpec, TrainingStep


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options that a caller may choose; a model takes only some. None: the model's own default."""

    batch_size: int | None = None
    image_size: int | None = None
    seed: int = 0
    """Weights and inputs are drawn from it."""
    num_devices: int = 1
    """Number of devices that the step is built for: it changes no computation, only where experts would put it."""
    vocab_size: int | None = None
    max_seq_length: int | None = None
    rnn_units: int | None = None
    rnn_unit_type: str | None = None
    num_layers: int | None = None
    encoder_type: str | None = None
    residual: bool | None = None
    rnn_chunk: int | None = None
    nasnet_cells: int | None = None
    nasnet_filters: int | None = None
    large: bool | None = None
    d_model: int | None = None
    d_ff: int | None = None
    num_heads: int | None = None
    dropout: float | None = None
    resnet_filters: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is built by the module of its name, which has a dataclass `Options` and `build(Options) -> (model, inputs)`."""

    takes: tuple[str, ...]
    """The fields of its `Options`."""
    help: str
    has_loss: bool = False
    """True if it returns its loss; otherwise it returns logits, and the loss is their cross-entropy with the last input."""
    batch_dim: int = 0
    """The dimension of each of its inputs in PyTorch that the examples stand along."""


_IMAGES = ("batch_size", "image_size")
_TEXT = ("batch_size", "vocab_size", "max_seq_length", "num_layers")
_RNN = ("vocab_size", "max_seq_length", "rnn_units", "rnn_unit_type", "num_layers", "encoder_type", "residual", "rnn_chunk")
_GNMT = ("batch_size", *_RNN, "num_devices")
_TRANSFORMER = "encoder and decoder of Attention is all you need, base; 49.3 M parameters, with the paper's 37,000 words 63.1 M"
_RNNLM = (*_TEXT, "rnn_units", "rnn_unit_type", "rnn_chunk", "dropout")
_GPT2 = "GPT-2 from transformers, fresh weights, 5.3 M parameters; GPT-2 small, 124.4 M, by its sizes"
_NASNET = (*_IMAGES, "nasnet_cells", "nasnet_filters", "large")
MODELS: dict[str, Model] = {
    "inception_v3": Model((*_IMAGES, "dropout"), "Inception-V3, 23.8 M parameters"),
    "wide_towers": Model(_IMAGES, "four independent convolutional towers"),
    "gnmt_v2": Model(_GNMT, "recurrent encoder and decoder with attention, 67.8 M parameters", has_loss=True, batch_dim=1),
    "nasnet": Model(_NASNET, "NASNet-A for CIFAR-10, 3.3 M parameters; with --large the one for ImageNet, 88.8 M"),
    "transformer": Model((*_TEXT, "d_model", "d_ff", "num_heads", "dropout"), _TRANSFORMER, has_loss=True),
    "gpt2": Model((*_TEXT, "d_model", "num_heads", "dropout"), _GPT2, has_loss=True),
    "resnet101": Model((*_IMAGES, "resnet_filters"), "ResNet-101, 44.5 M parameters"),
    "alexnet": Model((*_IMAGES, "dropout"), "AlexNet, 61.1 M parameters"),
    "rnnlm": Model(_RNNLM, "LSTM language model, 19.8 M parameters", has_loss=True, batch_dim=1),
}
TENSORFLOW_MODELS: dict[str, Model] = {
    "inception_v3": Model(_IMAGES, "Inception-V3 of keras.applications, 23.9 M parameters"),
    "wide_towers": Model((*_IMAGES, "num_layers", "d_model"), "four independent towers of large matrix products, 20.0 M parameters"),
    "gnmt_v2": Model(_GNMT, "as for PyTorch, unrolled; 67.8 M parameters", has_loss=True),
    "nasnet": Model(_NASNET, "NASNet-A mobile of keras.applications, 5.3 M parameters; with --large the large one, 88.9 M"),
}
_BUILDERS = {"torch": "baechi_runtime.models.torch", "tensorflow": "baechi_runtime.models.tensorflow"}
FRAMEWORKS: dict[str, dict[str, Model]] = {"torch": MODELS, "tensorflow": TENSORFLOW_MODELS}


def find_model(name: str, framework: str = "torch") -> Model:
    """Raises OptionError for an unknown name."""
    models = FRAMEWORKS[framework]
    if name not in models:
        raise OptionError(f"unknown model {name!r}; choose one of {', '.join(models)}")
    return models[name]


def code_of(name: str, framework: str = "torch") -> ModuleType:
    """The module that builds a model; importing it loads the framework."""
    return import_module(f"{_BUILDERS[framework]}.{name}")


def make_step(name: str, options: ModelOptions, optimizer: "OptimizerSpec") -> "TrainingStep":
    """The training step of model `name`; weights and inputs are drawn from `options.seed`.

    Raises OptionError for an unknown name or an option the model cannot take, MissingBackendError without torch.
    """
    model = find_model(name)
    chosen = chosen_options(name, options)
    try:
        import torch
    except ImportError as e:
        raise MissingBackendError(f"the model {name} needs PyTorch ({e}); pip install 'baechi-ext[torch]'") from e
    from baechi_runtime.models.training_step import TrainingStep, WithLoss

    torch.manual_seed(options.seed)
    code = code_of(name)
    built = code.Options(**chosen)
    module, inputs = code.build(built)
    module = module if model.has_loss else WithLoss(module)
    batch = built.batch_size or inputs[0].shape[model.batch_dim]  # NASNet's is that of its size
    return TrainingStep(name, module, inputs, optimizer, options.seed, batch, model.batch_dim)


def chosen_options(name: str, options: ModelOptions, framework: str = "torch") -> dict[str, Any]:
    """The options that are given, for the model's own. Raises OptionError for one that is not for this model."""
    model = find_model(name, framework)
    given = {field: value for field, value in asdict(options).items() if value is not None and field != "seed"}
    for field in given:
        if field not in model.takes and field != "num_devices":
            takers = ", ".join(other for other, m in FRAMEWORKS[framework].items() if field in m.takes)
            raise OptionError(f"--{field} is not an option of {name}; " + (f"it is one of {takers}" if takers else "drop it"))
    return {field: value for field, value in given.items() if field in model.takes}


def effective_options(name: str, options: ModelOptions, framework: str = "torch") -> dict[str, Any]:
    """All options that say what a model computes, with its own defaults. Raises what `chosen_options` raises."""
    effective = asdict(code_of(name, framework).Options(**chosen_options(name, options, framework)))
    effective.pop("num_devices", None)
    return effective
