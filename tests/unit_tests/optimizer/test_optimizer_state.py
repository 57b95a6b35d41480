"""Optimizer state: local files, logical tensors, resharding, gather to data-parallel rank 0."""

import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import Box
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.distrib_optimizer_state import Replication, logical_tensor
from megatron.core.param_meta import ParamMeta, set_param_meta
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import build, run_step

PLAIN = {"bucket_size": 100}
SHARDED = {"use_distributed_optimizer": True, "bucket_size": 100}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


def collect(tensors):
    """name -> (global shape, [(box, values)]), picklable."""
    return {
        tensor.name: (tensor.global_shape, [(piece.box, piece.data.clone()) for piece in tensor.pieces])
        for tensor in tensors.values()
    }


def assemble(parts):
    """Logical tensors from every rank's parts; each element is given at least once and always with one value."""
    whole = {}
    for part in parts:
        for name, (shape, pieces) in part.items():
            tensor, known = whole.setdefault(name, (torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)))
            for box, values in pieces:
                where = box.slices()
                assert torch.equal(tensor[where][known[where]], values[known[where]])
                tensor[where], known[where] = values, True
    assert all(known.all() for _, known in whole.values())
    return {name: tensor for name, (tensor, _) in whole.items()}


def fill(optimizer, logical):
    for tensor in optimizer.sharded_state_dict().values():
        for piece in tensor.pieces:
            piece.data.copy_(logical[tensor.name][piece.box.slices()])


def _train_and_collect(ddp, steps, dtype=torch.float32):
    model, optimizer = build(ddp, {}, dtype)
    for step in range(steps):
        run_step(model, optimizer, step)
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return collect(optimizer.sharded_state_dict()), json.dumps(optimizer.common_state_dict()), params


def _load_and_collect(ddp, logical, common, steps, dtype=torch.float32):
    model, optimizer = build(ddp, {}, dtype)
    with torch.no_grad():
        for param in model.param_to_name:
            param.fill_(9.0)
    fill(optimizer, logical)
    optimizer.load_common_state_dict(json.loads(common))
    optimizer.reload_after_load()
    loaded = collect(optimizer.sharded_state_dict())
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    step = optimizer.param_groups[0]["step"]
    losses = [run_step(model, optimizer, step + index)[0].item() for index in range(steps)]
    return loaded, params, step, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_every_change_of_data_parallel_size_bit_by_bit(dtype):
    saved = run_distributed(_train_and_collect, 2, SHARDED, 3, dtype)
    logical = assemble([part for part, _, _ in saved])
    common, params = saved[0][1], saved[0][2]
    assert {name.split(".")[1] for name in logical} == {"main_param", "exp_avg", "exp_avg_sq"}
    for size, ddp in ((1, SHARDED), (3, {**SHARDED, "bucket_size": 77}), (4, OVERLAP), (2, PLAIN), (1, PLAIN)):
        loaded = run_distributed(_load_and_collect, size, ddp, logical, common, 0, dtype)
        again = assemble([part for part, _, _, _ in loaded])
        assert again.keys() == logical.keys()
        for name in logical:
            assert torch.equal(again[name], logical[name]), (size, name)
        for _, restored, step, _ in loaded:
            assert step == 3
            for name, param in params.items():
                assert torch.equal(restored[name], param), (size, name)


def test_training_goes_on_as_if_never_interrupted():
    whole = run_distributed(_train_and_collect, 2, OVERLAP, 6)
    half = run_distributed(_train_and_collect, 2, OVERLAP, 3)
    logical = assemble([part for part, _, _ in half])
    resumed = run_distributed(_load_and_go_on, 2, OVERLAP, logical, half[0][1])
    expected = assemble([part for part, _, _ in whole])
    got = assemble(resumed)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def _load_and_go_on(ddp, logical, common):
    model, optimizer = build(ddp)
    fill(optimizer, logical)
    optimizer.load_common_state_dict(json.loads(common))
    optimizer.reload_after_load()
    for step in range(3, 6):
        run_step(model, optimizer, step)
    return collect(optimizer.sharded_state_dict())


# Local state


def _local_state(folder):
    model, optimizer = build(OVERLAP)
    for step in range(2):
        run_step(model, optimizer, step)
    rank = torch.distributed.get_rank()
    if rank == 0:  # must not hang: state_dict() is local, never a collective
        torch.save(optimizer.state_dict(), f"{folder}/optimizer_shard_rank0.pt")
    torch.save(optimizer.state_dict(), f"{folder}/shard{rank}.pt")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    run_step(model, optimizer, 2)
    expected = optimizer.state_dict()

    fresh_model, fresh = build(OVERLAP)
    fresh_model.load_state_dict(weights)
    fresh.load_state_dict(torch.load(f"{folder}/shard{rank}.pt", weights_only=True))
    run_step(fresh_model, fresh, 2)
    got = fresh.state_dict()
    for name, tensors in expected["state"].items():
        for key, value in tensors.items():
            assert torch.equal(got["state"][name][key], value), (name, key)
    assert got["common"] == expected["common"]

    refused = []
    for other, builder in ((1 - rank, OVERLAP), (rank, {**OVERLAP, "bucket_size": 50}), (rank, PLAIN)):
        with pytest.raises(CheckpointError, match="distributed checkpoint") as error:
            build(builder)[1].load_state_dict(torch.load(f"{folder}/shard{other}.pt", weights_only=True))
        refused.append(str(error.value).split(":")[0])
    with pytest.raises(CheckpointError, match="not an optimizer state"):
        fresh.load_state_dict({"param_groups": []})
    return refused


