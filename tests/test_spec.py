"""The spec: text to data, types, rules between sections, resolved form, and the casebook's area (a) and row 92."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pithtrain.errors import ABSENT, Problem, SpecError
from pithtrain.models.contract import ModelConfig, Strict, load_config
from pithtrain.models.qwen3_moe.config import Config
from pithtrain.spec import Mesh, RunSpec, from_dict, load

REPO = Path(__file__).parent.parent
TINY_YAML = REPO / "configs/tiny.yaml"

BASE = """\
name: t0
model:
  architecture: qwen3_moe
  vocab_size: 512
  hidden_size: 64
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 16
  intermediate_size: 128
  moe_intermediate_size: 64
  num_experts: 8
  num_experts_per_tok: 2
  norm_topk_prob: true
  mlp_only_layers: [0]
  rms_norm_eps: 1e-6
  rope_theta: 1e4
  tie_word_embeddings: false
  initializer_range: 0.02
training:
  max_steps: 20
  micro_batch_size: 1
  global_batch_size: 16
  sequence_length: 64
  device: cpu
optimizer:
  lr: 1e-3
data:
  sources: [{path: corpus}]
"""

DENSE = "model.mlp_only_layers=[0, 1, 2, 3]"

QWEN3_30B = {  # the public config.json of Qwen3-30B-A3B, field by field
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, BASE)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def refused(path: Path, *overrides: str) -> dict[str, Problem]:
    """The problems of a spec by path."""
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return {problem.path: problem for problem in caught.value.problems}


def sections(owner: type[Strict] = RunSpec) -> dict[str, type[Strict]]:
    """The sections right below `owner`, in order."""
    kinds = {name: info.annotation for name, info in owner.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Strict)}


def mesh_overrides(pp: int, dp: int, ep: int) -> list[str]:
    sizes = f"pipeline_parallel_size={pp}", f"expert_parallel_size={ep}"
    return [f"slurm.gpus_per_node={pp * dp * ep}", *(f"parallelism.{size}" for size in sizes)]


# ------------------------------------------------------------------------------------------------------ the casebook


def test_case_001(tmp_path: Path) -> None:
    """Mistyped, misplaced, hyphenated: each refused with its full path and where it belongs."""
    text = BASE.replace("name: t0", "name: t0\nlearning_rat: 1e-3").replace("  device: cpu", "  device: cpu\n  lr: 1")
    text += "logging:\n  wandb: {proj-ect: x, mo_de: offline}\nlr_scheduler: {warmup-steps: 3}\n"
    found = refused(write(tmp_path, text))
    hints = {path: problem.hint for path, problem in found.items()}
    assert hints == {
        "learning_rat": "did you mean optimizer.lr?",
        "training.lr": "did you mean optimizer.lr?",
        "lr_scheduler.warmup-steps": "did you mean lr_scheduler.warmup_steps?",
        "logging.wandb.proj-ect": "did you mean logging.wandb.project?",
        "logging.wandb.mo_de": "did you mean logging.wandb.mode?",
    }


def test_unknown_keys_are_refused_in_every_section(base: Path) -> None:
    """The kind behind case 1: no nesting level lets a key pass."""
    places = [*sections(), "logging.wandb", "data.sources.0", "model.rope_parameters"]
    for place in places:
        more = ["model.rope_parameters.rope_type=default"] if place == "model.rope_parameters" else []
        assert f"{place}.zzz" in refused(base, f"{place}.zzz=1", *more)


def test_a_key_that_stands_elsewhere_is_sent_there(base: Path) -> None:
    """Ties name all places."""
    assert refused(base, "model.aux_loss_coef=1")["model.aux_loss_coef"].hint == "did you mean moe.aux_loss_coef?"
    assert refused(base, "training.vocab_size=1")["training.vocab_size"].hint == "did you mean model.vocab_size?"
    assert refused(base, "optimzer.lr=1")["optimzer"].hint == "did you mean optimizer?"
    hint = refused(base, "training.interval=1")["training.interval"].hint
    assert hint == "did you mean validation.interval or checkpoint.interval or logging.interval?"
    assert "wandb" in refused(base, "logging.qqq=1")["logging.qqq"].hint


def test_case_002(tmp_path: Path) -> None:
    """1e-3, 1e3 and 5e2 are numbers everywhere; a string is one nowhere. There is no untyped place for an `eps`."""
    text = BASE.replace("max_steps: 20", "max_steps: 1e3").replace("vocab_size: 512", "vocab_size: 5e2")
    spec = load(write(tmp_path, text), ["optimizer.eps=1e-8", "optimizer.weight_decay=5"])
    assert spec.optimizer.lr == 0.001 and spec.optimizer.eps == 1e-8
    assert spec.training.max_steps == 1000 and isinstance(spec.training.max_steps, int)
    assert spec.model.config.vocab_size == 500 and isinstance(spec.model.config.vocab_size, int)
    found = refused(write(tmp_path, BASE), "optimizer.lr='1e-3'", "training.max_steps='20'", "training.seed=1_000")
    assert found["optimizer.lr"].hint == found["training.max_steps"].hint == "write it without quotes"
    assert "training.seed" in found
    assert "training.max_steps" in refused(write(tmp_path, BASE), "training.max_steps=1.5")


def test_case_003(tmp_path: Path) -> None:
    """A key given twice: refused with both lines, at every depth, in a config.json too, and by --set."""
    found = refused(write(tmp_path, BASE + "training:\n  seed: 2\n"))
    assert found[""].rule == "line 30: cannot be read: training is given twice, in lines 20 and 30"
    found = refused(write(tmp_path, BASE + "slurm: {env: {A: b, A: c}}\n"))
    assert found[""].rule == "line 30: cannot be read: A is given twice, in lines 30 and 30"
    assert "A is given twice" in refused(write(tmp_path, BASE), "slurm.env={A: b, A: c}")["slurm.env"].rule
    assert list(refused(write(tmp_path, BASE), "training.seed=1", "training.seed=2")) == ["training.seed"]
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 512, "vocab_size": 4}')
    assert "given twice" in refused(write(tmp_path, BASE), f"model.config_file={config}")["model.config_file"].rule


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("optimizer.lr=.nan", "finite"),
        ("optimizer.lr=0", "greater than 0"),
        ("optimizer.lr=true", "a number"),
        ("optimizer.lr=null", "a number"),
        ("optimizer.weight_decay=-0.1", "greater than or equal to 0"),
        ("optimizer.betas=[0.9, 1.0]", "less than 1"),
        ("optimizer.betas=[0.9]", "missing"),
        ("training.max_grad_norm=.inf", "finite"),
        ("training.max_grad_norm=0", "greater than 0"),
        ("training.max_steps=true", "a whole number"),
        ("training.seed=-1", "greater than or equal to 0"),
        ("training.sequence_length=0", "greater than 0"),
        ("training.deterministic=1", "true or false"),
        ("training.deterministic=yes", "true or false"),
        ("model.num_experts=true", "a whole number"),
        ("model.num_experts=0", "greater than 0"),
        ("model.num_experts_per_tok=0", "greater than 0"),
        ("model.rms_norm_eps=-1", "greater than 0"),
        ("slurm.nodes=0", "greater than 0"),
        ("version=true", "a whole number"),
        ("version=2", "there is one format"),
    ],
)
def test_case_004(base: Path, override: str, rule: str) -> None:
    """Not finite, out of range or of another type: refused with the field's path and what is allowed."""
    path = override.partition("=")[0]
    found = {key.removesuffix(".1"): problem for key, problem in refused(base, override).items()}
    assert rule in found[path].rule


