"""The run and the step, in the order in which they happen. Read this first.

    run     connect -> preflight -> build -> resume -> loop -> save -> marker -> leave
    loop    read a batch -> step -> agree to stop or save -> log -> save -> validate
    step    count the valid tokens of the global batch
            forwards and backwards (pipeline; gradients are reduced as their buckets fill)
            expert load of the global batch, gradient norm over all ranks, and whether the loss stands out
            selection biases one step against that load
            clip and AdamW or Muon on the shards; all-gather the new weights (each layer waits for its own)

A step reads nothing back from the device but the row counts of each MoE layer where ep > 1 (`ops/dispatch`); the host
looks at loss and norm when it logs or saves. Position is two numbers, steps
and sequences, and everything random is a function of them and the seed.

A request to stop or to save reaches any one rank at any moment, and all must act on it at the same step. So each step
begins a small all-reduce of the flags on the CPU and reads its answer when it ends: no wait of its own, and the run
acts on a request at the end of the step after the one that it arrived in, at the latest.
"""

import functools
import itertools
import math
import re
import resource
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pithtrain import catalog, checkpoint, convert, preflight
from pithtrain.batches import read_batches, valid_tokens
from pithtrain.build import Engine, build, device_type
from pithtrain.catalog import Marker
from pithtrain.checkpoint import DamagedError, Position, Saved, SaveError, Saver
from pithtrain.data import Dataset, held_out, open_dataset
from pithtrain.errors import CapacityError, CheckpointError, LossStoodOut, NotFiniteError, PithtrainError, RunFailed
from pithtrain.events import Events, Metrics, layer_load
from pithtrain.models.contract import active_parameters, causal_keys
from pithtrain.ops.linear import accumulate_dtype
from pithtrain.pipeline import MicroBatch
from pithtrain.rundir import RunDir, read_lines
from pithtrain.spec import LrSchedulerSection, RunSpec
from pithtrain.tape import Stats, new_stats
from pithtrain.validation import Validation
from pithtrain.watch import Watch
from pithtrain.world import Place, World, all_reduce_sum, connect

