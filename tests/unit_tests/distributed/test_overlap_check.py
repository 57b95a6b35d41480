"""Proof mode: each act out of order is named with bucket and parameter, whatever the state machine would have said."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed import finalize_model_grads
from megatron.core.errors import CommunicationStateError
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import UpdateUnit
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import build, run_step

OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 1,
    "check_overlap": True,
}
BUCKET_OF_SECOND = r"bucket 1 of float32 buffer \(second.weight\)"


class Pair(torch.nn.Module):
    """`second` can be applied without being called."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.calls_second = True

    def forward(self, hidden):
        hidden = self.first(hidden)
        return self.second(hidden) if self.calls_second else F.linear(hidden, self.second.weight)


def pair(**ddp):
    model, optimizer = build({**OVERLAP, **ddp}, module=Pair())
    return model, optimizer


def step(model, optimizer):
    model.zero_grad_buffer(overwrite=True)
    model(torch.ones(8)).sum().backward()
    finalize_model_grads([model])
    return optimizer.step()


def group_of(model, name):
    return next(group for param, group in model.param_to_bucket_group.items() if model.param_to_name[param] == name)


def refused(pattern):
    return pytest.raises(CommunicationStateError, match=f"check_overlap: .*{pattern}")


# Reads of parameters


def test_a_forward_that_does_not_wait_for_the_gather_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    model.disable_forward_pre_hook(param_sync=False)
    with refused(r"first.weight in bucket \d of float32 buffer \(first.weight\) was read at version 0, but version 1 .* in flight"):
        model(torch.ones(8))
    model.finish_param_sync()
    model(torch.ones(8))


def test_a_module_that_reads_anothers_weight_without_calling_it_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    model.module.calls_second = False
    with refused(f"second.weight in {BUCKET_OF_SECOND} was read at version 0, but version 1 is written"):
        model(torch.ones(8))
    with refused("second.weight"), torch.no_grad():
        model.module(torch.ones(8))
    model.module.second(torch.ones(8))
    model(torch.ones(8))


def test_a_read_before_the_dispatch_says_so():
    model, optimizer = pair()
    step(model, optimizer)
    model.finish_param_sync()
    model.disable_forward_pre_hook()
    group_of(model, "second.weight").mark_written()
    with refused(f"second.weight in {BUCKET_OF_SECOND} .* has not been dispatched"):
        model.module.second(torch.ones(8))


def test_a_state_dict_of_the_module_while_gathers_are_in_flight_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    with refused("first.weight in bucket"):
        model.module.state_dict()
    model.state_dict()  # waits