def test_case_006(base: Path) -> None:
    """ep divides the world and the experts, or the numbers that do not divide are named. ep multiplies the world here,
    so `ep=4 on dp x cp = 2` cannot be written. RunSpec itself, which the engine gets, holds the rule."""
    wrong = refused(base, "slurm.gpus_per_node=4", "parallelism.expert_parallel_size=3")
    assert "4 / 3 is not whole" in wrong["parallelism"].rule
    assert "the model's 8 experts" in wrong["parallelism.expert_parallel_size"].rule
    found = refused(base, *mesh_overrides(1, 1, 4), "model.num_experts=6")["parallelism.expert_parallel_size"]
    assert (found.value, found.rule.split(":")[0]) == (4, "must divide the model's 6 experts")
    assert found.hint == "1, 2, 3, 6 work"

    spec = load(base, mesh_overrides(1, 1, 2))
    parts = {name: getattr(spec, name) for name in RunSpec.model_fields}
    alone = spec.slurm.model_copy(update={"gpus_per_node": 3})
    with pytest.raises(SpecError, match="3 / 2 is not whole"):
        RunSpec(**{**parts, "slurm": alone})


def test_every_rank_of_a_sequence_holds_two_chunks(base: Path) -> None:
    four = ["slurm.gpus_per_node=4", "parallelism.context_parallel_size=4", *mesh_overrides(1, 1, 1)[1:]]
    found = refused(base, *four, "training.sequence_length=60")["training.sequence_length"]
    assert found.rule == "must be a multiple of 2 x context_parallel_size 4 = 8: every rank holds two chunks"
    assert found.hint == "nearest: 56 or 64"
    assert refused(base, *four, "training.sequence_length=6")["training.sequence_length"].hint == "nearest: 8"
    spec = load(base, [*four, "training.sequence_length=64"])
    assert spec.mesh.cp == 4 and spec.data.document_mask, "documents are kept apart unless told otherwise"
    assert not load(base, ["data.document_mask=false"]).data.document_mask


def test_case_007(base: Path) -> None:
    """The formula with the user's numbers and what is asked from Slurm; degrees below one are errors of the spec."""
    assert "what pp, cp and ep leave" in refused(base, "parallelism.dp=8")["parallelism.dp"].hint
    many = ["slurm.gpus_per_node=8", "parallelism.context_parallel_size=8", "parallelism.pipeline_parallel_size=2"]
    found = refused(base, *many)
    assert "slurm.nodes 1 x slurm.gpus_per_node 8 = 8" in found["parallelism"].rule
    assert "pp 2 x dp x cp 8 x ep 1 with a whole dp >= 1, but 8 / 16" in found["parallelism"].rule
    assert found["parallelism"].hint == "ask Slurm for a multiple of 16 ranks, or cut less"
    for size in ("pipeline", "expert", "context"):
        for degree in (0, -2):
            path = f"parallelism.{size}_parallel_size"
            assert refused(base, f"{path}={degree}")[path].rule == "must be greater than 0"
    assert "nodes 3" in refused(base, "slurm.nodes=3", "parallelism.pipeline_parallel_size=2")["parallelism"].rule


def test_weights_of_corpora_are_summed_as_they_are_written(base: Path) -> None:
    """0.1 + 0.2 + 0.7 is 1, though not as floats."""
    spec = load(base, ["data.sources=[{path: a, weight: 0.1}, {path: b, weight: 0.2}, {path: c, weight: 0.7}]"])
    assert [source.weight for source in spec.data.sources] == [0.1, 0.2, 0.7] and load(base).data.sources[0].weight == 1


def test_what_a_validation_needs(base: Path) -> None:
    """Nothing of the section is without effect, and each corpus has a name of its own."""
    sources = "validation.sources=[{path: a/books}, {path: b/books, name: more-books}]"
    spec = load(base, ["validation.interval=4", "logging.interval=2", sources])
    assert [source.label for source in spec.validation.sources] == ["books", "more-books"]
    for overrides, path, said in (
        (["validation.steps=2"], "validation.steps", "no effect with interval: null"),
        ([sources], "validation.sources", "no effect with interval: null"),
        (["validation.interval=4"], "validation.sources", "must hold a corpus"),
        (["validation.interval=7", "logging.interval=5", sources], "validation.interval", "multiple of logging"),
        (["validation.interval=2", sources.replace("more-", "")], "validation.sources", "more than one books"),
        (["validation.interval=2", sources.replace("more-", "a ")], "validation.sources.1.name", "letters, digits"),
        (
            ["validation.interval=2", "validation.sources=[{path: a, weight: 1.0}]"],
            "validation.sources.0.weight",
            "key",
        ),
    ):
        problem = refused(base, *overrides)[path]
        assert said in problem.rule and (problem.hint or "form" in problem.rule), problem
    for path, said in (("a/b{c}", "is no name of a loss"), ("corpus", "is trained on, in data.sources")):
        found = refused(base, "validation.interval=2", f"validation.sources=[{{path: '{path}'}}]")
        assert said in found["validation.sources.0.path"].rule and found["validation.sources.0.path"].hint
    assert refused(base, "validation.sources=[{pth: a}]")["validation.sources.0.pth"].hint.endswith("sources.path?")
    hint = refused(base, "validation.interval=7", "logging.interval=5", sources)["validation.interval"].hint
    assert hint == "nearest: 5 or 10"


def test_case_010(base: Path) -> None:
    """Every default is allowed and written out; every feature can be turned on or says what it needs."""
    spec = load(base)
    again = load(write(base.parent, spec.to_yaml()))
    assert again == spec and again.to_yaml() == spec.to_yaml() and again.stable_hash() == spec.stable_hash()
    assert load(base, ["moe.load_balance_type=aux_loss", "moe.aux_loss_coef=1e-3"]).moe.aux_loss_coef == 0.001
    needs = refused(base, "moe.load_balance_type=aux_loss")["moe.aux_loss_coef"]
    assert "needs a coefficient above 0" in needs.rule
    for kind in ("linear", "cosine", "wsd"):
        if kind == "wsd":
            assert "length of its last decay" in refused(base, "lr_scheduler.type=wsd")["lr_scheduler.decay_steps"].rule
        else:
            assert load(base, [f"lr_scheduler.type={kind}"]).lr_scheduler.decay_steps == 20
    for on in ("moe.dispatch=plain", "logging.wandb.mode=online", "data.repeat=true", "training.deterministic=true"):
        load(base, [on])


