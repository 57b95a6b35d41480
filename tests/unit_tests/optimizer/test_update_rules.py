"""Each update rule against its formula in float64, against torch's own optimizers bit by bit, and sharded against whole."""

import itertools

import pytest
import torch

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer import OptimizerConfig, memory_report
from tests.harness.distributed import run_distributed
from tests.reference import optimizers as reference
from tests.unit_tests.optimizer.given_grads import given_grads, step_with, train_given
from tests.unit_tests.optimizer.toy import Toy, build

SHARDED = {"use_distributed_optimizer": True, "bucket_size": 100}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
RULES = {
    "adamw": {},
    "adam": {"decoupled_weight_decay": False},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "sgd momentum": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "lion betas": {"optimizer": "lion", "lion_beta1": 0.6, "lion_beta2": 0.7},
}


def trained(module):
    return {name: param.detach() for name, param in module.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_formula_in_float64(rule, steps):
    module = Toy(torch.float64)
    options = {"lr": 1e-2, "weight_decay": 0.1, **RULES[rule]}
    expected, _ = reference.train(trained(module), given_grads(module, steps, torch.float64), options)
    params, _ = train_given({}, RULES[rule], steps)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_weight_decay_and_learning_rate_multipliers_act_per_group(rule):
    module = Toy(torch.float64)
    options = {"lr": 1e-2, "weight_decay": 0.1, **RULES[rule]}
    conditions = {
        "no_weight_decay_cond": lambda name, param: name == "last.weight",
        "scale_lr_cond": lambda name, param: name.startswith("first"),
        "lr_mult": 0.25,
    }
    expected = {}
    for name, param in trained(module).items():
        grads = [{name: step[name]} for step in given_grads(module, 3, torch.float64)]
        decays, factor = name != "last.weight", 0.25 if name.startswith("first") else 1.0
        own = reference.train({name: param}, grads, options, decays=lambda p, d=decays: d, lr_of=lambda n, f=factor: f)
        expected[name] = own[0][name]
    params, _ = train_given({}, RULES[rule], 3, conditions=conditions)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd", "sgd momentum"])
def test_one_process_is_bit_equal_to_torch(rule):
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    module = Toy()
    matrices = [param for param in module.parameters() if param.requires_grad and param.dim() >= 2]
    vectors = [param for param in module.parameters() if param.requires_grad and param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    extra = {"momentum": RULES[rule].get("sgd_momentum", 0.9)} if rule.startswith("sgd") else {}
    optimizer = kinds.get(rule, torch.optim.SGD)(groups, lr=1e-2, fused=True, **extra)
    for gradient in given_grads(module, 4, torch.float32):
        for name, param in module.named_parameters():
            param.grad = gradient.get(name)
        optimizer.step()
    params, _ = train_given({}, RULES[rule], 4, torch.float32)
    for name, value in trained(module).items():
        assert torch.equal(params[name], value), name


def _each_rule(ddp, dtype):
    return {rule: train_given(ddp, options, 3, dtype)[0] for rule, options in RULES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_data_parallel_size_gives_the_same_bits(dtype):
    expected = _each_rule({}, dtype)
    for size, ddp in itertools.product((1, 2, 3, 4), (SHARDED, OVERLAP)):
        for results in run_distributed(_each_rule, size, ddp, dtype):
            for rule, params in results.items():
                for name, value in params.items():
                    assert torch.equal(value, expected[rule][name]), (size, rule, name)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_keeps_its_states_and_no_others(rule):
    names = {"adamw": 2, "adam": 2, "sgd": 0, "sgd momentum": 1, "lion": 1, "lion betas": 1}
    for ddp in ({}, SHARDED):
        model, optimizer = build(ddp, RULES[rule])
        report = memory_report([model], optimizer)
        elements = sum(param.numel() for param in model.param_to_name)
        if not ddp:
            assert report.moments == names[rule] * 4 * elements
        assert report.moments - (report.padding if ddp else 0) <= names[rule] * 4 * elements <= report.moments
        assert {len(main.state) for main in optimizer.main_params()} == {names[rule]}


def test_divided_gradients_are_those_of_a_scaled_loss():
    for rule, options in RULES.items():
        results = []
        for scale in (None, 256.0):
            module = Toy(torch.float64)
            model, optimizer = build({}, {"clip_grad": 0.0, "loss_scale": scale, **options}, torch.float64, module=module)
            for gradient in given_grads(module, 2, torch.float64):
                step_with(model, optimizer, {name: value * (scale or 1.0) for name, value in gradient.items()})
            results.append(trained(module))
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name], value, rtol=1e-12, atol=1e-12, msg=f"{rule} {name}")


def test_state_of_another_optimizer_is_refused_by_name():
    states = {rule: build({}, options)[1].state_dict() for rule, options in RULES.items()}
    for saved, own in itertools.product(RULES, RULES):
        optimizer = build({}, RULES[own])[1]
        kept = [states[rule]["common"]["optimizer"] + str(states[rule]["common"]["states"]) for rule in (saved, own)]
        if kept[0] == kept[1]:
            optimizer.load_state_dict(states[saved])
            continue
        with pytest.raises(CheckpointError, match=r"another (optimizer|states)"):
            optimizer.load_state_dict(states[saved])
        with pytest.raises(CheckpointError, match=r"that of --optimizer .*this run has --optimizer .*--no-load-optim"):
            optimizer.load_common_state_dict(states[saved]["common"])


def test_wrong_combinations_are_refused():
    for optimizer in ("sgd", "lion"):
        with pytest.raises(ConfigError, match=f"only used with optimizer=adam, got {optimizer}"):
            OptimizerConfig(optimizer=optimizer, decoupled_weight_decay=False)
    with pytest.raises(ConfigError, match="optimizer must be one of adam, sgd, lion"):
        OptimizerConfig(optimizer="lamb")
    with pytest.raises(ConfigError, match="lion_beta1 must be less than 1"):
        OptimizerConfig(lion_beta1=1.0)
