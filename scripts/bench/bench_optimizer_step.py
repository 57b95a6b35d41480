"""The optimizer's step against its two limits: torch's fused Adam on one flat tensor, and touching its bytes once.

    python scripts/bench/bench_optimizer_step.py [--dtype fp32 bf16]        # shards of one rank: everything
    torchrun --nproc-per-node 2 scripts/bench/bench_optimizer_step.py       # shards of two ranks

`Adam on shards` is the update of all units of the distributed optimizer, unscaling and clip factor inside. `whole step` is
`optimizer.step()`: norm, clip, Adam, cast to 16 bit (the parameters' gather is left out: `bench_dist_optimizer.py` shows it).
Both work on the parameters of job R (see plain_gpt.py), cut into buckets and shards. The limits of the same run:
`fused Adam, flat`: torch.optim.AdamW(fused=True) on one tensor of as many elements.
`touch once`: main params and both moments are multiplied in place by one, gradients are summed, 16-bit params are written.
Contestants take turns in rotated order; a figure is the median ratio of their times in a turn.
"""

import argparse
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import UpdateUnit
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from scripts.bench.common import Report, add_common_arguments, interleave, nothing, pin_rank, slowest_rank, time_ratio
from scripts.bench.plain_gpt import TINY, Job, PlainGPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = {"lr": 1e-4, "weight_decay": 0.1}


def build(job: Job, dtype: str, bucket_size: int, groups: ProcessGroupCollection) -> DistributedOptimizer:
    """The distributed optimizer of the job's parameters, with random gradients in its buffers."""
    torch.manual_seed(1)
    model = PlainGPT(job).to(DTYPES[dtype])
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=dtype == "bf16", bucket_size=bucket_size
    )
    chunk = DistributedDataParallel(None, ddp_config, model, pg_collection=groups)
    config = OptimizerConfig(
        **SETTINGS,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        loss_scale=1024.0 if dtype == "fp16" else None,
    )
    optimizer = get_megatron_optimizer(config, [chunk], no_weight_decay_cond=lambda name, param: False)
    assert isinstance(optimizer, DistributedOptimizer)
    for buffer in chunk.buffers:
        buffer.grad_data.normal_(std=1e-3)
    return optimizer


def bytes_once(units: Sequence[UpdateUnit]) -> int:
    """Bytes of a step when each is read or written once: main params and moments both ways, gradients in, 16-bit params out."""
    total = 0
    for unit in units:
        total += sum(2 * tensor.nbytes for flats in unit.flats for tensor in flats.values())
        total += sum(target.nbytes for target, _ in unit.param_copies)
        widened = [source.nbytes for _, source in unit.grad_copies]
        total += sum(widened) if widened else sum(flats["main_param"].nbytes for flats in unit.flats)
    return total


def touch_once(units: Sequence[UpdateUnit], scratch: torch.Tensor) -> Callable[[], None]:
    """Reads and writes what a step must, with as little arithmetic as there can be."""
    flats = [tensor for unit in units for held in unit.flats for tensor in held.values()]
    grads = [source for unit in units for _, source in unit.grad_copies] or [flat for unit in units for flat in unit.dense]
    copies = [target for unit in units for target, _ in unit.param_copies]

    def touch() -> None:
        for tensor in flats:
            tensor.mul_(1.0)
        for tensor in grads:
            torch.sum(tensor, 0, out=scratch)
        for tensor in copies:
            tensor.zero_()

    return touch


def flat_adam(numel: int) -> Callable[[], None]:
    """One step of torch's fused AdamW on a flat tensor."""
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel) * 1e-3
    optimizer = torch.optim.AdamW([param], betas=(0.9, 0.95), fused=True, **SETTINGS)
    return lambda: optimizer.step()


def contestants(optimizer: DistributedOptimizer) -> dict[str, Callable[[], object]]:
    """What takes turns."""
    units = optimizer.units
    held = sum(flats["main_param"].numel() for unit in units for flats in unit.flats)
    for group in optimizer.param_groups:
        group["step"] = 1

    def adam_on_shards() -> None:
        for unit in units:
            unit.update(optimizer.rules, 2.0)

    @torch.no_grad()
    def whole_step() -> None:
        optimizer.grad_stats()
        for unit in units:
            unit.update(optimizer.rules, 2.0)
            unit.copy_params()

    dtype = units[0].param_copies[0][0].dtype if units[0].param_copies else torch.float32
    sums = torch.zeros((), dtype=torch.float32 if not units[0].grad_copies else dtype)
    return {
        "Adam on shards": torch.no_grad()(adam_on_shards),
        "fused Adam, flat": flat_adam(held),
        "whole step": whole_step,
        "touch once": torch.no_grad()(touch_once(units, sums)),
    }


def measure(report: Report, options: argparse.Namespace, dtype: str, groups: ProcessGroupCollection) -> None:
    """One dtype."""
    job = TINY if options.tiny else Job(layers=options.layers)
    optimizer = build(job, dtype, options.bucket_size, groups)
    align = dist.barrier if dist.is_initialized() else nothing
    seconds = slowest_rank(interleave(contestants(optimizer), options.pairs, warmup=2, align=align))
    held = sum(flats["main_param"].numel() for unit in optimizer.units for flats in unit.flats)
    moved = bytes_once(optimizer.units)
    title = f"{dtype}, {groups.size('dp_cp')} rank(s), {torch.get_num_threads()} thread(s), {held} elements in {len(optimizer.units)} shards"
    rows = []
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.append([name, f"{1e3 * median:.2f}", f"{1e9 * median / held:.3f}", f"{moved / median / 1e9:.1f}"])
    report.table(title, ("contestant", "ms", "ns/element", f"GB/s of {moved / held:.0f} bytes/element"), rows)
    report.time_ratio(dtype, time_ratio(seconds, "Adam on shards", "fused Adam, flat"), "<= 1.1 (target 4)")
    report.time_ratio(dtype, time_ratio(seconds, "whole step", "touch once"), "<= 1.5 (target 4)")


def start() -> ProcessGroupCollection:
    """This rank's groups; ranks of torchrun are pinned to one core each."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return ProcessGroupCollection.single_process()
    pin_rank(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    return create_process_groups(RankGrid(dp=ranks))


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["fp32", "bf16"], help="of the model's parameters")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--bucket-size", type=int, default=6_553_600, help="elements; the default is DDP's 25 MiB of fp32")
    parser.add_argument("--layers", type=int, default=Job.layers, help="fewer than R's for a slow machine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_common_arguments(parser, pairs=20)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    groups = start()
    report = Report(options.json, speaks=groups.rank("dp_cp") == 0)
    for dtype in options.dtype:
        measure(report, options, dtype, groups)
    report.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
