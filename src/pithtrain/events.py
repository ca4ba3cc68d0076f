"""What a run says of itself: one line per logged step, one line per event, to the console, two files and W&B.

Rank 0 alone opens `Events`; the numbers that come in are already those of the whole mesh. Three places, three jobs:

    console          step 20/300 | loss 6.1034 | aux 1.021 | lr 1.00e-03 | grad 0.834 | 9,120 tok/s | ...
    metrics.jsonl    the same as one flat JSON object a step, unrounded, null where unknown: programs read this
    W&B              the same under train/..., held-out losses under val_loss/..., with train/step as the declared axis

The file is the truth and W&B is a view of it: nothing is ever read back from W&B, and nothing it does (no login, no
network, a full disk) stops training. The first failure is one warning, and that is all of it from then on. Every wait
for it is bounded, because the other ranks wait for rank 0.

A resumed run continues the files: `rewind(step)` first cuts the lines beyond the checkpoint, so that no step is there
twice. `step` counts from 1: line k has the loss of the batch that made update k.
"""

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pithtrain import rundir
from pithtrain.rundir import RunDir
from pithtrain.spec import RunSpec

WANDB_TIMEOUT_S = 60  # of init, and of the last upload: the other ranks wait for rank 0 that long
FAILED_TIMEOUT_S = 10  # of the last upload when a run fails or is preempted: Slurm may kill all after 30 s


@dataclasses.dataclass(frozen=True)
class Metrics:
    """One logged step, over the whole mesh. None: unknown, or not computed at this step.

    `loss` is the LM cross entropy alone in nats per token, `aux_loss` (1.0 is perfect balance) and `router_z_loss` are
    means over MoE layers, `head_z_loss` is the mean over tokens of the head's log partition function squared. Trained
    on is loss + training.z_loss_coef x head_z_loss + MoE layers x (moe.aux_loss_coef x aux_loss + moe.z_loss_coef x
    router_z_loss); of those without a coefficient there is no number.
    Expert load, over the global batch of this step: most slots over mean and entropy (1.0 is perfect balance) of the
    worst layer each, experts without a token summed over layers; `expert_load` has every layer and expert.
    `grad_norm` the global norm before clipping, memory in GiB, times in seconds. `validation_s` and the losses of
    held-out text are added to the line of a step that is validated (`Events.validated`).
    """

    step: int
    tokens_seen: int
    loss: float
    aux_loss: float | None
    router_z_loss: float | None
    head_z_loss: float | None
    lr: float
    grad_norm: float
    step_time_s: float | None
    tokens_per_second: float | None
    tflops_per_device: float | None
    mfu: float | None
    memory_peak_gib: float | None
    data_wait_s: float | None
    checkpoint_stall_s: float | None
    validation_s: float | None
    expert_load_max_over_mean: float | None
    expert_load_entropy: float | None
    dead_experts: int | None
    force_load_balance: bool | None  # true: no router decided
    attempt: int
    expert_load: list[dict[str, Any]] | None = None  # of each MoE layer, in a line every so often

    def flat(self) -> dict[str, Any]:
        """The keys of metrics.jsonl in their order. A number that is not finite is null: JSON has no NaN."""
        row = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "expert_load"}
        row |= {} if self.expert_load is None else {"expert_load": self.expert_load}
        return _finite(row)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    infinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    return row | dict.fromkeys(infinite)


def layer_load(layer: int, counts_E: Sequence[int]) -> dict[str, Any]:
    """How even a layer's load is, from its slots per expert. `max_over_mean` is 1 when even. `entropy`: the sum of
    f log(1 / f) over log E, 1 when even or for a lone expert, 0 when one of many takes all. Without any slot both are
    0. `dead`: experts without a slot."""
    total, experts = sum(counts_E), len(counts_E)
    entropy = sum(count / total * math.log(total / count) for count in counts_E if count)
    even = min(1.0, entropy / math.log(experts)) if experts > 1 else 1.0
    most, dead = max(counts_E) * experts / max(total, 1), sum(count == 0 for count in counts_E)
    return {"layer": layer, "max_over_mean": most, "entropy": even, "dead": dead, "counts": counts_E}


def console_line(metrics: Metrics, max_steps: int) -> str:
    """The console's line for a step; what is unknown is left out."""
    parts: list[tuple[str, float | None]] = [
        (f"step {metrics.step}/{max_steps}", 0.0),
        ("loss {:.4f}", metrics.loss),
        ("aux {:.3f}", metrics.aux_loss),
        ("lr {:.2e}", metrics.lr),
        ("grad {:.3f}", metrics.grad_norm),
        ("{:,.0f} tok/s", metrics.tokens_per_second),
        ("{:.3g} TFLOP/s", metrics.tflops_per_device),
        ("{:.1f} GiB", metrics.memory_peak_gib),
    ]
    forced = " | forced routing" if metrics.force_load_balance else ""
    return " | ".join(text.format(value) for text, value in parts if value is not None) + forced