RETRY_SAVE_S = 30.0  # between two tries of a save that could not be written
NOTHING_SAVED = "nothing is saved: not at the end, not at a stop, not on request"
BF16_PEAK_FLOPS = {"H100": 989.5e12, "H200": 989.5e12, "B200": 2250e12}  # dense, per device; MFU is quoted against it


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step whose state is saved, and whether that was the last one asked for. With forced
    routing nothing is saved: the last step of a finished run, the first to go on from of one that was stopped."""

    step: int
    finished: bool


@dataclass(frozen=True)
class StepResult:
    """Device scalars and sums of one step, read by the host only when it logs."""

    stats: Stats
    norm: Tensor
    not_finite: Tensor  # whether the norm was not, and so nothing is trained
    stood_out: Tensor  # whether the loss did: then neither
    empty: Tensor  # whether no token of the global batch had a label: then nothing is trained


@dataclass(frozen=True)
class Job:
    """What every part of a run reads. `events`: of rank 0."""

    spec: RunSpec
    run_dir: RunDir
    world: World
    events: Events | None
    watch: Watch

    def tell(self, kind: str, **fields: Any) -> None:
        """An event, if this is rank 0."""
        if self.events is not None:
            self.events.event(kind, **fields)

    def warn(self, message: str) -> None:
        self.tell("warning", message=message)


def run(spec: RunSpec, run_dir: RunDir, place: Place, watch: Watch) -> Outcome:
    """Train to `training.max_steps`, or until any rank's `watch` is asked to stop; the state is saved either way.

    Every rank of the run calls it. The marker that says how it ended is written when it returns. Raises PithtrainError
    with a readable cause; other exceptions are ours.
    """
    if spec.training.deterministic:
        torch.use_deterministic_algorithms(True)
        # we read nothing that was not written
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    watch.enter("init", 0)
    with connect(place, spec.mesh, device_type(spec), spec.distributed) as world:
        events = Events(run_dir, spec, place.attempt) if world.rank == 0 else None
        try:
            outcome = _run(Job(spec, run_dir, world, events, watch))
            watch.ended(outcome.step, outcome.finished)
            world.barrier()  # no rank leaves before the marker is there
        except BaseException as error:
            if events is not None:
                events.close(exit_code=1)
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                knobs = "training.micro_batch_size, training.sequence_length, or spread the model over more ranks"
                raise CapacityError(f"rank {world.rank} is out of device memory ({error}); lower {knobs}") from error
            raise
        if events is not None:
            cancelled = not outcome.finished and run_dir.stop.exists()
            preempted = not outcome.finished and not cancelled
            word = "cancelled" if cancelled else "preempted" if preempted else "done"
            events.event(word, step=outcome.step, **({"reason": watch.reason} if watch.reason else {}))
            events.close(exit_code=int(preempted), preempted=preempted)
        return outcome


def _run(job: Job) -> Outcome:
    spec, world, watch, training = job.spec, job.world, job.watch, job.spec.training
    report = preflight.look(world)
    if world.rank == 0:
        for kind, fields in preflight.judge(report, job.run_dir.name):
            job.tell(kind, **fields)
    dataset = None
    if world.pp == 0 or spec.data.document_mask:  # has the embedding and the loss; documents are every rank's
        dataset = open_dataset(spec)
    corpora = held_out(spec, None if dataset is None else dataset.fingerprint)
    watch.enter("init", 0)
    engine = build(spec, world)
    about = _about(spec, job.run_dir, dataset)
    watch.enter("load", 0)
    position = _resume(job, engine, about)
    total = position.samples + (training.max_steps - position.step) * training.global_batch_size
    if dataset is not None:
        dataset.require(total)
    newest: dict[str, Any] = {}
    if job.events is not None:
        newest = job.events.rewind(position.step)
        _tell_start(job, engine, position.step)
        for read in [] if dataset is None else dataset.passes(position.samples, total):
            job.tell("data", **read)

    z_L = torch.zeros(spec.model.config.num_hidden_layers, dtype=accumulate_dtype(engine.dtype), device=world.device)
    meter = _Meter(torch.zeros(7, device=world.device), z_L)
    keys = spec.checkpoint
    saver = Saver(
        *(job.run_dir.checkpoints, engine.zero, world, about),
        asynchronous=keys.async_save,
        keep_last=keys.keep_last,
        keep_interval=keys.keep_interval,
    )
    saves = _Saves(job, engine, saver, meter, position.step)
    validation = Validation(spec, engine, job.events, watch, corpora)
    stop = world.max(watch.should_stop())()[0]  # asked while it started: nothing is lost, so nothing is saved
    # a stop came before the validation of the step that was saved
    owed = validation.due(position.step) and world.from_rank_zero(newest.get("validation_s", 0) is None)
    if owed and not stop:
        stop = validation.run(position.step, "first_step")
        owed = bool(stop)
    if not stop and position.step < training.max_steps:
        if not spec.moe.force_load_balance:
            saver.prepare()
        watch.enter("first_step", position.step)
    profile = None
    if spec.profiling.on:
        from pithtrain.profiling import Profile  # nothing of it where it is off

        profile = Profile(spec.profiling, world, job.events, watch)
    meter.restart()
    while position.step < training.max_steps and not stop:
        agreed = world.max(watch.should_stop(), watch.should_save(), saver.writing)
        if profile is not None:
            profile.begin(position.step + 1)
        begin = time.perf_counter()
        batches = read_batches(dataset, spec, world, position.samples)
        meter.data_wait_s += time.perf_counter() - begin

        step = position.step + 1
        lr = learning_rate(spec.lr_scheduler, spec.optimizer.lr, training.max_steps, step)
        result = train_step(engine, spec, batches, lr)
        tokens = training.global_batch_size * training.sequence_length
        position = Position(step, position.samples + training.global_batch_size, position.tokens + tokens)
        meter.stepped(step, result)
        meter.attention_flops += _attention_flops(spec, batches) if world.rank == 0 else 0.0

        stop, requested, writing = agreed()
        last = stop or step == training.max_steps
        if profile is not None:
            meter.since += profile.end(step, bool(last))
        requested = requested and not saves.requested  # else one that is under way
        log_due = last or step % spec.logging.interval == 0
        save_due = last or requested or (spec.checkpoint.interval is not None and step % spec.checkpoint.interval == 0)
        if log_due or save_due:
            fatal = _guard(job, meter, step)
            saves.step_s = (time.perf_counter() - meter.since) / meter.steps
            if log_due or fatal is not None:
                _log(job, meter, position, lr, result)
                meter.restart()
            if fatal is not None:
                saves.save(position, last=True)  # without the updates of those steps, so what stands is sound
                raise fatal
        if save_due:
            saves.save(position, bool(requested), bool(last))
        elif saver.in_flight and not writing:  # on every rank
            saves.hear(position)
        owed = validation.due(step)
        if owed and not stop:
            begin = time.perf_counter()
            stop = validation.run(step)
            owed = bool(stop)
            meter.since += time.perf_counter() - begin
            if stop:  # asked for meanwhile: what is owed is done by who goes on from here
                if save_due:
                    saves.hear(position)
                else:
                    saves.save(position, last=True)
                if profile is not None:
                    profile.end(step, last=True)
        if not (last or stop):
            watch.enter("step", step)
    watch.agreed(stop)
    engine.zero.wait_for_weights()
    finished = position.step >= training.max_steps and not owed
    if finished and spec.checkpoint.export_hf == "final":
        _export(job, position.step)
    return Outcome(position.step if finished else saves.step, finished)


def _tell_start(job: Job, engine: Engine, step: int) -> None:
    spec = job.spec
    job.tell("started", step=step, mesh=asdict(spec.mesh), device=str(job.world.device))
    if spec.mesh.ep > 1:
        job.tell("transport", of="expert traffic", used=engine.transport.name, why=engine.transport.why)
    kinds = [(re.sub(r"\.\d+\.", ".*.", p.name), p) for p in spec.model.config.parameters()]
    decayed, kept = (sorted({name for name, p in kinds if p.decay == decays}) for decays in (True, False))
    job.tell("weight_decay", value=spec.optimizer.weight_decay, decayed=decayed, kept=kept)
    if spec.optimizer.type == "muon":
        moved, rest = (
            sorted({n for n, p in kinds if p.trained and (p.moments(True) == 1) == own}) for own in (True, False)
        )
        job.tell("muon", momentum=spec.optimizer.momentum, muon=moved, adamw=rest)
    if spec.fp8.enabled:
        quantized, kept = (sorted({name for name, p in kinds if p.fp8 == narrow}) for narrow in (True, False))
        job.tell("fp8", recipe=spec.fp8.recipe, quantized=quantized, kept=kept)
    if spec.moe.force_load_balance:
        unseen = "nothing is validated, and " if spec.validation.interval else ""
        job.warn(f"moe.force_load_balance: tokens go round robin, so {unseen}{NOTHING_SAVED}")


@dataclass
class _Saves:
    """The run's saves: when one is begun and when its end is heard of, at the same step on all ranks.

    A save that cannot be written must not cost the state, which is in memory: the ranks wait and try again for up to
    `distributed.save_timeout_s`, and say so each time, while people make room.
    """

    job: Job
    engine: Engine
    saver: Saver
    meter: "_Meter"
    step: int  # whose state is on the disk
    requested: bool = False  # somebody waits for the save in flight
    step_s: float = 0.0  # of the steps before the newest line
    warned: bool = False

    def save(self, position: Position, requested: bool = False, last: bool = False) -> None:
        """Begin a save; it is on the disk when this returns if it is synchronous, or `last` whatever the spec says.
        Raises SaveError when it could not be written for `save_timeout_s`. With forced routing it does nothing."""
        spec, world, watch = self.job.spec, self.job.world, self.job.watch
        if spec.moe.force_load_balance:
            watch.saved()  # or one that is asked for would be due at every step
            return
        limit = spec.distributed.save_timeout_s
        counts = all_reduce_sum(self.engine.counts_LE.clone(), world.pp_group).tolist()  # of all stages
        deadline = time.monotonic() + limit
        while True:
            begin = time.perf_counter()
            try:
                watch.enter("save", position.step)
                self._settle()  # the one before
                watch.enter("save", position.step)  # the limit is that of one save
                self.requested = self.requested or requested
                losses = None
                if spec.guards.loss_spike_sigma is not None:
                    losses = [loss for loss in self.engine.losses.tolist() if math.isfinite(loss)]
                self.saver.save(position, counts, losses)
                if last or not self.saver.asynchronous:
                    self._settle()
                return
            except SaveError as error:
                if not world.from_rank_zero(time.monotonic() < deadline):
                    raise
                self._tell(position, error)
                time.sleep(min(RETRY_SAVE_S, limit / 10))
            finally:
                self.meter.stalled(time.perf_counter() - begin)

    def hear(self, position: Position) -> None:
        """The write behind the steps has ended on all ranks; if it failed, the state as it is now is saved before the
        next step."""
        try:
            self._settle()
        except SaveError as error:
            self._tell(position, error)
            self.save(position, last=True)

    def _tell(self, position: Position, error: SaveError) -> None:
        until = f"tried again until {self.job.spec.distributed.save_timeout_s} s are over"
        self.job.tell("save_failed", step=position.step, message=f"{error}; {until}")

    def _settle(self) -> None:
        saved = self.saver.wait()
        if saved is None:
            return
        self.step = saved.position.step
        if self.requested:
            self.job.watch.saved()
        seconds = {"stall_s": round(saved.stall_s, 3), "write_s": round(saved.write_s, 3)}
        facts = {"path": str(saved.path), **seconds, "bytes": saved.num_bytes, "requested": self.requested}
        self.job.tell("saved", step=self.step, **facts)
        for note in saved.notes:
            self.job.warn(note)
        self._warn_of_short_delay(saved)
        self.requested = False

    def _warn_of_short_delay(self, saved: Saved) -> None:
        """Once: the time limit may end the run before the save that its signal asks for is through."""
        save_s = max(saved.stall_s, saved.write_s) * (2 if self.saver.asynchronous else 1)  # one is under way
        slurm, need = self.job.spec.slurm, 1.5 * save_s + 2 * self.step_s
        if self.warned or slurm.time is None or slurm.signal_delay_s >= need:
            return
        self.warned = True
        told = f"1.5 x a save of {save_s:.1f} s + 2 steps of {self.step_s:.1f} s"
        self.job.warn(
            f"slurm.signal_delay_s = {slurm.signal_delay_s} is shorter than {told}: the time limit may end the run "
            f"before it is saved; make it {math.ceil(need)} or more"
        )


def _export(job: Job, step: int) -> None:
    """`checkpoint.export_hf: final`: the last checkpoint in Hugging Face form, in hf/step-*; all ranks write."""
    world, watch = job.world, job.watch
    watch.enter("save", step)
    begin = time.perf_counter()
    newest = catalog.newest(job.run_dir.checkpoints, lambda reason: None) if world.rank == 0 else None
    source = world.from_rank_zero(newest)
    assert source is not None, "the last step has just been saved"
    out = job.run_dir.hf / source.name
    if world.from_rank_zero(out.exists()):  # a finished run that was started again
        return
    if world.rank == 0:
        shutil.rmtree(catalog.partial(out), ignore_errors=True)  # of an export that was killed

    notes: list[str] = []

    def beat(*_: object) -> None:
        watch.enter("save", step)

    share = {"rank": world.rank, "size": world.mesh.size, "barrier": world.barrier}
    try:
        convert.export_hf(source, out, **share, note=notes.append, progress=beat)
    except CheckpointError as error:  # another attempt finds the run finished and tries this again
        raise RunFailed(f"step {step} is saved, and cannot be exported: {error}") from error
    for note in notes:
        job.warn(note)
    job.tell("exported", step=step, path=str(out), seconds=round(time.perf_counter() - begin, 3))


def train_step(engine: Engine, spec: RunSpec, batches: list[MicroBatch], lr: float) -> StepResult:
    """One optimizer step over the global batch. `batches`: this data rank's (`read_batches`)."""
    world, zero, config = engine.world, engine.zero, spec.model.config
    stats = new_stats(config.num_hidden_layers, config.num_experts, world.device, accumulate_dtype(engine.dtype))
    zero.begin_step(spec.num_micro_batches)
    scale = loss_scale(batches, engine)
    empty = scale == 0  # no update then: balance losses and weight decay alone would train something else
    engine.pipeline.step(batches, scale, stats)
    counts_LE = all_reduce_sum(stats.counts_LE.clone(), world.dense_group)  # integers: alike on every mesh
    # NaN if a router's logits were not finite, which gradients need not show, or if nothing is to be learnt
    norm = zero.grad_norm(torch.where(empty, math.nan, 0 * stats.z_L.sum()))
    stood_out, loss = torch.zeros_like(empty), None
    if spec.guards.loss_spike_sigma is not None:
        loss = world.sum(stats.loss.to(torch.float64, copy=True))
        stood_out = norm.isfinite() & stands_out(loss, engine.losses, spec.guards.loss_spike_sigma)
    rates = lr, norm, spec.training.max_grad_norm, counts_LE, spec.moe.bias_update_rate
    left_out = zero.update(engine.optimizer, *rates, leave_out=stood_out) > 0
    engine.counts_LE.copy_(torch.where(left_out, engine.counts_LE, counts_LE))
    if loss is not None:
        engine.losses.copy_(torch.where(left_out, engine.losses, torch.cat((engine.losses[1:], loss.view(1)))))
    return StepResult(stats, norm.where(~empty, 0.0), left_out & ~stood_out & ~empty, stood_out, empty)