def test_a_backward_after_the_optimizers_step_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    model.zero_grad_buffer()
    stale = model(torch.ones(8)).sum()
    with model.no_sync():
        model(torch.ones(8)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    model.zero_grad_buffer()
    with refused("a gradient of second.* belongs to version 1 of the parameter, but version 2 was written"):
        stale.backward()


# Writes and gathers


def test_a_gather_before_the_write_is_refused(monkeypatch):
    def reordered(self, unit):
        unit.bucket_group.dispatch_gather()
        unit.bucket_group.mark_written()

    monkeypatch.setattr(DistributedOptimizer, "_after_unit", reordered)
    model, optimizer = pair()
    with refused(r"gather of bucket \d of float32 buffer \(first.weight\) was dispatched before the optimizer's write"):
        step(model, optimizer)


def test_a_write_that_comes_after_its_own_mark_and_dispatch_is_seen_in_the_data(monkeypatch):
    model, optimizer = pair()
    update = UpdateUnit.update

    def reordered(unit, rule, divisor):
        unit.bucket_group.mark_written()
        unit.bucket_group.dispatch_gather()
        update(unit, rule, divisor)

    monkeypatch.setattr(UpdateUnit, "update", reordered)
    monkeypatch.setattr(DistributedOptimizer, "_after_unit", lambda self, unit: None)
    step(model, optimizer)
    with refused(r"parameters in bucket \d of float32 buffer \(first.weight\) were written while their gather was in flight"):
        model(torch.ones(8))


def test_a_second_dispatch_of_a_gather_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    group = group_of(model, "second.weight")
    with refused(f"gather of {BUCKET_OF_SECOND} was dispatched twice"):
        group.dispatch_gather()
    group.finish_param_sync()
    with refused(f"gather of {BUCKET_OF_SECOND} was dispatched before the optimizer's write"):
        group.start_param_sync()


def test_a_write_during_the_gather_is_refused():
    model, optimizer = pair()
    step(model, optimizer)
    with refused(f"version 2 of {BUCKET_OF_SECOND} was written while version 1 was in flight"):
        group_of(model, "second.weight").mark_written()


# Gradients


def test_a_gradient_after_the_dispatch_is_refused():
    model, _ = pair()
    model(torch.ones(8)).sum().backward()
    with refused(r"a gradient of second.bias in bucket 0 .*was added after its reduction had been dispatched; use no_sync"):
        model(torch.ones(8)).sum().backward()


def test_a_second_dispatch_of_a_reduction_is_refused():
    model, _ = pair()
    model(torch.ones(8)).sum().backward()
    with refused(f"reduction of {BUCKET_OF_SECOND} was dispatched twice"):
        group_of(model, "second.weight").start_grad_sync()


@pytest.mark.parametrize(("overlap", "state"), [(True, "is in flight"), (False, "was not dispatched")])
def test_an_optimizer_step_before_the_reduction_is_refused(overlap, state):
    model, optimizer = pair(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    model.zero_grad_buffer()
    model(torch.ones(8)).sum().backward()
    with refused(rf"read the gradients of bucket 0 of float32 buffer \(second.bias\) .*: the reduction {state}"):
        optimizer.step()


def _silent_write():
    model, _ = pair()
    model(torch.ones(8)).sum().backward()
    model.module.second.weight.main_grad.add_(1.0)
    with refused(f"gradients in {BUCKET_OF_SECOND} were changed while their reduction was in flight"):
        model.finish_grad_sync()
    for group in model.bucket_groups:  # leave nothing in flight
        if group.grad_reduce_handle is not None:
            group.finish_grad_sync()
    return True


def test_a_gradient_written_past_the_engine_during_the_reduction_is_seen_in_the_data():
    assert run_distributed(_silent_write, 2) == [True, True]


# Clean runs


def _clean(check):
    """Every overlap flag, accumulation, evaluation and a save in the middle."""
    results = []
    for with_step in (False, True):
        ddp = {**OVERLAP, "bucket_size": 60, "check_overlap": check}
        model, optimizer = build(ddp, {"overlap_param_gather_with_optimizer_step": with_step})
        for index in range(3):
            run_step(model, optimizer, index, accumulate=2)
            with torch.no_grad():
                model(torch.arange(5))
            results.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.reload_after_load()
    return results


def test_clean_runs_are_silent_and_bit_equal():
    for size in (1, 2):
        quiet, checked = run_distributed(_clean, size, False), run_distributed(_clean, size, True)
        for one, two in zip(quiet, checked, strict=True):
            for first, second in zip(one, two, strict=True):
                assert all(torch.equal(first[name], second[name]) for name in first)


def test_without_the_flag_nothing_is_hooked():
    model, _ = build({**OVERLAP, "check_overlap": False}, module=Pair())
    assert not any(group.observers for group in model.bucket_groups)
    assert not any(module._forward_hooks or module._state_dict_pre_hooks for module in model.modules())
    assert [len(module._forward_pre_hooks) for module in (model.module, model.module.first)] == [0, 1]  # its own wait


def test_a_failing_forward_leaves_the_check_in_order():
    model, optimizer = pair()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3))
    step(model, optimizer)
    assert torch.is_tensor(model(torch.ones(8)))


def test_compiled_modules_are_checked_too():
    module = Pair()
    module.second.compile(backend="eager")
    model, optimizer = build(OVERLAP, module=module)
    step(model, optimizer)
    step(model, optimizer)
    model.disable_forward_pre_hook(param_sync=False)
    group_of(model, "first.weight").ensure_params()
    group_of(model, "first.bias").ensure_params()
    with refused("second.weight"):
        model(torch.ones(8))