class Events:
    """The writer of one attempt. Open it on rank 0 only, call `rewind` after the checkpoint is chosen, then `close`."""

    def __init__(self, run: RunDir, spec: RunSpec, attempt: int) -> None:
        self.run, self.spec, self.attempt = run, spec, attempt
        self._metrics_file = _open_whole(run.metrics)
        self._events_file = _open_whole(run.events)
        self._wandb: Any = None  # the one W&B run of all attempts; a failure turns it off
        if spec.logging.wandb.mode != "disabled":
            self._wandb = self._bounded(lambda: _open_wandb(run, spec, attempt), WANDB_TIMEOUT_S + 15)

    def metrics(self, metrics: Metrics) -> None:
        row = metrics.flat()
        self._write(self._metrics_file, row)
        print(console_line(metrics, self.spec.training.max_steps), flush=True)
        self._to_wandb(row)

    def validated(self, step: int, losses: Mapping[str, float], seconds: float) -> None:
        """Complete the newest line, that of `step`, with val_loss/NAME, nats per token of each corpus, and
        validation_s. A full disk may cost these figures, as it may cost the line, and not the run."""
        found = _finite({**{f"val_loss/{name}": loss for name, loss in losses.items()}, "validation_s": seconds})
        self.event("validated", step=step, **found)
        rows = rundir.read_lines(self.run.metrics)
        if rows and rows[-1]["step"] == step:
            with contextlib.suppress(OSError):
                self._rewrite([*rows[:-1], rows[-1] | found])
        self._to_wandb({"step": step, **found})

    def _to_wandb(self, row: dict[str, Any]) -> None:
        if self._wandb is None:
            return
        figures = {key: value for key, value in row.items() if value is not None and key != "expert_load"}
        values = {key if "/" in key else f"train/{key}": value for key, value in figures.items()}
        for layer in row.get("expert_load", ()):  # a page of its own; the counts stay in the file
            for key in ("max_over_mean", "entropy", "dead"):
                values[f"expert_load/{key}_layer_{layer['layer']:03d}"] = layer[key]
        try:
            self._wandb.log(values)
        except Exception as error:
            self._without_wandb(str(error))

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened: started, saved, resumed, ... ; fields are plain JSON values."""
        row = {"time": time.time(), "event": kind, "attempt": self.attempt, **fields}
        self._write(self._events_file, row)
        text = ", ".join(f"{key} {value}" for key, value in fields.items())
        print(f"{kind}: {text}" if text else kind, flush=True)

    def _write(self, file: TextIO, row: dict[str, Any]) -> None:
        """A full disk must not cost the state in memory: what it does not take stays in the buffer for a later line."""
        with contextlib.suppress(OSError):
            print(json.dumps(row), file=file)
            self._metrics_file.flush()
            self._events_file.flush()

    def rewind(self, step: int) -> dict[str, Any]:
        """Cut the lines of metrics.jsonl beyond `step`, the step of the checkpoint that training goes on from. Returns
        the line of that step, {} where there is none."""
        rows = rundir.read_lines(self.run.metrics)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            self._rewrite(kept)
            self.event("rewound", step=step, lines_cut=len(rows) - len(kept))
        return kept[-1] if kept and kept[-1]["step"] == step else {}

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        rundir.write_atomic(self.run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        self._metrics_file.close()
        self._metrics_file = _open_whole(self.run.metrics)

    def close(self, exit_code: int, preempted: bool = False) -> None:
        """`preempted`: the run goes on in another attempt, which W&B should not take for an end."""
        if (wandb := self._wandb) is not None:

            def finish() -> None:
                if preempted:
                    wandb.mark_preempting()
                wandb.finish(exit_code=exit_code)

            self._bounded(finish, FAILED_TIMEOUT_S if exit_code else WANDB_TIMEOUT_S)
        for file in (self._metrics_file, self._events_file):
            with contextlib.suppress(OSError):
                file.close()

    def _bounded(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """The answer of a call of W&B, None where it fails, in `timeout_s`: its own limits do not cover every wait."""
        answer: list[Any] = []
        failure = f"no answer within {timeout_s:.0f} s"

        def run() -> None:
            nonlocal failure
            try:
                answer.append(call())
            except BaseException as error:  # it is known to raise SystemExit and KeyboardInterrupt as well
                failure = str(error).strip() or type(error).__name__

        thread = threading.Thread(target=run, name="wandb", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if answer:
            return answer[0]
        self._without_wandb(failure)
        return None

    def _without_wandb(self, problem: str) -> None:
        self._wandb = None
        self.event("warning", message=f"W&B: {' '.join(problem.split())}; training goes on without it")


def _open_wandb(run: RunDir, spec: RunSpec, attempt: int) -> Any:
    import wandb  # about a second

    options = spec.logging.wandb
    if options.mode == "online" and not wandb.login(prompt=False, verify=False, timeout=WANDB_TIMEOUT_S):
        raise RuntimeError("not logged in (`wandb login`, or logging.wandb.mode=offline)")
    os.environ["WANDB_DIR"] = str(run.path)
    opened = wandb.init(
        project=options.project,
        entity=options.entity,
        group=options.group,
        tags=list(options.tags),
        name=(options.name or spec.name) + ("-forced-routing" if spec.moe.force_load_balance else ""),
        id=run.wandb_id.read_text(encoding="utf-8").strip(),
        resume="allow",
        mode=options.mode,
        dir=run.path,
        config=spec.model_dump(mode="json") | {"attempt": attempt},
        allow_val_change=True,
        settings=wandb.Settings(init_timeout=WANDB_TIMEOUT_S, console="off", silent=True),
    )
    opened.define_metric("train/step")
    opened.define_metric("*", step_metric="train/step")
    return opened


def _open_whole(path: Path) -> TextIO:
    """Open a `.jsonl` file for appending, without the torn last line that a killed writer may have left."""
    with path.open("a+b") as file:
        file.seek(0)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)
    return path.open("a", encoding="utf-8")
