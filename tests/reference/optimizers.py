"""Optimizers written from the papers' formulas, one whole tensor at a time, any dtype: the oracle of `megatron.core.optimizer`.

Each rule is a function (parameter, gradient, state, step, options) -> new parameter; `state` is a dict that it fills. Options have
the names of OptimizerConfig.
"""

import math

import torch


def adam(p, g, state, step, o):
    """Kingma and Ba, 2015; weight decay decoupled (Loshchilov and Hutter, 2019) or added to the gradient."""
    b1, b2 = o.get("adam_beta1", 0.9), o.get("adam_beta2", 0.999)
    if o.get("decoupled_weight_decay", True):
        p = p - o["lr"] * o["weight_decay"] * p
    else:
        g = g + o["weight_decay"] * p
    state["exp_avg"] = b1 * state.get("exp_avg", 0) + (1 - b1) * g
    state["exp_avg_sq"] = b2 * state.get("exp_avg_sq", 0) + (1 - b2) * g * g
    mean, square = state["exp_avg"] / (1 - b1**step), state["exp_avg_sq"] / (1 - b2**step)
    return p - o["lr"] * mean / (square.sqrt() + o.get("adam_eps", 1e-8))


def sgd(p, g, state, step, o):
    """Momentum without dampening; weight decay is added to the gradient."""
    g = g + o["weight_decay"] * p
    if o.get("sgd_momentum", 0.9):
        g = state["momentum_buffer"] = o.get("sgd_momentum", 0.9) * state.get("momentum_buffer", 0) + g
    return p - o["lr"] * g


def lion(p, g, state, step, o):
    """Chen et al., 2023, algorithm 2."""
    b1, b2 = o.get("lion_beta1", 0.95), o.get("lion_beta2", 0.98)
    m = state.get("exp_avg", torch.zeros_like(p))
    update = torch.sign(b1 * m + (1 - b1) * g) + o["weight_decay"] * p
    state["exp_avg"] = b2 * m + (1 - b2) * g
    return p - o["lr"] * update


RULES = {"adam": adam, "sgd": sgd, "lion": lion}


def train(params, grads, options, rule_of=None, decays=lambda p: p.dim() >= 2, lr_of=lambda name: 1.0):
    """Values of all parameters after one step per element of `grads`.

    params: name -> tensor. grads: a name -> tensor per step. options: of OptimizerConfig. rule_of(name): the rule's name. lr_of(name):
    factor on the learning rate.
    """
    params, states = dict(params), {name: {} for name in params}
    for step, gradient in enumerate(grads, start=1):
        for name, p in params.items():
            o = {"weight_decay": 0.01, **options}
            o["lr"] *= lr_of(name)
            if not decays(p):
                o["weight_decay"] = 0.0
            rule = RULES[rule_of(name) if rule_of else options.get("optimizer", "adam")]
            params[name] = rule(p, gradient[name], states[name], step, o)
            assert not math.isnan(params[name].sum().item())
    return params, states
