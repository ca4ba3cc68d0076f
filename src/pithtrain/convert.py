"""Hugging Face folders, out and in: safetensors, config.json, tokenizer. No GPU; one tensor in memory at a time.

    out/model-00001-of-00007.safetensors ...   or one model.safetensors
        model.safetensors.index.json           {"weight_map": {tensor: file}}, where there are several
        config.json                            every field that the forward reads, and the matrices' dtype
        tokenizer.json tokenizer_config.json   of the run, and what else of PAPERS lies beside it

Which HF tensor is which rows of which parameter is the model's own table (`Config.hf_tensors`): nothing here names a
family or guesses from a shape. A reader takes the family's layout or, parameter by parameter, the fused one, which is
ours: [E, 2I, H] under the canonical name. Every tensor is consumed and every parameter filled, once, or one error lists
what is missing, unexpected or of another shape. Experts that lie otherwise in the file (`transposed`, `interleaved`)
are turned one expert at a time, both ways. Where the table says `mxfp4`, a folder may hold 4 bits a value instead (OCP
Microscaling Formats 1.0): NAME_blocks uint8 [E, out, in / 32, 16], two e2m1 values a byte, the low half first, and
NAME_scales uint8 [E, out, in / 32], 2^(scale - 127) for 32 values; they are widened while they are read.

An export in bfloat16 leaves `Parameter.fp32` (norms, router, biases) in float32, as they were trained; the dtype in
config.json is that of the matrices. An export in float32 has the masters bit for bit.

Reading is the safetensors library's. Writing is not, since it wants a whole file in memory: a header (its length, then
{name: dtype, shape, data_offsets} as JSON), and the values one after another. Cost of an export: 4 bytes a parameter
read, 2 written, memory of two tensors.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pithtrain import catalog, checkpoint
from pithtrain.catalog import Marker
from pithtrain.errors import CheckpointError, SpecError, show
from pithtrain.models.contract import HfTensor, ModelConfig, Parameter, architecture_of
from pithtrain.spec import ModelSection, read_model
from pithtrain.world import World
from pithtrain.zero import Zero

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
PAPERS = (TOKENIZER, SETTINGS, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PACKED = ("_blocks", "_scales")  # of a tensor in MXFP4: its values and their scales, both of dtype U8
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * torch.tensor([[1.0], [-1.0]])  # [sign, exponent and mantissa]
E2M1_PAIRS = torch.cartesian_prod(_E2M1.flatten(), _E2M1.flatten()).flip(1)  # [byte, (low half, high half)]
SHARD_BYTES = 4 << 30  # a file: what one rank of a shared export writes alone, and a broken download repeats
CHUNK_BYTES = 32 << 20  # read at once, before it is widened to fp32

Json = dict[str, Any]
Note = Callable[[str], None]
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the parameter just done


def _silent(*_: object) -> None:
    pass


# ---- out -------------------------------------------------------------------------------------------------------------


class _Planned(NamedTuple):
    """A parameter in an export, and the HF tensors that it becomes."""

    info: Parameter
    dtype: torch.dtype
    rows: list[HfTensor]

    @property
    def num_bytes(self) -> int:
        return self.info.size * self.dtype.itemsize


Plan = dict[str, list[_Planned]]  # file name -> its parameters; each lies in one file, so that it is read once


def export_hf(
    source: Path,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    rank: int = 0,
    size: int = 1,
    barrier: Callable[[], None] = _silent,
    note: Note = _silent,
    progress: Progress = _silent,
) -> int:
    """Write a checkpoint, or a run's newest, as a Hugging Face folder that appears whole or not at all; -> its bytes.
    `size` ranks may share the work: file k is rank k % size's, and each calls this with the same `barrier`. `note` is
    told what `out` will lack. Raises CheckpointError: `out` exists, the source is damaged, the disk does not take
    it."""
    note = note if rank == 0 else _silent
    if out.exists():
        raise CheckpointError(f"{out} exists already: name another folder, or remove it")
    source = catalog.candidates(source, note)[0]
    reader = checkpoint.Reader(source)
    model = read_model(reader.content["model"])
    _check_masters(source, reader.content, model.config)
    files = _plan(model.config, dtype, note)
    heads = {name: _header(members) for name, members in files.items()}
    want = {name: len(heads[name]) + sum(one.num_bytes for one in members) for name, members in files.items()}
    partial = catalog.partial(out)
    try:
        if rank == 0:
            catalog.begin(out)
            if (free := shutil.disk_usage(partial).free) < sum(want.values()):
                raise OSError(f"it takes {sum(want.values()) / 2**30:.2f} GiB, {free / 2**30:.2f} are free")
        barrier()
        mine = {name: members for place, (name, members) in enumerate(files.items()) if place % size == rank}
        done, total = 0, sum(one.num_bytes for members in mine.values() for one in members)
        for name, members in mine.items():
            with (partial / name).open("wb") as file:
                file.write(heads[name])
                for one in members:
                    _write_values(file, one, reader.tensor(f"master/{one.info.name}"))
                    progress(done := done + one.num_bytes, total, one.info.name)
                file.flush()
                os.fsync(file.fileno())
        barrier()
        if rank == 0:
            _write_papers(partial, model, dtype, files, reader.content, note)
            if {name: (partial / name).stat().st_size for name in want} != want:
                raise OSError(f"another export writes into {partial}")
            for path in (*partial.iterdir(), partial):
                catalog.sync(path)
            partial.rename(out)
        barrier()
    except BaseException as error:
        # where others write into it, theirs must not be the first error
        if size == 1 and not isinstance(error, FileExistsError):
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{out} cannot be written ({error})") from error
        raise
    return sum(want.values())


def _check_masters(path: Path, content: Marker, config: ModelConfig) -> None:
    have = {key: one["shape"] for key, one in content["tensors"].items() if key.startswith("master/")}
    catalog.check_tensors(path, have, {f"master/{info.name}": info.stored_shape for info in config.parameters()})


def _height(row: HfTensor, shape: Sequence[int]) -> int:
    """How many rows of a stored parameter of this shape a tensor fills."""
    return math.prod(row.shape) // math.prod(shape[1:])


def _plan(config: ModelConfig, dtype: torch.dtype, note: Note) -> Plan:
    tensors: dict[str, list[HfTensor]] = {}
    for row in config.hf_tensors():
        if not row.copy:
            tensors.setdefault(row.parameter, []).append(row)
    files: list[list[_Planned]] = [[]]
    for info in config.parameters():
        if info.name not in tensors:
            note(f"{info.name} has no place in this family's format and is lost; the checkpoint keeps it")
            continue
        one = _Planned(info, torch.float32 if info.fp32 else dtype, tensors[info.name])
        if files[-1] and sum(other.num_bytes for other in files[-1]) + one.num_bytes > SHARD_BYTES:
            files.append([])
        files[-1].append(one)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    # readers view values where they lie: wide ones first, and all of them stand at multiples of their size
    aligned = [sorted(members, key=lambda one: -one.dtype.itemsize) for members in files]
    return dict(zip(names if len(files) > 1 else [SINGLE], aligned, strict=True))


def _header(members: Sequence[_Planned]) -> bytes:
    """The beginning of a safetensors file, up to its values. transformers 4 refuses a file without `format`."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    entries: Json = {"__metadata__": {"format": "pt"}}
    begin = 0
    for row, dtype in ((row, one.dtype) for one in members for row in one.rows):
        end = begin + math.prod(row.shape) * dtype.itemsize
        entries[row.name] = {"dtype": words[dtype], "shape": list(row.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_values(file: BinaryIO, one: _Planned, stored: Tensor) -> None:
    for row in one.rows:
        piece = stored[row.row : row.row + _height(row, stored.shape)]
        turned = row.transposed or row.interleaved
        for block in piece.unflatten(0, (row.shape[0], -1)).split(1) if turned else (piece,):
            file.write(_theirs(row, block).to(one.dtype).contiguous().view(torch.uint8).numpy().data)


def _theirs(row: HfTensor, block: Tensor) -> Tensor:
    """Experts [n, out, in], or their biases [n, out], as the file has them. The inverse of `_ours`."""
    if row.interleaved:
        block = block.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return block.transpose(1, 2) if row.transposed else block


def _ours(row: HfTensor, block: Tensor) -> Tensor:
    """Experts of a file [n, in, out] if `transposed`, else [n, out, in], or their biases [n, out] -> out first, all of
    gate before all of up."""
    block = block.transpose(1, 2) if row.transposed else block
    return block.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if row.interleaved else block


def _widen(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 [..., in / 32, 16] and [..., in / 32] -> fp32 [..., in]. Exact, and bfloat16 holds every value too."""
    values = E2M1_PAIRS[blocks.to(torch.int32)].flatten(-2)
    return torch.ldexp(values, scales.to(torch.int32)[..., None] - 127).flatten(-2)


def _write_papers(out: Path, model: ModelSection, dtype: torch.dtype, plan: Plan, content: Marker, note: Note) -> None:
    """All but the values: index, config.json, tokenizer."""
    if len(plan) > 1:
        places = {row.name: name for name, members in plan.items() for one in members for row in one.rows}
        total = sum(one.num_bytes for members in plan.values() for one in members)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    word = str(dtype).removeprefix("torch.")
    config = {**model.config.hf_config(), "dtype": word, "torch_dtype": word}  # its name before transformers 5
    path = content["tokenizer_path"]
    if path is None or _sha256(Path(path)) != content["tokenizer"]:
        why = "names none" if path is None else f"was trained with another one than {path} is now"
        note(f"no tokenizer is written: the checkpoint {why}")
    else:
        for name in PAPERS:
            if (beside := Path(path).parent / name).is_file():
                shutil.copyfile(beside, out / name)
        shutil.copyfile(path, out / TOKENIZER)  # whatever its own name is
        config |= _end_of_text(out, model.config.max_position_embeddings)
    _write_json(out / CONFIG, config)


def _end_of_text(out: Path, longest: int | None) -> Json:
    """`eos_token_id` for config.json, so that a generation ends; writes tokenizer_config.json where there is none."""
    added = _read_json(out / TOKENIZER).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added if token.get("special")}
    if not (out / SETTINGS).exists():
        eos = next(iter(ids)) if len(ids) == 1 else None  # of several, nothing says which one ends a text
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "model_max_length": longest}
        _write_json(out / SETTINGS, settings)
    eos = _read_json(out / SETTINGS).get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos
    return {"eos_token_id": ids[eos]} if eos in ids else {}


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- in --------------------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """Where a tensor's values lie, and as what."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class HfFolder:
    """The tensors of a Hugging Face folder. Opening it reads the headers; `rows` reads values."""

    def __init__(self, path: Path, note: Note = _silent):
        """Raises CheckpointError for files that are missing or damaged, or hold a tensor twice. safetensors files that
        nothing names are left out, and noted."""
        self.path, self._note = path, note
        index: dict[str, str] | None = None
        if (path / INDEX).exists():
            index = _read_json(path / INDEX).get("weight_map")
            if not isinstance(index, dict) or any(Path(str(name)).name != name for name in index.values()):
                raise CheckpointError(f"{path / INDEX} has no weight_map of tensors to files beside it")
        names = {SINGLE} if index is None else {*index.values()}
        if lost := [name for name in sorted(names) if not (path / name).exists()]:
            why = f"and no {INDEX}" if index is None else f"which {INDEX} names"
            raise CheckpointError(f"{path} has no {', '.join(lost)}, {why}")
        strays = {file.name for file in path.glob("*.safetensors")} - names
        if SINGLE in strays:
            raise CheckpointError(f"{path} holds {INDEX} and {SINGLE}: remove the one that is stale")
        for stray in sorted(strays):
            note(f"{path / stray} is left out: nothing names it")
        self.tensors: dict[str, _Stored] = {}
        for name in sorted(names):
            found = _stored(path / name)
            if twice := sorted(self.tensors.keys() & found):
                raise CheckpointError(f"{path}: {', '.join(twice)} lies in {name} and in another file: one is stale")
            self.tensors |= found

    def match(self, config: ModelConfig) -> dict[str, list[HfTensor]]:
        """Parameter -> the tensors that fill it, as this folder has them; [] for one that has no place in the format.
        Layers of multi-token prediction, published behind the model's own and known by their `eh_proj`, are left out.
        Raises CheckpointError listing every tensor that is missing, unexpected or of another shape."""
        pieces: dict[str, list[HfTensor]] = {info.name: [] for info in config.parameters()}
        for row in config.hf_tensors():
            if not row.copy or row.name in self.tensors:
                pieces[row.parameter].append(self._as_held(row) if row.mxfp4 else row)
        for info in config.parameters():
            if info.name in self.tensors and all(row.name != info.name for row in pieces[info.name]):
                pieces[info.name] = [HfTensor(info.name, info.shape, info.name)]  # fused
        have = {name: one.shape for name, one in self.tensors.items()}
        want = {name: shape for rows in pieces.values() for row in rows for name, shape in _named(row).items()}
        heads = {name.removesuffix("eh_proj.weight") for name in have.keys() - want if name.endswith(".eh_proj.weight")}
        for head in sorted(heads):
            self._note(f"{self.path}: {head}* is left out: layers of multi-token prediction are not built")
        extra = {name for name in have.keys() - want if name.startswith(tuple(heads))}
        catalog.check_tensors(self.path, {name: have[name] for name in have if name not in extra}, want)
        return pieces

    def _as_held(self, row: HfTensor) -> HfTensor:
        """A tensor of the table that may be in 4 bits, as this folder has it: with `mxfp4` only if it is."""
        experts, out, width = (row.shape[n] for n in ((0, 2, 1) if row.transposed else (0, 1, 2)))
        if width % 32 or self.tensors.keys().isdisjoint(row.name + end for end in PACKED):
            return replace(row, mxfp4=False)
        return replace(row, shape=(experts, out, width), transposed=False)

    def rows(self, info: Parameter, pieces: Sequence[HfTensor], first: int, count: int) -> Tensor:
        """Rows [first, first + count) of a stored parameter, fp32; a file is mapped only while one piece is read.
        Raises CheckpointError where a second copy of the parameter holds other values."""
        whole = torch.empty(count, *info.stored_shape[1:])
        for piece in pieces:
            height = _height(piece, whole.shape)
            begin, end = max(first - piece.row, 0), min(first + count - piece.row, height)  # rows of this piece
            lead = height // piece.shape[0]  # stored rows under one index of its first axis: 2I in a fused [E, 2I, H]
            step = lead * max(CHUNK_BYTES * piece.shape[0] // (4 * math.prod(piece.shape)), 1)
            with contextlib.ExitStack() as files:
                names = _named(piece)
                stored = [files.enter_context(_opened(self.tensors[name].file)).get_slice(name) for name in names]
                for at in range(begin, end, step):
                    stop = min(at + step, end)
                    a, b = at // lead, -(-stop // lead)
                    block = _widen(*(each[a:b] for each in stored)) if piece.mxfp4 else stored[0][a:b]
                    values = _ours(piece, block).reshape(-1, *whole.shape[1:])[at - a * lead : stop - a * lead]
                    target = whole[piece.row + at - first :][: stop - at]
                    if not piece.copy:
                        target.copy_(values)
                    elif not torch.equal(target, values.to(target.dtype)):
                        raise CheckpointError(f"{self.path}: {piece.name} should be the same as {piece.parameter}")
        return whole


def _named(row: HfTensor) -> dict[str, tuple[int, ...]]:
    """The names and shapes under which a file has a tensor: two if it is in MXFP4."""
    if not row.mxfp4:
        return {row.name: row.shape}
    *outer, width = row.shape
    return dict(
        zip((row.name + end for end in PACKED), ((*outer, width // 32, 16), (*outer, width // 32)), strict=True)
    )


@contextlib.contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    """A safetensors file; the library sees that every value is there. Raises CheckpointError."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error})") from error


def _stored(path: Path) -> dict[str, _Stored]:
    """What a file holds."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        found = {name: _Stored(path, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    for name, one in found.items():
        read = ("U8",) if name.endswith(PACKED) else tuple(DTYPES)
        if one.dtype not in read:
            raise CheckpointError(f"{path}: {name} is of dtype {one.dtype}; read are {', '.join(read)}")
    return found


def _read_json(path: Path) -> Json:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def import_hf(
    source: Path, out: Path, architecture: str | None = None, note: Note = _silent, progress: Progress = _silent
) -> Path:
    """Write a Hugging Face folder as a checkpoint of kind "weights", for `init_from`; -> `out`. `architecture` is a
    folder of models/, the one for the config's `model_type` otherwise. Raises SpecError for a config.json that this
    model does not read, CheckpointError for tensors or a disk."""
    if architecture is None:
        architecture = architecture_of(str(_read_json(source / CONFIG).get("model_type")))
        if "/" in architecture:  # it would be a folder outside the package, whose code is run: not for a file to say
            raise CheckpointError(f"{source / CONFIG}: model_type = {architecture!r} is no name of a model")
    model = read_model({"architecture": architecture, "config_file": str(source / CONFIG)})
    folder = HfFolder(source, note)
    pieces = folder.match(model.config)
    table = {info.name: info for info in model.config.parameters()}
    done, total = 0, 4 * sum(info.size for info in table.values())

    def make(name: str) -> Tensor:
        nonlocal done
        info = table[name]
        progress(done := done + 4 * info.size, total, name)
        if pieces[name]:
            return folder.rows(info, pieces[name], 0, info.stored_shape[0])
        value = float(info.init == "ones")
        note(f"{name} has no place in this family's format and begins as {value:g} everywhere")
        return torch.full(info.stored_shape, value)

    tokenizer = source.absolute() / TOKENIZER
    sha = _sha256(tokenizer)
    about = {"run": out.name, "spec_hash": None, "model": model.model_dump(mode="json"), "tokenizer": sha, "data": None}
    about |= {"tokenizer_path": None if sha is None else str(tokenizer), "expert_counts": None, "recent_losses": None}
    return checkpoint.write_weights(out, {name: info.stored_shape for name, info in table.items()}, make, about)


def init(path: Path, zero: Zero, world: World, model: ModelSection, report: Note, tokenizer: str | None = None) -> None:
    """`init_from`: the weights of a Hugging Face folder, a checkpoint or a run's newest into this rank's shards. Every
    rank calls it and reads its own rows alone. Names and shapes must be this model's; other fields that differ, and the
    tokenizer where `tokenizer` (a sha256) is given, are reported, by rank 0. Raises CheckpointError."""
    report = report if world.rank == 0 else _silent
    ours = model.model_dump(mode="json")
    if world.from_rank_zero((path / CONFIG).exists()):
        read = type(model.config).canonical
        try:
            given, written = read(_read_json(path / CONFIG)), read(model.config.hf_config())
        except SpecError as error:
            raise CheckpointError(f"{path / CONFIG}: {'; '.join(map(str, error.problems))}") from error
        # a field that says what an export of ours would say is ours: null there may be a derived value in the file
        theirs = {key: ours[key] if given.get(key) == written.get(key) else given.get(key) for key in ours}
        theirs_sha = _sha256(path / TOKENIZER)
        folder = HfFolder(path, report)
        pieces = folder.match(model.config)
        for name, one in zero.sharded.items():
            if pieces[name]:
                one.master.copy_(folder.rows(one.info, pieces[name], one.first_row, one.master.shape[0]))
        for name in (name for name, found in pieces.items() if not found):
            report(f"{name} has no place in this family's format and begins as training.seed makes it")
        zero.loaded(0)
    else:
        try:
            path = world.from_rank_zero(catalog.candidates(path, report)[0] if world.rank == 0 else path)
        except CheckpointError as error:
            raise CheckpointError(f"init_from: no {CONFIG} of a Hugging Face folder there, and {error}") from error
        content = catalog.read(path)
        theirs, theirs_sha = content["model"], content["tokenizer"]
        _check_masters(path, content, model.config)
        checkpoint.load_weights(path, zero, world, content)
    mine = [name for name, one in zero.sharded.items() if not one.master.isfinite().all()]
    if bad := world.from_rank_zero(sorted({name for names in world.to_rank_zero(mine) for name in names})):
        raise CheckpointError(f"init_from: {path} holds NaN or infinity in {', '.join(bad)}")
    for key, there, here in catalog.differences("model", theirs, ours):
        report(f"init_from {path}: {key} is {show(there)} there and {show(here)} in the spec, which is what counts")
    if tokenizer is not None and theirs_sha != tokenizer:
        report(f"init_from {path}: its tokenizer is not the one that the data were made with, so ids mean other text")