def stands_out(loss: Tensor, losses: Tensor, sigma: float) -> Tensor:
    """Whether a loss lies more than `sigma` standard deviations above the mean of `losses` (NaN: not known yet), of
    which half must be known; all on the device."""
    known = losses.isfinite()
    count = known.sum()
    mean = losses.where(known, 0.0).sum() / count
    deviation = ((losses - mean).where(known, 0.0).square().sum() / (count - 1)).sqrt()
    return (count >= len(losses) // 2) & (loss > mean + sigma * deviation)


def loss_scale(batches: list[MicroBatch], engine: Engine) -> Tensor:
    """One over the valid tokens of the global batch, a device scalar, the same on all ranks; 0 if there is none. Summed
    over all ranks, of which those without tokens bring 0: the groups of data ranks still carry the weights of the step
    before, and a sum on them would wait for all of these."""
    valid = engine.world.sum(valid_tokens(batches, engine.world))
    return torch.where(valid > 0, 1 / valid, 0.0).to(accumulate_dtype(engine.dtype))


def learning_rate(schedule: LrSchedulerSection, peak: float, max_steps: int, step: int) -> float:
    """The rate of step `step`, counted from 1, as `LrSchedulerSection` has it. Warm-up is linear from peak /
    warmup_steps to peak, and wsd's decay is linear."""
    decay = schedule.decay_steps or max_steps
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.type == "constant":
        return peak
    begin = max_steps - decay if schedule.type == "wsd" else schedule.warmup_steps
    end = max_steps if schedule.type == "wsd" else decay
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.type == "cosine" else 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * left


def _resume(job: Job, engine: Engine, about: dict[str, Any]) -> Position:
    """Load the checkpoint to go on from; the beginning where there is none. Rank 0 chooses and checks, since on a
    shared file system ranks may see different folders for a while."""
    spec, world, checkpoints = job.spec, job.world, job.run_dir.checkpoints

    def report(reason: str) -> None:
        job.tell("skipped_checkpoint", reason=reason)

    def choose() -> list[Path]:
        found = catalog.complete(checkpoints, report)  # its own progress wins: a requeue goes on
        if found and spec.moe.force_load_balance:
            raise CheckpointError(
                f"{checkpoints} holds the state of a real training, which moe.force_load_balance would leave "
                "behind unsaved: measure in a run of its own"
            )
        if found:
            return found
        saved = [row["step"] for row in read_lines(job.run_dir.events) if row["event"] == "saved"]
        if saved:  # a restart from 0 would cut the run's history
            raise CheckpointError(
                f"step {saved[-1]} was saved, and {checkpoints} holds no complete checkpoint any more; "
                "put one back, or start another run"
            )
        return catalog.candidates(Path(spec.resume), report) if spec.resume != "auto" else []

    def look(path: Path) -> Marker:
        content = catalog.read(path)
        catalog.check(path, content, about)
        if content["kind"] != "full":
            raise CheckpointError(f"{path} holds weights alone, no optimizer state: name it as init_from")
        catalog.check_optimizer(path, content, spec.optimizer.type)
        have = {key: one["shape"] for key, one in content["tensors"].items()}
        muon = spec.optimizer.type == "muon"
        catalog.check_tensors(path, have, checkpoint.shapes(spec.model.config.parameters(), muon))
        if content["step"] > spec.training.max_steps:
            raise CheckpointError(
                f"{path} is at step {content['step']}, beyond training.max_steps = {spec.training.max_steps}; "
                "raise max_steps"
            )
        return content

    candidates = world.from_rank_zero(choose() if world.rank == 0 else [])
    for path in candidates:
        job.watch.enter("load", 0)
        content = world.from_rank_zero(look(path) if world.rank == 0 else cast(Marker, {}))
        try:
            position = checkpoint.load(path, engine.zero, world, content)
        except DamagedError as error:  # on all ranks
            if path == candidates[-1]:
                raise
            report(f"{error}; the one before is taken")
            continue
        if counts := content.get("expert_counts"):
            own = [[n * (layer in engine.layers) for n in row] for layer, row in enumerate(counts)]
            engine.counts_LE.copy_(torch.tensor(own))
        if losses := (content.get("recent_losses") or [])[-len(engine.losses) :]:
            engine.losses[-len(losses) :] = torch.tensor(losses, dtype=torch.float64)
        job.tell("resumed", step=position.step, path=str(path))
        saved, kept = checkpoint.moments_dtype(content), spec.optimizer.moments_dtype
        if saved != kept and "bfloat16" in (saved, kept):
            changed = f"moments were {saved} up to step {position.step} and are {kept} from here on"
            job.warn(f"optimizer.moments_dtype: {changed}")
        for key, theirs, ours in catalog.differences("data", content["data"], about["data"]):
            changed = f"{key} was {theirs} up to step {position.step} and is {ours} from here on"
            job.warn(f"{changed}: a sample's number stands for other text, so some is skipped and some read again")
        return position
    if spec.init_from is not None:
        told: list[str] = []
        convert.init(spec.init_from, engine.zero, world, spec.model, told.append, about["tokenizer"])
        job.tell("initialised", path=str(spec.init_from))
        for note in told:
            job.warn(note)
    return Position(step=0, samples=0)


def _about(spec: RunSpec, run_dir: RunDir, dataset: Dataset | None) -> dict[str, Any]:
    """What a checkpoint says of its run, beside the position and the tensors."""
    return {
        "run": run_dir.name,
        "spec_hash": spec.stable_hash(),
        "model": spec.model.model_dump(mode="json"),
        # the ranks of the first stage have a data set, at least
        "tokenizer": None if dataset is None else dataset.fingerprint,
        "tokenizer_path": str(spec.data.tokenizer) if spec.data.tokenizer else None,
        "data": {  # what a position in samples means
            "sources": [source.model_dump(mode="json") for source in spec.data.sources],
            "shuffle": spec.data.shuffle,
            "seed": spec.training.seed,
            "sequence_length": spec.training.sequence_length,
        },
    }


@dataclass
class _Meter:
    """What adds up between two lines: clocks, on the host, and `skips`, on the device: how many updates were left out
    since the norm was not finite and the first such step, with the z of its routers on this rank; the same where the
    loss stood out; the steps without a label; then, over the lines, how many updates in a row were left out up to now,
    and at most. `attention_flops`: per token, of each step, on rank 0."""

    skips: Tensor
    z_L: Tensor
    since: float = 0.0
    steps: int = 0
    data_wait_s: float = 0.0
    stall_s: float = 0.0
    attention_flops: float = 0.0

    def restart(self) -> None:
        self.since, self.steps = time.perf_counter(), 0
        self.data_wait_s = self.stall_s = self.attention_flops = 0.0

    def stalled(self, seconds: float) -> None:
        self.stall_s += seconds
        self.since += seconds  # the step rate is that of steps; the stall has a key of its own

    def stepped(self, step: int, result: StepResult) -> None:
        self.steps += 1
        count, first, spikes, first_spike, empty, row, longest = self.skips
        is_first = result.not_finite & (count == 0)
        is_first_spike = result.stood_out & (spikes == 0)
        not_finite = count + result.not_finite, torch.where(is_first, step, first)
        stood_out = spikes + result.stood_out, torch.where(is_first_spike, step, first_spike)
        left_out = result.not_finite | result.stood_out
        row = (row + left_out) * left_out
        self.skips = torch.stack((*not_finite, *stood_out, empty + result.empty, row, torch.maximum(row, longest)))
        self.z_L = torch.where(is_first, result.stats.z_L, self.z_L)


def _guard(job: Job, meter: _Meter, step: int) -> PithtrainError | None:
    """What was left out since the last look, told; and, where `guards` do not let it pass, the error that ends the run
    once the state is saved. Waits for the device; a collective of all ranks where a norm was not finite."""
    spec, world, guards = job.spec, job.world, job.spec.guards
    count, first, spikes, first_spike, empty, _, longest = meter.skips.tolist()
    meter.skips[:5] = 0
    if empty:
        job.warn(f"no token had a label in {empty:.0f} of the steps up to {step}: those updates were left out")
    found, rules = [], []
    if count:
        where = (
            f"at step {first:.0f}{_first_bad_router(meter.z_L, world)}, and at {count:.0f} of the steps up to {step}"
        )
        found.append(f"the gradient norm was not finite {where}")
        rules.append("guards.non_finite = skip")
    if spikes:
        rules.append(f"guards.loss_spike_sigma = {guards.loss_spike_sigma:g}")
        found.append(f"the loss stood out at step {first_spike:.0f}, and at {spikes:.0f} of the steps up to {step}")
    if not found:
        return None
    told = f"{'; '.join(found)}; those updates were left out"
    most, stops = guards.max_consecutive_skips, count > 0 and guards.non_finite == "stop"
    if not stops and longest < most:
        job.warn(f"{told}, as {' and '.join(rules)} has it")
        return None
    forced = spec.moe.force_load_balance
    kept, then = (NOTHING_SAVED, "start again") if forced else (f"step {step} is saved", "resume")
    rule = "non_finite is 'stop'" if stops else f"max_consecutive_skips is {most}"
    if stops or not spikes:
        advice = f"lower optimizer.lr or look at the data of that step, then {then}"
        return NotFiniteError(f"{told} and {kept}. guards.{rule}: {advice}")
    advice = f"look at the data of that step; where they are right, {then} with a larger guards.loss_spike_sigma"
    return LossStoodOut(f"{told} and {kept}. guards.{rule}: {advice}")


def _first_bad_router(z_L: Tensor, world: World) -> str:
    """Where router logits were first not finite, in words; "" where all were. A collective of all ranks."""
    found = world.to_rank_zero(z_L.isfinite().logical_not().nonzero().flatten().tolist())
    layer = min((layer for layers in found for layer in layers), default=None)
    ranks = ", ".join(str(rank) for rank, layers in enumerate(found) if layer in layers)
    return world.from_rank_zero("" if layer is None else f" (non-finite router logits, layer {layer}, rank {ranks})")


def _attention_flops(spec: RunSpec, batches: list[MicroBatch]) -> float:
    """FLOPs per token of attention's core, forward and backward, as the documents of these micro-batches have it."""
    config, length = spec.model.config, spec.training.sequence_length
    lengths: Counter[int] = Counter()
    for batch in batches:
        rows = batch.part.documents if batch.part is not None else None
        for starts in rows or [[0]] * spec.training.micro_batch_size:
            lengths.update(b - a for a, b in itertools.pairwise((*starts, length)))

    @functools.cache
    def keys(window: int | None) -> float:
        seen = sum(count * n * causal_keys(n, window) for n, count in lengths.items())
        return seen / (len(batches) * spec.training.micro_batch_size * length)

    layers = map(config.carried, range(config.num_hidden_layers))
    return sum(6 * layer.core_width * keys(layer.window) for layer in layers)


def _log(job: Job, meter: _Meter, position: Position, lr: float, result: StepResult) -> None:
    """Write the line of a step on rank 0, which waits for the device; a collective of all ranks."""
    spec, world, events, stats = job.spec, job.world, job.events, result.stats
    config, training = spec.model.config, spec.training
    sums = stats.loss.view(1), stats.head_z.view(1), stats.balance_L, stats.z_L, stats.counts_LE.flatten()
    total = world.sum(torch.cat([each.to(torch.float64) for each in sums]))
    if events is None:
        return
    parts = total.cpu().split([len(each) for each in sums])
    (loss,), (head_z,), balance_L, z_L, counts = (part.tolist() for part in parts)
    elapsed = time.perf_counter() - meter.since
    experts = config.num_experts
    moe = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    loads = [layer_load(layer, [int(n) for n in counts[layer * experts :][:experts]]) for layer in moe]
    every = spec.logging.expert_load_interval
    line_before = (position.step - 1) // spec.logging.interval * spec.logging.interval  # whether we wrote it or not
    whole = every is not None and position.step // every > line_before // every
    balanced = bool(moe) and spec.moe.load_balance_type != "none"
    tokens_per_step = training.global_batch_size * training.sequence_length
    rate = meter.steps * tokens_per_step / elapsed
    flops = rate * (6 * active_parameters(config) + meter.attention_flops / meter.steps) / world.mesh.size
    peak = _peak_flops(world.device)
    line = Metrics(
        step=position.step,
        tokens_seen=position.tokens,
        loss=loss,
        aux_loss=sum(balance_L[layer] for layer in moe) / len(moe) if balanced else None,
        router_z_loss=sum(z_L[layer] for layer in moe) / len(moe) if moe and spec.moe.z_loss_coef else None,
        head_z_loss=head_z if training.z_loss_coef else None,
        lr=lr,
        grad_norm=result.norm.item(),
        step_time_s=elapsed / meter.steps,
        tokens_per_second=rate,
        tflops_per_device=flops / 1e12,
        mfu=flops / peak if peak else None,
        memory_peak_gib=_memory_peak_gib(world.device),
        data_wait_s=meter.data_wait_s / meter.steps,
        checkpoint_stall_s=meter.stall_s,
        validation_s=None,  # `Events.validated` completes the line
        expert_load_max_over_mean=max((load["max_over_mean"] for load in loads), default=None),
        expert_load_entropy=min((load["entropy"] for load in loads), default=None),
        dead_experts=sum(load["dead"] for load in loads) if moe else None,
        force_load_balance=spec.moe.force_load_balance or None,
        attempt=events.attempt,
        expert_load=loads if whole else None,
    )
    events.metrics(line)


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in BF16_PEAK_FLOPS.items() if chip in name), None)


def _memory_peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
