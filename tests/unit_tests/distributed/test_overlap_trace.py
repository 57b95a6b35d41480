"""The trace of a step: slices nest, collectives have their own lanes, waits are what is measured, ranks share one clock."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import parallel_state
from megatron.core.distributed.overlap_trace import (
    GATHER,
    LANES,
    REDUCE,
    THREAD,
    OverlapTrace,
    RankRecord,
    Slice,
    chrome_trace,
    clock_reference,
    compute_units,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import build, run_step

ALL_OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 60}
WITH_STEP = {"overlap_param_gather_with_optimizer_step": True}


def merged(records, iteration=3):
    return chrome_trace(records, iteration=iteration, clock_uncertainty=1e-6, device="cpu")


def slices_of(trace, rank=0):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))])
        self.norm = torch.nn.LayerNorm(2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.block = Block()
        self.activation = torch.nn.ReLU()
        self.head = torch.nn.Linear(2, 3)


def test_lists_are_opened_and_parts_without_parameters_left_out():
    assert list(compute_units(Model())) == ["embedding", "block.layers.0", "block.layers.1", "block.norm", "head"]
    assert list(compute_units(torch.nn.Linear(1, 1))) == ["Linear"]


def test_the_ranks_clocks_are_set_alike():
    part = Slice(THREAD, "forward", "forward a", 101.0, 102.0)
    first = RankRecord(0, "rank 0", 100.0, 100.5, 103.0, (part,))
    second = RankRecord(1, "rank 1", 5000.0, 5000.25, 5003.0, (Slice(THREAD, "forward", "forward a", 5001.0, 5002.0),))
    trace = merged([first, second])
    assert [(event["ts"], event["dur"]) for rank in (0, 1) for event in slices_of(trace, rank)] == [(750000.0, 1e6)] * 2
    assert (trace["otherData"]["step_begin_us"], trace["otherData"]["step_end_us"]) == (250000.0, 2750000.0)
    assert trace["otherData"]["clock_uncertainty_us"] == 1.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from([REDUCE, GATHER])), max_size=25))
def test_collectives_of_a_lane_never_overlap(spans):
    parts = tuple(Slice(row, "collective", "c", float(begin), float(begin + length)) for begin, length, row in spans)
    events = slices_of(merged([RankRecord(0, "rank 0", 0.0, 0.0, 100.0, parts)]))
    assert len(events) == len(spans)
    for _, lane in itertools.groupby(sorted(events, key=lambda e: (e["tid"], e["ts"], e["dur"])), key=lambda e: e["tid"]):
        for earlier, later in itertools.pairwise(lane):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]


def _clock():
    reference, uncertainty = clock_reference(torch.distributed.group.WORLD, torch.device("cpu"))
    return reference, uncertainty


def test_one_machines_clocks_agree_within_the_stated_uncertainty():
    readings = run_distributed(_clock, 2)
    uncertainty = readings[0][1]
    assert readings[1][1] == uncertainty > 0
    assert abs(readings[0][0] - readings[1][0]) <= uncertainty


def _trained(ddp, opt, traced, instances=1, accumulate=2):
    """Three steps; the trace of the second where `traced`."""
    groups = None
    if instances > 1:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        groups = ProcessGroupCollection.resolve(None)
        ddp = {**ddp, "num_distributed_optimizer_instances": instances}
    model, optimizer = build(ddp, opt, groups=groups)
    trace = OverlapTrace(model.bucket_groups, compute_units(model.module))
    if traced:
        trace.watch()
    run_step(model, optimizer, 0, accumulate)
    model.take_exposed_comm_time()
    if traced:
        trace.begin()
    with trace.phase("step"):
        norm = run_step(model, optimizer, 1, accumulate)[3]
    exposed = model.take_exposed_comm_time()
    if traced:
        trace.end()
    assert not any(group.observers for group in model.bucket_groups)
    assert not any(module._forward_hooks for module in model.modules())
    run_step(model, optimizer, 2, accumulate)
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return params, norm, exposed, trace.record(torch.distributed.get_rank(), "rank", 0.0), len(model.bucket_groups)


ARRIVALS = {"seen at a boundary before the wait", "seen in the wait", "still in flight at the end of the step"}


@pytest.mark.parametrize("sharded", [True, False])
def test_a_traced_step_shows_every_collective_and_changes_no_number(sharded):
    ddp, opt = (ALL_OVERLAP, WITH_STEP) if sharded else ({"overlap_grad_reduce": True, "bucket_size": 60}, {})
    plain = run_distributed(_trained, 2, ddp, opt, False)
    for (params, norm, *_), (got, got_norm, exposed, record, groups) in zip(
        plain, run_distributed(_trained, 2, ddp, opt, True), strict=True
    ):
        assert norm == got_norm and all(torch.equal(params[name], got[name]) for name in params)
        events = slices_of(merged([record]), record.rank)
        kind = "reduce-scatter" if sharded else "all-reduce"
        names = [event["name"] for event in events if event["cat"] == "collective"]
        assert sorted(names) == sorted([f"{kind} bucket {index}" for index in range(groups)] + [
            f"all-gather bucket {index}" for index in range(groups) for _ in range(2) if sharded
        ])  # gathers of the step before, which were in flight, and of this one  # fmt: skip
        waits = [event for event in events if event["cat"] == "wait"]
        assert len(waits) == (2 if sharded else 1) * groups
        assert sum(event["dur"] for event in waits) / 1e6 == pytest.approx(exposed, abs=1e-9 * len(waits))  # each to the ns
        assert_nested([event for event in events if event["tid"] == THREAD])
        arrivals = {e["args"]["arrival"] for e in events if e["cat"] == "collective" and e["tid"] // LANES == GATHER}
        assert bool(arrivals) == sharded and arrivals <= ARRIVALS  # which of them is a matter of timing
        thread = [event["name"] for event in events if event["cat"] in ("forward", "backward", "optimizer")]
        for part in ("embedding", "first", "norm", "last"):
            assert thread.count(f"forward {part}") == thread.count(f"backward {part}") == 2  # microbatches
        assert thread.count("gradient norm") == 1
        updates = [f"update bucket {index}" for index in reversed(range(groups))] if sharded else ["update all"]
        assert [name for name in thread if name.startswith("update")] == updates


def assert_nested(events):
    """Slices of one thread lie beside or inside each other."""
    ends = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + 1e-4:  # ns
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 2e-3, event  # both ends are rounded to 1e-3
        ends.append(end)


def test_reductions_between_instances_have_their_own_row():
    for *_, record, groups in run_distributed(_trained, 4, ALL_OVERLAP, WITH_STEP, True, 2, 1):
        names = [part.name for part in record.slices if part.kind == "collective"]
        assert sum(name.startswith("all-reduce between instances") for name in names) == groups
        assert sum(part.kind == "wait" for part in record.slices) == 3 * groups


def _polled():
    model, _ = build({"overlap_grad_reduce": True}, module=torch.nn.Linear(900, 900))  # 3.2 MB: gloo's own all-reduce
    trace = OverlapTrace(model.bucket_groups, compute_units(model.module))
    trace.begin()
    model(torch.ones(900)).sum().backward()
    (group,) = model.bucket_groups
    while not group.grad_reduce_handle.arrived():
        pass
    with trace.phase("after the arrival"):
        pass
    model.finish_grad_sync()
    trace.end()
    return trace.record(0, "rank", 0.0).slices


def test_an_arrival_is_seen_before_the_wait_where_the_backend_can_be_asked():
    for slices in run_distributed(_polled, 2):
        (flight,) = [part for part in slices if part.kind == "collective"]
        (phase,) = [part for part in slices if part.kind == "phase"]
        assert flight.args["arrival"] == "seen at a boundary before the wait"
        assert flight.end <= phase.begin


def test_one_process_sends_nothing():
    model, optimizer = build(ALL_OVERLAP, WITH_STEP)
    trace = OverlapTrace(model.bucket_groups, compute_units(model.module))
    trace.begin()
    run_step(model, optimizer, 0)
    trace.end()
    kinds = {part.kind for part in trace.record(0, "rank", 0.0).slices}
    assert kinds == {"forward", "backward", "optimizer", "wait"}


def test_compiled_parts_are_timed_from_outside():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[0].compile(backend="eager")
    compiled = module[0]._compiled_call_impl
    model, _ = build({}, module=module)
    trace = OverlapTrace(model.bucket_groups, compute_units(module))
    trace.begin()
    model(torch.ones(3)).sum().backward()
    trace.end()
    names = [part.name for part in trace.record(0, "rank", 0.0).slices if part.kind in ("forward", "backward")]
    assert names == ["forward 0", "forward 1", "backward 1", "backward 0"]
    assert module[0]._compiled_call_impl is compiled
