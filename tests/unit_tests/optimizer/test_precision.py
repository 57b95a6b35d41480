"""use_precision_aware_optimizer in the engines: remainders are fp32 main params bit by bit, 16-bit values are the same in every layout."""

import json

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, memory_report
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.test_optimizer_state import assemble, collect
from tests.unit_tests.optimizer.toy import build, run_step

PLAIN = {"grad_reduce_in_fp32": True, "bucket_size": 100}
SHARDED = {**PLAIN, "use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
FP32 = {}
REMAINDERS = {"use_precision_aware_optimizer": True}
BF16 = {"use_precision_aware_optimizer": True, "main_params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
FP16 = {"use_precision_aware_optimizer": True, "main_params_dtype": "fp16", "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}
MIXED = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}
ROUNDED = [{**form, "stochastic_rounding": stochastic} for form in (BF16, FP16, MIXED) for stochastic in (False, True)]


def trained(ddp, opt, steps, dtype=torch.bfloat16):
    """(model parameters, optimizer values, norms) after `steps` steps."""
    model, optimizer = build(ddp, opt, dtype)
    norms = [run_step(model, optimizer, step, accumulate=2)[3] for step in range(steps)]
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return params, collect(optimizer.sharded_state_dict()), norms


def many(cases):
    """`trained` of each case; runs on each rank."""
    return [trained(*case) for case in cases]


def assert_alike(one, other):
    """Parameters on every rank and the whole optimizer state of two cases are equal."""
    for (params, _, _), (others, _, _) in zip(one, other, strict=True):
        for name in params:
            assert torch.equal(params[name], others[name]), name
    first, second = assemble([part for _, part, _ in one]), assemble([part for _, part, _ in other])
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("size", [1, 2])
def test_remainders_are_fp32_main_params_over_twenty_steps(size):
    cases = [(ddp, opt, 20) for ddp in (PLAIN, OVERLAP) for opt in (FP32, REMAINDERS)]
    by_rank = run_distributed(many, size, cases)
    results = list(zip(*by_rank, strict=True))
    for other in results[1:]:
        assert_alike(results[0], other)


@pytest.mark.parametrize("size", [1, 2])
def test_plain_and_sharded_engines_round_alike(size):
    cases = [(ddp, opt, 6) for opt in ROUNDED for ddp in (PLAIN, OVERLAP)]
    results = list(zip(*run_distributed(many, size, cases), strict=True))
    for plain, sharded in zip(results[::2], results[1::2], strict=True):
        assert_alike(plain, sharded)
    assert not torch.equal(results[0][0][0]["last.weight"], results[2][0][0]["last.weight"])  # stochastic rounding does something


def steps_with(ddp, opt, steps, state=None):
    """Steps whose gradients depend on step and parameter alone, from `state` on; (values, common state)."""
    model, optimizer = build(ddp, opt, torch.bfloat16)
    if state is not None:
        logical, common = state
        targets = optimizer.load_targets({name: value.dtype for name, value in logical.items()})
        for tensor in targets.tensors.values():
            for piece in tensor.pieces:
                piece.data.copy_(logical[tensor.name][piece.box.slices()])
        targets.finish()
        optimizer.load_common_state_dict(json.loads(common))
        optimizer.reload_after_load()
    begin = optimizer.common_state_dict()["step"]
    for step in range(begin, begin + steps):
        for index, param in enumerate(model.param_to_name):
            generator = torch.Generator().manual_seed(100 * step + index)
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))
        assert optimizer.step()[0]
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return params, collect(optimizer.sharded_state_dict()), json.dumps(optimizer.common_state_dict())


def steps_of_all(cases):
    """`steps_with` of each case; runs on each rank."""
    return [steps_with(*case) for case in cases]


FORMS = [REMAINDERS, *ROUNDED]


def test_values_are_the_same_with_any_number_of_ranks_and_after_a_resume_at_another():
    whole = {size: run_distributed(steps_of_all, size, [(SHARDED, opt, 6) for opt in FORMS]) for size in (1, 2, 3)}
    halves = run_distributed(steps_of_all, 2, [(SHARDED, opt, 3) for opt in FORMS])
    resumed = []
    for index, opt in enumerate(FORMS):
        parts = [results[index] for results in halves]
        resumed.append((PLAIN if index % 2 else {**SHARDED, "bucket_size": 60}, opt, 3, (typed(parts), parts[0][2])))
    whole["resumed"] = run_distributed(steps_of_all, 3, resumed)
    for index in range(len(FORMS)):
        expected = assemble([results[index][1] for results in whole[1]])
        for results in whole.values():
            got = assemble([result[index][1] for result in results])
            for name in expected:
                assert torch.equal(got[name], expected[name]), (name, FORMS[index])
            for result in results:
                for name, param in whole[1][0][index][0].items():
                    assert torch.equal(result[index][0][name], param), (name, FORMS[index])


def typed(parts):
    """Logical tensors in the dtype they were saved in."""
    dtypes = {name: pieces[0][1].dtype for part in parts for name, (_, pieces) in part[1].items()}
    return {name: value.to(dtypes[name]) for name, value in assemble([part[1] for part in parts]).items()}


