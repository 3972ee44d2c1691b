"""Steps that a Run plans, with their costs, and how a plan of them is run: of a graph, a call of a module or of a TensorFlow step, or a
built-in model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from baechi_ext.cost import Profile
from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import temporary_folder
from baechi_ext.options import ApplyOptions
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.call_options import require_known
from baechi_runtime.drivers.comparing import compare
from baechi_runtime.drivers.comparison import CompareRequest, Comparison
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement, place
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.drivers.training import placed, train

if TYPE_CHECKING:
    from torch import nn

    from baechi_runtime.drivers.backend import PlacingBackend
    from baechi_runtime.tensorflow.calls.parallelize import ParallelizeOptions as TensorFlowOptions
    from baechi_runtime.tensorflow.calls.parallelize import PlannedCall
    from baechi_runtime.torch.calls.parallelize import ParallelizeOptions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A graph with its costs; a subclass has the code whose graph it is."""

    name: str
    graph: OpGraph
    """With the costs of devices that work side by side."""
    alone: OpGraph
    """With the costs of a device that works alone."""
    profile: Profile | None = None
    """None where costs were not measured."""
    costs_given: bool = False
    """The graph came with its costs: a plan is held to them, and every gain counts."""

    def plan(self, request: PlanRequest, cluster: Cluster, number: str = "") -> PlanResult:
        """The step's plan on these devices. Raises what `pipeline.plan` raises."""
        result = pipeline.plan_watched(self.graph, cluster, request, pipeline.plan, number)
        if self.costs_given:
            return result
        return pipeline.whole_if_faster(result, self.graph, cluster, request, self.single_on(cluster))

    def single_on(self, cluster: Cluster) -> Timeline:
        """The step on the fastest of these devices, with the others idle."""
        return one_device_timeline(self.alone, cluster.devices[cluster.fastest].speed)

    def placement(self, result: PlanResult) -> Placement:
        """A plan of the step, as what runs steps takes it: there "one device" is the first, whose program is run beside it."""
        first = result.plan.cluster.devices[0]
        return Placement(result.plan.graph, self.profile, result, one_device_timeline(self.alone, first.speed))

    def apply(self, result: PlanResult, request: PlanRequest, options: ApplyOptions) -> Any:
        """Has the step run by a plan. Raises OptionError where there is nothing to run."""
        raise self._no_code()

    def compare(self, requests: Mapping[str, PlanRequest], cluster: Cluster) -> Comparison:
        """The plans of several methods, measured in turn. Raises OptionError where there is nothing to run."""
        raise self._no_code()

    @contextmanager
    def _measuring(self, request: TrainRequest, cluster: Cluster) -> Iterator[TrainRequest]:
        """The request for these devices, with the costs that were measured, as long as the body takes."""
        if self.profile is None:
            raise OptionError(f"the costs of {self.name} were not measured here; plan it again")
        with temporary_folder() as folder:
            costs = folder / "costs.json"
            self.profile.save(costs)
            # How much memory they have was said once for all; now the devices say it.
            yield replace(request, num_devices=len(cluster), cluster=cluster, device_memory=None, cost_path=str(costs))

    def _no_code(self) -> OptionError:
        return OptionError(
            f"there is no code of it to run: {self.name} is a graph, or planned for hardware that is not here; plan a module, or a "
            "built-in model by its name"
        )


def _known(options: ApplyOptions, names: Sequence[str], what: str) -> dict[str, Any]:
    require_known(options, names, f"apply() for {what}")
    return dict(options)


def of_graph(graph: OpGraph) -> Step:
    """The step of a costed graph."""
    return Step(name=graph.name or "graph", graph=graph, alone=graph, costs_given=True)


@dataclass(frozen=True, kw_only=True)
class ModuleStep(Step):
    """A training call of a module: its forward and backward passes. Loss and optimizer stay in the caller's loop."""

    module: "nn.Module"
    inputs: Any
    options: "ParallelizeOptions"

    def apply(self, result: PlanResult, request: PlanRequest, options: ApplyOptions) -> "nn.Module":
        from baechi_runtime.torch.calls.parallelize import apply_plan

        given = _known(options, ("verify_steps", "strict", "keep_placed", "timeout_seconds"), "a module")
        pins = tuple(map(str, request.pins))
        chosen = replace(self._options_on(result.plan.cluster), method=request.method, pins=pins, **given)
        return apply_plan(self.module, self.inputs, chosen, self.placement(result))

    def compare(self, requests: Mapping[str, PlanRequest], cluster: Cluster) -> Comparison:
        from baechi_runtime.torch.calls.comparing import compare_call

        request = self._options_on(cluster).request()
        if request.cuda:
            raise OptionError("a module's call is compared on CPU workers: with several plans, a parameter would be on several GPUs")
        return of_one_process(compare_call(CompareRequest(request, requests), self.module, self.inputs))

    def _options_on(self, cluster: Cluster) -> "ParallelizeOptions":
        devices = self.options.devices
        if len(cluster) != (devices if isinstance(devices, int) else len(devices)):
            devices = len(cluster) if isinstance(devices, int) else [f"cuda:{d}" for d in range(len(cluster))]
        return replace(self.options, devices=devices, cluster=cluster, device_memory=None)


