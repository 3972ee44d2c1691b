"""An hour of trainings to which anything happens, drawn by a seed: processes killed, stopped and interrupted, disks that fill up, a cable
that is pulled. Each goes on from its last checkpoint, on threads, processes, torchrun or two nodes in turn, until it is done; its losses
are those of a training that nothing happens to, bit for bit, no process is left over, and nothing ends with a traceback.

    BAECHI_CHAOS_SECONDS=600 BAECHI_CHAOS_SEED=7 pytest -m slow tests/runtime/test_chaos.py -s
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.runtime.namespaces import ADDRESSES, on_a_small_disk, refusal, two_nodes
from tests.runtime.trainings import STEP, baechi

SECONDS = float(os.environ.get("BAECHI_CHAOS_SECONDS", "3600"))
SEED = int(os.environ.get("BAECHI_CHAOS_SEED", "0"))
STEPS = 400
TIMEOUT_SECONDS = 8
"""The trainings' --timeout."""
ENDS_WITHIN = 60.0
"""Seconds beyond that in which every process has ended; generous, since the machine may be busy."""
PATIENCE = 300.0
"""Seconds that a run has to end in, whatever happened to it."""
MOST_ATTEMPTS = 25
"""Then a training is left in peace, so that it ends."""
LATEST_SECONDS = 14.0
"""A fault comes at the latest so long after the start; a start takes about half of it."""
TENSORFLOW = [
    *("train", "--framework=tensorflow", "--model_name=gnmt_v2", "--rnn_units=8", "--vocab_size=50", "--max_seq_length=4"),
    *("--batch_size=2", "--optimizer=adam", "--learning_rate=0.001", "--placement_method=contiguous", "--comm_cost_coeffs=0.001,100"),
]
FLAGS = {
    "threads": (*STEP, "--workers=thread"),
    "processes": (*STEP, "--workers=process"),
    "torchrun": (*STEP, "--workers=process"),
    "two nodes": (*STEP, "--workers=process"),
    "servers": (*TENSORFLOW, "--workers=process"),
    "logical devices": (*TENSORFLOW, "--workers=thread"),
}
FRAMEWORKS = {"torch": ("threads", "processes", "torchrun", "two nodes"), "tensorflow": ("servers", "logical devices")}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


class Chaos:
    """Events of the trainings of one framework in one folder, and counts of each kind of fault."""

    def __init__(self, draw: random.Random, folder: Path, framework: str, costs: str) -> None:
        self.draw, self.framework, self.costs = draw, framework, costs
        self.run, self.folder = folder / "run", folder
        self.happened: Counter[str] = Counter()
        self.ended: Counter[int] = Counter()

    def losses(self) -> list[float]:
        """The losses of a training that has come through."""
        for _ in range(MOST_ATTEMPTS):
            executor = self.draw.choice([e for e in FRAMEWORKS[self.framework] if e != "two nodes" or refusal() is None])
            code, out, err = self._attempt(executor)
            self.ended[code] += 1
            assert not re.search(r'File "[^"]*baechi_(ext|runtime)', err), err  # torchrun shows tracebacks of its own
            if code == 0:
                return json.loads(out)["losses"]
        code, out, err = finished(self._start(FRAMEWORKS[self.framework][0]))
        assert code == 0, err
        return json.loads(out)["losses"]

    def _attempt(self, executor: str) -> Ended:
        if executor == "two nodes":
            self.happened["two nodes: cable pulled"] += 1
            return self._two_nodes()
        faults: list[Callable[[str], Ended]] = [self._signalled, self._signalled, self._stopped]
        if executor in ("threads", "processes") and refusal() is None:
            faults.append(self._full_disk)
        return self.draw.choice(faults)(executor)

    def _command(self, executor: str, run: Path | None = None) -> tuple[str, ...]:
        every = self.draw.randint(1, 4)
        flags = (f"--train_steps={STEPS}", f"--checkpoint={run or self.run}", f"--checkpoint_every={every}", "--resume", "--json")
        return (*FLAGS[executor], self.costs, *flags, f"--timeout={TIMEOUT_SECONDS}")

    def _start(self, executor: str) -> subprocess.Popen[str]:
        command = self._command(executor)
        if executor != "torchrun":
            return baechi(*command)
        return baechi("--standalone", "--nproc-per-node=2", "-m", "baechi_ext", *command, module="torch.distributed.run")

    def _signalled(self, executor: str) -> Ended:
        """Some process of the run, or all of them, gets a signal."""
        name = self.draw.choice(list(SIGNALS))
        whole = self.draw.random() < 0.3
        seconds, which = self.draw.uniform(0.3, LATEST_SECONDS), self.draw.random()
        self.happened[f"{executor}: {name} {'all' if whole else 'one'}"] += 1

        def strike(processes: list[psutil.Process]) -> None:
            for process in processes if whole else [processes[int(which * len(processes))]]:
                process.send_signal(SIGNALS[name])

        return self._struck(self._start(executor), seconds, strike)

    def _stopped(self, executor: str) -> Ended:
        """Some process stands still for a while, which --timeout may or may not cover."""
        seconds, which, pause = self.draw.uniform(0.3, LATEST_SECONDS), self.draw.random(), self.draw.uniform(0.1, 2.0 * TIMEOUT_SECONDS)
        self.happened[f"{executor}: stopped for {'less' if pause < TIMEOUT_SECONDS else 'more'} than --timeout"] += 1

        def strike(processes: list[psutil.Process]) -> None:
            process = processes[int(which * len(processes))]
            process.suspend()
            time.sleep(pause)
            process.resume()

        return self._struck(self._start(executor), seconds, strike)

    def _struck(self, process: subprocess.Popen[str], seconds: float, strike: Callable[[list[psutil.Process]], None]) -> Ended:
        """The end of a run that is struck after so many seconds; no process of it is left then."""
        known: dict[int, psutil.Process] = {}
        reader = Reader(process)
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            known |= {p.pid: p for p in family(process.pid)}
            time.sleep(0.1)
        alive = family(process.pid)
        known |= {p.pid: p for p in alive}
        if alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                strike(alive)
        end = reader.finished(PATIENCE)
        gone, left = psutil.wait_procs([p for p in known.values() if p.pid != process.pid], timeout=TIMEOUT_SECONDS + ENDS_WITHIN)
        assert not left, [p.cmdline() for p in left if p.is_running()]
        return end

    def _full_disk(self, executor: str) -> Ended:
        """There is room for what is there and some more, perhaps too little; what was written is kept."""
        held = sum(f.stat().st_size for f in self.run.rglob("*") if f.is_file()) if self.run.exists() else 0
        size = held + self.draw.randint(1 << 16, 1 << 23)
        self.happened[f"{executor}: disk of {'< 2' if size < held + (1 << 21) else '>= 2'} MiB to spare"] += 1
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        self.run.mkdir(exist_ok=True)
        before, after = f"cp -a {self.run}/. {disk}", f"rm -rf {self.run}/*; cp -a {disk}/. {self.run}"
        command = ["-m", "baechi_ext", *self._command(executor, disk)]
        return finished(on_a_small_disk(command, disk, str(size + (1 << 16)), before=before, after=after))

    def _two_nodes(self) -> Ended:
        """The cable is pulled at some moment, or not before the end."""
        cut = self.folder / "cut"
        cut.unlink(missing_ok=True)
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        meeting = [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "-m", "baechi_ext"]
        flags = self._command("two nodes")
        timer = threading.Timer(self.draw.uniform(1.0, 2 * LATEST_SECONDS), cut.touch)
        timer.start()
        try:
            first, _ = two_nodes([[*torchrun, f"--node-rank={rank}", *meeting, *flags] for rank in range(2)], cut=cut)
        finally:
            timer.cancel()
        assert first["left"] == []
        return first["code"], first["out"], first["err"]


