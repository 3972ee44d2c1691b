"""`baechi compare`: capture and profile a step once, then for every method place, load and check; measure all in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from baechi_ext.cost import scale_links
from baechi_ext.errors import BaechiError, CaptureError, first_line
from baechi_ext.ir import Cluster
from baechi_ext.ir.files import write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Captured, PlacingBackend
from baechi_runtime.drivers.comparison import AUTO, CompareRequest, Comparison, Contender
from baechi_runtime.drivers.placement import Placement, auto_sizes, is_near_least, on_one_device, place
from baechi_runtime.drivers.ranking import IN_REACH, Engines
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.drivers.training import EnginesOf, OnDevices, measured, recorded
from baechi_runtime.files.run_folder import (
    COMPARISON,
    PARTS_GRAPH,
    SINGLE_GRAPH,
    SPLIT_GRAPH,
    begin_run,
    method_plan,
    said_where_plans_are,
)
from baechi_runtime.host.as_main import EndedError
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import require_parity
from baechi_runtime.report.progress import progress
from baechi_runtime.report.report import COMPILED, SINGLE
from baechi_runtime.report.tables import as_time

C = TypeVar("C", bound=Captured)
L = TypeVar("L")


def compare(request: CompareRequest, on_devices: OnDevices, engines_of: EnginesOf | None = None) -> Comparison | None:
    """Every method's plan, predicted and measured; beside `auto`, where there is `engines_of`, the framework's own engines. None in a
    process that does not drive.

    Raises what capture, profiling and link probing raise; what a method raises is its row's refusal.
    """

    def drive(backend: PlacingBackend[Any, Any]) -> Comparison:
        engines = None if engines_of is None else engines_of(backend)
        return compared(request, backend, backend.capture(), request.train.model, engines=engines)

    return on_devices(request.train, drive)


def compared(
    request: CompareRequest,
    backend: PlacingBackend[C, L],
    captured: C,
    model: str,
    notes: Sequence[str] = (),
    engines: Engines[C, L] | None = None,
) -> Comparison:
    """Every method's plan of a captured step, predicted and measured, and kept where files are."""
    train, found = request.train, backend.cluster()
    single = one_device_timeline(captured.alone, found[0].devices[0].speed)
    contenders = [_compiled(backend, captured)] if train.compile else []
    contenders += checked_contenders(captured, scale_links(found[0], train.comm_cost_factor), backend, request.plans)
    contenders += _beside_auto(request, backend, contenders, found, engines)
    variants = loaded_contenders(captured, contenders, backend, single, engines)
    if train.out is not None:
        begin_run(Path(train.out))
        keep_plans(Path(train.out), captured, contenders, _fastest(contenders), train.made_by)
    with said_where_plans_are(train.out):
        measurement = measured(backend, captured, variants, f"each of {len(variants) + 1} variants")
    comparison = Comparison(
        model=model,
        executor=backend.kind if train.framework == "torch" else f"TensorFlow, {backend.kind}",
        contenders=tuple(contenders),
        measurement=measurement,
        single=single,
        peaks_measured_by=backend.peaks_measured_by,
        notes=(
            *notes,
            *captured.notes,
            *on_one_device(found[0]),
            *([] if found[1] is None else [f"probed link: {found[1]}"]),
            *dict.fromkeys(note for loaded in variants.values() for note in backend.notes(loaded)),
        ),
        unplaced=backend.unplaced,
    )
    if train.out is not None:
        begin_run(Path(train.out))
        if comparison.planned is not None:
            contender = comparison.contender(comparison.planned)
            placed = _as_planned(backend, captured, contender, variants)
            comparison = replace(comparison, notes=(*comparison.notes, *recorded(backend, contender.step, placed)))
        keep(Path(train.out), captured, comparison, train.made_by)
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
            reason = first_line(e)
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
    captured: C, cluster: Cluster, backend: PlacingBackend[C, Any], plans: Mapping[str, pipeline.PlanRequest]
) -> list[Contender]:
    """Every method's plan, run and checked: it computes what the unplaced step does, unless random numbers are relaxed. Of `single` it is
    the one-device program. What a method raises is its refusal; the others go on. Raises KeyboardInterrupt."""
    contenders = [Contender(method, step=captured) for method in plans]
    single = one_device_timeline(captured.alone, cluster.devices[0].speed)
    for number, contender in enumerate(contenders, start=1):
        request, of_all = plans[contender.method], f" ({number} of {len(plans)})"
        try:
            result = pipeline.plan_watched(captured.graph, cluster, request, pipeline.plan, of_all)
            if result.interrupted:
                raise KeyboardInterrupt
            contender.result = pipeline.whole_if_faster(result, captured.graph, cluster, request, single)
            contender.notes += contender.result.notes
            _check(contender, backend, single, of_all)
        except BaechiError as e:
            contender.refusal = str(e)
    return contenders


