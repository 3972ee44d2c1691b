"""`baechi compare`: capture and profile a step once, then for every method place, load and check; measure all in turn."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from baechi_ext.cost import Profile, scale_links
from baechi_ext.errors import BaechiError, CaptureError, MissingBackendError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Backend, Captured
from baechi_runtime.drivers.compare_plots import save_steps
from baechi_runtime.drivers.comparison import CompareRequest, Comparison, Contender
from baechi_runtime.drivers.training import OnDevices, recorded
from baechi_runtime.files.run_folder import COMPARISON, PLOT, SINGLE_GRAPH, SPLIT_GRAPH, begin_run, method_plan
from baechi_runtime.host.as_main import EndedError
from baechi_runtime.measure.parity_result import require_parity
from baechi_runtime.measure.timing import WARMUP
from baechi_runtime.report.progress import progress, rounds
from baechi_runtime.report.report import SINGLE

C = TypeVar("C", bound=Captured)
L = TypeVar("L")


def compare(request: CompareRequest, on_devices: OnDevices) -> Comparison | None:
    """Every method's plan, predicted and measured. None in a process that does not drive.

    Raises what capture, profiling and link probing raise; what a method raises is its row's refusal.
    """
    if request.train.out is not None:
        make_folder(Path(request.train.out))
    return on_devices(request.train, lambda backend: compared(request, backend, backend.capture(), request.train.model))


def compared(request: CompareRequest, backend: Backend[C, L], captured: C, model: str, notes: Sequence[str] = ()) -> Comparison:
    """Every method's plan of a captured step, predicted and measured, and kept where files are."""
    train = request.train
    cluster, probe = backend.cluster()
    contenders = checked_contenders(captured, scale_links(cluster, train.comm_cost_factor), backend, request.plans)
    variants = loaded_contenders(captured, contenders, backend)
    with progress(f"measuring {train.num_steps} steps of each of {len(variants) + 1} variants") as show:
        measurement = backend.measure(captured, variants, train.num_steps, rounds(show, WARMUP + train.num_steps))
    comparison = Comparison(
        model=model,
        executor=backend.kind if train.framework == "torch" else f"TensorFlow, {backend.kind}",
        contenders=tuple(contenders),
        measurement=measurement,
        single=one_device_timeline(captured.alone),
        peaks_measured_by=backend.peaks_measured_by,
        notes=(
            *notes,
            *captured.notes,
            *([] if probe is None else [f"probed link: {probe}"]),
            *(note for loaded in [*variants.values()][-1:] for note in backend.notes(loaded)),
        ),
        unplaced=backend.unplaced,
    )
    if train.out is not None:
        begin_run(Path(train.out))
        if comparison.recommended is not None:
            placed = _as_planned(backend, captured, comparison.contender(comparison.recommended), variants)
            comparison = replace(comparison, notes=(*comparison.notes, *recorded(backend, captured, placed)))
        keep(Path(train.out), captured.graph, captured.profile, comparison, train.made_by)
    return comparison


class ScriptComparison:
    """The first training step of a script: it is compared, and the script goes no further."""

    def __init__(self, what: str) -> None:
        self._what = what
        """The name that errors give to the step: "a call", "a step"."""
        self.done = False
        self._comparison: Comparison | None = None
        self._error: BaechiError | None = None

    def end_script(self, name: str, compare: Callable[[], Comparison | None]) -> NoReturn:
        """Compares the step of `name`, and raises EndedError; again where the script took that for its own, and went on."""
        try:
            if not self.done:
                self._comparison = compare()
        except BaechiError as e:
            self._error = e
        except Exception as e:  # noqa: BLE001 - what nobody has thought of, and what the script's own step raises
            reason = (str(e).splitlines() or [""])[0]
            self._error = CaptureError(f"{self._what} of {name} can't be compared: {type(e).__name__}: {reason}")
        finally:
            self.done = True
        raise EndedError

    def outcome(self) -> Comparison | None:
        """The comparison; None in a process that does not report, and where there was none. Raises what stood in its way."""
        if self._error is not None:
            raise self._error
        return self._comparison


