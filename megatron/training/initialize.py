"""Launch: who this process is, the device it computes on, the process groups of the job.

    torchrun        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun            SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; the address of the first task's node
    plain python    one process, without torch.distributed

`read_launch_environment` is pure; the other functions act on what it found. `initialize_megatron` is a facade for scripts written
for Megatron: it installs the global variables that those read.
"""

import dataclasses
import datetime
import gc
import os
import re
import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.core import process_groups_config
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.training import global_vars
from megatron.training.agreement import print_rank_0 as print_rank_0  # Megatron users look for it here
from megatron.training.arguments import Arguments, parse_args, validate_args
from megatron.training.config.run_config import LaunchConfig, rank_grid
from megatron.training.run_tokenizer import build_run_tokenizer

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "MV2_COMM_WORLD_SIZE": "mpirun", "PALS_LOCAL_SIZE": "aprun"}
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
    """Who this process is, as its launcher said.

    source: "torchrun", "slurm" or "single". local_rank: position on this machine.
    master_addr, master_port: where rank 0 keeps the store; None in a single process.
    agent_store: torchrun's own process keeps the store already. attempt: restarts of this job by torchrun.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    source: str = "single"
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    attempt: int = 0


def read_launch_environment(environ: Mapping[str, str]) -> LaunchInfo:
    """Who this process is, from its environment variables. Pure.

    Raises ConfigError, saying what to do, when the variables are incomplete or contradict each other.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE")):
        return _from_torchrun(environ)
    if _slurm_tasks(environ) > 1:
        return _from_slurm(environ)
    _check_batch_script(environ)
    for variable, launcher in _OTHER_LAUNCHERS.items():
        if _number(environ, variable, default=1) > 1:
            raise ConfigError(
                f"{variable}={environ[variable]}: started by {launcher}, which is not supported; use torchrun or srun"
            )
    return LaunchInfo()


def initialize_distributed(launch_config: LaunchConfig, launch: LaunchInfo) -> torch.device:
    """Choose the device, and join torch.distributed when there are several processes; returns the device.

    A single process needs no torch.distributed: its groups are None. NCCL carries GPU tensors, gloo CPU tensors.

    Raises ConfigError for a backend or a GPU that is not there, ParallelStateError when rank 0's store cannot be reached.
    """
    device = _device(launch_config.distributed_backend, launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size > 1 and not dist.is_initialized():
        timeout = datetime.timedelta(minutes=launch_config.distributed_timeout_minutes)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_open_store(launch, timeout),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    return device


def create_groups(
    parallel: ModelParallelConfig,
    ddp: DistributedDataParallelConfig,
    world_size: int,
    launch_config: LaunchConfig | None = None,
) -> ProcessGroupCollection:
    """The process groups that a configuration asks for, installed for Megatron's getters too. Collective over all ranks.

    launch_config: gives the groups' timeout; None = that of the group of all ranks.

    Raises ConfigError naming the options and the rule when `world_size` processes cannot be divided so.
    """
    grid = rank_grid(parallel, world_size)
    timeout = None if launch_config is None else datetime.timedelta(minutes=launch_config.distributed_timeout_minutes)
    groups = create_process_groups(grid, optimizer_instances=ddp.num_distributed_optimizer_instances, timeout=timeout)
    process_groups_config.install(groups)
    return groups


def initialize_megatron(argv: Sequence[str] | None = None, *, parsed_args: Arguments | None = None) -> Arguments:
    """Megatron's start: arguments, timers, tokenizer, torch.distributed, process groups and seeds, all installed globally.

    argv: command line (default: this process's); parsed_args: arguments made elsewhere, instead. Returns the arguments.
    Collective over all ranks. Raises ConfigError, DataError or ParallelStateError.
    """
    launch = read_launch_environment(os.environ)
    args = validate_args(parse_args(argv) if parsed_args is None else parsed_args, launch.world_size)
    config = args.config
    initialize_distributed(config.launch, launch)
    groups = create_groups(config.parallel, config.ddp, launch.world_size, config.launch)
    model_parallel_seed(config.training.seed, groups)
    global_vars.set_global_variables(args, tokenizer=build_run_tokenizer(config))
    return args


def shut_down() -> None:
    """Leave torch.distributed and forget the groups; does nothing in a single process.

    The caller holds no trainer, model or groups any more: a group ends with the last object that knows it, and one whose thread
    still runs when the interpreter ends can abort the process.
    """
    process_groups_config.forget_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


# Reading the environment


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name}={text!r} should be a whole number; it is set by the launcher")
    return int(text)


def _from_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    missing = [name for name in _TORCHRUN if not environ.get(name)]
    if missing:
        present = [name for name in _TORCHRUN if environ.get(name)]
        raise ConfigError(
            f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not; start with torchrun, which sets all of them, or unset them for one process"
        )
    info = LaunchInfo(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        source="torchrun",
        master_addr=environ["MASTER_ADDR"],
        master_port=_port(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )
    _check_rank(info, _number(environ, "LOCAL_WORLD_SIZE", default=info.world_size))
    _check_torchrun_inside_srun(environ)
    return info


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} should be between 1 and 65535")
    return port


