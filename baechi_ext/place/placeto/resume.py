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
    value = {"kind": KIND, "policy": _policy(trainer), "config": _config(trainer), "state": numbers}
    write_pair(path, signed(value, made_by), tensors)


def resume_training(path: str | Path, trainer: Trainer) -> None:
    """Sets a trainer to where the files' one was; it then ends as that one would have.

    Raises FileError where there is no such file, PolicyError where it is damaged or of another training.
    """
    value, tensors = read_pair(path, KIND)
    for what, own in (("policy", _policy(trainer)), ("config", _config(trainer))):
        given = value.get(what)
        if given != own:
            raise PolicyError(f"{path}: the training is another one: its {what} is {given}, expected {own}; start anew")
    try:
        trainer.restore(value["state"], tensors)
    except (KeyError, TypeError, RuntimeError) as e:
        raise PolicyError(f"{path}: the training can't be resumed ({e!r}); start anew") from e


def _policy(trainer: Trainer) -> dict[str, object]:
    return _listed(trainer.policy.config.to_json())


def _config(trainer: Trainer) -> dict[str, object]:
    """Without the number of threads, which changes no result."""
    return {name: value for name, value in _listed(trainer.config.to_json()).items() if name != "workers"}


def _listed(config: dict[str, object]) -> dict[str, object]:
    """As JSON has it: lists and no tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