def of_module(module: "nn.Module", inputs: Any, options: "ParallelizeOptions") -> tuple[Step, PlanResult]:
    """The step of a module's training call with these inputs, and its plan. Raises CaptureError where it can't be placed, and what placing
    raises."""
    from baechi_runtime.torch.calls.parallelize import plan_call

    graph, placement = plan_call(module, inputs, options)
    known: dict[str, Any] = {"name": type(module).__name__, "graph": graph, "alone": placement.single.graph, "profile": placement.profile}
    return ModuleStep(**known, module=module, inputs=inputs, options=options), placement.result


@dataclass(frozen=True, kw_only=True)
class FunctionStep(Step):
    """A call of a TensorFlow training step, or of a Keras model's: all that it computes, update included."""

    call: "PlannedCall"
    options: "TensorFlowOptions"

    def plan(self, request: PlanRequest, cluster: Cluster, number: str = "") -> PlanResult:
        return super().plan(self.options.begun(request), cluster, number)

    def apply(self, result: PlanResult, request: PlanRequest, options: ApplyOptions) -> Any:
        """The step whose calls run by the plan, to be called in place of the function; or the model, whose fit does."""
        from baechi_runtime.tensorflow.calls.parallelize import apply_plan

        given = _known(options, ("verify_steps", "keep_placed", "timeout_seconds"), "a TensorFlow step")
        cluster = result.plan.cluster
        pins = tuple(map(str, request.pins))
        there = replace(self.options, devices=len(cluster), cluster=cluster, device_memory=None)
        chosen = replace(there, method=request.method, pins=pins, **given)
        return apply_plan(self.call, chosen, self.placement(result))

    def compare(self, requests: Mapping[str, PlanRequest], cluster: Cluster) -> Comparison:
        from baechi_runtime.tensorflow.calls.comparing import compare_call

        with self._measuring(self.call.step.settings.request, cluster) as wanted:
            return compare_call(CompareRequest(wanted, {name: self.options.begun(r) for name, r in requests.items()}), self.call)


def of_function(function: Any, inputs: Any, options: "TensorFlowOptions") -> tuple[Step, PlanResult]:
    """The step of a TensorFlow training step's call, or of a Keras model's, with these inputs, and its plan. Raises CaptureError where it
    can't be placed, and what placing raises."""
    from baechi_runtime.tensorflow.calls.parallelize import plan_call

    call, graph, placement = plan_call(function, inputs, options)
    known: dict[str, Any] = {"name": call.step.name, "graph": graph, "alone": placement.single.graph, "profile": placement.profile}
    return FunctionStep(**known, call=call, options=options), placement.result


@dataclass(frozen=True, kw_only=True)
class ModelStep(Step):
    """The training step of a built-in model: forward, loss, backward and update."""

    request: TrainRequest

    def apply(self, result: PlanResult, request: PlanRequest, options: ApplyOptions) -> Any:
        """The report of the step, measured beside the unplaced one and one device's."""
        from baechi_runtime.torch.backend import on_devices

        given = _known(options, ("num_steps", "timeout_seconds"), "a built-in model")
        with self._measuring(self.request, result.plan.cluster) as wanted:
            return train(replace(wanted, plan=request, **given), on_devices, partial(placed, planned=self.placement(result)))

    def compare(self, requests: Mapping[str, PlanRequest], cluster: Cluster) -> Comparison:
        from baechi_runtime.torch.backend import on_devices

        with self._measuring(self.request, cluster) as wanted:
            return of_one_process(compare(CompareRequest(wanted, requests), on_devices))


def of_model(request: TrainRequest) -> tuple[Step, PlanResult]:
    """The step of a built-in model, and its plan. Raises what capturing, profiling and placing raise."""
    from baechi_runtime.torch.backend import on_devices

    def drive(backend: "PlacingBackend[Any, Any]") -> tuple[Step, PlanResult]:
        captured = backend.capture()
        placement = place(request, captured, backend.cluster())
        step = ModelStep(name=request.model, graph=captured.graph, alone=captured.alone, profile=captured.profile, request=request)
        return step, placement.result

    return of_one_process(on_devices(request, drive))


def of_one_process(found: T | None) -> T:
    """The findings of a driver. Raises OptionError where another process has them."""
    if found is None:
        raise OptionError("plan() and its verbs are for one process; start it without torchrun")
    return found