def _check(contender: Contender, backend: PlacingBackend[Any, Any], single: Timeline, of_all: str = "") -> None:
    timeline, alone = contender.program(single)
    with progress(f"checking {contender.method}: the same results as the unplaced step, and its memory{of_all}"):
        contender.parity = backend.check(contender.step, timeline, alone=alone)
        if contender.parity is not None and not backend.request.relaxed_random:
            require_parity(contender.parity)
        contender.peak_bytes = backend.peak_bytes(contender.step, timeline, alone=alone)


def _compiled(backend: PlacingBackend[C, L], captured: C) -> Contender:
    """The unplaced step under the framework's compiler: what the user has without any plan, whatever its parity."""
    contender = Contender(COMPILED, step=captured)
    try:
        with progress("compiling the unplaced step"):
            contender.loaded, contender.parity, note = backend.compiled(captured)
        contender.notes.append(note)
    except BaechiError as e:
        contender.refusal = str(e)
    return contender


def _beside_auto(
    request: CompareRequest,
    backend: PlacingBackend[C, L],
    contenders: Sequence[Contender],
    found: tuple[Cluster, LinkProbe | None],
    engines: Engines[C, L] | None,
) -> list[Contender]:
    """The contenders that `train` weighs against the plan of `auto`: the step over parts of its batch, and the framework's own engines.
    Where the plan leaves nothing to look for, only the parts that the request names."""
    auto = next((c for c in contenders if c.method == AUTO and c.result is not None), None)
    if auto is None or auto.result is None or request.train.microbatches == 1:
        return []
    whole, parts, cluster = auto.step, request.train.microbatches, found[0]
    best = Placement(whole.graph, None, auto.result, one_device_timeline(whole.alone, cluster.devices[0].speed))
    if parts is None and is_near_least(best, cluster):
        return []
    train = replace(request.train, plan=request.plans[AUTO])
    wanted = _parts_beside(whole, cluster) if parts is None else parts
    parted = [] if wanted is None else [in_parts(train, backend, whole, wanted, found)]
    for contender in parted:
        if contender.result is not None and contender.result.predicted_step_us < auto.result.predicted_step_us:
            best = replace(best, result=contender.result)
    return parted if engines is None else [*parted, *_of_engines(engines, whole, best, cluster)]


def _parts_beside(whole: Captured, cluster: Cluster) -> int | tuple[int, ...] | None:
    """The parts that are tried where nobody names any; None where there would be a single one, which is the whole batch."""
    if whole.batch is None:
        return len(cluster)
    sizes = auto_sizes(whole, cluster)
    return sizes if len(sizes) > 1 else None


def in_parts(
    train: TrainRequest, backend: PlacingBackend[C, L], whole: C, parts: int | Sequence[int], found: tuple[Cluster, LinkProbe | None]
) -> Contender:
    """The plan of the step over so many parts of its batch, or parts of these sizes, run and checked; see `checked_contenders`."""
    number, sizes = (parts, str(parts)) if isinstance(parts, int) else (len(parts), ",".join(map(str, parts)))
    contender = Contender(f"{AUTO}_{number}_parts", flag=f"--microbatches={sizes}")
    try:
        captured = backend.in_parts(whole, parts)
        placement = place(train, captured, found)
        if placement.result.interrupted:
            raise KeyboardInterrupt
        contender.step = replace(captured, graph=placement.graph)
        contender.result, contender.notes = placement.result, [*placement.result.notes, *captured.notes]
        _check(contender, backend, one_device_timeline(whole.alone, found[0].devices[0].speed))
    except BaechiError as e:
        contender.refusal = str(e)
    return contender


