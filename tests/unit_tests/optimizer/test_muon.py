"""Muon: the iteration, whole matrices against the SVD, shards against whole, owners and rounds, tensor parallelism, memory."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import parallel_state
from megatron.core.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, memory_report
from megatron.core.optimizer.matrix_owners import assign_owners, orthogonalization_cost, plan_rounds
from megatron.core.optimizer.muon import COEFFICIENTS, newton_schulz, scale_factor
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.reference import optimizers as reference
from tests.unit_tests.optimizer.given_grads import given_grads, train_given
from tests.unit_tests.optimizer.toy import Toy, build, run_step

MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
SHARDED = {"use_distributed_optimizer": True, "bucket_size": 100}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
OPTIONS = {
    "default": {},
    "nesterov": {"muon_nesterov": True, "muon_momentum": 0.8},
    "simple": {"muon_coefficient_type": "simple", "muon_num_ns_steps": 3},
    "ten steps": {"muon_num_ns_steps": 10},
    "shape_scaling": {"muon_scale_mode": "shape_scaling"},
    "unit_rms_norm": {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
    "lion for the rest": {"muon_scalar_optimizer": "lion"},
}


def is_matrix(name, param):
    return param.dim() == 2 and "embedding" not in name


def rule_of(module, options):
    matrices = {name for name, param in module.named_parameters() if is_matrix(name, param)}
    return lambda name: "muon" if name in matrices else options.get("muon_scalar_optimizer", "adam")


def trained(module):
    return {name: param.detach() for name, param in module.named_parameters() if param.requires_grad}


# The iteration


@pytest.mark.parametrize("shape", [(5, 5), (3, 17), (17, 3), (1, 4), (6, 1)])
@pytest.mark.parametrize("kind", ["simple", "quintic"])
def test_iteration_is_a_polynomial_of_the_singular_values(kind, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = reference.polynomial_of_singular_values(matrix, reference.NEWTON_SCHULZ[kind])
    torch.testing.assert_close(newton_schulz(matrix, COEFFICIENTS[kind]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "rounds", "low", "high"), [("simple", 5, 0.67, 1.21), ("quintic", 1, 0.7, 1.2), ("polar_express", 1, 0.99, 1.01)])
def test_singular_values_come_near_one(kind, rounds, low, high):
    generator = torch.Generator().manual_seed(2)
    u, v = (torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    matrix = u @ torch.diag(torch.logspace(-2, 0, 24, dtype=torch.float64)) @ v
    values = torch.linalg.svdvals(newton_schulz(7.0 * matrix, COEFFICIENTS[kind] * rounds))
    assert low < values.min() and values.max() < high


def test_scale_and_zero_matrix():
    assert [scale_factor(mode, 16, 4) for mode in ("spectral", "shape_scaling", "unit_rms_norm")] == [4.0, 2.0, 2.0]
    assert [scale_factor(mode, 4, 16) for mode in ("spectral", "shape_scaling", "unit_rms_norm")] == [4.0, 1.0, 0.5]
    assert not newton_schulz(torch.zeros(3, 4), COEFFICIENTS["quintic"]).any()


def test_bf16_products_stay_near_fp32():
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(3))
    low, full = (newton_schulz(matrix, COEFFICIENTS["quintic"], precision) for precision in ("medium", "highest"))
    assert low.dtype == torch.float32
    assert 0 < (low - full).norm() / full.norm() < 5 * 2**-8 * 4  # 5 iterations of products rounded to 8 bits, slopes below 4.1
    assert torch.equal(newton_schulz(matrix, COEFFICIENTS["quintic"], "high"), full)  # TF32 exists on CUDA only


# Whole matrices


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("case", OPTIONS)
def test_steps_equal_the_formula_in_float64(case, steps):
    module, options = Toy(torch.float64), {**MUON, "lr": 1e-2, "weight_decay": 0.1, **OPTIONS[case]}
    grads = given_grads(module, steps, torch.float64)
    expected, states = reference.train(trained(module), grads, options, rule_of(module, options))
    params, kept = train_given({}, {**MUON, **OPTIONS[case]}, steps)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-11, atol=1e-12)  # the oracle's SVD costs a digit
        assert kept[name].keys() == states[name].keys()
        for key, state in states[name].items():
            torch.testing.assert_close(kept[name][key], state.view(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_steps_are_those_of_torchs_muon_up_to_bf16():
    module = Toy()
    params = {name: param.detach().clone() for name, param in module.named_parameters() if param.requires_grad and is_matrix(name, param)}
    optimizer = torch.optim.Muon(list(params.values()), lr=1e-2, weight_decay=0.1, momentum=0.95, nesterov=True)
    for gradient in given_grads(module, 3, torch.float32):
        for name, param in params.items():
            param.grad = gradient[name]
        optimizer.step()
    options = {**MUON, "muon_nesterov": True, "muon_coefficient_type": "simple", "muon_scale_mode": "shape_scaling"}
    ours, kept = train_given({}, {**options, "muon_fp32_matmul_prec": "medium"}, 3, torch.float32)
    before = trained(Toy())
    for name, param in params.items():
        assert torch.equal(kept[name]["momentum_buffer"], optimizer.state[param]["momentum_buffer"].view(-1))
        moved = (param - before[name]).norm()
        assert (ours[name] - param).norm() < 0.08 * moved, name  # both round to 8 bits in 15 products, in another order


# Owners and rounds


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(1, 10**6), max_size=40), ranks=st.integers(1, 9))
def test_each_matrix_has_one_owner_and_loads_are_balanced(costs, ranks):
    owners = assign_owners(costs, ranks)
    assert len(owners) == len(costs)
    assert all(0 <= owner < ranks for owner in owners)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_the_largest_load_is_within_a_third_of_the_best(costs, ranks):
    def largest(owners):
        return max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))

    best = min(largest(owners) for owners in itertools.product(range(ranks), repeat=len(costs)))
    assert largest(assign_owners(costs, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.lists(st.integers(1, 1000), max_size=6), max_size=12), ranks=st.integers(1, 5))
def test_rounds_cover_the_buckets_once_in_order_and_end_when_even(costs, ranks):
    rounds = plan_rounds(costs, ranks)
    assert [index for part in rounds for index in part] == list(range(len(costs)))
    for part in rounds[:-1]:
        inside = [cost for index in part for cost in costs[index]]
        owners = assign_owners(inside, ranks)
        loads = [sum(cost for cost, owner in zip(inside, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) * ranks <= 1.25 * sum(inside)
    if ranks == 1:
        assert len(rounds) == len(costs)


def test_cost_counts_the_smaller_side_squared():
    assert orthogonalization_cost(2, 10) == orthogonalization_cost(10, 2) == 4 * 4 * 10 + 2 * 8


# Shards


def _each_case(ddp, dtype, opt):
    return {case: train_given(ddp, {**MUON, **OPTIONS[case], **opt}, 3, dtype) for case in ("default", "nesterov", "lion for the rest")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_data_parallel_size_gives_the_same_bits(dtype):
    expected = _each_case({}, dtype, {})
    gather = {"overlap_param_gather_with_optimizer_step": True}
    for size, (ddp, opt) in itertools.product((1, 2, 3, 4), ((SHARDED, {}), ({**OVERLAP, "bucket_size": 1}, gather), ({**OVERLAP, "bucket_size": None}, gather))):
        for results in run_distributed(_each_case, size, ddp, dtype, opt):
            for case, (params, states) in results.items():
                for name, value in params.items():
                    assert torch.equal(value, expected[case][0][name]), (size, case, name)
                assert all(state.keys() == expected[case][1][name].keys() for name, state in states.items())


def _counted(ddp):
    """How often this rank orthogonalised, and the rounds."""
    model, optimizer = build(ddp, MUON)
    shapes, inner = [], optimizer.rules["muon"].orthogonalize
    optimizer.rules["muon"].orthogonalize = lambda matrix, rows: shapes.append(tuple(matrix.shape)) or inner(matrix, rows)
    run_step(model, optimizer, 0)
    return shapes, [len(units) for _, units in optimizer._rounds]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_matrix_is_orthogonalised_once_by_one_rank(size):
    expected = sorted(tuple(param.shape) for name, param in Toy().named_parameters() if param.requires_grad and is_matrix(name, param))
    for ddp in (SHARDED, {**SHARDED, "bucket_size": 1}, {**SHARDED, "bucket_size": None}):
        results = run_distributed(_counted, size, ddp)
        assert sorted(shape for shapes, _ in results for shape in shapes) == expected
        assert len({tuple(rounds) for _, rounds in results}) == 1


def _instances(instances, opt):
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    ddp = {**OVERLAP, "num_distributed_optimizer_instances": instances}
    return train_given(ddp, {**MUON, **opt}, 3, torch.float32, groups=ProcessGroupCollection.resolve(None))[0]


def test_instances_each_orthogonalise_and_agree_bit_by_bit():
    expected, _ = train_given({}, MUON, 3, torch.float32)
    for params in run_distributed(_instances, 4, 2, {"overlap_param_gather_with_optimizer_step": True}):
        for name, value in expected.items():
            assert torch.equal(params[name], value), name


def _dp_zero(state, ddp):
    """The state gathered to rank 0 after two steps; or, given one, what each rank holds after loading it."""
    model, optimizer = build(ddp, MUON)
    if state is None:
        for step in range(2):
            run_step(model, optimizer, step)
        return optimizer.get_parameter_state_dp_zero(), None
    optimizer.load_parameter_state_from_dp_zero(state if torch.distributed.get_rank() == 0 else None)
    held = {main.name: {key: (main.start, stored.values().clone()) for key, stored in main.stored().items()} for main in optimizer.main_params()}
    return optimizer.get_parameter_state_dp_zero(), held


def test_gather_to_rank_zero_holds_each_parameters_own_states():
    saved, nothing = (result[0] for result in run_distributed(_dp_zero, 2, None, SHARDED))
    assert nothing is None
    module = Toy()
    for name, param in trained(module).items():
        states = {"momentum_buffer"} if is_matrix(name, param) else {"exp_avg", "exp_avg_sq"}
        assert saved["params"][name].keys() == {"main_param", *states}
        assert "unused" in name or all(value.any() for value in saved["params"][name].values()), name
    for size in (1, 3):
        results = run_distributed(_dp_zero, size, saved, {**SHARDED, "bucket_size": 170})
        again = results[0][0]
        for name, values in saved["params"].items():
            for key, value in values.items():
                assert torch.equal(again["params"][name][key], value), (name, key)
        for _, held in results:
            for name, values in held.items():
                for key, (start, part) in values.items():
                    assert torch.equal(saved["params"][name][key].view(-1)[start : start + len(part)], part)


# Packed projections and tensor parallelism


class Projections(torch.nn.Module):
    """A packed query, key and value [2 groups x (4 + 2 + 2), 6], a gated [2 x 6, 6] and a row-parallel [6, 8] matrix."""

    def __init__(self, rank=0, size=1):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        qkv, gate, out = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((16, 6), (12, 6), (6, 8)))
        self.qkv = torch.nn.Parameter(qkv.chunk(size)[rank].clone())
        self.gate = torch.nn.Parameter(torch.cat([block.chunk(size)[rank] for block in gate.chunk(2)]))
        self.out = torch.nn.Parameter(out.chunk(size, dim=1)[rank].clone())
        set_param_meta(self.qkv, ParamMeta(tp_dim=0, qkv_rows=(4, 2, 2)))
        set_param_meta(self.gate, ParamMeta(tp_dim=0, tp_blocks=2))
        set_param_meta(self.out, ParamMeta(tp_dim=1))


def whole_grads(steps):
    return given_grads(Projections(), steps, torch.float64)


def expected_projections(steps, opt):
    options = {"lr": 1e-2, "weight_decay": 0.1, **opt}
    extra = lambda name: {"qkv_rows": (4, 2, 2)} if name == "qkv" else {}  # noqa: E731
    return reference.train(trained(Projections()), whole_grads(steps), options, lambda name: "muon", extra=extra)[0]


def local_part(name, whole, rank, size):
    if name == "out":
        return whole.chunk(size, dim=1)[rank]
    return torch.cat([block.chunk(size)[rank] for block in whole.chunk(2)]) if name == "gate" else whole.chunk(size)[rank]


def _tensor_parallel(tp, ddp, opt, steps):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    groups = ProcessGroupCollection.resolve(None)
    rank = groups.rank("tp")
    module = Projections(rank, tp)
    model, optimizer = build(ddp, {"clip_grad": 0.0, **MUON, **opt}, torch.float64, module=module, groups=groups)
    for gradient in whole_grads(steps):
        model.zero_grad_buffer()
        for param, name in model.param_to_name.items():
            param.main_grad.copy_(local_part(name, gradient[name], rank, tp))
        assert optimizer.step()[0]
    optimizer.finish_param_sync()
    return rank, trained(module)


@pytest.mark.parametrize("split", [True, False])
def test_packed_query_key_and_value_are_three_matrices(split):
    opt = {**MUON, "muon_split_qkv": split}
    expected = expected_projections(3, opt)
    params, _ = train_given({}, opt, 3, module=Projections())
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("size", "ddp"), [(2, {}), (2, SHARDED), (4, OVERLAP)])
@pytest.mark.parametrize("split", [True, False])
def test_duplicated_mode_equals_the_whole_matrix_on_one_process(size, ddp, split):
    opt = {"muon_tp_mode": "duplicated", "muon_split_qkv": split}
    expected = expected_projections(3, opt)
    for rank, params in run_distributed(_tensor_parallel, size, 2, ddp, opt, 3):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], local_part(name, value, rank, 2), rtol=1e-11, atol=1e-12)


def test_blockwise_mode_orthogonalises_each_ranks_block():
    options = {"lr": 1e-2, "weight_decay": 0.1}
    for rank, params in run_distributed(_tensor_parallel, 2, 2, SHARDED, {"muon_tp_mode": "blockwise"}, 3):
        grads = [{name: local_part(name, value, rank, 2) for name, value in step.items()} for step in whole_grads(3)]
        extra = lambda name: {"qkv_rows": (4, 2, 2)} if name == "qkv" else {}  # noqa: E731
        expected, _ = reference.train(trained(Projections(rank, 2)), grads, options, lambda name: "muon", extra=extra)
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-11, atol=1e-12)


# Memory, configuration


def _memory(ddp):
    model, optimizer = build(ddp, MUON)
    report = memory_report([model], optimizer)
    held = {main.name: (main.main.numel(), len(main.state)) for main in optimizer.main_params()}
    return report.moments, report.padding, held


def test_matrices_keep_one_state_and_the_rest_two():
    named = trained(Toy())
    elements = sum(param.numel() * (1 if is_matrix(name, param) else 2) for name, param in named.items())
    assert _memory({})[0] == 4 * elements
    for size in (1, 2, 3):
        results = run_distributed(_memory, size, {"use_distributed_optimizer": True})
        assert sum(numel * states for _, _, held in results for numel, states in held.values()) == elements
        for moments, padding, held in results:
            rounded = sum(-(-numel // 32) * 32 * states for numel, states in held.values())
            assert moments == 4 * rounded
            assert moments - padding <= 4 * sum(numel * states for numel, states in held.values())


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="muon_num_ns_steps=6 must be a multiple of 5 with muon_coefficient_type=quintic"):
        OptimizerConfig(optimizer="muon", muon_num_ns_steps=6)
    with pytest.raises(ConfigError, match=r"multiple of 8 .*polar_express"):
        OptimizerConfig(optimizer="muon", muon_coefficient_type="polar_express")
    with pytest.raises(ConfigError, match="muon_tp_mode must be one of blockwise, duplicated"):
        OptimizerConfig(optimizer="muon", muon_tp_mode="distributed")
    with pytest.raises(ConfigError, match="only used with optimizer=adam, got muon"):
        OptimizerConfig(optimizer="muon", decoupled_weight_decay=False)
