"""A window of steps under profilers: `profiling` of the spec. Imported only where one of its three is on.

    torch              profiles/attempt-N/rank-R.json.gz    operators, kernels and copies; ui.perfetto.dev shows it
    memory_snapshot    profiles/attempt-N/rank-R.pickle     allocations of the window with their Python stacks
    nsys               what `nsys profile --capture-range=cudaProfilerApi` catches; nsys itself writes it

Each step is a range `step N`, from reading its batch to the agreement at its end; its log line lies behind it. The
window opens and closes on a device that is drained, so it holds the kernels of its steps, and of a validation between
two of them, and no others: the first of them start without the host's lead. Inside, an operator costs microseconds
more, so the lines of these steps tell of a slower run, and some 30 when the trace is written, which counts for no step.
The numbers stay bitwise the same.

A run that is asked to stop inside the window writes what it has. One that fails writes nothing, because draining a
device that hangs would hold back the error; but a failed allocation writes the snapshot, which is about that moment.
"""

import contextlib
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pithtrain.events import Events
from pithtrain.spec import ProfilingSection
from pithtrain.watch import Watch
from pithtrain.world import World

SNAPSHOT_ENTRIES = 1_000_000  # allocations and frees that are kept, the newest: about 1 kB of host memory each


class Profile:
    """The profilers of one attempt. All ranks call it at the same steps; those of `profiling.ranks` record."""

    def __init__(self, keys: ProfilingSection, world: World, events: Events | None, watch: Watch) -> None:
        self.keys, self.world, self.events, self.watch = keys, world, events, watch
        cuda, mine = world.device.type == "cuda", world.rank in keys.ranks
        self._cuda = cuda and mine
        self._nsys, self._memory = self._cuda and keys.nsys, self._cuda and keys.memory_snapshot
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
        self._torch = profile(activities=activities) if mine and keys.torch else None
        self._first: int | None = None  # step of the open window
        self._ranges = contextlib.ExitStack()
        idle = [f"profiling.{key}" for key in ("nsys", "memory_snapshot") if getattr(keys, key)]
        if idle and not cuda and events is not None:
            message = f"{' and '.join(idle)} record nothing: they look at CUDA, and this run is on {world.device}"
            events.event("warning", message=message)

    def begin(self, step: int) -> None:
        """Before anything of `step` is done. The first step of the window that this attempt makes opens it."""
        if not self._inside(step):
            return
        if self._first is None:
            self._first = step
            self._open()
        if self._torch is not None:
            self._ranges.enter_context(record_function(f"step {step}"))
        if self._nsys:
            self._ranges.enter_context(torch.cuda.nvtx.range(f"step {step}"))

    def end(self, step: int, last: bool) -> float:
        """After `step`; a collective where the window or the run ends. Returns the seconds that writing took."""
        if not self._inside(step):
            return 0.0
        self._ranges.close()
        if step < (self.keys.end_step or 0) and not last:
            return 0.0
        began = time.perf_counter()
        self.watch.enter("save", step)  # a trace of many micro-batches may outlast the limit of a step
        written, problem = list[Path](), None
        try:
            self._close(written)
        except (OSError, RuntimeError) as error:  # a profile is not worth a run
            problem = f"rank {self.world.rank} could not write its profile: {error}"
        for paths, said in self.world.to_rank_zero((written, problem)):
            assert self.events is not None, "rank 0 has them"
            for path in paths:
                self.events.event("profiled", step=step, first_step=self._first, path=str(path))
            if said is not None:
                self.events.event("warning", message=said)
        return time.perf_counter() - began

    def _inside(self, step: int) -> bool:
        return (self.keys.start_step or 0) <= step <= (self.keys.end_step or 0)

    def _open(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        if self._memory:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=SNAPSHOT_ENTRIES)
            observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009  # the stubs do not know it
            observe(lambda *_: self._snapshot())
        if self._torch is not None:
            self._torch.start()
        if self._nsys:
            torch.cuda.profiler.start()

    def _close(self, written: list[Path]) -> None:
        """Stop all that records, then write; `written` gets each file that is whole on the disk."""
        if self._cuda:
            torch.cuda.synchronize()
        if self._nsys:
            torch.cuda.profiler.stop()
        if self._torch is not None:
            self._torch.stop()
        if self._memory:
            try:
                written.append(self._snapshot())
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
                self._memory = False
        if self._torch is not None:
            path = self.watch.run.trace(self.watch.attempt, self.world.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}")  # its suffix is what compresses it
            self._torch.export_chrome_trace(str(aside))
            written.append(aside.replace(path))
            self._torch = None

    def _snapshot(self) -> Path:
        path = self.watch.run.memory_snapshot(self.watch.attempt, self.world.rank)
        if self._memory:  # the observer outlives the window
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        return path
