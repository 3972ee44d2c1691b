"""Where a training's progress is kept: a CSV file, and scalars for TensorBoard."""

import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from baechi_ext.errors import FileError, MissingBackendError
from baechi_ext.place.placeto.train import TrainingProgress

Watch = Callable[[TrainingProgress], None]


def csv_log(path: str | Path) -> Watch:
    """Appends a line for each update to a CSV file, after a header where the file is new; what is not known is empty. Raises FileError."""
    names = [field.name for field in fields(TrainingProgress)]

    def write(*values: object) -> None:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(",".join(map(str, values)) + "\n")
        except OSError as e:
            raise FileError(f"cannot write {str(path)!r}: {e.strerror}; choose a file in a folder that exists and is writable") from e

    if not Path(path).exists():
        write(*names)
    return lambda progress: write(*("" if value == math.inf else value for value in asdict(progress).values()))


def tensorboard_log(folder: str | Path) -> Watch:
    """Writes each update's numbers as scalars for TensorBoard. Raises MissingBackendError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise MissingBackendError("TensorBoard scalars need tensorboard; pip install 'baechi-ext[plots]', or keep to the CSV file") from e
    writer = SummaryWriter(str(folder))

    def write(progress: TrainingProgress) -> None:
        for name, value in asdict(progress).items():
            if name != "updates":
                writer.add_scalar(f"placeto/{name}", value, progress.updates)
        writer.flush()

    return write