def checked_contenders(
    captured: C, cluster: Cluster, backend: Backend[C, L], plans: Mapping[str, pipeline.PlanRequest]
) -> list[Contender]:
    """Every method's plan, run and checked: it computes what the unplaced step does, unless random numbers are relaxed. Of `single` it is
    the one-device program. What a method raises is its refusal; the others go on. Raises KeyboardInterrupt."""
    contenders, single = [Contender(method) for method in plans], one_device_timeline(captured.alone)
    for number, contender in enumerate(contenders, start=1):
        request, of_all = plans[contender.method], f" ({number} of {len(plans)})"
        try:
            result = pipeline.plan_watched(captured.graph, cluster, request, pipeline.plan, of_all)
            if result.interrupted:
                raise KeyboardInterrupt
            contender.result = pipeline.whole_if_faster(result, captured.graph, cluster, request, single)
            contender.notes += contender.result.notes
            with progress(f"checking {contender.method}: the same results as the unplaced step, and its memory{of_all}"):
                _check(contender, captured, backend, single)
        except BaechiError as e:
            contender.refusal = str(e)
    return contenders


def _check(contender: Contender, captured: C, backend: Backend[C, L], single: Timeline) -> None:
    timeline, alone = contender.program(single)
    contender.parity = backend.check(captured, timeline, alone=alone)
    if contender.parity is not None and not backend.request.relaxed_random:
        require_parity(contender.parity)
    contender.peak_bytes = backend.peak_bytes(captured, timeline, alone=alone)


def loaded_contenders(captured: C, contenders: Sequence[Contender], backend: Backend[C, L]) -> dict[str, L]:
    """The steps that are measured, by method; where one can't be loaded beside the others, that is its refusal."""
    single, loaded = one_device_timeline(captured.alone), dict[str, L]()
    for contender in contenders:
        if not contender.refusal:
            timeline, alone = contender.program(single)
            try:
                loaded[contender.method] = backend.load(captured, timeline, alone=alone)
            except BaechiError as e:
                contender.refusal = str(e)
    return loaded


def _as_planned(backend: Backend[C, L], captured: C, contender: Contender, variants: Mapping[str, L]) -> L:
    """The contender's own plan, loaded. Of `single` that is not what was measured: a plan names one of all devices."""
    if contender.method != SINGLE or contender.result is None:
        return variants[contender.method]
    return backend.load(captured, contender.result.timeline, alone=True)


def keep(folder: Path, graph: OpGraph, profile: Profile, comparison: Comparison, made_by: MadeBy) -> None:
    """Writes graph.json, profile.json, every method's plan, that of the recommended one as plan.json, compare.json, and with matplotlib
    compare.png. The graph's costs are those of plan.json: of devices at work beside others, or where it has one device, of one alone. The
    graph with the others, for plans made with them, is graph_single.json, or graph_split.json."""
    chosen = comparison.recommended
    best = None if chosen is None else comparison.contender(chosen).result
    graphs = {SPLIT_GRAPH: graph, SINGLE_GRAPH: comparison.single.graph}
    graphs.pop(SPLIT_GRAPH if best is None or best.splits else SINGLE_GRAPH).save(folder / "graph.json", made_by)
    for name, other in graphs.items():
        other.save(folder / name, made_by)
    profile.save(folder / "profile.json", made_by)
    for contender in comparison.contenders:
        if contender.result is not None:
            contender.result.plan.save(folder / method_plan(contender.method), made_by)
    if best is not None:
        best.plan.save(folder / "plan.json", made_by)
    write_json(folder / COMPARISON, signed(comparison.to_json(), made_by))
    with contextlib.suppress(MissingBackendError):
        save_steps(folder / PLOT, comparison, made_by)
