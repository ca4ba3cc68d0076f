"""Cluster profiles: what a place adds to a spec, what wins over it, and the files of slurm/ themselves."""

import re
from pathlib import Path

import pytest
import yaml

from pithtrain import submit
from pithtrain.errors import SpecError
from pithtrain.rundir import RunDir
from pithtrain.spec import RUN_ONLY, RunSpec, SlurmSection, load

ROOT = Path(__file__).parent.parent
PROFILES = sorted((ROOT / "slurm").glob("*.yaml"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# sixteen nodes of any of these profiles fit the mesh of any of these configs; this batch divides by all of them
FITS = ["slurm.nodes=16", "training.global_batch_size=3840"]

PLACE = """
account: lab
partition: gpu
cpus_per_task: 3
setup: [module load a]
srun_args: [--mpi=none]
env: {A: place, B: place}
additional_parameters: {reservation: ours, mail_type: END}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's directory, with a profile `place` and a config that uses it."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/place.yaml").write_text(PLACE)
    (tmp_path / "run.yaml").write_text(bare(CONFIGS[-1]) + "slurm: {profile: place}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bare(config: Path) -> str:
    """The config's text without its slurm section."""
    text, found = re.subn(r"(?m)^slurm:\n(  .*\n?)+", "", config.read_text())
    assert found == 1
    return text


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load(Path("run.yaml"), ["slurm.gpus_per_node=4", *overrides])
    return {problem.path: f"{problem.rule}; {problem.hint}" for problem in caught.value.problems}


def loaded(*overrides: str) -> RunSpec:
    return load(Path("run.yaml"), ["slurm.gpus_per_node=4", *overrides])


# ---- the rules -------------------------------------------------------------------------------------------------------


def test_defaults_then_profile_then_file_then_set(here: Path) -> None:
    """The nearer the user, the stronger; what nobody says keeps its default."""
    assert loaded().slurm.account == "lab" and loaded().slurm.qos is None and loaded().slurm.nodes == 1
    text = (here / "run.yaml").read_text().replace("{profile: place}", "{profile: place, account: mine, partition: x}")
    (here / "run.yaml").write_text(text)
    slurm = loaded("slurm.partition=y").slurm
    assert (slurm.account, slurm.partition, slurm.cpus_per_task, slurm.profile) == ("mine", "y", 3, None)
    assert loaded("slurm.account=null").slurm.account is None


def test_maps_are_joined_and_lists_come_after(here: Path) -> None:
    slurm = loaded(
        "slurm.env.B=run",
        "slurm.env.C=run",
        "slurm.setup=[module load b]",
        "slurm.srun_args=[--cpu-bind=none]",
        "slurm.additional_parameters={mail_type: FAIL, nice: 5}",
    ).slurm
    assert slurm.env == {"A": "place", "B": "run", "C": "run"}
    assert slurm.setup == ("module load a", "module load b") and slurm.srun_args == ("--mpi=none", "--cpu-bind=none")
    assert slurm.additional_parameters == {"reservation": "ours", "mail_type": "FAIL", "nice": 5}


def test_the_resolved_spec_needs_the_profile_no_more(here: Path) -> None:
    spec = loaded()
    assert spec.slurm.setup == ("module load a",)
    (here / "resolved.yaml").write_text(spec.to_yaml())
    (here / "slurm/place.yaml").unlink()
    assert load(here / "resolved.yaml") == spec
    # every key stands in it, so a profile would change nothing but setup and env: refused, not half obeyed
    (here / "slurm/place.yaml").write_text(PLACE)
    with pytest.raises(SpecError, match="changes nothing here"):
        load(here / "resolved.yaml", ["slurm.profile=place"])


def test_a_profile_by_its_path(here: Path) -> None:
    """Relative to the caller's directory, or absolute; `--set` alone is enough to name one."""
    (here / "mine.yaml").write_text("account: other\n")
    for name in ("mine.yaml", "./mine.yaml", str(here / "mine.yaml")):
        assert loaded(f"slurm.profile={name}").slurm.account == "other"


def test_an_unknown_profile_lists_what_is_there(here: Path) -> None:
    (here / "slurm/other.yaml").write_text("")
    found = problems("slurm.profile=plaec")
    assert found == {"slurm.profile": f"there is no file {here}/slurm/plaec.yaml; profiles there: other, place"}
    assert "profiles there: none" in problems("slurm.profile=a/b.yaml")["slurm.profile"]
    assert "a string" in problems("slurm.profile=3")["slurm.profile"]


@pytest.mark.parametrize("key", sorted(RUN_ONLY))
def test_what_belongs_to_a_run_is_no_fact_of_a_place(here: Path, key: str) -> None:
    (here / "slurm/place.yaml").write_text(f"{key}: {'x' if key in ('exclude', 'profile') else 1}\n")
    assert "belongs to a run" in problems()[f"slurm/place.yaml: slurm.{key}"]
    assert set(SlurmSection.model_fields) >= RUN_ONLY


def test_mistakes_in_a_profile_name_its_file(here: Path) -> None:
    """And hide none of the spec's own."""
    (here / "slurm/place.yaml").write_text("acount: lab\nmem: 64GB\nenv: [A]\n")
    found = problems("training.lr=1")
    assert set(found) == {
        "slurm/place.yaml: slurm.acount",
        "slurm/place.yaml: slurm.mem",
        "slurm/place.yaml: slurm.env",
        "training.lr",
    }
    assert "did you mean slurm.account?" in found["slurm/place.yaml: slurm.acount"]
    (here / "slurm/place.yaml").write_text("a: [\n")
    assert "line 2: cannot be read" in problems()["slurm.profile"]


def test_rules_hold_for_what_comes_from_a_profile(here: Path) -> None:
    (here / "slurm/place.yaml").write_text("env: {RANK: '1'}\nsetup: [export HF_TOKEN=hunter2]\n")
    assert set(problems()) == {"slurm.env.RANK", "slurm.setup.0"}


# ---- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_profile_with_every_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path, profile: Path
) -> None:
    """By its name, from the repository; its facts arrive, also in the sbatch script; the result loads as itself."""
    monkeypatch.chdir(ROOT)
    if profile.stem == "local" and not config.stem.startswith("tiny"):  # 2 GB a node hold no 52 GB of checkpoint
        with pytest.raises(SpecError, match=r"slurm\.mem"):
            load(config, [f"slurm.profile={profile.stem}"])
        return
    load(config, [f"slurm.profile={profile.stem}"])
    (tmp_path / "run.yaml").write_text(bare(config))
    spec = load(tmp_path / "run.yaml", [f"slurm.profile={profile.stem}", *FITS])
    facts = yaml.safe_load(profile.read_text())
    slurm = spec.slurm.model_dump(mode="json")
    assert facts and {key: slurm[key] for key in facts} == facts
    (tmp_path / "resolved.yaml").write_text(spec.to_yaml())
    assert load(tmp_path / "resolved.yaml") == spec
    script = submit.render(spec, RunDir(tmp_path / "run"))
    assert f"#SBATCH --partition={facts['partition']}" in script
    assert all(f"export {name}=" in script for name in facts["env"])


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_variable_has_its_reason(profile: Path) -> None:
    """The line above each says why it is there, and none is set that NCCL chooses by itself."""
    text = profile.read_text()
    assert text.startswith(f"# slurm.profile: {profile.stem} ")
    set_here = yaml.safe_load(text)["env"]
    for name in set_here:
        reason = re.search(rf"((?:  # .*\n)+)  {name}:", text)
        assert reason is not None and len(reason[1]) > 40, name
    assert set(set_here) <= {"NCCL_IB_HCA", "NCCL_IB_TC", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def test_commented_examples_work(here: Path) -> None:
    """The containers of h100-infiniband.yaml, with their `#` taken away one at a time."""
    blocks = re.findall(r"(?m)^# srun_args:\n(?:#   - .*\n)+", (ROOT / "slurm/h100-infiniband.yaml").read_text())
    assert len(blocks) == 3
    for block in blocks:
        (here / "slurm/place.yaml").write_text(re.sub(r"(?m)^# ", "", block))
        spec = loaded()
        assert len(spec.slurm.srun_args) == block.count("#   - ")
        script = submit.render(spec, RunDir(here / "run"))
        assert f" {' '.join(spec.slurm.srun_args)} " in script
