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


def polynomial_of_singular_values(matrix, triples):
    """U p(S) V^T for the composition p of x -> a x + b x^3 + c x^5: what the Newton-Schulz iteration computes, by the SVD."""
    u, s, vt = torch.linalg.svd(matrix / matrix.norm().clamp_min(1e-7), full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


NEWTON_SCHULZ = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


def muon(p, g, state, step, o):
    """Jordan et al., 2024, with decoupled weight decay. Option qkv_rows: a packed projection's rows of query, key, value per group."""
    mu = o.get("muon_momentum", 0.95)
    m = state["momentum_buffer"] = mu * state.get("momentum_buffer", torch.zeros_like(p)) + (1 - mu) * g
    u = mu * m + (1 - mu) * g if o.get("muon_nesterov") else m
    triples = NEWTON_SCHULZ[o.get("muon_coefficient_type", "quintic")]
    triples = triples * (o.get("muon_num_ns_steps", 5) // len(triples))

    def scaled(matrix):
        rows, cols = matrix.shape
        mode = o.get("muon_scale_mode", "spectral")
        scale = {"spectral": max(rows, cols), "shape_scaling": max(1, rows / cols), "unit_rms_norm": rows / cols}[mode] ** 0.5
        return scale * o.get("muon_extra_scale_factor", 1.0) * polynomial_of_singular_values(matrix, triples)

    if o.get("qkv_rows") and o.get("muon_split_qkv", True):
        kinds = torch.tensor([i for i, n in enumerate(o["qkv_rows"]) for _ in range(n)]).repeat(len(p) // sum(o["qkv_rows"]))
        update = torch.zeros_like(p)
        for kind in range(3):
            update[kinds == kind] = scaled(u[kinds == kind])
    else:
        update = scaled(u)
    return p - o["lr"] * o["weight_decay"] * p - o["lr"] * update


RULES = {"muon": muon, "adam": adam, "sgd": sgd, "lion": lion}


def train(params, grads, options, rule_of=None, decays=lambda p: p.dim() >= 2, lr_of=lambda name: 1.0, extra=lambda name: {}):
    """Values of all parameters after one step per element of `grads`.

    params: name -> tensor. grads: a name -> tensor per step. options: of OptimizerConfig. rule_of(name): the rule's name. lr_of(name):
    factor on the learning rate. extra(name): options of one parameter.
    """
    params, states = dict(params), {name: {} for name in params}
    for step, gradient in enumerate(grads, start=1):
        for name, p in params.items():
            o = {"weight_decay": 0.01, **options, **extra(name)}
            o["lr"] *= lr_of(name)
            if not decays(p):
                o["weight_decay"] = 0.0
            rule = RULES[rule_of(name) if rule_of else options.get("optimizer", "adam")]
            params[name] = rule(p, gradient[name], states[name], step, o)
            assert not math.isnan(params[name].sum().item())
    return params, states