def test_case_081(base: Path) -> None:
    """Experts that do not spread evenly are refused with the numbers; 5 experts on one expert rank are fine."""
    assert load(base, [*mesh_overrides(1, 4, 1), "model.num_experts=5"]).mesh == Mesh(1, 4, 1, 1)
    found = refused(base, *mesh_overrides(1, 1, 4), "model.num_experts=3")["parallelism.expert_parallel_size"]
    assert (found.value, found.hint) == (4, "1, 3 work") and "the model's 3 experts" in found.rule


def test_case_092(base: Path) -> None:
    """Too few micro-batches for the schedule: the minimum is quoted."""
    for pp, batch in ((2, 1), (2, 2), (2, 3), (4, 7)):
        found = refused(base, *mesh_overrides(pp, 1, 1), f"training.global_batch_size={batch}")
        problem = found["training.global_batch_size"]
        assert f"= {batch} micro-batches" in problem.rule and f"N >= 2 pp = {2 * pp}" in problem.rule
        assert problem.hint == f"at least {2 * pp} works"
    assert load(base, [*mesh_overrides(4, 1, 1), "training.global_batch_size=8"]).num_micro_batches == 8


# ------------------------------------------------------------------------------------------------------- the meshes


def test_tiny_runs_on_every_mesh_that_is_promised() -> None:
    """At most 8 processes, dp and ep a power of two, ep <= 4, pp <= 4."""
    meshes = [
        (pp, dp, ep) for pp in (1, 2, 3, 4) for dp in (1, 2, 4, 8) for ep in (1, 2, 4) if pp * dp * ep <= 8
    ]  # fmt: skip
    assert len(meshes) == 21
    for pp, dp, ep in meshes:
        spec = load(TINY_YAML, mesh_overrides(pp, dp, ep))
        assert spec.mesh == Mesh(pp, dp, 1, ep) and spec.world_size == spec.mesh.size == pp * dp * ep
        assert spec.num_micro_batches == 16 // (dp * ep)


def test_configs_load_and_name_their_command() -> None:
    """Every file of configs/ is valid and begins with the command that runs it."""
    for path in sorted((REPO / "configs").glob("*.yaml")):
        assert load(path).name == path.stem
        first = path.read_text().splitlines()[0]
        assert re.fullmatch(rf"# pithtrain (submit|train) configs/{path.name}( --wait)?", first), first
    total = sum(parameter.size for parameter in load(TINY_YAML).model.config.parameters())
    assert 2.8e6 < total < 3.2e6


def test_mesh_ranks_are_a_bijection_with_ep_innermost() -> None:
    """rank and coords invert each other; neighbours differ in ep."""
    mesh = Mesh(pp=2, dp=3, cp=2, ep=4)
    coords = [mesh.coords(rank) for rank in range(mesh.size)]
    assert [mesh.rank(*at) for at in coords] == list(range(48)) and len(set(coords)) == 48
    assert coords[:5] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 3), (0, 0, 1, 0)]
    assert mesh.rank(1, 2, 1, 3) == ((1 * 3 + 2) * 2 + 1) * 4 + 3


