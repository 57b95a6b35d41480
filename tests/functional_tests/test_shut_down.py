"""A run leaves nothing behind in its process: no thread of a process group, which could abort the end of the interpreter."""

import pathlib
import socket
import subprocess
import sys

import pytest

from tests.harness.d0 import write_d0
from tests.harness.t0 import pretrain_environment, t0_flags

GROUPS_LEFT = """
import pathlib, sys
{run}
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print("threads of groups:", sum("gloo" in name for name in names))
"""
BY_COMMAND = "from megatron.training.main import main\nassert main(sys.argv[1:]) == 0"
BY_PRETRAIN = "from megatron.training import pretrain\npretrain()"


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="names of threads are read from /proc")
@pytest.mark.parametrize("run", [BY_COMMAND, BY_PRETRAIN])
def test_no_thread_of_a_process_group_outlives_the_run(tmp_path: pathlib.Path, run: str) -> None:
    """One that still runs while the interpreter ends can abort the process, after all work is done."""
    data = write_d0(str(tmp_path / "d0"))
    flags = t0_flags(data_path=data, train_iters=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUPS_LEFT.format(run=run), *flags],
            env=pretrain_environment(
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "threads of groups: 0" in output
