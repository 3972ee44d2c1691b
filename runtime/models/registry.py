"""The built-in models by name; `make_step` builds the training step of one with fresh weights and synthetic inputs."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from baechi_ext.errors import MissingBackendError, OptionError

if TYPE_CHECKING:
    from runtime.step import OptimizerSpec, TrainingStep


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """None: the model's own default."""

    batch_size: int | None = None
    image_size: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ImageModel:
    """An image classifier: its class, and the defaults of its inputs."""

    module: str
    name: str
    classes: int
    batch_size: int
    image_size: int
    smallest_image: int
    help: str


MODELS: dict[str, ImageModel] = {
    "inception_v3": ImageModel("runtime.models.torch.inception_v3", "InceptionV3", 1000, 32, 299, 75, "Inception-V3, 23.8 M parameters"),
    "wide_towers": ImageModel("runtime.models.torch.wide_towers", "WideTowers", 10, 8, 64, 2, "four independent convolutional towers"),
}


def find_model(name: str) -> ImageModel:
    """Raises OptionError for an unknown name."""
    if name not in MODELS:
        raise OptionError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def make_step(name: str, options: ModelOptions, optimizer: "OptimizerSpec") -> "TrainingStep":
    """The training step of model `name`; weights and inputs are drawn from `options.seed`.

    Raises OptionError for an unknown name or an image the model cannot take, MissingBackendError without torch.
    """
    model = find_model(name)
    batch, size = options.batch_size or model.batch_size, options.image_size or model.image_size
    if size < model.smallest_image:
        raise OptionError(f"--image_size={size} is too small for {name}; it takes {model.smallest_image} pixels or more")
    try:
        import torch
    except ImportError as e:
        raise MissingBackendError(f"the model {name} needs PyTorch ({e}); pip install 'baechi-ext[torch]'") from e
    from runtime.step import TrainingStep, WithLoss

    torch.manual_seed(options.seed)
    module = WithLoss(getattr(import_module(model.module), model.name)())
    inputs = torch.randn(batch, 3, size, size), torch.randint(model.classes, (batch,))
    return TrainingStep(name, module, inputs, optimizer, options.seed)