# ------------------------------------------------------------------------------------------- rules between sections


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["training.global_batch_size=15", *mesh_overrides(1, 2, 2)], "training.global_batch_size", "ep 2 = 4: "),
        (["training.micro_batch_size=3"], "training.global_batch_size", "micro_batch_size 3 x dp 1"),
        (["model.max_position_embeddings=32"], "training.sequence_length", "max_position_embeddings = 32"),
        (["training.compute_dtype=float64", "training.device=auto"], "training.compute_dtype", "proofs on the CPU"),
        (["lr_scheduler.min_lr=1", "lr_scheduler.type=linear"], "lr_scheduler.min_lr", "optimizer.lr = 0.001"),
        (["lr_scheduler.decay_steps=5"], "lr_scheduler.decay_steps", "no effect with type: constant"),
        (["lr_scheduler.min_lr=1e-4"], "lr_scheduler.min_lr", "no effect with type: constant"),
        (["lr_scheduler.warmup_steps=21"], "lr_scheduler.warmup_steps", "training.max_steps = 20"),
        (["lr_scheduler={type: cosine, warmup_steps: 20}"], "lr_scheduler.warmup_steps", "training.max_steps = 20"),
        (
            ["lr_scheduler={type: linear, warmup_steps: 5, decay_steps: 5, min_lr: 1e-4}"],
            "lr_scheduler.warmup_steps",
            "below",
        ),
        (["lr_scheduler={type: cosine, decay_steps: 5}"], "lr_scheduler.decay_steps", "ends at a rate of 0 before"),
        (["resume=never"], "resume", "auto or a path"),
        (["slurm.env={A-B: x}"], "slurm.env", "no name of a variable"),
        (["slurm.env={WANDB_API_KEY: x}"], "slurm.env.WANDB_API_KEY", "looks like a secret"),
        (["slurm.env={PITHTRAIN_ATTEMPT: x}"], "slurm.env.PITHTRAIN_ATTEMPT", "set by pithtrain"),
        (["slurm.additional_parameters={array: 0-3}"], "slurm.additional_parameters.array", "ours to set"),
        (["slurm.additional_parameters={hold: false}"], "slurm.additional_parameters.hold", "or true"),
        (["lr_scheduler={type: wsd, warmup_steps: 11, decay_steps: 10}"], "lr_scheduler.decay_steps", "11 + decay"),
        (["moe.aux_loss_coef=0.1"], "moe.aux_loss_coef", "no effect with load_balance_type: none"),
        (["moe.load_balance_type=seq_aux_loss"], "moe.aux_loss_coef", "needs a coefficient above 0"),
        (["moe.z_loss_coef=-1"], "moe.z_loss_coef", "greater than or equal to 0"),
        (["moe.bias_update_rate=1e-3"], "moe.bias_update_rate", "needs a router with a selection bias"),
        ([DENSE, "moe.bias_update_rate=1e-3"], "moe.bias_update_rate", "no layer of this model has experts"),
        ([DENSE, "moe.force_load_balance=true"], "moe.force_load_balance", "no layer of this model has experts"),
        ([DENSE, "moe.z_loss_coef=1e-3"], "moe.z_loss_coef", "no layer of this model has experts"),
        (["moe.force_load_balance=true", "checkpoint.export_hf=final"], "checkpoint.export_hf", "no effect with moe"),
        (["logging.expert_load_interval=0"], "logging.expert_load_interval", "greater than 0"),
        (["data.sources=[]"], "data.sources", "must hold a corpus"),
        (["data.sources=[{path: a, weight: 0.7}]"], "data.sources", "sum to 0.7, not to 1"),
        (["data.sources=[{path: a, weight: 0.7}, {path: b, weight: 0.2}]"], "data.sources", "sum to 0.9, not to 1"),
        (["data.sources=[{path: a, weight: 0.7}, {path: a, weight: 0.3}]"], "data.sources", "given twice"),
        (["data.sources=[{path: a, weight: 0}, {path: b}]"], "data.sources.0.weight", "greater than 0"),
        (["guards.max_consecutive_skips=3"], "guards.max_consecutive_skips", "no effect with non_finite: stop"),
        (["guards.loss_spike_sigma=0"], "guards.loss_spike_sigma", "greater than 0"),
        (["optimizer.momentum=0.9"], "optimizer.momentum", "no effect with type: adamw"),
        (["data.repeat=true", "data.epochs=2"], "data.epochs", "no effect with data.repeat: true"),
        (["checkpoint={interval: 5, keep_interval: 10}"], "checkpoint.keep_interval", "which keeps every checkpoint"),
        (["checkpoint={keep_last: 2, keep_interval: 10}"], "checkpoint.keep_interval", "no effect with interval: null"),
        (["checkpoint={interval: 4, keep_last: 2, keep_interval: 6}"], "checkpoint.keep_interval", "interval = 4"),
        (["checkpoint.interval=0"], "checkpoint.interval", "greater than 0"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last", "greater than 0"),
        (["checkpoint.keep_last=true"], "checkpoint.keep_last", "a whole number"),
        (["checkpoint.async_save=final"], "checkpoint.async_save", "true or false"),
        (["checkpoint.export_hf=all"], "checkpoint.export_hf", "must be 'final'"),
        (["checkpoint.async_save=true", "slurm.mem=1K"], "slurm.mem", "that a checkpoint is copied to"),
        (["optimizer.moments_dtype=float16"], "optimizer.moments_dtype", "'float32' or 'bfloat16'"),
        (
            ["training.device=cpu", "training.compute_dtype=float64", "optimizer.moments_dtype=bfloat16"],
            *("optimizer.moments_dtype", "whose moments are float64"),
        ),
        (["training.z_loss_coef=-1"], "training.z_loss_coef", "greater than or equal to 0"),
        (["init_from=a", "resume=b"], "init_from", "weights alone, or full state"),
        (["init_from=3"], "init_from", "must be a path"),
        (["slurm.time=10"], "slurm.signal_delay_s", "half of slurm.time = 10"),
        (["slurm.env.RANK='1'"], "slurm.env.RANK", "set by pithtrain or Slurm"),
        (["slurm.env.SLURM_X='1'"], "slurm.env.SLURM_X", "set by pithtrain or Slurm"),
        (["slurm.env.A=1"], "slurm.env.A", "must be a string"),
        (["slurm.additional_parameters={gpus-per-node: 2}"], "slurm.additional_parameters.gpus-per-node", "is ours"),
        (["slurm.additional_parameters={begin: [now]}"], "slurm.additional_parameters.begin", "must be a string"),
        (["slurm.mem=64GB"], "slurm.mem", "as in 64G"),
        (["name=a/b"], "name", "at most 100 letters"),
        (["resume="], "resume", "a string"),
        (["training=3"], "training", "a mapping"),
        (["moe="], "moe", "a mapping"),
        (["data.sources=[corpus]"], "data.sources.0", "a mapping"),
        (["slurm.setup=module load x"], "slurm.setup", "must be a list"),
        (["optimizer.type=adam"], "optimizer.type", "'adamw' or 'muon'"),
        (["model.architecture=gwen3_moe"], "model.architecture", "no folder of pithtrain/models"),
        (["model.architecture=1"], "model.architecture", "must be a string"),
        (["model.architecture=./nowhere"], "model.architecture", "holds no config.py"),
        (["model=3"], "model", "must be a mapping"),
        (["model.config_file=nope.json"], "model.config_file", "cannot be read"),
        (["model.config_file=3"], "model.config_file", "cannot be read"),
    ],
)
def test_refused(base: Path, overrides: list[str], path: str, words: str) -> None:
    """Each rule with the numbers it is about; nothing else is reported beside it."""
    found = refused(base, *overrides)
    assert words in found[path].rule
    assert list(found) == [path]


def test_what_forced_routing_and_dense_models_take(base: Path) -> None:
    """Forced routing takes any cadence of checkpoints: the run warns that none is made."""
    keys = "checkpoint={interval: 5, keep_last: 2, keep_interval: 10, async_save: true}"
    assert load(base, ["moe.force_load_balance=true", keys]).moe.force_load_balance
    assert load(base, [DENSE]).moe.load_balance_type == "none"
    both = refused(base, DENSE, "moe={load_balance_type: aux_loss, aux_loss_coef: 0.01}")
    assert list(both) == ["moe.load_balance_type", "moe.aux_loss_coef"]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("slurm.env={WANDB_API_KEY: hunter2}", "slurm.env.WANDB_API_KEY"),
        ("slurm.env={hf_token: hunter2}", "slurm.env.hf_token"),
        ("slurm.env={SLURM_JWT: hunter2}", "slurm.env.SLURM_JWT"),
        ("slurm.env={HTTPS_PROXY: 'http://me:hunter2@proxy:3128'}", "slurm.env.HTTPS_PROXY"),
        ("slurm.setup=[module load x, export WANDB_API_KEY=hunter2]", "slurm.setup.1"),
        ("slurm.setup=['export HF_TOKEN=\"hunter2\"']", "slurm.setup.0"),
        ("slurm.setup=['a; MY_SECRET_2=hunter2 b']", "slurm.setup.0"),
        ("slurm.setup=[login --password hunter2]", "slurm.setup.0"),
        ("slurm.setup=['pip install -i https://me:hunter2@host/simple x']", "slurm.setup.0"),
        ("slurm.setup=['git clone https://hunter2@host/x']", "slurm.setup.0"),
        ("slurm.setup=['curl -H \"Authorization: Bearer hunter2\" host']", "slurm.setup.0"),
        (f"slurm.setup=[wandb login {'hunter2' * 6}]", "slurm.setup.0"),
        ("slurm.srun_args=['--export=ALL,HF_TOKEN=hunter2']", "slurm.srun_args.0"),
        (
            "slurm.additional_parameters={export: 'ALL,AWS_SECRET_ACCESS_KEY=hunter2'}",
            "slurm.additional_parameters.export",
        ),
        ("slurm.additional_parameters={api_key: hunter2}", "slurm.additional_parameters.api_key"),
        ("slurm.env={DB_PASS: hunter2}", "slurm.env.DB_PASS"),
        ("slurm.env={MYSQL_PWD: hunter2}", "slurm.env.MYSQL_PWD"),
        ("slurm.env={X: hf_hunter2hunter2hunter2}", "slurm.env.X"),
        (f"slurm.env={{X: {'abcdef0123' * 4}}}", "slurm.env.X"),
        ("slurm.setup=['curl -u user:hunter2 host']", "slurm.setup.0"),
        ("slurm.setup=['curl -H \"X-Api-Key: hunter2\" host']", "slurm.setup.0"),
        ("slurm.setup=['echo hunter2 | docker login --password-stdin']", "slurm.setup.0"),
        ('logging.wandb.tags=["WANDB_API_KEY=hunter2"]', "logging.wandb.tags.0"),
        ("init_from=https://user:hf_hunter2hunter2hunter2@host/model", "init_from"),
    ],
)
def test_secrets_are_refused_and_not_repeated(base: Path, override: str, path: str) -> None:
    """A spec is kept, snapshotted and shown."""
    with pytest.raises(SpecError) as caught:
        load(base, [override])
    assert "hunter2" not in str(caught.value)
    said = {problem.path: f"{problem.rule} {problem.hint}" for problem in caught.value.problems}
    assert "looks like a secret" in said[path] and "export it in the shell" in said[path]