def test_every_form_loads_what_every_other_saved():
    saved = {index: steps_with(SHARDED, opt, 3) for index, opt in enumerate([FP32, *FORMS])}
    for one, (_, values, common) in saved.items():
        logical = typed([(None, values)])
        for other, opt in enumerate([FP32, *FORMS]):
            params, loaded, _ = steps_with(SHARDED, opt, 0, (logical, common))
            got = assemble([loaded])
            for name, value in logical.items():
                torch.testing.assert_close(got[name], value.float(), rtol=2.0**-8, atol=0.0 if other < 2 else 1e-6)
                if other < 2 or [FP32, *FORMS][one] == opt:  # fp32 and remainders hold everything
                    assert torch.equal(got[name], value.float()), name
            for name, param in params.items():
                if f"optimizer.main_param.{name}" in logical:
                    assert torch.equal(got[f"optimizer.main_param.{name}"].bfloat16(), param), name


def test_bf16_gradients_read_as_they_are_give_what_fp32_copies_give():
    ddp = {**OVERLAP, "grad_reduce_in_fp32": False}
    cases = [(ddp, {**opt, **grads}, 4) for opt in (MIXED, BF16) for grads in ({}, {"main_grads_dtype": "bf16"})]
    results = list(zip(*run_distributed(many, 2, cases), strict=True))
    for copied, read in zip(results[::2], results[1::2], strict=True):
        assert_alike(copied, read)
        assert copied[0][2] == read[0][2]
    with pytest.raises(ConfigError, match="main_grads_dtype=bf16 needs grad_reduce_in_fp32=False"):
        build(OVERLAP, {**BF16, "main_grads_dtype": "bf16"}, torch.bfloat16)


def drift(opt, steps=100):
    """Mean of 64 x 64 parameters that begin at 1 and are to fall by 1e-4 per step, less than half of what bf16 can show."""
    module = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(module.weight)
    _, optimizer = build(SHARDED, {**opt, "lr": 1e-4, "weight_decay": 0.0, "clip_grad": 0.0}, torch.bfloat16, module=module)
    for _ in range(steps):
        module.weight.main_grad.fill_(1.0)
        optimizer.step()
    return module.weight.float().mean().item()


def test_small_updates_are_lost_in_bf16_and_add_up_with_stochastic_rounding():
    assert drift(BF16) == 1.0
    # A step falls by 2**-8 with probability p = 1e-4 x 2**8, so 100 steps have deviation 2**-8 sqrt(100 p (1 - p)) per element.
    deviation = 2.0**-8 * (100 * 1e-4 * 2**8) ** 0.5 / 64
    assert drift({**BF16, "stochastic_rounding": True}) == pytest.approx(0.99, abs=5 * deviation)
    assert drift(REMAINDERS) == pytest.approx(0.99, abs=2.0**-8)


def report(cases):
    """(main params, main grads, moments, total, padding) of each case; runs on each rank."""
    found = []
    for ddp, opt in cases:
        module = torch.nn.Linear(64, 64).to(torch.bfloat16)
        model, optimizer = build(ddp, opt, torch.bfloat16, module=module)
        held = memory_report([model], optimizer)
        found.append((held.main_params, held.main_grads, held.moments, held.total, held.padding))
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_bytes_held_are_the_formula(size):
    bf16_grads = {"grad_reduce_in_fp32": False, "use_distributed_optimizer": True}
    cases = [(SHARDED, REMAINDERS), (SHARDED, BF16), (SHARDED, FP16), (bf16_grads, {**BF16, "main_grads_dtype": "bf16"})]
    padded = {1: 4160, 3: 4224}[size]  # 64 x 64 + 64 elements -> a multiple of lcm(size, 128)
    own = padded // size
    expected = [
        (2 * own, 0, 8 * own, 6 * padded + 10 * own),
        (0, 0, 4 * own, 6 * padded + 4 * own),
        (2 * own + own // 32, 0, 4 * own + 2 * (own // 32), 6 * padded + 6 * own + 3 * (own // 32)),
        (0, 0, 4 * own, 4 * padded + 4 * own),
    ]
    by_rank = run_distributed(report, size, [({**ddp, "bucket_size": None}, opt) for ddp, opt in cases])
    for results in by_rank:
        assert [result[:4] for result in results] == expected
    for case, (shared, whole) in enumerate(((10, 6), (4, 6), (6 + 3 / 32, 6), (4, 4))):
        held = [results[case][3] - results[case][4] for results in by_rank]
        assert sum(held) == pytest.approx(4160 * (size * whole + shared), abs=0 if size == 1 else 3 * size)  # rows cut by a shard's end


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype=bf16 needs use_precision_aware_optimizer=True"),
        ({"stochastic_rounding": True}, "stochastic_rounding=True needs use_precision_aware_optimizer=True"),
        ({"store_param_remainders": True}, "store_param_remainders=True needs use_precision_aware_optimizer=True"),
        ({**REMAINDERS, "optimizer": "sgd"}, "needs optimizer=adam, got sgd"),
        ({**REMAINDERS, "main_params_dtype": "bf16"}, "main_params_dtype=bf16 needs bf16=True or fp16=True"),
        ({**REMAINDERS, "main_grads_dtype": "bf16", "fp16": True}, "main_grads_dtype=bf16 needs bf16=True"),
        ({**REMAINDERS, "store_param_remainders": True, "fp16": True}, "needs bf16=True and main_params_dtype=fp32"),
        ({**REMAINDERS, "stochastic_rounding": True, "bf16": True}, "stochastic_rounding=True needs one of"),
    ],
)
def test_impossible_combinations_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        OptimizerConfig(**options)
