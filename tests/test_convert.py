"""Hugging Face folders: what transformers reads of ours, what we read of theirs, bit for bit both ways."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness import Pool, Shards, assemble, batches_of, distance, fields_of, make_spec, shards, tiny
from oracle import configs, logits_of, oracle, spec_of
from pithtrain import catalog, checkpoint, convert
from pithtrain.build import build
from pithtrain.checkpoint import Position, Reader, Saver
from pithtrain.errors import CheckpointError, PithtrainError, SpecError
from pithtrain.models.contract import HfTensor, ModelConfig, architecture_of, load_config
from pithtrain.spec import RunSpec, from_dict, read_model
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from stdlib import train_tokenizer
from test_cli import pithtrain
from test_models import FOLDERS

ROOT = Path(__file__).parent.parent
EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"


def native(out: Path, spec: RunSpec, **about: Any) -> Path:
    """A checkpoint of random masters, norms and biases too, that fp32 alone can hold."""
    generator = torch.Generator().manual_seed(3)
    table = {info.name: info for info in spec.model.config.parameters()}

    def make(name: str) -> Tensor:
        noise = torch.randn(table[name].stored_shape, generator=generator) * 0.1
        return 1 + noise if name.endswith("norm.weight") else noise

    shapes = {name: info.stored_shape for name, info in table.items()}
    content = {"model": spec.model.model_dump(mode="json"), "tokenizer": None, "tokenizer_path": None, "tokens": 0}
    return checkpoint.write_weights(out, shapes, make, content | about)


def masters(path: Path) -> dict[str, np.ndarray]:
    reader = Reader(path)
    keys = [key for key in reader.content["tensors"] if key.startswith("master/")]
    return {key.removeprefix("master/"): reader.tensor(key).numpy() for key in keys}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def rewrite(folder: Path, change: Any) -> Path:
    """Change the tensors of a folder of one file."""
    found = tensors(folder)
    change(found)
    save_file(
        {name: value.contiguous() for name, value in found.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def logits(spec: RunSpec, path: Path, told: list[str] | None = None) -> tuple[Tensor, Tensor]:
    """Token ids, and our engine's logits for them, begun with `init_from: path`."""
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        convert.init(path, engine.zero, world, spec.model, (told if told is not None else []).append)
        tokens = torch.cat([batch.tokens for batch in batches_of(spec, engine, 0)])
        return tokens, logits_of(engine, tokens).detach()