def test_local_state_loads_into_the_same_rank_only(tmp_path):
    for refused in run_distributed(_local_state, 2, str(tmp_path)):
        assert [text.split("another ")[1] for text in refused] == ["data-parallel rank and size", "ranges", "optimizer"]
    assert (tmp_path / "optimizer_shard_rank0.pt").exists()


def test_plain_and_chained_state_round_trip():
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = build({}, {}, dtype)
        run_step(model, optimizer, 0)
        chain = ChainedOptimizer([optimizer])
        other_model, other = build({}, {}, dtype)
        ChainedOptimizer([other]).load_state_dict(chain.state_dict())
        for one, two in zip(model.param_to_name, other_model.param_to_name, strict=True):
            assert torch.equal(one, two)
        assert collect(chain.sharded_state_dict()).keys() == collect(other.sharded_state_dict()).keys()
        assert chain.common_state_dict()["chained"][0]["step"] == 1
    with pytest.raises(CheckpointError, match="0 chained optimizers"):
        chain.load_state_dict({"chained": []})
    with pytest.raises(CheckpointError, match="two of the chained"):
        ChainedOptimizer([optimizer, other]).sharded_state_dict()
    with pytest.raises(ConfigError, match="at least one"):
        ChainedOptimizer([])


def test_reload_model_params_takes_loaded_weights_as_main_params():
    for ddp in ({}, SHARDED):
        model, optimizer = build(ddp, {}, torch.bfloat16)
        with torch.no_grad():
            model.module.last.weight.fill_(3.0)
        optimizer.reload_model_params()
        main = next(main for main in optimizer.main_params() if main.name == "last.weight")
        assert torch.equal(main.main, torch.full_like(main.main, 3.0))


# Gather to data-parallel rank 0


def _dp_zero(folder):
    model, optimizer = build(OVERLAP)
    for step in range(2):
        run_step(model, optimizer, step)
    own = collect(optimizer.sharded_state_dict())
    gathered = collect(optimizer.sharded_state_dict("dp_zero_gather_scatter"))
    optimizer.save_parameter_state(Path(folder) / "parameter_state.pt")
    state = optimizer.get_parameter_state_dp_zero()
    with pytest.raises(ConfigError, match="sharding_type"):
        optimizer.sharded_state_dict("dp_reshardable")
    return own, gathered, state is None


def _load_dp_zero(folder):
    _, optimizer = build(SHARDED)
    optimizer.load_parameter_state(Path(folder) / "parameter_state.pt")
    with pytest.raises(CheckpointError, match="not a parameter state"):
        optimizer.load_parameter_state_from_dp_zero(None)
    return collect(optimizer.sharded_state_dict()), optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("size", [1, 3])
def test_gather_to_rank_zero_holds_the_same_values_and_loads_anywhere(tmp_path, size):
    saved = run_distributed(_dp_zero, 2, str(tmp_path))
    expected = assemble([own for own, _, _ in saved])
    assert [nothing for _, _, nothing in saved] == [False, True]
    assert saved[1][1] == {}
    gathered = assemble([saved[0][1]])
    loaded = run_distributed(_load_dp_zero, size, str(tmp_path))
    again = assemble([part for part, _ in loaded])
    assert {step for _, step in loaded} == {2}
    for name in expected:
        assert torch.equal(gathered[name], expected[name])
        assert torch.equal(again[name], expected[name])


# Arithmetic of logical tensors and Megatron's names


def test_vocabulary_padding_and_tensor_parallel_offset():
    param = set_param_meta(torch.nn.Parameter(torch.zeros(6, 4)), ParamMeta(tp_dim=0, logical_shape=(11, 4)))
    data = torch.arange(15.0)
    tensor = logical_tensor("t", param, 9, data, Replication(tp_rank=1, tp_size=2))
    assert tensor.global_shape == (11, 4)
    assert [(piece.box, piece.data.flatten().tolist()) for piece in tensor.pieces] == [
        (Box((8, 1), (1, 3)), [0.0, 1.0, 2.0]),
        (Box((9, 0), (2, 4)), [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]),  # row 11 is padding
    ]
    whole = set_param_meta(torch.nn.Parameter(torch.zeros(3)), ParamMeta(tp_dim=0))
    assert logical_tensor("t", whole, 0, torch.zeros(3), Replication(1, 2)).global_shape == (6,)


def test_range_maps_under_megatrons_names():
    model, optimizer = build({**SHARDED, "bucket_size": 300})
    assert isinstance(optimizer, DistributedOptimizer)
    (buffer,) = model.buffers
    maps = DistributedOptimizer._build_gbuf_range_map(buffer)[torch.float32, torch.float32]
    assert len(maps) == len(buffer.buckets)
    seen = {}
    for bucket, entry in zip(buffer.buckets, maps, strict=True):
        for param, ranges in entry["param_map"].items():
            start, end, _ = buffer.param_index_map[param]
            assert (ranges["gbuf_world"].start, ranges["gbuf_world"].end) == (start, end)
            assert ranges["gbuf_world_in_bucket"].start == start - bucket.offset
            seen[buffer.param_to_name[param]] = ranges["param"].size
    assert seen == {name: param.numel() for param, name in model.param_to_name.items()}
