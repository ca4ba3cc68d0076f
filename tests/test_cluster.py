"""The local Slurm: its two texts, and real daemons side by side where Slurm is installed."""

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster
from conftest import NO_SLURM, short_folder
from fake_run import wait_for
from pithtrain.errors import SlurmError

needs_slurm = pytest.mark.skipif(NO_SLURM is not None, reason=NO_SLURM or "")


def conf_of(user: str = "someone", gpus: int = 4, ports: tuple[int, ...] = (10007, 10008, 10009)) -> dict[str, str]:
    """slurm.conf as its last value of each key; nodes and partitions under `NodeName n0` and the like."""
    found: dict[str, str] = {}
    for line in cluster.slurm_conf(Path("/d"), user, "host", list(ports), gpus).splitlines():
        key, _, value = line.partition("=")
        if key in ("NodeName", "PartitionName"):
            name, _, value = value.partition(" ")
            key = f"{key} {name}"
        found[key] = value
    return found


def test_every_path_of_the_conf_lies_in_the_folder() -> None:
    conf = conf_of()
    paths = [value for value in conf.values() if "/" in value.partition("=")[2] or value.startswith("/")]
    assert len(paths) >= 7
    assert all(value.removeprefix("socket=").startswith("/d/") for value in paths)


def test_each_daemon_has_its_own_port() -> None:
    conf = conf_of(ports=(10007, 10008, 10009, 10010))
    assert conf["SlurmctldPort"] == "10007"
    assert [re.findall(r"Port=(\d+)", conf[f"NodeName n{i}"]) for i in range(3)] == [["10008"], ["10009"], ["10010"]]
    assert "NodeName n3" not in conf


def test_clusters_number_their_jobs_apart() -> None:
    """Job 1 of two clusters on a host would meet at one rendezvous port."""
    texts = [cluster.slurm_conf(Path(folder), "someone", "host", [1, 2], 4) for folder in ("/a", "/b", "/a")]
    ids = [re.findall(r"FirstJobId=(\d+)", text) for text in texts]
    assert ids[0] == ids[2] != ids[1]


def test_processes_are_tracked_as_the_user_may() -> None:
    assert conf_of("root")["ProctrackType"] == "proctrack/linuxproc"
    assert conf_of("someone")["ProctrackType"] == "proctrack/pgid"
    assert conf_of("someone")["SlurmUser"] == conf_of("someone")["SlurmdUser"] == "someone"


def test_train_is_preempted_by_high_and_requeued() -> None:
    conf = conf_of()
    assert conf["PreemptType"] == "preempt/partition_prio"
    assert conf["PreemptMode"] == "REQUEUE"
    assert "PriorityTier=10 GraceTime=20 Default=YES" in conf["PartitionName train"]
    assert "PriorityTier=20 PreemptMode=OFF" in conf["PartitionName high"]


def test_a_node_has_a_cpu_for_every_task() -> None:
    assert "CPUs=8 " in conf_of(gpus=8)["NodeName n0"]
    assert "CPUs=4 " in conf_of(gpus=1)["NodeName n0"]


def test_the_gpus_of_a_node_are_files() -> None:
    head, line = cluster.gres_conf(Path("/d"), 2, 4).splitlines()
    assert head == "AutoDetect=off"
    assert line == "NodeName=n0,n1 Name=gpu File=/d/dev/gpu[0-3]"
    assert cluster.gres_conf(Path("/d"), 1, 1).endswith("NodeName=n0 Name=gpu File=/d/dev/gpu0\n")


