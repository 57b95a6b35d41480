"""Launch: who this process is among the others (torchrun, SLURM or alone), and how they find each other."""

import dataclasses
import datetime
import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed

from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.training import global_vars
from megatron.training.agreement import own_rank
from megatron.training.config.run_config import LaunchConfig

DEFAULT_PORT = "29500"


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
    """What the launcher says about this process. source: "torchrun", "slurm" or "single"."""

    rank: int
    world_size: int
    local_rank: int
    source: str
    master_addr: str = "127.0.0.1"
    master_port: str = DEFAULT_PORT
    attempt: int = 0


def read_launch_environment(environment: Mapping[str, str]) -> LaunchInfo:
    """The launcher's variables, checked against each other. Pure.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; srun without torchrun sets SLURM_PROCID, SLURM_NTASKS,
    SLURM_LOCALID; neither = one process. Raises ConfigError when some are missing, or torchrun runs once per SLURM task of a node.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))) > 1:
        return _from_slurm(environment)
    return LaunchInfo(0, 1, 0, "single")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise ConfigError(f"environment variable {name}={text!r} must be a whole number; unset it or start with torchrun")
    return int(text)


def _from_torchrun(environment: Mapping[str, str]) -> LaunchInfo:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if missing:
        have = ", ".join(name for name in needed if name in environment)
        raise ConfigError(
            f"environment variables {have} are set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; start with "
            "torchrun, which sets all of them, or unset them to run one process"
        )
    rank, world, local = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if rank >= world:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world}")
    tasks = environment.get("SLURM_NTASKS_PER_NODE", "1")
    launched_by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if launched_by_torchrun and tasks.isdigit() and int(tasks) > 1:
        raise ConfigError(
            f"torchrun runs in each of SLURM's {tasks} tasks per node and would start every rank {tasks} times; "
            "use --ntasks-per-node=1 with torchrun, or start pretrain_gpt.py with srun directly"
        )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchInfo(
        rank, world, local, "torchrun", environment["MASTER_ADDR"], environment["MASTER_PORT"], int(attempt) if attempt.isdigit() else 0
    )


def _from_slurm(environment: Mapping[str, str]) -> LaunchInfo:
    world = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
    if "SLURM_LOCALID" not in environment:
        raise ConfigError("SLURM_PROCID is set but SLURM_LOCALID is not; start with srun inside the job")
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if address is None:
        raise ConfigError("SLURM job without MASTER_ADDR; export MASTER_ADDR=<first node>, as scripts/slurm/pretrain.sbatch does")
    port = environment.get("MASTER_PORT", DEFAULT_PORT)
    return LaunchInfo(
        _number(environment, "SLURM_PROCID"), world, _number(environment, "SLURM_LOCALID"), "slurm", address, port,
        int(environment.get("SLURM_RESTART_COUNT", "0")),
    )  # fmt: skip


def initialize_distributed(launch: LaunchConfig, info: LaunchInfo) -> torch.device:
    """Join the other processes; returns this rank's device. One process alone joins nothing.

    NCCL on CUDA and gloo on CPU unless `distributed_backend` says otherwise. After a restart by torchrun the store's keys get a
    prefix of the attempt, since the agent's store still holds the addresses of the processes that died.
    """
    cuda = torch.cuda.is_available() and launch.distributed_backend != "gloo"
    if launch.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("distributed_backend=nccl needs a CUDA device, and torch sees none; use auto or gloo")
    if cuda and info.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {info.local_rank} has no GPU: this node shows {torch.cuda.device_count()}; start at most that many per node"
        )
    device = torch.device("cuda", info.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if info.world_size > 1 and not torch.distributed.is_initialized():
        _join(launch, info, "nccl" if cuda else "gloo")
    return device


def _join(launch: LaunchConfig, info: LaunchInfo, backend: str) -> None:
    timeout = datetime.timedelta(minutes=launch.distributed_timeout_minutes)
    os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.world_size), LOCAL_RANK=str(info.local_rank))
    os.environ.update(MASTER_ADDR=info.master_addr, MASTER_PORT=info.master_port)
    rendezvous = torch.distributed.rendezvous("env://", info.rank, info.world_size, timeout=timeout)
    store, rank, world_size = next(iter(rendezvous))
    store = torch.distributed.PrefixStore(f"attempt{info.attempt}", store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def create_groups(
    parallel: ModelParallelConfig,
    ddp: DistributedDataParallelConfig,
    world_size: int,
    launch: LaunchConfig | None = None,
) -> ProcessGroupCollection:
    """This rank's groups for the configured sizes; a collective. Raises ConfigError when they do not fit `world_size`."""
    grid = RankGrid.for_world(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
    )
    timeout = None if launch is None else datetime.timedelta(minutes=launch.distributed_timeout_minutes)
    return create_process_groups(grid, optimizer_instances=ddp.num_distributed_optimizer_instances, timeout=timeout)


def shut_down() -> None:
    """Leave the process group, if one was joined."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def print_rank_0(message: str) -> None:
    """Print on the first rank only."""
    if own_rank() == 0:
        print(message, flush=True)


def initialize_megatron() -> torch.device:
    """Facade: everything Megatron's call of this name does, from the configuration that `set_args` installed."""
    args = global_vars.get_args()
    config = args.run_config
    info = read_launch_environment(os.environ)
    device = initialize_distributed(config.launch, info)
    if parallel_state.model_parallel_is_initialized():
        raise ParallelStateError("initialize_megatron() was called twice; call parallel_state.destroy_model_parallel() between")
    parallel = config.parallel
    groups = parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        config.ddp.num_distributed_optimizer_instances,
        parallel.expert_tensor_parallel_size,
        config.launch.distributed_timeout_minutes,
    )
    model_parallel_seed(config.training.seed, groups)
    sys.stdout.flush()
    return device