@pytest.mark.parametrize(
    "override",
    [
        "slurm.env={TOKENIZERS_PARALLELISM: 'false', AWS_SHARED_CREDENTIALS_FILE: /a, HTTP_PROXY: 'http://proxy:3128'}",
        "slurm.setup=['export HF_TOKEN=$(cat ~/.hf)', 'export WANDB_API_KEY=\"$(<~/.key)\"', 'A_KEY=`cat f`']",
        "slurm.setup=['pip install https://host/a@2.whl', 'git clone ssh://git@host/x', module load keyutils]",
        "slurm.setup=['curl https://me:$PASS@host', 'curl -H \"Authorization: Bearer $T\" host', wandb login]",
        "slurm.srun_args=['--container-image=docker://me@host#image', '--container-env=HF_TOKEN,WANDB_API_KEY']",
        "slurm.setup=['f() {\n\techo é\n}']",
        "slurm.setup=['curl -u $USER:$PASS host', 'git checkout 0123456', 'python a.py --author me']",
    ],
)
def test_no_secrets(base: Path, override: str) -> None:
    """Names, files, and values that are read from elsewhere; lines of setup may hold tabs and several lines."""
    spec = load(base, [override])
    assert load(write(base.parent, spec.to_yaml())) == spec


@pytest.mark.parametrize(
    "override",
    [
        "logging.wandb.api_key=hunter2",
        "wandb={api_key: hunter2}",
        "slurm.env.HF_TOKEN=[hunter2]",
        "slurm.setup=export WANDB_API_KEY=hunter2",
        "slurm.proxy=http://me:hunter2@proxy",
        "WANDB_API_KEY:hunter2",
    ],
)
def test_mistakes_of_any_kind_do_not_repeat_secrets(base: Path, override: str) -> None:
    """An unknown key, a wrong type: the error shows no value that may be one, and every other value as before."""
    with pytest.raises(SpecError) as caught:
        load(base, [override, "model.num_key_value_heads=3", "optimizer.lr=-1"])
    assert "hunter2" not in str(caught.value)
    assert {str(problem.value) for problem in caught.value.problems} in ({"..."}, {"3", "-1", "..."})


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ('slurm.partition="a\\nb"', "slurm.partition"),
        ('slurm.constraint="a\\tb"', "slurm.constraint"),
        ('slurm.setup=["a\\eb"]', "slurm.setup.0"),
        ('slurm.setup=["module\\_load x"]', "slurm.setup.0"),
        ('slurm.env={A: "\\a"}', "slurm.env.A"),
        ('slurm.env={"A\\nB": x}', "slurm.env"),
        ('slurm.srun_args=["a\\0"]', "slurm.srun_args.0"),
        ('slurm.additional_parameters={begin: "now\\n#SBATCH --wrap=x"}', "slurm.additional_parameters.begin"),
        ('slurm.additional_parameters={"begin\\n": now}', "slurm.additional_parameters"),
        ("slurm.additional_parameters={C: fast}", "slurm.additional_parameters"),
        ("slurm.additional_parameters={no-requeue: true}", "slurm.additional_parameters.no-requeue"),
    ],
)
def test_what_would_garble_an_sbatch_script(base: Path, override: str, path: str) -> None:
    """Characters that cannot be printed, a web page's no-break space among them; options that are none, or ours."""
    assert list(refused(base, override)) == [path]


def test_accepted_at_the_edge_of_each_rule(base: Path) -> None:
    """The nearest spec on the right side of the rules above."""
    for overrides in (
        ["model.max_position_embeddings=64"],
        ["training.compute_dtype=float64"],
        ["lr_scheduler.warmup_steps=20"],
        ["lr_scheduler={type: cosine, warmup_steps: 19, min_lr: 1e-3}"],
        ["lr_scheduler={type: linear, warmup_steps: 30, decay_steps: 31}"],  # may exceed max_steps
        ["lr_scheduler={type: wsd, warmup_steps: 10, decay_steps: 10}"],
        ["slurm.time=11"],
        ["slurm.env={OMP_NUM_THREADS: '1'}", "slurm.additional_parameters={begin: now+1hour, nice: 5}"],
        ["checkpoint={interval: 5, keep_last: 1, keep_interval: 10, async_save: true, export_hf: final}"],
        # requested saves and the last one are there without an interval
        ["checkpoint={keep_last: 2, async_save: true, export_hf: null}"],
        ["checkpoint={interval: 5, keep_interval: 5, keep_last: 1}", "init_from=somewhere", "resume=auto"],
        ["model.num_hidden_layers=1", *mesh_overrides(4, 1, 1)],  # fewer layers than stages
        ["model.num_hidden_layers=7", *mesh_overrides(3, 1, 2)],
    ):
        load(base, overrides)


def test_hints_name_specs_that_work(base: Path) -> None:
    """The batch that an error proposes is valid."""
    for overrides in (mesh_overrides(2, 1, 2), mesh_overrides(3, 2, 1), mesh_overrides(1, 2, 2)):
        for batch in (1, 3, 5, 17, 18, 31):
            try:
                load(base, [*overrides, f"training.global_batch_size={batch}"])
            except SpecError as error:
                for better in re.findall(r"\d+", error.problems[0].hint):
                    load(base, [*overrides, f"training.global_batch_size={better}"])


def test_the_old_spelling_of_export_hf_is_told_the_new_one(base: Path) -> None:
    """Resolved specs of older runs hold it."""
    assert refused(base, "checkpoint.export_hf=true")["checkpoint.export_hf"].hint.endswith("write final")
    assert refused(base, "checkpoint.export_hf=false")["checkpoint.export_hf"].hint.endswith("write null")