def _of_engines(engines: Engines[C, L], whole: C, best: Placement, cluster: Cluster) -> list[Contender]:
    """The engines that compute the same step, and are predicted to come near the best plan; what stands against another is its refusal."""
    enough_us, found = best.result.predicted_step_us * IN_REACH, []
    for engine in engines.predicted(whole, best, cluster, enough_us):
        contender = Contender(engine.name, step=whole, engine=engine, flag=engine.flag, notes=[engine.title])
        found.append(contender)
        try:
            if engine.predicted_us is not None and engine.predicted_us > enough_us:
                contender.refusal = f"{engine.title}: more than {IN_REACH:g} times the plan's {as_time(best.result.predicted_step_us)}"
            elif refusal := engine.why_not or engines.refusal(whole, engine):
                contender.refusal = f"{engine.title}: {refusal}"
            else:
                contender.parity = engines.check(whole, engine)
                require_parity(contender.parity)
        except BaechiError as e:
            contender.refusal = str(e)
    return found


def loaded_contenders(
    captured: C, contenders: Sequence[Contender], backend: PlacingBackend[C, L], single: Timeline, engines: Engines[C, L] | None = None
) -> dict[str, L]:
    """The steps that are measured, by method; where one can't be loaded beside the others, that is its refusal."""
    loaded: dict[str, L] = {}
    for contender in contenders:
        if not contender.refusal:
            timeline, alone = contender.program(single)
            try:
                if contender.loaded is not None:
                    loaded[contender.method] = contender.loaded
                elif engines is not None and contender.engine is not None:
                    loaded[contender.method] = engines.load(captured, contender.engine)
                else:
                    loaded[contender.method] = backend.load(contender.step, timeline, alone=alone)
            except BaechiError as e:
                contender.refusal = str(e)
    return loaded


def _fastest(contenders: Sequence[Contender]) -> Contender | None:
    """The contender with the plan that is predicted to be the fastest; None where there is no plan."""
    planned = [(c.result.predicted_step_us, c) for c in contenders if c.result is not None and not c.refusal]
    return min(planned, key=lambda found: found[0], default=(0, None))[1]


def _as_planned(backend: PlacingBackend[C, L], captured: C, contender: Contender, variants: Mapping[str, L]) -> L:
    """The contender's own plan, loaded. Of `single` that is not what was measured: a plan names one of all devices."""
    if contender.method != SINGLE or contender.result is None:
        return variants[contender.method]
    return backend.load(captured, contender.result.timeline, alone=True)


def keep(folder: Path, captured: Captured, comparison: Comparison, made_by: MadeBy) -> None:
    """Writes the plans, that of `planned` as plan.json, and compare.json."""
    kept = None if comparison.planned is None else comparison.contender(comparison.planned)
    keep_plans(folder, captured, comparison.contenders, kept, made_by)
    write_json(folder / COMPARISON, signed(comparison.to_json(), made_by))


def keep_plans(folder: Path, captured: Captured, contenders: Sequence[Contender], kept: Contender | None, made_by: MadeBy) -> None:
    """Writes every method's plan, that of `kept` as plan.json, too, profile.json and graph.json. The graph is that of plan.json: with the
    costs of devices at work beside others, where it has one device with those of one alone, or over parts of the batch. The others, for
    plans made with them, are graph_split.json, graph_single.json and graph_parts.json."""
    best = None if kept is None else kept.result
    graphs = {SPLIT_GRAPH: captured.graph, SINGLE_GRAPH: one_device_timeline(captured.alone).graph}
    for contender in contenders:
        if contender.result is not None and contender.step is not captured:
            graphs[PARTS_GRAPH] = contender.step.graph
    own = SPLIT_GRAPH if best is None or best.splits else SINGLE_GRAPH
    if kept is not None and kept.step is not captured:
        captured, own = kept.step, PARTS_GRAPH
    graphs.pop(own).save(folder / "graph.json", made_by)
    for name, other in graphs.items():
        other.save(folder / name, made_by)
    captured.profile.save(folder / "profile.json", made_by)
    for contender in contenders:
        if contender.result is not None:
            contender.result.plan.save(folder / method_plan(contender.method), made_by)
    if best is not None:
        best.plan.save(folder / "plan.json", made_by)