def small(model: Mapping[str, Any] | None = None) -> RunSpec:
    return make_spec(
        model=dict(model or {}),
        training={"global_batch_size": 4, "micro_batch_size": 2},
        moe={"load_balance_type": "none", "aux_loss_coef": 0.0},
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native(tmp_path_factory.mktemp("native") / "step-00000000", small())


@pytest.fixture
def exported(source: Path, tmp_path: Path) -> Path:
    convert.export_hf(source, tmp_path / "hf", torch.float32)
    return tmp_path / "hf"


# ---- the models' tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tensors_of_a_family_fill_each_parameter_once(name: str) -> None:
    config = tiny(name)
    rows = {info.name: [0] * info.stored_shape[0] for info in config.parameters()}
    widths = {info.name: info.size // info.stored_shape[0] for info in config.parameters()}
    names = set()
    for tensor in config.hf_tensors():
        assert tensor.name not in names
        names.add(tensor.name)
        if not tensor.copy:
            height, rest = divmod(int(np.prod(tensor.shape)), widths[tensor.parameter])
            assert rest == 0, tensor
            for row in range(tensor.row, tensor.row + height):
                rows[tensor.parameter][row] += 1
    assert all(set(count) <= {1} or set(count) == {0} for count in rows.values())
    assert [p for p, count in rows.items() if not any(count)] == [], "parameters that an export would lose"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_reads_what_it_writes(name: str) -> None:
    config, owner = tiny(name), load_config(name)
    fields = json.loads(json.dumps(config.hf_config()))
    again = owner.model_validate({k: v for k, v in owner.canonical(fields).items() if k not in owner.IGNORED})
    assert again.hf_config() == config.hf_config()
    assert architecture_of(fields["model_type"]) == name, "import-hf finds the folder by it"


def test_rope_theta_beside_other_rope_parameters_is_refused(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    (exported / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(SpecError, match=r"rope_theta = 5\.0: contradicts rope_parameters\.rope_theta = 10000\.0"):
        convert.import_hf(exported, tmp_path / "native")
    with pytest.raises(CheckpointError, match=rf"{exported}/config\.json: rope_theta = 5\.0: contradicts"):
        logits(small(), exported)
    (exported / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    convert.import_hf(exported, tmp_path / "native")


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [convert.SHARD_BYTES, 20_000], ids=["one file", "many files"])
@pytest.mark.parametrize("name", FOLDERS)
def test_native_to_hf_to_native_is_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, name: str
) -> None:
    """Of every family, and of V3's selection biases: no tensor is lost (casebook 132)."""
    spec = spec_of(name, configs(name).get("V3", tiny(name)))
    source = native(tmp_path / "source", spec)
    monkeypatch.setattr(convert, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(convert, "CHUNK_BYTES", 1000)  # reading in pieces, and rows wider than a piece
    told: list[str] = []
    size = convert.export_hf(source, tmp_path / "hf", torch.float32, note=told.append)
    assert size == sum(len(data) for name, data in files(tmp_path / "hf").items() if name.endswith(".safetensors"))
    out = convert.import_hf(tmp_path / "hf", tmp_path / "native", note=told.append)  # V3's model_type is no folder
    assert [line.split(":")[0] for line in told] == ["no tokenizer is written"]
    want, have = masters(source), masters(out)
    assert have.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_array_equal(have[key].view(np.int32), value.view(np.int32), key)
    content, before = catalog.read(out), catalog.read(source)
    assert (content["kind"], content["step"], content["samples"]) == ("weights", 0, 0)
    assert content["tensors"] == before["tensors"]
    assert read_model(content["model"]).config.hf_config() == spec.model.config.hf_config()


@pytest.mark.parametrize("name", FOLDERS)
def test_any_rows_are_those_of_the_whole_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard begins and ends anywhere: inside an expert, inside its gate."""
    config = tiny(name)
    convert.export_hf(native(tmp_path / "native", spec_of(name, config)), tmp_path / "hf")
    folder = convert.HfFolder(tmp_path / "hf")
    check_rows(folder, config, monkeypatch)


def check_rows(folder: convert.HfFolder, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = folder.match(config)
    whole = {info.name: folder.rows(info, pieces[info.name], 0, info.stored_shape[0]) for info in config.parameters()}
    monkeypatch.setattr(convert, "CHUNK_BYTES", 500)
    generator = np.random.default_rng(0)
    for info in (info for info in config.parameters() if info.layer == 1):
        height = info.stored_shape[0]
        for first, end in [(0, 0), (height, height), *np.sort(generator.integers(0, height + 1, (3, 2)))]:
            part = folder.rows(info, pieces[info.name], int(first), int(end - first))
            assert torch.equal(part, whole[info.name][first:end]), (info.name, first, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hf_to_native_to_hf_keeps_every_byte_and_so_does_a_second_export(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    convert.export_hf(source, tmp_path / "first", dtype)
    convert.export_hf(source, tmp_path / "second", dtype)
    assert files(tmp_path / "first") == files(tmp_path / "second")
    native = convert.import_hf(tmp_path / "first", tmp_path / "native")
    convert.export_hf(native, tmp_path / "third", dtype)
    assert files(tmp_path / "first") == files(tmp_path / "third")


def test_half_precision_files_are_read(exported: Path, tmp_path: Path) -> None:
    rewrite(exported, lambda found: found.update({name: value.half() for name, value in found.items()}))
    want = {name: value.astype(np.float16).astype(np.float32) for name, value in masters(
        convert.import_hf(exported, tmp_path / "a")).items()}  # fmt: skip
    for name, value in masters(tmp_path / "a").items():
        np.testing.assert_array_equal(value, want[name])


# ---- against transformers --------------------------------------------------------------------------------------------

ALL_AT_ONCE = {
    "norm_topk_prob": False,
    "head_dim": 12,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "rms_norm_eps": 1e-2,
    "rope_theta": 77.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "num_experts_per_tok": 3,
}
FORWARD = [(name, label) for name in FOLDERS for label in configs(name)]


def loaded(folder: Path, config: ModelConfig) -> Any:
    """transformers' model of an export: every tensor found, none left over. The epsilon of DeepSeek's norms inside
    attention is a class default there, whatever config.json says."""
    theirs: Any
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")  # pyright: ignore
    assert not any(info.values()), info
    for module in theirs.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
    return theirs


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("qwen3_moe", "all at once"),
        *(pytest.param(*one, marks=[] if one[1] == "tiny" else pytest.mark.slow) for one in FORWARD),
    ],
)
def test_case_126_every_field_of_the_forward_reaches_transformers(name: str, variant: str, tmp_path: Path) -> None:
    spec = small(ALL_AT_ONCE) if variant == "all at once" else spec_of(name, configs(name)[variant])
    path = native(tmp_path / "native", spec)
    convert.export_hf(path, tmp_path / "hf", torch.float32)
    theirs = loaded(tmp_path / "hf", spec.model.config)
    told: list[str] = []
    tokens, ours = logits(spec, path, told)
    assert told == []
    expected = theirs(tokens).logits.detach()
    assert distance(ours.numpy(), expected.numpy()) < 1e-5
    assert torch.equal(logits(spec, tmp_path / "hf", told)[1], ours)
    assert told == []


def test_case_133_logits_are_theirs_at_every_position_both_ways(tmp_path: Path) -> None:
    """The wrong halves of a rotary head would agree at position 0 alone."""
    spec = make_spec(
        model={"head_dim": 16, "rope_theta": 100.0},
        training={"global_batch_size": 2, "sequence_length": 64},
    )
    oracle(spec.model.config).save_pretrained(tmp_path / "theirs")
    convert.export_hf(convert.import_hf(tmp_path / "theirs", tmp_path / "native"), tmp_path / "ours", torch.float32)
    for folder in ("theirs", "ours"):
        tokens, ours = logits(spec, tmp_path / folder)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / folder)(tokens).logits.detach()
        for position in range(tokens.shape[1]):
            assert distance(ours[:, position].numpy(), expected[:, position].numpy()) < 1e-5, position


def test_case_126_no_field_of_ours_is_left_to_a_default_of_theirs(exported: Path) -> None:
    written = json.loads((exported / "config.json").read_text())
    ours = small().model.model_dump(mode="json")
    left_out = {key for key in ours if key not in written}
    assert left_out == {"architecture", "max_position_embeddings"}, "null, or ours alone"
    assert (written["architectures"], written["dtype"], written["torch_dtype"]) == (
        ["Qwen3MoeForCausalLM"],
        "float32",
        "float32",
    )


@pytest.mark.parametrize("variant", ["tiny", "tied head", "biases, no renormalisation"])
@pytest.mark.parametrize("layout", ["per expert", "fused", "sharded"])
def test_case_124_what_transformers_saves_imports_in_both_layouts(layout: str, variant: str, tmp_path: Path) -> None:
    spec = small({**fields_of(configs("qwen3_moe")[variant]), "max_position_embeddings": 32768})
    theirs = oracle(spec.model.config)
    shard = {"max_shard_size": "60KB"} if layout == "sharded" else {}
    theirs.save_pretrained(tmp_path / "hf", save_original_format=layout != "fused", **shard)
    names = tensors(tmp_path / "hf")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == (layout == "fused")
    assert (tmp_path / "hf" / convert.INDEX).exists() == (layout == "sharded")

    path = convert.import_hf(tmp_path / "hf", tmp_path / "native")
    assert catalog.read(path)["model"] == spec.model.model_dump(mode="json")
    told: list[str] = []
    tokens, ours = logits(spec, path, told)
    assert distance(ours.numpy(), theirs(tokens).logits.detach().numpy()) < 1e-5
    assert torch.equal(logits(spec, tmp_path / "hf", told)[1], ours)
    assert told == []


def test_case_124_an_expert_that_nothing_fills_is_an_error(exported: Path, tmp_path: Path) -> None:
    """The fused name of one projection does not excuse the other; both layouts of one at once are one too many."""

    def fuse(found: dict[str, Tensor]) -> None:
        found["model.layers.1.mlp.experts.down_proj"] = torch.stack(
            [found.pop(EXPERT.format(1, expert, "down_proj")) for expert in range(8)]
        )

    rewrite(exported, fuse)
    convert.import_hf(exported, tmp_path / "mixed")
    rewrite(exported, lambda found: found.pop(EXPERT.format(1, 7, "up_proj")))
    with pytest.raises(CheckpointError, match=rf"missing: {EXPERT.format(1, 7, 'up_proj')}"):
        convert.import_hf(exported, tmp_path / "native")
    rewrite(exported, lambda found: found.update({EXPERT.format(1, 7, "up_proj"): torch.zeros(16, 32)}))
    rewrite(exported, lambda found: found.update({EXPERT.format(1, 3, "down_proj"): torch.zeros(32, 16)}))
    with pytest.raises(CheckpointError, match=rf"unexpected: {EXPERT.format(1, 3, 'down_proj')}"):
        convert.import_hf(exported, tmp_path / "native")


# ---- GPT-OSS: transposed, gate and up in turns, 4 bits ---------------------------------------------------------------

OSS = "model.layers.{}.mlp.experts.{}"


def oss(**model: Any) -> RunSpec:
    config = {**fields_of(tiny("gpt_oss")), "num_hidden_layers": 2, "hidden_size": 64, "layer_types": None, **model}
    return spec_of("gpt_oss", read_model({"architecture": "gpt_oss", **config}).config)


@pytest.mark.parametrize("width", [64, 96])
def test_case_127_experts_of_gpt_oss_are_turned_by_name_and_not_by_shape(width: int, tmp_path: Path) -> None:
    """hidden 64: with experts as wide down_proj is square, [64, 96] it is not."""
    spec = oss(intermediate_size=width)
    config = spec.model.config
    oracle(config).save_pretrained(tmp_path / "theirs")
    path = convert.import_hf(tmp_path / "theirs", tmp_path / "native")
    theirs, ours = tensors(tmp_path / "theirs"), masters(path)
    for layer in range(2):
        gate_up, down = (theirs[OSS.format(layer, part)] for part in ("gate_up_proj", "down_proj"))
        mine = torch.tensor(ours[OSS.format(layer, "gate_up_proj")]).view(8, 2 * width, 64)
        assert torch.equal(mine[:, :width], gate_up[:, :, 0::2].transpose(1, 2))
        assert torch.equal(mine[:, width:], gate_up[:, :, 1::2].transpose(1, 2))
        mine = torch.tensor(ours[OSS.format(layer, "down_proj")]).view(8, 64, width)
        assert torch.equal(mine, down.transpose(1, 2))
        bias = torch.tensor(ours[OSS.format(layer, "gate_up_proj_bias")]).view(8, 2, width)
        assert torch.equal(bias.transpose(1, 2).flatten(1), theirs[OSS.format(layer, "gate_up_proj_bias")])

    convert.export_hf(path, tmp_path / "ours", torch.float32)
    for name, value in tensors(tmp_path / "ours").items():
        assert torch.equal(value, theirs[name]), name
    tokens, found = logits(spec, tmp_path / "theirs")
    expected = loaded(tmp_path / "ours", config)(tokens).logits.detach()
    assert distance(found.numpy(), expected.numpy()) < 1e-5


def in_four_bits(spec: RunSpec, folder: Path, scales: tuple[int, int] = (120, 126)) -> dict[str, Tensor]:
    """Two folders of random weights: `folder` as the family is released, `folder`-plain with what transformers makes
    of it, in bfloat16. Returns the tensors of the first."""
    plain = folder.with_name(f"{folder.name}-plain")
    convert.export_hf(native(folder.with_name("seed"), spec), plain)
    generator = torch.Generator().manual_seed(5)
    packed, wide = tensors(plain), tensors(plain)
    for row in spec.model.config.hf_tensors():
        if row.mxfp4:
            experts, width, out = row.shape
            shape = (experts, out, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            powers = torch.randint(*scales, shape, generator=generator).to(torch.uint8)
            del packed[row.name]
            packed |= {f"{row.name}_blocks": blocks, f"{row.name}_scales": powers}
            wide[row.name] = convert_moe_packed_tensors(blocks, powers)
    shutil.copytree(plain, folder)
    for where, found in ((folder, packed), (plain, wide)):
        rewrite(where, lambda old, found=found: (old.clear(), old.update(found)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return packed


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = oss(intermediate_size=96)
    in_four_bits(spec, tmp_path / "hf")
    path = convert.import_hf(tmp_path / "hf", tmp_path / "native")
    want = masters(convert.import_hf(tmp_path / "hf-plain", tmp_path / "other"))
    for name, value in masters(path).items():
        np.testing.assert_array_equal(value.view(np.int32), want[name].view(np.int32), name)
    tokens, ours = logits(spec, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf-plain", dtype=torch.float32)
    assert distance(ours.numpy(), theirs(tokens).logits.detach().numpy()) < 1e-5
    check_rows(convert.HfFolder(tmp_path / "hf"), spec.model.config, monkeypatch)
    convert.export_hf(path, tmp_path / "again")  # bfloat16 holds every value
    for name, value in tensors(tmp_path / "again").items():
        assert torch.equal(value, tensors(tmp_path / "hf-plain")[name]), name


def test_every_byte_and_scale_of_mxfp4() -> None:
    """All 256 x 256, subnormal and too large numbers too, as in transformers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(256, 1, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 1, 16).contiguous()
    found = convert._widen(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).float()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())
    assert found[127, 0, :8].tolist() == [0, 0, 0.5, 0, 1, 0, 1.5, 0], "low half first"
    assert found[255, 0, 4].isinf()


def test_what_is_wrong_with_a_folder_in_four_bits_is_listed(tmp_path: Path) -> None:
    spec = oss(intermediate_size=32)
    good = in_four_bits(spec, tmp_path / "hf")
    gate_up, down = OSS.format(0, "gate_up_proj"), OSS.format(1, "down_proj")

    def refused(**changes: Tensor | None) -> list[str]:
        found = {**good, **changes}
        rewrite(
            tmp_path / "hf", lambda old: (old.clear(), old.update({k: v for k, v in found.items() if v is not None}))
        )
        with pytest.raises(CheckpointError) as error:
            convert.import_hf(tmp_path / "hf", tmp_path / "native")
        with pytest.raises(CheckpointError, match=re.escape(str(error.value))):
            logits(spec, tmp_path / "hf")
        return [line.strip() for line in str(error.value).splitlines()[1:]] or [str(error.value)]

    assert refused(**{f"{gate_up}_scales": None, f"{down}_blocks": None}) == [
        f"missing: {gate_up}_scales",
        f"missing: {down}_blocks",
    ]
    assert refused(**{f"{gate_up}_scales": None, f"{gate_up}_blocks": None}) == [f"missing: {gate_up}"]
    both = torch.zeros(8, 32, 64, dtype=torch.bfloat16)
    assert refused(**{down: both}) == [f"unexpected: {down}"], "both forms"
    assert refused(**{down: both, f"{down}_scales": None}) == [f"missing: {down}_scales", f"unexpected: {down}"]
    assert refused(**{f"{gate_up}_blocks": good[f"{gate_up}_blocks"].flatten(2)}) == [
        f"shape of {gate_up}_blocks: [8, 64, 32] there, [8, 64, 2, 16] here"
    ]
    assert refused(**{f"{down}_scales": good[f"{down}_scales"].transpose(0, 1)}) == [
        f"shape of {down}_scales: [64, 8, 1] there, [8, 64, 1] here"
    ]
    [line] = refused(**{f"{down}_scales": good[f"{down}_scales"].float()})
    assert f"{down}_scales is of dtype F32; read are U8" in line
    [line] = refused(**{"model.norm.weight": torch.ones(64, dtype=torch.uint8)})
    assert "model.norm.weight is of dtype U8; read are F32, BF16, F16" in line


def test_bits_of_a_tensor_that_has_none_in_its_table_are_refused(exported: Path, tmp_path: Path) -> None:
    """Only where the table says mxfp4, and where rows are whole groups of 32."""
    name = "model.layers.1.mlp.experts.down_proj"
    pair = {f"{name}_blocks": torch.zeros(8, 32, 1, 16).byte(), f"{name}_scales": torch.zeros(8, 32, 1).byte()}
    rewrite(exported, lambda found: found.update(pair))
    with pytest.raises(CheckpointError, match=rf"unexpected: {name}_blocks\n +unexpected: {name}_scales"):
        convert.import_hf(exported, tmp_path / "native")
    narrow = oss(intermediate_size=48)
    row = HfTensor(OSS.format(0, "down_proj"), (8, 48, 64), OSS.format(0, "down_proj"), transposed=True, mxfp4=True)
    assert row in narrow.model.config.hf_tensors()
    rewrite(exported, lambda found: (found.clear(), found.update({f"{row.name}_scales": torch.zeros(8, 64, 2).byte()})))
    with pytest.raises(CheckpointError, match=rf"missing: {row.name}\n"):
        convert.HfFolder(exported).match(narrow.model.config)


# ---- DeepSeek --------------------------------------------------------------------------------------------------------


def test_case_135_latent_attention_has_the_norms_that_transformers_has(tmp_path: Path) -> None:
    """Without query compression there is no query norm, with it there is one: the same keys, and the same logits."""
    for label, norm in (("query latent, biases everywhere", True), ("tiny", False)):
        config, folder = configs("deepseek_v2")[label], tmp_path / label
        oracle(config).save_pretrained(folder)
        assert set(tensors(folder)) == {row.name for row in config.hf_tensors()}
        assert any("q_a_layernorm" in info.name for info in config.parameters()) == norm
    tokens, found = logits(spec_of("deepseek_v2", config), folder)
    assert distance(found.numpy(), loaded(folder, config)(tokens).logits.detach().numpy()) < 1e-5
    extra = "model.layers.0.self_attn.q_a_layernorm.weight"
    kept = "model.layers.0.self_attn.kv_a_layernorm.weight"

    def change(found: dict[str, Tensor]) -> None:
        found[extra] = found.pop(kept)

    with pytest.raises(CheckpointError, match=rf"missing: {kept}\n +unexpected: {extra}"):
        convert.import_hf(rewrite(tmp_path / "tiny", change), tmp_path / "native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selection_biases_travel_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    spec = spec_of("deepseek_v2", configs("deepseek_v2")["V3"])
    biases = [info.name for info in spec.model.config.parameters() if info.update == "load"]
    path = native(tmp_path / "native", spec)
    convert.export_hf(path, tmp_path / "hf", dtype)
    found, exact = tensors(tmp_path / "hf"), masters(path)
    assert biases
    for name in biases:
        assert found[name].dtype == torch.float32
        np.testing.assert_array_equal(found[name].numpy(), exact[name])
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        convert.init(tmp_path / "hf", engine.zero, world, spec.model, pytest.fail)
        for name in biases:
            np.testing.assert_array_equal(engine.zero.sharded[name].weight.data.numpy(), exact[name])
    rewrite(tmp_path / "hf", lambda found: found.pop(biases[0]))
    with pytest.raises(CheckpointError, match=f"missing: {biases[0]}"):
        convert.import_hf(tmp_path / "hf", tmp_path / "back", "deepseek_v2")


def test_layers_of_multi_token_prediction_are_left_out_with_a_word(tmp_path: Path) -> None:
    """DeepSeek-V3 is published with one more layer than num_hidden_layers: told once, and nothing of it is read. Any
    other layer behind the last one is a config.json of another model."""
    spec = spec_of("deepseek_v2", configs("deepseek_v2")["V3"])
    path = native(tmp_path / "native", spec)
    convert.export_hf(path, tmp_path / "hf", torch.float32)
    last = f"model.layers.{spec.model.config.num_hidden_layers}."

    def behind(*names: str) -> Path:
        return rewrite(tmp_path / "hf", lambda found: found.update({last + n: torch.zeros(2) for n in names}))

    own = "input_layernorm.weight", "shared_head.norm.weight"
    with pytest.raises(CheckpointError, match=rf"unexpected: {last}{own[0]}"):
        convert.import_hf(behind(*own), tmp_path / "back")
    told: list[str] = []
    convert.import_hf(behind("eh_proj.weight"), tmp_path / "back", note=told.append)
    assert [line for line in told if "left out" in line] == [
        f"{tmp_path}/hf: {last}* is left out: layers of multi-token prediction are not built"
    ]
    want, have = masters(path), masters(tmp_path / "back")
    assert have.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(have[name], value)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_case_122_missing_unexpected_and_misshapen_tensors_are_all_listed(exported: Path, tmp_path: Path) -> None:
    gone = [EXPERT.format(3, 2, part) for part in ("gate_proj", "up_proj", "down_proj")]

    def damage(found: dict[str, Tensor]) -> None:
        for name in gone:
            del found[name]
        found["model.layers.3.stray"] = torch.zeros(2)
        found["model.layers.1.self_attn.q_porj.weight"] = found.pop("model.layers.1.self_attn.q_proj.weight")
        found["model.norm.weight"] = torch.ones(33)

    rewrite(exported, damage)
    want = {
        *(f"missing: {name}" for name in gone),
        "missing: model.layers.1.self_attn.q_proj.weight",
        "unexpected: model.layers.3.stray",
        "unexpected: model.layers.1.self_attn.q_porj.weight",
        "shape of model.norm.weight: [33] there, [32] here",
    }
    with pytest.raises(CheckpointError) as error:
        convert.import_hf(exported, tmp_path / "native")
    assert want == {line.strip() for line in str(error.value).splitlines()[1:]}
    assert not (tmp_path / "native").exists()
    with pytest.raises(CheckpointError) as again:
        logits(small(), exported)
    assert str(again.value) == str(error.value)


def test_case_129_a_tied_head_is_taken_at_its_word(source: Path, tmp_path: Path) -> None:
    convert.export_hf(source, tmp_path / "untied", torch.float32)
    both = masters(convert.import_hf(tmp_path / "untied", tmp_path / "a"))
    assert not np.array_equal(both["lm_head.weight"], both["model.embed_tokens.weight"])

    headless = shutil.copytree(tmp_path / "untied", tmp_path / "headless")
    rewrite(headless, lambda found: found.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        convert.import_hf(headless, tmp_path / "b")

    def tie(folder: Path) -> Path:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        return folder

    assert "lm_head.weight" not in masters(convert.import_hf(tie(headless), tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be the same as model\.embed_tokens\.weight"):
        convert.import_hf(tie(tmp_path / "untied"), tmp_path / "d")
    rewrite(headless, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    convert.import_hf(headless, tmp_path / "e")  # some writers write the tied head out: a copy, which has to be one
    tied = small({"tie_word_embeddings": True})
    assert torch.equal(logits(tied, headless)[1], logits(tied, tmp_path / "e")[1])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be the same"):
        logits(tied, tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"missing: master/lm_head\.weight"):
        logits(small(), tmp_path / "e")


@pytest.fixture(params=[convert.SHARD_BYTES, 30_000], ids=["one file", "many files"])
def in_bf16(source: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "SHARD_BYTES", request.param)
    convert.export_hf(source, tmp_path / "hf")
    assert (len(list((tmp_path / "hf").glob("*.safetensors"))) > 3) == (request.param == 30_000)
    return tmp_path / "hf"


def test_case_130_every_file_says_pt_and_its_values_are_aligned(in_bf16: Path) -> None:
    for file in in_bf16.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
        length = int.from_bytes(file.read_bytes()[:8], "little")
        entries = json.loads(file.read_bytes()[8 : 8 + length])
        assert length % 8 == 0
        for name, entry in entries.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0, name
    if (in_bf16 / convert.INDEX).exists():
        index, found = json.loads((in_bf16 / convert.INDEX).read_text()), tensors(in_bf16)
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_case_131_what_was_trained_in_fp32_keeps_its_bits(source: Path, in_bf16: Path) -> None:
    fp32 = {info.name for info in small().model.config.parameters() if info.fp32}
    assert {"model.layers.1.mlp.gate.weight", "model.norm.weight"} <= fp32
    found, exact = tensors(in_bf16), masters(source)
    for name, value in found.items():
        assert value.dtype == (torch.float32 if name in fp32 else torch.bfloat16), name
    for name in fp32:
        np.testing.assert_array_equal(found[name].numpy(), exact[name])
    config = json.loads((in_bf16 / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert loaded(in_bf16, small().model.config).dtype == torch.bfloat16


LOSSY = """
from pithtrain.models.contract import vector
from pithtrain.models.qwen3_moe.config import Config as Base

class Config(Base):
    def layer_parameters(self, layer):
        yield from super().layer_parameters(layer)
        if self.is_moe(layer):
            yield vector("mlp.gate.balance", (self.num_experts,), "zeros")

    def hf_tensors(self):
        return tuple(row for row in super().hf_tensors() if not row.name.endswith("balance"))
"""


def test_case_132_what_the_format_has_no_place_for_is_named_and_kept_natively(tmp_path: Path) -> None:
    folder = tmp_path / "lossy_moe"
    folder.mkdir()
    (folder / "config.py").write_text(LOSSY)
    spec = small({"architecture": str(folder)})
    path = native(tmp_path / "native", spec)
    biases = [f"model.layers.{layer}.mlp.gate.balance" for layer in (1, 2, 3)]
    told: list[str] = []
    convert.export_hf(path, tmp_path / "hf", torch.float32, note=told.append)
    assert [line.split()[0] for line in told if "is lost" in line] == biases
    before = masters(path)
    assert all(before[name].any() for name in biases)
    told.clear()
    after = masters(convert.import_hf(tmp_path / "hf", tmp_path / "back", str(folder), told.append))
    assert [line.split()[0] for line in told if "begins as 0 everywhere" in line] == biases
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], np.zeros_like(value) if name in biases else value)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_case_134_one_file_a_missing_shard_and_a_stray(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert.export_hf(source, tmp_path / "one", torch.float32)
    assert not (tmp_path / "one" / convert.INDEX).exists()
    want = masters(convert.import_hf(tmp_path / "one", tmp_path / "a"))

    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "one" / "consolidated.safetensors")
    told: list[str] = []
    stray = masters(convert.import_hf(tmp_path / "one", tmp_path / "b", note=told.append))
    np.testing.assert_array_equal(stray["model.norm.weight"], want["model.norm.weight"])
    assert told == [f"{tmp_path}/one/consolidated.safetensors is left out: nothing names it"]

    monkeypatch.setattr(convert, "SHARD_BYTES", 60_000)
    convert.export_hf(source, tmp_path / "many", torch.float32)
    many = tmp_path / "many"
    last = sorted(many.glob("*.safetensors"))[-1]
    shutil.copy(tmp_path / "one" / "model.safetensors", many)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: remove the one that is stale"):
        convert.import_hf(many, tmp_path / "c")
    (many / "model.safetensors").rename(many / "model-00001-of-00002.safetensors")  # of another download
    told.clear()
    np.testing.assert_equal(masters(convert.import_hf(many, tmp_path / "c", note=told.append)), want)
    assert len(told) == 1

    (many / "model-00001-of-00002.safetensors").rename(many / "model-00009-of-00009.safetensors")
    index = json.loads((many / convert.INDEX).read_text())["weight_map"]
    (many / convert.INDEX).write_text(json.dumps({"weight_map": index | {"x": "model-00009-of-00009.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight, .* in another file: one is stale"):
        convert.import_hf(many, tmp_path / "d")
    (many / convert.INDEX).write_text(json.dumps({"weight_map": index | {"x": index["lm_head.weight"]}}))
    last.unlink()
    with pytest.raises(CheckpointError, match=rf"has no {last.name}, which {convert.INDEX} names"):
        convert.import_hf(many, tmp_path / "d")
    (many / convert.INDEX).write_text(json.dumps({"weight_map": {"a": "../one/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="no weight_map of tensors to files beside it"):
        convert.import_hf(many, tmp_path / "d")
    (many / convert.INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"has no model\.safetensors, and no {convert.INDEX}"):
        convert.import_hf(many, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def header(**entry: Any) -> bytes:
    text = json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128], **entry}}
    ).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read as safetensors"),
        (b"\xff" * 100, "cannot be read as safetensors"),
        (b"<html>404 Not Found</html>", "cannot be read as safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "cannot be read as safetensors"),
        (header(), "cannot be read as safetensors"),
        (header(data_offsets=[-8, 120]) + bytes(128), "cannot be read as safetensors"),
        (header(shape=[31]) + bytes(128), "cannot be read as safetensors"),
        (header(dtype="F8_E4M3", data_offsets=[0, 32]) + bytes(32), "is of dtype F8_E4M3; read are F32, BF16, F16"),
        (header(data_offsets=None) + bytes(128), "cannot be read as safetensors"),
        (b"\x02" + bytes(7) + b"[]", "cannot be read as safetensors"),
    ],
)
def test_a_damaged_file_is_named(exported: Path, tmp_path: Path, content: bytes, why: str) -> None:
    (exported / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(why)) as error:
        convert.import_hf(exported, tmp_path / "native")
    assert f"{exported}/model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model.architecture = 'llama': is no folder of pithtrain/models"),
        ({"norm_topk_prob": None}, "model.norm_topk_prob"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "model.rope_parameters.rope_type"),
        ({"use_sliding_window": True}, "model.use_sliding_window = true: must be false"),
    ],
)
def test_a_config_of_another_model_is_refused_with_its_field(
    exported: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpecError, match=re.escape(message)):
        convert.import_hf(exported, tmp_path / "native")


def test_what_is_no_source_is_said(exported: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a complete checkpoint nor a run directory"):
        convert.export_hf(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        convert.import_hf(tmp_path / "nowhere", tmp_path / "out")
    (exported / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        convert.import_hf(exported, tmp_path / "out")
    for convertible in (lambda: convert.export_hf(source, exported), lambda: convert.import_hf(exported, source)):
        with pytest.raises(PithtrainError):
            convertible()
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_never_written_into(exported: Path, source: Path, tmp_path: Path) -> None:
    before = files(exported)
    with pytest.raises(CheckpointError, match=rf"{exported} exists already"):
        convert.export_hf(source, exported)
    assert files(exported) == before
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken exists already"):
        convert.import_hf(exported, tmp_path / "taken")


def test_an_export_that_dies_anywhere_leaves_none(source: Path, tmp_path: Path) -> None:
    """Before each of its file operations in turn; the export that follows succeeds and has the same bytes."""
    out, clean, operations = tmp_path / "hf", tmp_path / "clean", 0
    convert.export_hf(source, clean)

    def dies(at: int) -> int:
        done = 0
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "mkdir"), (Path, "open"), (os, "fsync"), (Path, "write_text"), (Path, "rename")):
                original = getattr(owner, name)

                def step(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                    nonlocal done
                    if threading.current_thread() is threading.main_thread():
                        done += 1
                    if done == at:
                        raise KeyboardInterrupt
                    return original(*args, **kwargs)

                patch.setattr(owner, name, step)
            if at:
                with pytest.raises(KeyboardInterrupt):
                    convert.export_hf(source, out)
            else:
                convert.export_hf(source, tmp_path / "counted")
        return done

    operations = dies(0)
    assert operations > 8
    for at in range(1, operations + 1):
        dies(at)
        assert not out.exists(), at
    convert.export_hf(source, out)
    assert files(out) == files(clean)


KILLED = """
import os, signal, sys
from pathlib import Path
from pithtrain import convert
convert.SHARD_BYTES = 60_000
progress = lambda done, total, name: done > total / 2 and os.kill(os.getpid(), signal.SIGKILL)
getattr(convert, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]), progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["export_hf", "import_hf"])
def test_one_that_is_killed_leaves_no_folder_and_what_lies_there_is_not_deleted(
    function: str, source: Path, exported: Path, tmp_path: Path
) -> None:
    given, out = source if function == "export_hf" else exported, tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, function, given, out], check=False)
    assert done.returncode == -9
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir() if path != exported] == ["out.partial"]
    with pytest.raises(CheckpointError, match=r"out\.partial is there, of a try that was killed, or yours: remove it"):
        getattr(convert, function)(given, out)
    shutil.rmtree(tmp_path / "out.partial")
    getattr(convert, function)(given, out)
    assert out.exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (os, "fsync", OSError(28, "No space left on device")),
        (Path, "mkdir", PermissionError(13, "Permission denied")),
        (Path, "rename", OSError(5, "Input/output error")),
    ],
)
def test_an_error_of_the_disk_is_told_and_leaves_nothing(
    owner: Any, name: str, error: OSError, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.raises(CheckpointError, match=rf"hf cannot be written .*{error.strerror}"):
            convert.export_hf(source, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_known_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(CheckpointError, match=r"it takes 0\.00 GiB, 0\.00 are free"):
        convert.export_hf(source, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_short_while_it_is_read(exported: Path) -> None:
    folder = convert.HfFolder(exported)
    pieces = folder.match(small().model.config)
    os.truncate(exported / "model.safetensors", 9000)
    table = {info.name: info for info in small().model.config.parameters()}
    head = table["lm_head.weight"], pieces["lm_head.weight"], 0, 96
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        folder.rows(*head)
    (exported / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors \(.*No such file"):
        folder.rows(*head)


def test_a_damaged_checkpoint_is_not_exported(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "step-00000000")
    shard = max(copy.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(str(copy))):
        convert.export_hf(copy, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "hf.partial").exists()


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat", "a dog ran"], 300, path)
    return path


def test_the_tokenizer_travels_and_generation_ends(tokenizer: Path, tmp_path: Path) -> None:
    spec = small({"vocab_size": 300, "max_position_embeddings": 64})
    about = {"tokenizer": convert._sha256(tokenizer), "tokenizer_path": str(tokenizer)}
    told: list[str] = []
    convert.export_hf(native(tmp_path / "native", spec, **about), tmp_path / "hf", note=told.append)
    assert told == []
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded.decode(loaded("the dog sat").input_ids) == "the dog sat"
    assert (loaded.eos_token, loaded.eos_token_id, loaded.model_max_length) == ("<|endoftext|>", 0, 64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert theirs.generation_config.eos_token_id == 0

    back = catalog.read(convert.import_hf(tmp_path / "hf", tmp_path / "back"))
    assert back["tokenizer"] == about["tokenizer"]
    assert back["tokenizer_path"] == str(tmp_path / "hf" / "tokenizer.json")
    convert.export_hf(tmp_path / "back", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "hf")


def test_papers_beside_a_tokenizer_travel_with_it(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    shutil.copy(tokenizer, folder / "bpe.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<|endoftext|>"}, "extra": 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "secrets.txt").write_text("mine")
    about = {"tokenizer": convert._sha256(tokenizer), "tokenizer_path": str(folder / "bpe.json")}
    path = native(tmp_path / "native", small({"vocab_size": 300}), **about)
    convert.export_hf(path, tmp_path / "hf")
    assert {name for name in files(tmp_path / "hf") if name != "model.safetensors"} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert json.loads((tmp_path / "hf/tokenizer_config.json").read_text()) == settings
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 0


def test_a_tokenizer_that_is_gone_or_changed_is_a_note(tokenizer: Path, tmp_path: Path) -> None:
    for number, about in enumerate(
        (
            {},
            {"tokenizer": "ab" * 32, "tokenizer_path": str(tokenizer)},
            {"tokenizer": "ab" * 32, "tokenizer_path": str(tmp_path / "gone.json")},
        )
    ):
        path = native(tmp_path / f"native-{number}", small(), **about)
        told: list[str] = []
        convert.export_hf(path, tmp_path / f"hf-{number}", note=told.append)
        assert len(told) == 1 and told[0].startswith("no tokenizer is written"), told
        assert str(about.get("tokenizer_path", "")) in told[0]
        assert files(tmp_path / f"hf-{number}").keys() == {"config.json", "model.safetensors"}


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_ranks_that_share_an_export_write_the_same_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 30_000)
    convert.export_hf(source, tmp_path / "alone")
    for size in (2, 3, 40):
        meeting = threading.Barrier(size)
        out = tmp_path / f"by-{size}"
        told: list[str] = []
        threads = [
            threading.Thread(
                target=convert.export_hf,
                args=(source, out, torch.bfloat16, rank, size),
                kwargs={"barrier": lambda meeting=meeting: meeting.wait(60), "note": told.append},
            )
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert files(out) == files(tmp_path / "alone")
        assert len(told) == 1, "rank 0 speaks"


def init_job(place: Place, fields: dict[str, Any], path: Path, folder: Path) -> tuple[Shards, Shards, list[str]]:
    """Begin with `path`, on any mesh; save a checkpoint and export it, all ranks writing."""
    spec = from_dict(fields)
    told: list[str] = []
    with connect(place, spec.mesh, "cpu", spec.distributed) as world:
        engine = build(spec, world)
        convert.init(path, engine.zero, world, spec.model, told.append, "ab" * 32)
        weights = shards(engine, lambda p: p._own(p._data)[: p.master.shape[0]])
        begun = shards(engine, lambda p: p.master)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        about = {"model": fields["model"], "tokenizer": None, "tokenizer_path": None}
        saver = Saver(folder / "checkpoints", engine.zero, world, about)
        saver.save(Position(1, 16))
        saver.wait()
        with pytest.MonkeyPatch.context() as patch:  # the process goes on to other tests
            patch.setattr(convert, "SHARD_BYTES", 60_000)
            convert.export_hf(folder, folder / "hf", torch.float32, world.rank, world.mesh.size, world.barrier)
        assert (folder / "hf").exists(), "on every rank when it returns"
        return begun, weights, told


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2), (1, 3, 1), (1, 2, 2)], ids=lambda m: "pp{}dp{}ep{}".format(*m))
@pytest.mark.parametrize("kind", ["hf", "native"])
def test_any_mesh_begins_with_the_same_weights_and_exports_its_own(
    pool: Pool, source: Path, tmp_path: Path, mesh: tuple[int, int, int], kind: str
) -> None:
    path = source
    if kind == "hf":
        path = tmp_path / "source"
        convert.export_hf(source, path, torch.float32)
    fields = make_spec(*mesh, training={"global_batch_size": 12 if mesh[1] == 3 else 16}).model_dump(mode="json")
    parts = pool.run(mesh[0] * mesh[1] * mesh[2], init_job, fields, path, tmp_path)
    want = masters(source)
    for place in (0, 1):
        found = assemble([part[place] for part in parts])
        assert found.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_array_equal(found[name], value, name)
    assert [len(part[2]) for part in parts] == [1] + [0] * (len(parts) - 1), "rank 0 speaks"
    assert "its tokenizer is not the one" in parts[0][2][0]

    # the newest checkpoint of the run that followed, as its ranks exported it
    run = catalog.candidates(tmp_path, pytest.fail)[0]
    exported = masters(convert.import_hf(tmp_path / "hf", tmp_path / "native"))
    np.testing.assert_equal(exported, masters(run))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert any(not np.array_equal(exported[name], want[name]) for name in want), "it has trained"


def test_a_run_that_begins_with_other_fields_is_told_which(source: Path, exported: Path, tmp_path: Path) -> None:
    other = small({"rms_norm_eps": 1e-5, "rope_theta": 500.0, "norm_topk_prob": False})
    for path in (source, exported):
        told: list[str] = []
        logits(other, path, told)
        assert [re.search(r": model\.(\S+) is (\S+) there and (\S+)", line).groups() for line in told] == [  # type: ignore[union-attr]
            ("norm_topk_prob", "true", "false"),
            ("rms_norm_eps", "1e-06", "1e-05"),
            ("rope_parameters.rope_theta", "10000.0", "500.0"),
        ]
    wide = small({"head_dim": 16, "decoder_sparse_step": 2})
    for path, prefix in ((source, "master/"), (exported, "")):
        with pytest.raises(CheckpointError) as error:
            logits(wide, path)
        text = str(error.value)
        assert f"shape of {prefix}model.layers.0.self_attn.q_proj.weight: [32, 32] there, [64, 32] here" in text
        assert f"missing: {prefix}model.layers.2.mlp.gate_proj.weight" in text
        assert f"unexpected: {prefix}model.layers.2.mlp.gate.weight" in text


# ---- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
from pithtrain import checkpoint, convert

checkpoint.SUMMED = convert.CHUNK_BYTES = 1 << 20  # a piece at a time is not what this test is of
status = Path("/proc/self/status")
convert_it = getattr(convert, sys.argv[1])
convert_it(Path(sys.argv[2]), Path(sys.argv[3] + ".small"))  # what is imported and allocated once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status.read_text()
convert_it(Path(sys.argv[4]), Path(sys.argv[3]))
now, peak = ([int(line.split()[1]) for line in text.splitlines() if line.startswith(key)][0]
             for text, key in ((before, "VmRSS"), (status.read_text(), "VmHWM")))
print((peak - now) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_two_tensors_whatever_the_model(source: Path, exported: Path, tmp_path: Path) -> None:
    """Growth of resident memory in a process of its own, for a model of many large tensors. What is freed goes back to
    the system at once, so that the allocator's habits are not measured; 8 MiB are for buffers of files."""
    sizes = {"vocab_size": 2048, "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 32}
    spec = small({**sizes, "num_hidden_layers": 10, "intermediate_size": 512})
    path = native(tmp_path / "native", spec)
    largest = 4 * max(info.size for info in spec.model.config.parameters())
    total = sum(file.stat().st_size for file in path.iterdir())
    assert total > 12 * largest
    for function, warm, given, out in (
        ("export_hf", source, path, "new"),
        ("import_hf", exported, tmp_path / "new", "back"),
    ):
        command = [sys.executable, "-c", MEMORY, function, warm, tmp_path / out, given]
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        growth = int(done.stdout)
        print(f"{function}: {growth >> 20} MiB, the model {total >> 20}, its largest tensor {largest >> 20}")
        assert growth < 2 * largest + (8 << 20), function


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_convert_both_ways(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(source, run / "checkpoints" / "step-00000000")
    done = pithtrain("export-hf", "runs/tiny", "hf", "--dtype", "float32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match(r"hf: \d+\.\d\d GiB", done.stdout)
    assert "note: no tokenizer is written" in done.stderr
    assert "100 %" in done.stderr, "progress, in plain lines where no one looks"
    done = pithtrain("import-hf", "hf", "native", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "init_from=native" in done.stdout
    np.testing.assert_equal(masters(tmp_path / "native"), masters(source))

    for arguments, message in (
        (("export-hf", "runs/tiny", "hf"), "hf exists already"),
        (("export-hf", "nowhere", "out"), "nowhere"),
        (("import-hf", "runs/tiny", "out"), "config.json"),
        (("import-hf", "hf", "out", "--architecture", "llama"), "is no folder of pithtrain/models"),
        (("export-hf", "runs/tiny", "out", "--dtype", "float16"), "float16"),
    ):
        done = pithtrain(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_named_before_a_step_is_trained(exported: Path) -> None:
    """A selection bias too, which no gradient and no loss would show."""
    gate = "model.layers.1.mlp.gate.weight"

    def spoil(found: dict[str, Tensor]) -> None:
        found[gate][2, 3] = float("nan")
        found["model.layers.2.mlp.experts.3.up_proj.weight"][0, 0] = float("-inf")

    with pytest.raises(CheckpointError, match=rf"NaN or infinity in {gate}, model\.layers\.2\.mlp\.experts\.gate_up_"):
        logits(small(), rewrite(exported, spoil))