def _check_rank(info: LaunchInfo, local_world_size: int) -> None:
    if not 0 <= info.rank < info.world_size:
        raise ConfigError(f"rank {info.rank} is not among {info.world_size} processes (0 to {info.world_size - 1}); check the launcher")
    if not 0 <= info.local_rank < local_world_size <= info.world_size:
        raise ConfigError(
            f"local rank {info.local_rank}, {local_world_size} processes on this machine and {info.world_size} in all do not fit "
            "together; check the launcher"
        )


def _check_torchrun_inside_srun(environ: Mapping[str, str]) -> None:
    """Each srun task that runs torchrun must be one of torchrun's machines, or several jobs would run as one or one as several."""
    tasks = _slurm_tasks(environ)
    if tasks <= 1 or "GROUP_WORLD_SIZE" not in environ:
        return
    machines = _number(environ, "GROUP_WORLD_SIZE")
    if tasks != machines:
        raise ConfigError(
            f"srun started {tasks} tasks, but each of their torchruns counts {machines} machine(s); start one task per node "
            "(--ntasks-per-node=1) and give torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID, as scripts/slurm/pretrain.sbatch "
            "does, or let srun start python without torchrun"
        )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the srun step that this process belongs to; 1 outside of a step."""
    if "SLURM_PROCID" not in environ or not _inside_step(environ):
        return 1
    return _number(environ, "SLURM_STEP_NUM_TASKS", default=_number(environ, "SLURM_NTASKS", default=1))


def _inside_step(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID"))


def _check_batch_script(environ: Mapping[str, str]) -> None:
    """A batch script runs once, however many tasks the job has: python started there without srun would train alone."""
    tasks = _number(environ, "SLURM_NTASKS", default=1)
    if "SLURM_PROCID" in environ and not _inside_step(environ) and tasks > 1:
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but this process was started by the batch script itself; start it with srun (or torchrun), "
            "or ask for one task"
        )


def _from_slurm(environ: Mapping[str, str]) -> LaunchInfo:
    world_size = _slurm_tasks(environ)
    port = 1 + _number(environ, "SLURM_JOB_ID", default=0) % _SLURM_PORTS
    info = LaunchInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        source="slurm",
        master_addr=environ.get("MASTER_ADDR") or _slurm_first_node(environ),
        master_port=_port(environ) if environ.get("MASTER_PORT") else _FIRST_SLURM_PORT + port,
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
    )
    _check_rank(info, world_size)
    return info


def _slurm_first_node(environ: Mapping[str, str]) -> str:
    """Host name of the node of task 0: the first of the node list, `gpu[03-07,9],x1` -> `gpu03`."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if _number(environ, "SLURM_STEP_NUM_NODES", default=_number(environ, "SLURM_NNODES", default=2)) == 1:
        return "127.0.0.1"
    match = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?", nodes)
    if match is None:
        raise ConfigError(f"cannot read the first node from SLURM_STEP_NODELIST={nodes!r}; set MASTER_ADDR to its address")
    return "".join(part or "" for part in match.groups())


# Device and store


def _device(backend: str, launch: LaunchInfo) -> torch.device:
    """The GPU of this process where there is one, unless the backend is gloo; else the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "gloo" or (backend == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise ConfigError("distributed_backend=nccl needs a CUDA device, and none is visible; use gloo (or auto) to run on the CPU")
    local_rank = 0 if gpus == 1 and launch.source == "slurm" else launch.local_rank  # srun may show each task its own GPU only
    if local_rank >= gpus:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {gpus} visible on this machine; start at most {gpus} processes here, or use "
            "--distributed-backend gloo to run on the CPU"
        )
    return torch.device("cuda", local_rank)


def _open_store(launch: LaunchInfo, timeout: datetime.timedelta) -> dist.Store:
    """The store that the processes meet at, with a prefix per attempt.

    torchrun's store outlives a restart of the ranks; without the prefix they would read the addresses of the attempt before.
    """
    assert launch.master_addr is not None and launch.master_port is not None
    try:
        socket.getaddrinfo(launch.master_addr, launch.master_port)
    except OSError as error:
        raise ParallelStateError(
            f"the address of rank 0, {launch.master_addr!r}, cannot be resolved ({error}); set MASTER_ADDR to an address that every "
            "machine reaches"
        ) from error
    try:
        store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.agent_store,
            timeout=timeout,
            wait_for_workers=not launch.agent_store,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise ParallelStateError(
            f"cannot join the other ranks at {launch.master_addr}:{launch.master_port} ({str(error).splitlines()[0][:200]}); is rank 0 "
            "running there, is the port free, and do MASTER_ADDR and MASTER_PORT agree on all machines?"
        ) from error
    return dist.PrefixStore(f"attempt{launch.attempt}", store)
