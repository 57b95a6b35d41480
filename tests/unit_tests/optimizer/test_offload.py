"""Optimizer values on the host, with CPU tensors as the device: nothing is read before it came, and every bit is the same."""

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, memory_report
from megatron.core.optimizer.offload import offloaded
from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer
from tests.harness.t0 import run_pretrain, t0_flags
from tests.unit_tests.optimizer.test_optimizer_state import assemble, collect
from tests.unit_tests.optimizer.toy import Toy, groups_of_all_ranks, run_step

SHARDED = {"use_distributed_optimizer": True, "bucket_size": 100}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
STEP = {"overlap_param_gather_with_optimizer_step": True}
PRECISE = {"use_precision_aware_optimizer": True}
BF16 = {**PRECISE, "main_params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16", "stochastic_rounding": True}


class Lazy:
    """Copies that are made when they are waited for, never earlier; `order` is what happened."""

    def __init__(self):
        self.order, self.numbers = [], {}

    def host_like(self, tensor):
        return torch.full_like(tensor, 3.0)

    def to_host(self, host, device):
        return self._begin("down", host, device)

    def wait(self, copy):
        self._finish("wait", copy)

    def to_device(self, device, host):
        return self._begin("up", device, host)

    def join(self, copy):
        self._finish("join", copy)

    def _begin(self, name, target, source):
        number = self.numbers.setdefault(target.data_ptr() if name == "up" else source.data_ptr(), len(self.numbers))
        self.order.append((name, number))
        return target, source, number

    def _finish(self, name, copy):
        target, source, number = copy
        target.copy_(source)
        self.order.append((name, number))


def build(ddp, opt, dtype, transfers=None):
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, clip_grad=0.3, log_num_zeros_in_grad=True, use_distributed_optimizer=True,
        bf16=dtype == torch.bfloat16, optimizer_cpu_offload=transfers is not None, **opt,
    )  # fmt: skip
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=opt.get("main_grads_dtype") != "bf16", **ddp)
    model = DistributedDataParallel(None, ddp_config, Toy(dtype), pg_collection=groups_of_all_ranks(), reduce_op="sum")
    return model, get_megatron_optimizer(config, [model], transfers=transfers)


def trained(ddp, opt, dtype, fraction):
    """Five steps with a reload in between. fraction None: nothing is offloaded."""
    transfers = None if fraction is None else Lazy()
    opt = opt if fraction is None else {**opt, "optimizer_offload_fraction": fraction}
    model, optimizer = build(ddp, opt, dtype, transfers)
    results = []
    for step in range(5):
        results.append([float(value) for value in run_step(model, optimizer, step)])
        if step == 2:
            optimizer.finish_param_sync()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            state = optimizer.state_dict()
            model, optimizer = build(ddp, opt, dtype, None if fraction is None else Lazy())
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return params, collect(optimizer.sharded_state_dict()), results


def many(cases):
    """`trained` of each case; runs on each rank."""
    return [trained(*case) for case in cases]


@pytest.mark.parametrize("size", [1, 2])
def test_offloaded_values_are_bit_equal_to_those_on_the_device(size):
    kinds = [
        (SHARDED, {}, torch.float32),
        (OVERLAP, STEP, torch.float32),
        (OVERLAP, STEP, torch.bfloat16),
        (OVERLAP, PRECISE, torch.bfloat16),
        (OVERLAP, {**STEP, **BF16, "main_grads_dtype": "bf16"}, torch.bfloat16),
    ]
    cases = [(*kind, fraction) for kind in kinds for fraction in (None, 1.0, 0.5)]
    results = list(zip(*run_distributed(many, size, cases), strict=True))
    for index in range(0, len(cases), 3):
        kept, *others = results[index : index + 3]
        expected = assemble([values for _, values, _ in kept])
        for other in others:
            got = assemble([values for _, values, _ in other])
            assert all(torch.equal(got[name], expected[name]) for name in expected)
            for (params, _, steps), (others_params, _, others_steps) in zip(kept, other, strict=True):
                assert steps == others_steps
                assert all(torch.equal(param, others_params[name]) for name, param in params.items())


def test_all_gradients_come_first_and_each_bucket_goes_as_soon_as_it_is_updated():
    transfers = Lazy()
    model, optimizer = build(SHARDED, {}, torch.float32, transfers)
    number = len(optimizer.units)
    assert number > 2 and [name for name, _ in transfers.order] == ["down", "wait"] * number
    transfers.order.clear()
    run_step(model, optimizer, 0)
    begun, done = transfers.order[:number], transfers.order[number:]
    assert [name for name, _ in begun] == ["down"] * number
    assert [name for name, _ in done] == ["wait", "up", "join"] * number
    assert [index for name, index in done if name == "wait"] == [index for _, index in begun]


def test_loaded_weights_become_main_params_on_the_host():
    for dtype, opt in ((torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, PRECISE)):
        model, optimizer = build(SHARDED, opt, dtype, Lazy())
        with torch.no_grad():
            model.module.last.weight.fill_(2.0)
        optimizer.reload_model_params()
        main = next(main for main in optimizer.main_params() if main.name == "last.weight")
        assert torch.equal(main.stored()["main_param"].values().float(), torch.full((main.main.numel(),), 2.0))


def test_the_last_buckets_that_make_up_the_fraction_are_offloaded():
    assert offloaded([10, 20, 30, 40], 1.0) == [True] * 4
    assert offloaded([10, 20, 30, 40], 0.0) == [False] * 4
    assert offloaded([10, 20, 30, 40], 0.4) == [False, False, False, True]
    assert offloaded([10, 20, 30, 40], 0.41) == [False, False, True, True]
    assert offloaded([], 1.0) == []


def test_host_memory_is_counted_apart():
    model, optimizer = build(SHARDED, {}, torch.bfloat16, Lazy())
    report = memory_report([model], optimizer)
    (buffer,) = model.all_buffers()
    assert (report.main_params, report.moments, report.main_grads) == (0, 0, 0)
    assert report.host == buffer.numel * (2 + 4 + 4 + 8)  # copies of parameter and gradient, main param, moments
    assert "in host memory" in str(report)
    model, optimizer = build(SHARDED, {}, torch.bfloat16)
    assert memory_report([model], optimizer).host == 0


def test_a_run_on_the_cpu_refuses_it():
    flags = t0_flags("unused", use_distributed_optimizer=True, optimizer_cpu_offload=True, distributed_backend="gloo")
    with pytest.raises(ConfigError, match="optimizer_cpu_offload=True needs a CUDA device; the device is cpu"):
        make_trainer(flags)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, ddp_config, Toy(), pg_collection=groups_of_all_ranks())
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0, use_distributed_optimizer=True, optimizer_cpu_offload=True), [model])
    finished = run_pretrain(flags)
    assert finished.returncode == 2 and "optimizer_cpu_offload" in finished.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True needs use_distributed_optimizer=True"),
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction is only used with optimizer_cpu_offload=True"),
        ({"optimizer_cpu_offload": True, "use_distributed_optimizer": True, "optimizer": "muon"}, "optimizer=muon does not"),
    ],
)
def test_impossible_combinations_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        OptimizerConfig(**options)