@pytest.mark.parametrize(("kept", "near"), [(1, "4"), (6, "4 or 8"), (9, "8 or 12")])
def test_the_hint_of_keep_interval_is_a_spec_that_works(base: Path, kept: int, near: str) -> None:
    problem = refused(base, f"checkpoint={{interval: 4, keep_last: 2, keep_interval: {kept}}}")
    assert problem["checkpoint.keep_interval"].hint == f"nearest: {near}"
    for better in near.split(" or "):
        load(base, [f"checkpoint={{interval: 4, keep_last: 2, keep_interval: {better}}}"])


def test_all_problems_at_once(base: Path) -> None:
    """Text of one section, type of another, rule between two more: one message with all, and its head."""
    with pytest.raises(SpecError) as caught:
        load(base, ["training.lr=1", "optimizer.lr=-1", "slurm.gpus_per_node=3", *mesh_overrides(2, 1, 1)[1:]])
    assert {p.path for p in caught.value.problems} == {"training.lr", "optimizer.lr", "parallelism"}
    assert str(caught.value).startswith(f"{base}: 3 problems\n  ")
    assert caught.value.exit_code == 2


def test_bf16_moments_need_a_third_less_host_memory(base: Path) -> None:
    needs = []
    for moments in ("float32", "bfloat16"):
        overrides = ["checkpoint.async_save=true", "slurm.mem=1K", f"optimizer.moments_dtype={moments}"]
        with pytest.raises(SpecError) as caught:
            load(base, [*overrides, "model.vocab_size=100000", "model.hidden_size=8192"])
        (problem,) = (each for each in caught.value.problems if each.path == "slurm.mem")
        needs.append(float(re.findall(r"([\d.]+) GiB", problem.rule)[0]))
    assert needs[1] == pytest.approx(needs[0] * 8 / 12, rel=0.02)


def test_copy_engines_are_asked_for_only_where_they_can_be(base: Path) -> None:
    """`symmetric` where no token leaves its rank, on a CPU, over two hosts; `auto` and `nccl` anywhere."""
    ep2 = ["training.device=cuda", *mesh_overrides(1, 1, 2)]
    assert load(base, [*ep2, "moe.transport=symmetric"]).moe.transport == "symmetric"
    for overrides, said in {
        ("training.device=cuda", *mesh_overrides(1, 2, 1)): "no token leaves its rank",
        ("training.device=cpu", *mesh_overrides(1, 1, 2)): "copy engines of GPUs",
        ("slurm.nodes=2", "slurm.gpus_per_node=1", ep2[0], *ep2[2:]): "on one host",
    }.items():
        problem = refused(base, "moe.transport=symmetric", *overrides)["moe.transport"]
        assert said in problem.rule and problem.hint == "use auto"
        for fine in ("auto", "nccl"):
            load(base, [*overrides, f"moe.transport={fine}"])


def test_every_section_of_the_design_is_there_and_every_key_says_what_it_is() -> None:
    """DESIGN section 3, and a description with unit or reason for each field."""
    names = "model parallelism training optimizer lr_scheduler moe fp8 compile activation_checkpoint data validation"
    names += " checkpoint logging guards profiling distributed slurm"
    assert list(sections()) == names.split()

    def walk(owner: type[Strict]) -> None:
        assert owner.__doc__
        for name, info in owner.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Strict):
                walk(info.annotation)
            else:
                assert info.description, f"{owner.__name__}.{name}"

    walk(RunSpec)
    walk(Config)


def test_a_mistake_in_one_section_hides_no_rule_of_others(base: Path) -> None:
    """Each section broken in turn: the rules that do not read it still speak."""
    wrong = ["slurm.gpus_per_node=3", "parallelism.pipeline_parallel_size=2", "data.repeat=true", "data.epochs=2"]
    wrong += ["moe.aux_loss_coef=1", "training.compute_dtype=float64", "training.device=cuda", "fp8.enabled=true"]
    wrong += ["lr_scheduler.min_lr=1", "lr_scheduler.type=linear", "model.num_experts=3"]
    wrong += ["parallelism.expert_parallel_size=2"]
    readers = {
        "parallelism": {"parallelism", "slurm"},
        "parallelism.expert_parallel_size": {"parallelism", "model"},
        "training.compute_dtype": {"training"},
        "lr_scheduler.min_lr": {"lr_scheduler", "optimizer", "training"},
        "moe.aux_loss_coef": {"moe"},
        "data.epochs": {"data"},
        "fp8.enabled": {"fp8", "model", "training"},
        "fp8.recipe": {"fp8", "model", "training"},
    }
    assert set(refused(base, *wrong)) == set(readers)
    for section in sections():
        found = set(refused(base, *wrong, f"{section}.zzz=1"))
        assert found == {f"{section}.zzz"} | {path for path, reads in readers.items() if section not in reads}