def test_without_slurm_up_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "search_path", lambda: str(tmp_path))
    with pytest.raises(SlurmError, match=r"no munged, slurmctld, .* apt-get install slurm-wlm munge"):
        cluster.up(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_status_of_a_folder_without_a_cluster(tmp_path: Path) -> None:
    status = cluster.status(tmp_path)
    assert not status.is_up
    assert (status.daemons, status.nodes, status.jobs) == ({}, {}, 0)


def test_a_pid_file_whose_number_is_anothers_is_no_daemon(tmp_path: Path) -> None:
    """After a reboot the numbers of a cluster's pid files belong to whatever: `down` must not kill that."""
    (tmp_path / "run").mkdir()
    (tmp_path / "slurm.conf").write_text("")
    (tmp_path / "run" / "slurmctld.pid").write_text(f"{os.getpid()}\n")
    assert cluster.status(tmp_path).daemons == {"munged": False, "slurmctld": False}


@needs_slurm
@pytest.mark.parametrize(
    ("name", "message"),
    [("a" * 100, "longer than a socket's path may be"), ("a b", "holds a character that slurm.conf reads as its own")],
)
def test_a_folder_that_cannot_hold_a_cluster_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(SlurmError, match=message):
        cluster.up(tmp_path / name)
    assert not (tmp_path / name).exists()


@needs_slurm
def test_no_node_is_refused() -> None:
    with pytest.raises(SlurmError, match="at least 1 node of 1 GPU"):
        cluster.up(Path("/tmp/pithtrain-none"), nodes=0)


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    made = [short_folder(), short_folder()]
    yield made
    for folder in made:
        cluster.down(folder)
        shutil.rmtree(folder)


def ask(folder: Path, command: str) -> str:
    env = cluster.environment(folder)
    return subprocess.run(command, shell=True, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


@needs_slurm
@pytest.mark.slow
def test_two_clusters_side_by_side(folders: list[Path]) -> None:
    """Each runs its own jobs with its own devices; stopping one, with jobs of every kind, leaves the other alone."""
    first, second = folders
    for folder in folders:
        assert cluster.up(folder, gpus=2)
        assert not cluster.up(folder), "up twice: it is up"
        assert cluster.status(folder).nodes == {"n0": "idle", "n1": "idle"}
    for folder in folders:
        tasks = ask(folder, "srun -N2 --gpus-per-node=1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'")
        assert sorted(tasks.splitlines()) == ["n0 0", "n1 0"]

    deaf = "trap '' TERM; echo $$ > running; sleep 600 & wait; sleep 600"
    ask(first, f'cd {first} && sbatch -o /dev/null --wrap "srun sh -c \\"{deaf.replace("$$", "$$$$")}\\""')
    begin = ask(first, "sbatch --parsable --begin=now+1hour --wrap true")
    kept = ask(second, f"cd {second} && sbatch --parsable -o /dev/null --wrap 'sleep 600'").strip()
    wait_for(lambda: cluster.status(second).nodes["n0"] == "mixed")
    wait_for((first / "running").exists)
    assert cluster.status(first).jobs == 2
    assert cluster.down(first)
    assert not cluster.down(first), "down twice: nothing was running"
    assert leftovers(first) == []
    assert ask(second, f"squeue -h -j {kept} -o %T") == "RUNNING\n"

    assert cluster.up(first), "it comes up again, and its ids go on"
    assert int(ask(first, "sbatch --parsable -o /dev/null --wrap true")) == int(begin) + 1


@needs_slurm
@pytest.mark.slow
def test_a_dead_controller_is_started_again_and_a_cluster_without_one_goes_down(folders: list[Path]) -> None:
    folder, _ = folders
    cluster.up(folder)
    job = ask(folder, f"cd {folder} && sbatch --parsable -o /dev/null --wrap 'srun sleep 600'").strip()
    wait_for(lambda: ask(folder, f"squeue -h -s -j {job} -o %i").count(".0") == 1)
    stop_controller(folder, signal.SIGTERM)
    status = cluster.status(folder)
    assert not status.is_up and status.nodes == {}
    assert cluster.up(folder)
    wait_for(lambda: ask(folder, f"squeue -h -j {job} -o %T") == "RUNNING\n")
    stop_controller(folder, signal.SIGKILL)
    assert cluster.down(folder)
    assert leftovers(folder) == []


def stop_controller(folder: Path, number: signal.Signals) -> None:
    """With SIGTERM it saves what it knows; with SIGKILL it forgets the jobs of its last seconds."""
    os.kill(int((folder / "run" / "slurmctld.pid").read_text()), number)
    wait_for(lambda: not cluster.status(folder).daemons["slurmctld"])


def leftovers(folder: Path) -> list[str]:
    """Command lines of all processes that name the folder in their command or environment, but for this one's."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            text = command + (process / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in text:
            found.append(command.replace(b"\0", b" ").decode())
    return found


@needs_slurm
@pytest.mark.slow
def test_a_cluster_that_does_not_come_up_shows_its_logs(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = folders
    monkeypatch.setattr(
        cluster, "gres_conf", lambda folder, nodes, gpus: "NodeName=n0,n1 Name=gpu File=/nowhere/gpu0\n"
    )
    monkeypatch.setattr(cluster, "UP_WITHIN_S", 5)
    with pytest.raises(SlurmError, match=r"(?s)slurmd.*/nowhere/gpu0"):
        cluster.up(folder)
    assert leftovers(folder) == []


def test_ports_are_free_and_lie_below_those_of_runs() -> None:
    ports = cluster._free_ports(3)
    assert len(set(ports)) == 3
    assert all(10000 <= port < 15000 for port in ports)
    with socket.socket() as taken:
        taken.bind(("", ports[0]))
        taken.listen()
        assert ports[0] not in cluster._free_ports(4500)
