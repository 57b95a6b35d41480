"""Launch: what the environment of each launcher means, contradictions, meeting at the store, the facade."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.training import global_vars
from megatron.training.config.run_config import LaunchConfig
from megatron.training.initialize import (
    LaunchInfo,
    initialize_distributed,
    initialize_megatron,
    print_rank_0,
    read_launch_environment,
    shut_down,
)
from tests.harness.t0 import t0_flags

ROOT = Path(__file__).parents[3]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_plain_python_is_one_process() -> None:
    assert read_launch_environment({"PATH": "/bin", "MASTER_ADDR": "somewhere"}) == LaunchInfo()


def test_torchrun_variables() -> None:
    assert read_launch_environment(TORCHRUN | AGENT) == LaunchInfo(1, 2, 1, "torchrun", "127.0.0.1", 29500, True, 2)


def test_srun_variables_give_the_first_node_as_meeting_place() -> None:
    assert read_launch_environment(SRUN) == LaunchInfo(3, 4, 1, "slurm", "gpu03", 22346)
    assert read_launch_environment(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4444"}).master_addr == "10.0.0.1"
    assert read_launch_environment(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-2,7]", "n1"), ("rack-a[001,004-006],x9", "rack-a001"), ("a[1-2]-ib", "a1-ib")],
)
def test_compressed_node_lists(nodes: str, first: str) -> None:
    assert read_launch_environment(SRUN | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_a_batch_script_of_one_task_is_one_process() -> None:
    assert read_launch_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}) == LaunchInfo()


def test_one_torchrun_per_srun_task_is_accepted() -> None:
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert read_launch_environment(step | TORCHRUN | AGENT | {"GROUP_WORLD_SIZE": "2"}).source == "torchrun"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, ["RANK is set", "WORLD_SIZE", "torchrun", "unset"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is set", "RANK"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["MASTER_PORT is not"]),
        (TORCHRUN | {"RANK": "two"}, ["RANK='two'", "whole number"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'"]),
        (TORCHRUN | {"RANK": "2"}, ["rank 2", "2 processes"]),
        (TORCHRUN | {"LOCAL_RANK": "5"}, ["local rank 5"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, ["3 processes on this machine"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        (SRUN | TORCHRUN | AGENT, ["srun started 4 tasks", "--ntasks-per-node=1"]),
        (SRUN | {"SLURM_PROCID": "4"}, ["rank 4"]),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, ["SLURM_NTASKS=4", "srun"]),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, ["mpirun", "torchrun"]),
    ],
)
def test_contradictions_say_what_to_do(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch_environment(environment)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_process_does_not_start_torch_distributed() -> None:
    device = initialize_distributed(LaunchConfig(distributed_backend="gloo"), LaunchInfo())
    assert device.type == "cpu" and not dist.is_initialized()
    shut_down()


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="about machines without a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="nccl needs a CUDA device"):
        initialize_distributed(LaunchConfig(distributed_backend="nccl"), LaunchInfo())


def test_an_address_that_does_not_resolve_is_named() -> None:
    launch = LaunchInfo(1, 2, 1, "slurm", "no-such-host.invalid", 29500)
    with pytest.raises(ParallelStateError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        initialize_distributed(LaunchConfig(), launch)


def test_a_rank_zero_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    launch = LaunchInfo(1, 2, 1, "torchrun", "127.0.0.1", port)
    with pytest.raises(ParallelStateError, match=f"127.0.0.1:{port}"):
        initialize_distributed(LaunchConfig(distributed_timeout_minutes=0.02), launch)
    assert not dist.is_initialized()


def start(program: str, rank: int, world_size: int, port: int, **more: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


SUM_OF_RANKS = """
import os, torch, torch.distributed as dist
from megatron.training.config.run_config import LaunchConfig
from megatron.training.initialize import *
initialize_distributed(LaunchConfig(distributed_backend="gloo"), read_launch_environment(os.environ))
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
print("sum", int(value))
shut_down()
"""


def test_attempts_of_a_restarted_job_do_not_read_each_others_addresses() -> None:
    """torchrun keeps its store over a restart. Two attempts after each other on one store both work."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("0", "1"):
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        ranks = [start(SUM_OF_RANKS, rank, 2, store.port, **agent) for rank in range(2)]
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
        assert all("sum 3" in output for output in outputs)


def facade(flags: list[str]) -> tuple[int, int, int, int]:
    try:
        args = initialize_megatron(flags)
        assert global_vars.get_args() is args
        global_vars.get_timers()("step").start()
        print_rank_0("ready")
        return (
            args.hidden_size,
            global_vars.get_tokenizer().vocab_size,
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
    finally:
        global_vars.unset_global_variables()


def test_initialize_megatron_installs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = t0_flags("unread")
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    try:
        assert facade(flags) == (32, 101, 1, 0)
    finally:
        shut_down()


FOREIGN = """
import sys, json
sys.path[:0] = json.loads(sys.argv[1])
import megatron
assert "torch" not in sys.modules, "importing megatron must stay cheap"
"""


def import_beside(tmp_path: Path, rank: str) -> str:
    command = [sys.executable, "-c", FOREIGN, json.dumps([str(ROOT), str(tmp_path)])]
    result = subprocess.run(command, env={"RANK": rank, "PATH": ""}, capture_output=True, text=True, check=True)
    return result.stderr


def test_nvidias_megatron_core_beside_this_package_is_said_once(tmp_path: Path) -> None:
    assert import_beside(tmp_path, "0") == ""
    info = tmp_path / "megatron_core-0.16.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n")
    said = import_beside(tmp_path, "0")
    assert said.count("\n") == 1 and "megatron-core 0.16.1" in said and "separate virtual environment" in said
    assert import_beside(tmp_path, "1") == ""