# ------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+2", 100.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("+7", 7),
        ("off", "off"),
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("2026-01-31", "2026-01-31"),
        ("True", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("<<", "<<"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_yaml_core_rules(base: Path, text: str, value: object) -> None:
    """YAML 1.2's core rules, seen through a field that refuses and shows any value."""
    problem = refused(base, f"qqq={text}")["qqq"]
    assert problem.value == value and type(problem.value) is type(value)


@pytest.mark.parametrize("name", ["1e-4", "0o17", "off", "1_0", "12", "null", "1.", "2026-01-31", "0x1F", "yes", "1e3"])
def test_strings_that_look_like_something_else_survive_a_dump(base: Path, name: str) -> None:
    """A string that either YAML version reads as a number, a date or a bool is quoted."""
    spec = load(base, [f"name='{name}'", f"slurm.env={{A: '{name}'}}", f"slurm.partition='{name}'"])
    assert spec.name == name
    assert load(write(base.parent, spec.to_yaml())) == spec


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must hold a mapping"),
        ("- a\n", "must hold a mapping"),
        ("a: [1\n", "line 2: cannot be read: while parsing a flow sequence, expected"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: &x [*x]\n", "line 1: cannot be read: found unconstructable recursive node"),
        ("1: a\n", "a key must be a string"),
        ("a: !!python/name:os.system x\n", "line 1: cannot be read: could not determine a constructor"),
        ("a: !!int x\n", "cannot be read: invalid literal for int"),
        ("a: \x07\n", "cannot be read: special characters"),
    ],
)
def test_files_that_are_no_spec(tmp_path: Path, text: str, rule: str) -> None:
    """One readable reason, with the line where there is one."""
    found = refused(write(tmp_path, text))
    assert [rule in problem.rule for problem in found.values()] == [True]


def test_a_missing_file_names_its_neighbour(base: Path) -> None:
    """A mistyped file name."""
    with pytest.raises(SpecError, match=r"cannot be read.*did you mean .*run\.yaml\?"):
        load(base.parent / "rum.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        load(base.parent)


def test_set(base: Path) -> None:
    """Values by YAML's rules, sections made on the way, lists by number, no place that is not there."""
    spec = load(
        base,
        [
            "moe.dispatch=plain",
            "logging.wandb.tags=[a, b]",
            "data.sources.0.path=/other",
            "slurm.env.A=x=y",
            "optimizer.betas=[0.8, 0.9]",
            "slurm.time=1-02:00:00",
            "model.rms_norm_eps=1e-5",
        ],
    )
    assert spec.moe.dispatch == "plain" and spec.logging.wandb.tags == ("a", "b")
    assert spec.data.sources[0].path == Path("/other") and spec.slurm.env == {"A": "x=y"}
    assert spec.optimizer.betas == (0.8, 0.9) and spec.slurm.time == "1-02:00:00"
    assert spec.model.config.rms_norm_eps == 1e-5
    for override, at in (
        ("lr", "--set"),
        ("a..b=1", "--set"),
        ("data.sources.1.path=x", "data.sources"),
        ("data.sources.x=1", "data.sources"),
        ("optimizer.lr.x=1", "optimizer.lr"),
        ("optimizer.lr={", "optimizer.lr"),
    ):
        assert list(refused(base, override)) == [at]


def test_aliases_are_copies(tmp_path: Path) -> None:
    """--set on one place leaves another that was written as its alias alone."""
    text = BASE + "logging: {wandb: {tags: &t [a], group: x}}\nslurm: {setup: *t, srun_args: *t}\n"
    spec = load(write(tmp_path, text), ["slurm.setup.0=b"])
    assert (spec.logging.wandb.tags, spec.slurm.setup, spec.slurm.srun_args) == (("a",), ("b",), ("a",))


def test_paths_are_taken_against_the_callers_directory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are stored absolute, and stay when read again elsewhere."""
    here = base.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    spec = load(base, ["data.tokenizer=../tok.json", "resume=old/step-1", "output_dir=~/runs"])
    assert load(base, ["init_from=../hf"]).init_from == here.parent / "hf"
    assert spec.data.sources[0].path == here / "corpus"
    assert spec.data.tokenizer == here.parent / "tok.json"
    assert spec.resume == str(here / "old/step-1") and spec.output_dir == Path.home() / "runs"
    assert load(base).output_dir == here / "runs" and load(base).resume == "auto"
    monkeypatch.chdir(base.parent)
    assert load(write(base.parent, spec.to_yaml())) == spec


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("00:30:00", 30), ("00:10:01", 11), ("1-12:00:00", 2160), ("100:00:00", 6000), ("null", None)],
)
def test_slurm_time(base: Path, text: str, minutes: int | None) -> None:
    """[D-]HH:MM:SS or whole minutes; rounded up."""
    assert load(base, [f"slurm.time={text}", "slurm.signal_delay_s=1"]).slurm.time_minutes == minutes


@pytest.mark.parametrize("text", ["0", "12:30", "1.5", "1h", "00:00:00", "00:60:00", "true", "''", "-5"])
def test_slurm_time_refused(base: Path, text: str) -> None:
    """What sbatch would read in another sense, or not at all."""
    assert "slurm.time" in refused(base, f"slurm.time={text}")


def test_hash_is_of_the_values(base: Path) -> None:
    """Comments and order do not count, any value does; the digits are the same in every process."""
    spec = load(base)
    turned = "\n".join(reversed(re.split(r"\n(?=\w)", BASE.strip()))) + "\n# a comment\n"
    assert load(write(base.parent, turned)) == spec
    assert load(write(base.parent, turned)).stable_hash() == spec.stable_hash()
    assert load(write(base.parent, BASE), ["training.seed=1"]).stable_hash() != spec.stable_hash()
    pinned = from_dict({**spec.model_dump(mode="json"), "output_dir": "/r"})
    code = f"from pithtrain.spec import from_dict; print(from_dict({pinned.model_dump(mode='json')!r}).stable_hash())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == pinned.stable_hash()


def test_a_spec_is_frozen_and_checks_leave_it_alone(base: Path) -> None:
    """Nothing can be assigned, and running every check again changes no value."""
    spec = load(base)
    before = spec.to_yaml()
    with pytest.raises(ValueError, match="frozen"):
        spec.training.max_steps = 3  # type: ignore[misc]
    assert RunSpec(**dict(spec)) == spec
    assert spec.to_yaml() == before


def test_front_rooms_import_neither_torch_nor_numpy() -> None:
    """So validate and plan answer in a fraction of a second."""
    code = (
        "import sys; from pathlib import Path; from pithtrain.spec import load; from pithtrain.plan import plan;"
        f"print(plan(load(Path({str(TINY_YAML)!r}))).ranks, {{'torch', 'numpy', 'rich'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "4 set()"


# ---------------------------------------------------------------------------------------------------- the HF fields


def config_of(tmp_path: Path, fields: dict[str, object], *overrides: str) -> ModelConfig:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields, indent="\t"))
    text = re.sub(r"model:\n(  .*\n)+", f"model: {{architecture: qwen3_moe, config_file: {file}}}\n", BASE, count=1)
    return load(write(tmp_path, text), overrides).model.config


def test_public_config_file(tmp_path: Path) -> None:
    """A released config.json is read as it is; the resolved spec needs the file no more; the spec's own keys win."""
    config = config_of(tmp_path, QWEN3_30B)
    assert (config.num_hidden_layers, config.num_experts, config.max_position_embeddings) == (48, 128, 40960)
    assert config_of(tmp_path, QWEN3_30B, "model.num_hidden_layers=6").num_hidden_layers == 6
    spec = load(tmp_path / "run.yaml")
    resolved = spec.to_yaml()
    assert "config_file" not in resolved and "torch_dtype" not in resolved
    (tmp_path / "config.json").unlink()
    assert load(write(tmp_path, resolved)) == spec


def test_config_of_the_installed_transformers(tmp_path: Path) -> None:
    """What the oracle's own version writes (rope_parameters, num_local_experts) is read to the same numbers."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3MoeConfig(
        **{k: v for k, v in QWEN3_30B.items() if k not in ("rope_theta", "torch_dtype")}
    )
    theirs.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in fields and "rope_theta" not in fields
    assert config_of(tmp_path, fields) == config_of(tmp_path, QWEN3_30B)
    assert config_of(tmp_path, fields, "model.num_experts=16").num_experts == 16
    assert config_of(tmp_path, theirs.to_dict()) == config_of(tmp_path, QWEN3_30B)


@pytest.mark.parametrize("field", [field for field, info in Config.model_fields.items() if info.is_required()])
def test_a_field_of_the_forward_left_out_is_an_error(tmp_path: Path, field: str) -> None:
    """No class default steps in (casebook 126)."""
    fields = {key: value for key, value in QWEN3_30B.items() if key not in (field, "rope_theta")}
    fields |= {} if field == "rope_parameters" else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(SpecError) as caught:
        config_of(tmp_path, fields)
    assert [p.path for p in caught.value.problems] == [f"model.{field}"]
    assert caught.value.problems[0].value == ABSENT and "missing" in caught.value.problems[0].rule


def test_the_fields_that_have_no_default() -> None:
    """The list itself, so that a default added later is noticed."""
    optional = {field for field, info in Config.model_fields.items() if not info.is_required()}
    structure = {"decoder_sparse_step", "mlp_only_layers", "attention_bias"}  # HF's own defaults: MoE all over, no bias
    one_case = {"model_type", "hidden_act", "attention_dropout", "use_sliding_window"}
    assert optional == structure | one_case | {"max_position_embeddings"}  # the last is a limit only


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("model.hidden_act=gelu", "model.hidden_act"),
        ("model.attention_dropout=0.1", "model.attention_dropout"),
        ("model.use_sliding_window=true", "model.use_sliding_window"),
        ("model.rope_scaling={type: yarn}", "model.rope_parameters.rope_type"),
        ("model.model_type=llama", "model.model_type"),
        ("model.shared_expert_intermediate_size=64", "model.shared_expert_intermediate_size"),
        ("model.num_key_value_heads=3", "model.num_key_value_heads"),
        ("model.num_experts_per_tok=9", "model.num_experts_per_tok"),
        ("model.head_dim=15", "model.head_dim"),
        ("model.mlp_only_layers=[0, 4]", "model.mlp_only_layers"),
        ("model.rope_parameters={rope_type: default, rope_theta: 2e4}", "model.rope_theta"),
        ("model.num_local_experts=4", "model.num_local_experts"),
    ],
)
def test_hf_fields_refused(base: Path, override: str, path: str) -> None:
    """What is not built, not known, contradictory, or given in two spellings that differ."""
    assert list(refused(base, override)) == [path]


@pytest.mark.parametrize(
    ("rope", "path"),
    [
        ("{rope_type: yarn, rope_theta: 1e4, factor: 4}", "rope_type"),
        ("{rope_type: default}", "rope_theta"),
        ("{rope_theta: 1e4}", "rope_type"),
        ("{rope_type: default, rope_theta: 1e4, partial_rotary_factor: 0.5}", "partial_rotary_factor"),
        ("{rope_type: default, rope_theta: 0}", "rope_theta"),
    ],
)
def test_rope_keys_missing_or_unknown(tmp_path: Path, rope: str, path: str) -> None:
    """A missing or unknown rope key is an error, never a default."""
    text = BASE.replace("rope_theta: 1e4", f"rope_parameters: {rope}")
    assert f"model.rope_parameters.{path}" in refused(write(tmp_path, text))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", ["3", "[1]", "false", "yarn"])
def test_a_rope_that_is_no_mapping_is_one_problem(base: Path, key: str, value: str) -> None:
    problems = refused(base, f"model.{key}={value}")
    assert list(problems) == [f"model.{key}"]
    assert "must be a mapping" in str(problems[f"model.{key}"])


def test_a_key_that_takes_few_words_is_told_with_them_where_it_is_missing(tmp_path: Path) -> None:
    text = BASE.replace("rope_theta: 1e4", "rope_parameters: {rope_theta: 1e4}")
    problem = refused(write(tmp_path, text))["model.rope_parameters.rope_type"]
    assert "missing; 'default': how the waves are scaled" in str(problem)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((0, 4), "[0, 4]"),
        (("a", "b"), "['a', 'b']"),
        ([None, True, (1.5,)], "[null, true, [1.5]]"),
        ({"a": None, "b": (Path("c"),)}, "{a: null, b: ['c']}"),
        ([], "[]"),
    ],
)
def test_a_value_is_told_as_yaml_spells_it(value: object, text: str) -> None:
    assert str(Problem("a.b", value, "is wrong")) == f"a.b = {text}: is wrong"


def test_a_list_that_is_wrong_is_told_as_it_was_given(base: Path) -> None:
    for override, told in (
        ("data.sources=[]", "data.sources = []: "),
        ("data.sources=0", "data.sources = 0: "),
        ("model.mlp_only_layers=[0, 4]", "model.mlp_only_layers = [0, 4]: "),
    ):
        (problem,) = refused(base, override).values()
        assert str(problem).startswith(told)


def test_fields_without_effect_have_their_reason(base: Path) -> None:
    """IGNORED fields are accepted with any value, change nothing, and do not overlap the fields that are read."""
    assert all(Config.IGNORED.values())
    assert not set(Config.IGNORED) & set(Config.model_fields)
    overrides = [f"model.{field}=[1]" for field in Config.IGNORED]
    assert load(base, overrides) == load(base)


def test_a_model_outside_the_package(tmp_path: Path) -> None:
    """A folder given by its path, also by one relative to the caller; a name that Python uses already is refused."""
    folder = tmp_path / "outside_moe"
    folder.mkdir()
    source = (REPO / "src/pithtrain/models/qwen3_moe/config.py").read_text()
    (folder / "config.py").write_text(source.replace("nothing", "NOTHING"))
    spec = load(write(tmp_path, BASE.replace("architecture: qwen3_moe", f"architecture: {folder}")))
    assert spec.model.architecture == str(folder)
    assert type(spec.model.config).__module__ == "outside_moe.config" and load_config(str(folder)) is type(
        spec.model.config
    )
    assert load(write(tmp_path, spec.to_yaml())) == spec
    for module in ("outside_moe.config", "outside_moe"):
        sys.modules.pop(module)
    taken = tmp_path / "json"
    taken.mkdir()
    (taken / "config.py").write_text("")
    found = refused(write(tmp_path, BASE), f"model.architecture={taken}")
    assert "belongs to another Python module" in found["model.architecture"].rule


@pytest.mark.parametrize("key", ["arr", "no_requ", "chd", "job_name", "mem_per_cpu"])
def test_an_option_of_ours_is_refused_by_its_beginning_too(base: Path, key: str) -> None:
    """sbatch takes `--arr` for `--array`: copies of a run in one run directory."""
    with pytest.raises(SpecError, match=f"additional_parameters.{key} = 1: is ours to set"):
        load(base, [f"slurm.additional_parameters={{{key}: 1}}"])


@pytest.mark.parametrize("folder", ["/a/r%j", "/a/b\\s"])
def test_an_output_folder_that_slurm_would_read_otherwise_is_refused(base: Path, folder: str) -> None:
    with pytest.raises(SpecError, match="which Slurm reads as its own"):
        load(base, [f"output_dir='{folder}'"])
