"""Full state on disk: canonical names, whole shapes, any mesh in and out.

    checkpoints/step-00000100/
        checkpoint.json     written last: step, samples, model, tokenizer, mesh, versions, the size of every other file
        .metadata *.distcp  torch.distributed.checkpoint

A save writes into `step-00000100.partial`, where all ranks put their shards of master, exp_avg and exp_avg_sq as
DTensors of the whole shape; rank 0 then adds checkpoint.json, flushes it, and one rename makes the checkpoint visible.
What lacks checkpoint.json, holds a file of another size, or still ends in `.partial` is incomplete: readers skip it and
say so. A step that is saved again first moves the old one to `.old`, which counts until the new one stands. Experts
are one [E * out, in] tensor per layer and projection, cut by (ep, dp x cp); everything else is cut by dp x cp x ep.
Loading cuts the same whole tensors another way, so any mesh loads any other. Weights are the masters, rounded.

Cost: 12 bytes per parameter written, each exactly once over all ranks.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pithtrain.errors import CheckpointError, RunFailed
from pithtrain.world import World
from pithtrain.zero import Sharded, Zero

FORMAT = 1
MARKER = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


class IncompleteError(CheckpointError):
    """A checkpoint whose save did not end, or that has lost a part since."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done and sequences consumed."""

    step: int
    samples: int


def folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def save(checkpoints: Path, zero: Zero, world: World, position: Position, about: dict[str, Any]) -> Path:
    """Write a checkpoint; every rank calls it, and it is complete and visible when this returns on any rank.

    `about` (JSON values) is kept in checkpoint.json: the model and the tokenizer are compared at a load.
    """
    final = folder(checkpoints, position.step)
    partial = final.with_name(final.name + ".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)
    world.barrier()
    try:
        dcp_saver.save(_state(zero, world), checkpoint_id=partial, process_group=world.control_group)
    except CheckpointException as error:
        free = shutil.disk_usage(checkpoints).free / 2**30
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk its room is needed to say why
        reason = f"{_causes(error)}; {free:.2f} GiB free"
        raise RunFailed(f"{final} cannot be written ({reason}); older checkpoints are intact") from error
    if world.rank == 0:
        facts = {"updates": zero.updates, "mesh": asdict(world.mesh), "torch": torch.__version__}
        files = {file.name: file.stat().st_size for file in partial.iterdir()}
        content = {"format": FORMAT, **asdict(position), **facts, **about, "files": files}
        with (partial / MARKER).open("w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _replace(final, partial)
    world.barrier()
    return final


def newest(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The complete checkpoint with the highest step, or None. `report` hears of each one that is skipped, and why.

    Raises CheckpointError for one that another version wrote: going on without it would lose its steps.
    """
    found: list[tuple[int, bool, Path]] = []
    for path in sorted(checkpoints.glob("step-*")):
        match = _NAME.fullmatch(path.name)
        if path.name.endswith(".partial"):
            report(f"{path.name} is a save that did not end")
            continue
        if match is None:
            report(f"{path.name} is not a checkpoint: its name is not step-<number>")
            continue
        try:
            read(path)
        except IncompleteError as error:
            report(str(error))
        else:
            found.append((int(match[1]), match[2] is None, path))
    return max(found)[2] if found else None


def resolve(path: str, report: Callable[[str], None]) -> Path:
    """The checkpoint that a user names: its folder, or a run directory, of which the newest. Raises CheckpointError."""
    folder = Path(path)
    if (folder / MARKER).exists():
        return folder
    found = newest(folder / "checkpoints", report)
    if found is None:
        raise CheckpointError(f"resume = {path}: neither a complete checkpoint nor a run directory that has one")
    return found


def read(path: Path) -> dict[str, Any]:
    """The marker of a complete checkpoint. Raises IncompleteError, or CheckpointError for another format."""
    try:
        content = json.loads((path / MARKER).read_text())
        written_by, files = content["format"], dict[str, int]()
        if written_by == FORMAT:
            files = dict(content["files"])
            if not all(isinstance(content[key], int) for key in ("step", "samples", "updates")):
                raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise IncompleteError(f"{path.name} is incomplete: it has no readable {MARKER}") from None
    if written_by != FORMAT:
        raise CheckpointError(
            f"{path} has format {written_by}, this version reads {FORMAT}: load it with its own version"
        )
    for name, size in files.items():
        file = path / name
        have = file.stat().st_size if file.exists() else None
        if have != size:
            raise IncompleteError(f"{path.name} is incomplete: {name} has {have} bytes of {size}")
    return content


def check(path: Path, content: dict[str, Any], about: dict[str, Any]) -> None:
    """Raises CheckpointError when the checkpoint's model or tokenizer is not that of `about`."""
    problems = [
        f"{key}: the checkpoint has {theirs!r}, the spec {ours!r}"
        for kind in about
        for key, theirs, ours in _differences(kind, content.get(kind), about[kind])
    ]
    if problems:
        raise CheckpointError("\n  ".join([f"{path} is of another run and cannot be resumed:", *problems]))


def load(path: Path, zero: Zero, world: World, content: dict[str, Any]) -> Position:
    """Read masters and optimizer state into this rank's shards, whatever mesh wrote them; publish the weights.

    `content`: what `read` answered. Raises CheckpointError when a file cannot be read, or belongs to another user:
    torch unpickles `.metadata`, and a pickle can run anything.
    """
    owner = (path / ".metadata").stat().st_uid
    if owner != os.getuid():
        raise CheckpointError(f"{path} belongs to uid {owner}; if you trust it, make it yours:  cp -r {path} ELSEWHERE")
    try:
        dcp_loader.load(_state(zero, world), checkpoint_id=path, process_group=world.control_group)
    except CheckpointException as error:
        raise CheckpointError(f"{path} cannot be read ({_causes(error)}); remove it to take the one before") from error
    zero.loaded(content["updates"])
    return Position(content["step"], content["samples"])


def _causes(error: CheckpointException) -> str:
    """torch's exception is no `Exception` and holds the ranks' own."""
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


def _differences(key: str, theirs: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted({*theirs, *ours})
        return [item for k in keys for item in _differences(f"{key}.{k}", theirs.get(k), ours.get(k))]
    return [] if theirs == ours else [(key, theirs, ours)]


def _state(zero: Zero, world: World) -> dict[str, Any]:
    """DTensors over this rank's own shards: saving reads them, loading writes them in place."""
    meshes = {kind: _mesh(world, kind) for kind in ("dense", "expert")}
    state: dict[str, Any] = {}
    for name, one in zero.sharded.items():
        for kind, shard in (("master", one.master), ("exp_avg", one.exp_avg), ("exp_avg_sq", one.exp_avg_sq)):
            state[f"{kind}/{name}"] = as_dtensor(one, shard, meshes[one.info.kind])
    return state


def as_dtensor(one: Sharded, shard: Tensor, mesh: DeviceMesh) -> DTensor:
    """`shard` as this rank's piece of a tensor of the parameter's whole shape."""
    shape = torch.Size(one.whole_shape)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh(world: World, kind: str) -> DeviceMesh:
    """The ranks that share a kind of parameter on this stage: dense one axis, experts (ep, dp x cp).

    Only coordinates are read from it, no collective runs on it, so it gets no process groups of its own.
    """
    m = world.mesh
    data = [(dp, cp) for dp in range(m.dp) for cp in range(m.cp)]
    if kind == "expert":
        ranks: list[Any] = [[m.rank(world.pp, dp, cp, ep) for dp, cp in data] for ep in range(m.ep)]
    else:
        ranks = [m.rank(world.pp, dp, cp, ep) for dp, cp in data for ep in range(m.ep)]
    return DeviceMesh(world.device.type, torch.tensor(ranks), _init_backend=False)


def _replace(final: Path, partial: Path) -> None:
    """Make `partial` visible as `final`. One of the same step (the step was done again) stays until then."""
    old = final.with_name(final.name + ".old")
    _sync_folder(partial)
    if final.exists():  # else `old` may be all there is, after a death between these two renames
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
