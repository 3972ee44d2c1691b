"""The unplaced step under torch.compile, on one device: what a plan has to beat as well."""

import time
import warnings

import torch

from baechi_ext.capture.torch_dynamo import compile_workers_ended, quietly, traced
from baechi_ext.errors import BaechiError, ExecutionError
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.devices import one_thread
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.measure import eager_times
from baechi_runtime.torch.parity import parity_of_parts, results_of
from baechi_runtime.torch.processes.executor import Executor


class CompiledStep:
    """The step as a user compiles it, on device 0 of an executor; it runs like a loaded one."""

    def __init__(self, executor: Executor, step: TrainingStep) -> None:
        self._executor, self.device = executor, executor.devices[0].torch_device
        self.eager = EagerStep(step, self.device)
        self.eager.forward = traced(self.eager.step.module, "inductor")

    def run(self) -> tuple[torch.Tensor | None, StepTimes]:
        """No loss, and the times of one step."""
        return None, self._executor.call(0, lambda: eager_times(self._executor, self.eager))


def compiled_step(executor: Executor, step: TrainingStep, *, draws: bool) -> tuple[CompiledStep, Parity | None, str]:
    """The compiled step, its parity with the unplaced one, and a note on how long compiling took. A step that `draws` random numbers is not
    compared: compiled it draws others. The step's state is put back.

    A compiled step adds up in another order, as parts of a batch do, and may differ by as much. Raises ExecutionError where torch can't
    compile it.
    """
    begin = time.perf_counter()
    with as_it_was(step) as saved, one_thread(), quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about parts of itself
        try:
            compiled = CompiledStep(executor, step)
            actual = results_of(compiled.eager)
        except BaechiError:
            raise
        except Exception as e:  # noqa: BLE001 - of a compiler, which raises what it likes
            cause = getattr(e, "inner_exception", e)
            reason = next(filter(None, str(cause).splitlines()), "")
            raise ExecutionError(f"torch.compile can't take the step: {type(cause).__name__}: {reason}") from e
        finally:
            compile_workers_ended()
        note = f"torch.compile took {time.perf_counter() - begin:.1f} s"
        if draws:
            return compiled, None, f"{note}; its step draws other random numbers, so its results are not compared"
        step.restore(saved)
        expected = results_of(EagerStep(step, compiled.device))
        step.restore(saved)
        parity = parity_of_parts(step, compiled.device, expected, actual)
    differs = f"its results differ by {parity.max_rel_diff:.2g} from the unplaced step's"
    return compiled, parity, f"{note}; {differs}" + ("" if parity.passed else f", more than {parity.tolerance:g}")
