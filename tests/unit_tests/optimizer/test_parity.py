"""Every mode of the engine against plain torch on one process, and against each other bit by bit."""

import itertools

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import Toy, batch, build, run_step, token_loss_sum, train, train_plain

PLAIN = {}
REDUCE = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
GATHER = {**SHARDED, **REDUCE, "overlap_param_gather": True}
MODES = {
    "plain": (PLAIN, {}),
    "plain, overlapped reduce": (REDUCE, {}),
    "sharded": (SHARDED, {}),
    "sharded, overlapped reduce": ({**SHARDED, **REDUCE}, {}),
    "sharded, overlapped gather": (GATHER, {}),
    "sharded, all overlap": (GATHER, {"overlap_param_gather_with_optimizer_step": True}),
}


def assert_same(got, expected):
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def assert_close(got, expected, tolerance):
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance)


def test_one_process_is_bit_equal_to_torch_adamw():
    # One gradient accumulation, no scale: the mean over the one process, loss divided before the backward as plain torch does.
    expected, _ = train_plain(steps=4, clip=0)
    for ddp, opt in MODES.values():
        model, optimizer = build(ddp, {"clip_grad": 0.0, **opt}, reduce_op="mean", module=Toy())
        for step in range(4):
            model.zero_grad_buffer(overwrite=True)
            tokens, mask = batch(step)
            (token_loss_sum(model, tokens, mask, step) / mask.sum()).backward()
            model.finish_grad_sync()
            assert optimizer.step()[0]
        optimizer.finish_param_sync()
        assert_same(dict(model.module.named_parameters()), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_mode_equals_plain_torch_in_float64(size):
    expected, norms = train_plain(dtype=torch.float64, clip=0.3)
    for mode in ("plain, overlapped reduce", "sharded, all overlap"):
        ddp, opt = MODES[mode]
        options = ({**ddp, "bucket_size": 100}, {**opt, "clip_grad": 0.3}, torch.float64)
        for params, got_norms, _ in run_distributed(train, size, 4, 1, *options):
            assert_close(params, expected, 1e-7)  # clip factor and gradient scale pass through fp32 kernel arguments
            assert got_norms == pytest.approx(norms, rel=1e-7)


def _many(size_dependent, accumulate):
    """Each (mode, bucket size) on this rank."""
    results = {}
    for (mode, (ddp, opt)), bucket in itertools.product(MODES.items(), size_dependent):
        results[mode, bucket] = train(4, accumulate, {**ddp, "bucket_size": bucket}, {**opt, "clip_grad": 0.3})[:2]
    return results


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_modes_and_bucket_sizes_are_bit_equal_and_agree_with_plain_torch(size, accumulate):
    expected, norms = train_plain(clip=0.3)
    by_rank = run_distributed(_many, size, [1, 150, None], accumulate)
    reference_params, reference_norms = by_rank[0]["plain", None]
    # Adam's first steps are about lr x sign(gradient), which rounding decides for tiny gradients.
    assert_close(reference_params, expected, 2e-5)
    assert reference_norms == pytest.approx(norms, rel=1e-5)
    for results in by_rank:
        for key, (params, got_norms) in results.items():
            assert_same(params, reference_params)
            assert got_norms == pytest.approx(reference_norms, rel=1e-12), key


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch_sgd(size, momentum):
    expected, _ = train_plain(sgd=momentum, clip=0)
    opt = {"optimizer": "sgd", "sgd_momentum": momentum, "clip_grad": 0.0}
    for mode in ("plain", "sharded, all overlap"):
        for params, _, _ in run_distributed(train, size, 4, 1, MODES[mode][0], {**MODES[mode][1], **opt}):
            assert_close(params, expected, 1e-6)


@pytest.mark.parametrize("fp32_grads", [True, False])
def test_bf16_modes_are_bit_equal_and_learn_like_fp32(fp32_grads):
    expected, _ = train_plain()
    by_rank = run_distributed(_bf16, 2, fp32_grads)
    reference, _ = by_rank[0]["plain"]
    for name in expected:  # 8 bits of mantissa
        torch.testing.assert_close(reference[name].float(), expected[name], rtol=0.03, atol=0.03)
    for results in by_rank:
        for params, _ in results.values():
            assert_same(params, reference)


def _bf16(fp32_grads):
    extra = {"grad_reduce_in_fp32": fp32_grads, "bucket_size": 150}
    return {mode: train(4, 2, {**ddp, **extra}, opt, torch.bfloat16)[:2] for mode, (ddp, opt) in MODES.items()}


def _repeated():
    ddp, opt = MODES["sharded, all overlap"]
    quiet = train(6, 2, {**MODES["sharded"][0], "bucket_size": 60})
    return quiet, [train(6, 2, {**ddp, "bucket_size": 60}, opt) for _ in range(10)]


def test_ten_overlapped_runs_are_bit_equal_to_one_without_overlap():
    for quiet, runs in run_distributed(_repeated, 2):
        for params, norms, results in runs:
            assert_same(params, quiet[0])
            assert norms == quiet[1]
            assert [result[0].item() for result in results] == [result[0].item() for result in quiet[2]]


def _in_eval():
    """Evaluation, a state_dict and a save between the steps see whole parameters."""
    seen = []
    for mode in ("sharded", "sharded, all overlap"):
        ddp, opt = MODES[mode]
        model, optimizer = build({**ddp, "bucket_size": 60}, opt)
        values = []
        for step in range(4):
            run_step(model, optimizer, step)
            with torch.no_grad():
                values.append(token_loss_sum(model, *batch(50), step).item())
            values.append({key: value.clone() for key, value in model.state_dict().items()})
        seen.append(values)
    return seen


def test_evaluation_and_save_after_a_step_see_the_new_weights():
    for quiet, overlapped in run_distributed(_in_eval, 2):
        for first, second in zip(quiet, overlapped, strict=True):
            if isinstance(first, float):
                assert first == second
            else:
                assert_same(second, first)


def _replicated_instances(instances):
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    groups = ProcessGroupCollection.resolve(None)
    ddp, opt = MODES["sharded, all overlap"]
    return train(4, 1, {**ddp, "num_distributed_optimizer_instances": instances, "bucket_size": 150}, opt, groups=groups)


def test_replicated_instances_train_alike():
    expected, norms = train_plain()
    for params, got_norms, _ in run_distributed(_replicated_instances, 4, 2):
        assert_close(params, expected, 2e-5)
        assert got_norms == pytest.approx(norms, rel=1e-5)
