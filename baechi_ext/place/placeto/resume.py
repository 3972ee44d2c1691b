"""Trainings as files, to go on with after an interruption: the same pair of files as a policy's."""

from pathlib import Path

from baechi_ext.errors import PolicyError
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.place.placeto.checkpoint import read_pair, write_pair
from baechi_ext.place.placeto.train import Trainer

KIND = "placeto training"


def save_training(path: str | Path, trainer: Trainer, made_by: MadeBy | None = None) -> None:
    """Writes NAME.json, signed by `made_by`, and NAME.safetensors; `path` is either, or NAME. Raises FileError where it can't."""
    numbers, tensors = trainer.state()
    value = {"kind": KIND, **_settings(trainer), "state": numbers}
    write_pair(path, signed(value, made_by), tensors)


def resume_training(path: str | Path, trainer: Trainer) -> None:
    """Sets a trainer to where the files' one was; it then ends as that one would have.

    Raises FileError where there is no such file, PolicyError where it is damaged or of another training.
    """
    value, tensors = read_pair(path, KIND)
    for what, own in _settings(trainer).items():
        given = value.get(what)
        if given != own:
            raise PolicyError(f"{path}: the training is another one: its {what} is {given}, expected {own}; start anew")
    try:
        trainer.restore(value["state"], tensors)
    except (KeyError, TypeError, RuntimeError, PolicyError) as e:
        raise PolicyError(f"{path}: the training can't be resumed ({e!r}); start anew") from e


def _settings(trainer: Trainer) -> dict[str, dict[str, object]]:
    """The settings as JSON has them, lists and no tuples, without the number of threads, which changes no result."""
    configs = {"policy": trainer.policy.config.to_json(), "config": trainer.config.to_json()}
    return {
        what: {name: list(value) if isinstance(value, tuple) else value for name, value in config.items() if name != "workers"}
        for what, config in configs.items()
    }