class Reader:
    """Reads what a process says while it runs, so that no full pipe holds it up."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._said: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=lambda: self._said.append(process.communicate()))
        self._thread.start()

    def finished(self, seconds: float) -> Ended:
        """Its output; it has so many seconds."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
            raise AssertionError(f"the run did not end in {seconds} s: {self._said}")
        return self._process.returncode, *self._said[0]


def finished(process: subprocess.Popen[str]) -> Ended:
    """The end of a run that nobody touches."""
    return Reader(process).finished(PATIENCE)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty where it has ended."""
    try:
        first = psutil.Process(pid)
        return [p for p in (first, *first.children(recursive=True)) if p.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def costs_for(framework: str, folder: Path) -> str:
    """The flag that spares trainings of this framework the profile."""
    flag = f"--cost_path={folder / framework}.json"
    flags = [f for f in FLAGS[FRAMEWORKS[framework][-1]] if not f.startswith(("--workers", "--placement_method", "--comm_cost"))]
    code, _, err = finished(baechi(*flags, "--costgen", flag))
    assert code == 0, err
    return flag


@pytest.mark.slow
def test_an_hour_of_faults(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    deadline = time.monotonic() + SECONDS
    happened: Counter[str] = Counter()
    ended: Counter[int] = Counter()
    costs = {framework: costs_for(framework, tmp_path) for framework in FRAMEWORKS}
    whole: dict[str, list[float]] = {}
    for framework, executors in FRAMEWORKS.items():
        code, out, err = finished(baechi(*FLAGS[executors[0]], costs[framework], f"--train_steps={STEPS}", "--json"))
        assert code == 0, err
        whole[framework] = json.loads(out)["losses"]
        assert len(set(whole[framework])) > STEPS // 2
    trainings: Counter[str] = Counter()
    while time.monotonic() < deadline:
        framework = draw.choice(list(FRAMEWORKS))
        folder = tmp_path / f"training_{sum(trainings.values())}"
        folder.mkdir()
        chaos = Chaos(draw, folder, framework, costs[framework])
        try:
            assert chaos.losses() == whole[framework]
        finally:
            happened += chaos.happened
            ended += chaos.ended
            trainings[framework] += 1
            print(json.dumps({"seed": SEED, "trainings": trainings, "attempts": ended.total(), "ended": ended, "happened": happened}))
