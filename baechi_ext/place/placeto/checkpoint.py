"""Policies as files: NAME.json says what the policy is and how it was trained, NAME.safetensors holds its parameters. Never pickle.

The JSON file carries the other one's digest: a pair that does not belong together is noticed. New parameters are NAME.next.safetensors
until the JSON file of theirs is there, so that what is killed while it writes leaves the old pair or the new one.
"""

import hashlib
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import FileError, MissingBackendError, PolicyError
from baechi_ext.ir.files import SCHEMA_VERSION, read_bytes, read_json, write_bytes, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.place.placeto.decisions import OP_FEATURES
from baechi_ext.place.placeto.environment_kernel import FEATURES
from baechi_ext.place.placeto.policy import EMBEDDED, Policy, PolicyConfig

if TYPE_CHECKING:
    from torch import Tensor

KIND = "placeto policy"
_NEXT = ".next.safetensors"
SHIPPED = Path(__file__).parent / "policies" / "default"
"""The policy that comes with the package."""


def save_policy(path: str | Path, policy: Policy, training: dict[str, Any], made_by: MadeBy | None = None) -> None:
    """Writes NAME.json and NAME.safetensors; `path` is either, or NAME. `training` is kept as it is; `made_by` signs.

    Raises FileError where that is not possible.
    """
    value = {"kind": KIND, "config": policy.config.to_json(), "training": training}
    write_pair(path, signed(value, made_by), policy.parameters)


def load_policy(path: str | Path) -> Policy:
    """The policy in NAME.json and NAME.safetensors; `path` is either, or NAME.

    Raises FileError where there is no such JSON file, PolicyError where it is not of a policy for the features of this version or
    does not belong to its parameters, MissingBackendError without torch or safetensors.
    """
    value, tensors = read_pair(path, KIND)
    config = _config(value.get("config"), str(path))
    return Policy(config, fitting(tensors, config, str(path)))


def parameters_sha256(path: str | Path) -> str:
    """The digest of the parameters of a policy that `load_policy` loads."""
    return str(read_json(_named(path, ".json"), KIND)["sha256"])


def write_pair(path: str | Path, value: dict[str, Any], tensors: dict[str, "Tensor"]) -> None:
    """The tensors, and JSON that names and seals them."""
    save = require_torch().save
    content = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    unsealed, file = _named(path, _NEXT), _named(path, ".safetensors")
    write_bytes(unsealed, content)
    try:
        write_json(_named(path, ".json"), {**value, "schema_version": SCHEMA_VERSION, "sha256": hashlib.sha256(content).hexdigest()})
    except FileError:
        unsealed.unlink(missing_ok=True)
        raise
    try:
        os.replace(unsealed, file)
    except OSError as e:
        raise FileError(f"cannot write {str(file)!r}: {e.strerror}; check the path and its permissions") from e


def read_pair(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """The object and the tensors that `write_pair` wrote. Raises FileError, PolicyError or MissingBackendError as `load_policy` does."""
    value = read_json(_named(path, ".json"), kind)
    if value.get("kind") != kind:
        raise PolicyError(f'{path}: the file is of kind {value.get("kind")!r}, expected "{kind}"; give one that `placeto` wrote')
    wrong = ""
    for file in (_named(path, _NEXT), _named(path, ".safetensors")):
        try:
            content = read_bytes(file, "parameters")
        except FileError as e:
            wrong = f"{e}; it belongs beside the JSON file, copy both"
            continue
        if hashlib.sha256(content).hexdigest() == value.get("sha256"):
            return value, _tensors(content, file)
        wrong = f"{file}: the parameters are not those that its JSON file was written with; the file is damaged, copy both again"
    raise PolicyError(wrong)


def _tensors(content: bytes, file: Path) -> dict[str, "Tensor"]:
    """The tensors in a file's content. Raises PolicyError where they can't be read, or are no finite numbers of the usual type."""
    library, again = require_torch(), "train it again, or copy both files again"
    from safetensors import SafetensorError

    try:
        tensors: dict[str, Tensor] = library.load(content)
        wrong = next((name for name, tensor in tensors.items() if tensor.is_complex() or not bool(tensor.isfinite().all())), None)
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as e:  # torch has not all types that safetensors names
        raise PolicyError(f"{file} can't be read: {e!r}; {again}") from e
    if wrong is not None:
        raise PolicyError(f"{file}: the parameter {wrong!r} has values that are no finite numbers; {again}")
    return tensors


def fitting(tensors: dict[str, "Tensor"], config: PolicyConfig, source: str) -> dict[str, "Tensor"]:
    """The tensors, if they are the parameters of such a policy. Raises PolicyError."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in config.shapes().items():
        expected |= {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise PolicyError(
            f"{source}: {len(wrong)} of its parameters do not belong to such a policy, first {name!r} of shape {found.get(name)}, "
            f"expected {expected.get(name)}; train it again"
        )
    typed = next((name for name, tensor in tensors.items() if str(tensor.dtype) != "torch.float32"), None)
    if typed is not None:
        raise PolicyError(f"{source}: the parameter {typed!r} is of {tensors[typed].dtype}, expected torch.float32; train it again")
    return tensors


def _config(value: object, source: str) -> PolicyConfig:
    names = {*EMBEDDED, *(field.name for field in fields(PolicyConfig))}
    if not isinstance(value, dict) or set(value) != names:
        raise PolicyError(f'{source}: "config" is {value!r}; expected an object of {", ".join(sorted(names))}')
    if other := next((name for name, known in EMBEDDED.items() if value[name] != known), None):
        raise PolicyError(f"{source}: {other} is {value[other]!r}, this version reads {EMBEDDED[other]!r}; train it again")
    given: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in value.items() if name not in EMBEDDED}
    config = PolicyConfig(**given)
    sizes = (config.width, config.rounds, config.hidden, config.visits)
    if not all(isinstance(size, int) and 1 <= size <= 4096 for size in sizes):
        raise PolicyError(f"{source}: width, rounds, hidden and visits are {sizes}; expected whole numbers from 1 to 4096")
    for what, features, known in (("ops", config.op_features, OP_FEATURES), ("devices", config.device_features, FEATURES)):
        if features != known:
            raise PolicyError(
                f"{source}: the policy was trained on other features of {what} ({_listed(features)}) than this version computes "
                f"({_listed(known)}); train it again"
            )
    return config


def _listed(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, tuple) else repr(names)


def _named(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    return path.with_suffix(suffix) if path.suffix in (".json", ".safetensors") else path.with_name(path.name + suffix)


def require_torch() -> Any:
    """Loads what policies are made of; returns safetensors. Raises MissingBackendError without torch or safetensors."""
    try:
        import safetensors.torch
        import torch  # noqa: F401
    except ImportError as e:
        raise MissingBackendError(
            f"placeto needs torch and safetensors, and {e.name or 'one of them'} is not installed; pip install 'baechi-ext[torch]', or "
            f"choose another --placement_method"
        ) from e
    return safetensors.torch
