"""MoEConfig: the options of mixture-of-experts layers, a part of the model's architecture; and which layers are such layers."""

import ast
import dataclasses

from megatron.core.config_field import config_field
from megatron.core.errors import ConfigError

BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "sinkhorn", "expert_choice", "none")
DISPATCHERS = ("allgather", "alltoall")
_LOSS_TYPES = ("aux_loss", "seq_aux_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts. A layer that is one has a router and `num_experts` MLPs in place of its MLP."""

    num_experts: int | None = config_field(
        None, minimum=1, aliases=("num_moe_experts",), help="Experts in each mixture-of-experts layer; default: a dense model."
    )
    moe_layer_freq: str = config_field(
        "1",
        help="Which layers have experts: N = every N-th, from the first one on; or a pattern with a 1 (experts) or 0 (dense) for "
        "each layer, such as [0,1,1,1] or ([0]*3+[1]*58).",
    )
    moe_ffn_hidden_size: int | None = config_field(None, minimum=1, help="Width of an expert; default ffn_hidden_size.")
    moe_shared_expert_intermediate_size: int | None = config_field(
        None, minimum=1, help="Width of the shared experts together, which every token passes; default: none."
    )
    moe_router_topk: int = config_field(2, minimum=1, help="Experts of a token.")
    moe_router_score_function: str = config_field(
        "softmax", choices=("softmax", "sigmoid"), help="From the router's logits to the experts' weights."
    )
    moe_router_pre_softmax: bool = config_field(
        False, help="Softmax over all experts before the choice (the weights of a token's experts then don't sum up to 1)."
    )
    moe_router_num_groups: int | None = config_field(
        None, minimum=1, help="Group-limited routing: the experts are cut into this many equal groups."
    )
    moe_router_group_topk: int | None = config_field(None, minimum=1, help="Group-limited routing: groups that a token may choose from.")
    moe_router_topk_scaling_factor: float | None = config_field(
        None, exclusive_minimum=0, help="Factor on the weights of a token's experts."
    )
    moe_router_enable_expert_bias: bool = config_field(
        False, help="Balance without a loss: a bias on each expert's score, for the choice only, moves towards equal loads. Needs sigmoid."
    )
    moe_router_bias_update_rate: float = config_field(1e-3, minimum=0, help="Step of the expert bias.")
    moe_router_dtype: str = config_field("fp32", choices=("fp32", "fp64"), help="Precision of the router, at least the model's.")
    moe_router_load_balancing_type: str = config_field(
        "aux_loss",
        choices=BALANCING_TYPES,
        help="aux_loss = auxiliary loss over a microbatch, seq_aux_loss = over each sequence, sinkhorn = balanced assignment, "
        "expert_choice = experts choose tokens, none.",
    )
    moe_aux_loss_coeff: float = config_field(0.0, minimum=0, help="Weight of the auxiliary loss.")
    moe_z_loss_coeff: float | None = config_field(None, minimum=0, help="Weight of the router's z-loss.")
    moe_expert_capacity_factor: float | None = config_field(
        None,
        exclusive_minimum=0,
        help="An expert takes at most this times tokens x topk / num_experts of a microbatch; default: no token is dropped "
        "(expert_choice: 1.0).",
    )
    moe_pad_expert_input_to_capacity: bool = config_field(
        False, help="Fill up each expert's input with zeros to the capacity, so that shapes don't depend on the routing."
    )
    moe_token_drop_policy: str = config_field(
        "probs", choices=("probs", "position"), help="Above the capacity an expert keeps its most probable, or its first tokens."
    )
    moe_token_dispatcher_type: str = config_field(
        "allgather", choices=DISPATCHERS, help="How tokens reach the ranks of their experts."
    )
    moe_grouped_gemm: bool = config_field(
        False, help="All local experts in one grouped matrix product where the device has it (bf16 on CUDA), else one after the other."
    )
    moe_layer_recompute: bool = config_field(
        False, help="Recompute norm, router and experts of each such layer in the backward (as recompute_modules moe)."
    )
    moe_per_layer_logging: bool = config_field(False, help="Log the balance of each layer, beside the mean over layers.")

    def moe_problems(self, num_layers: int) -> list[str]:
        """What is wrong with these options alone."""
        if self.num_experts is None:
            defaults = {field.name: field.default for field in dataclasses.fields(MoEConfig)}
            given = [name for name, default in defaults.items() if getattr(self, name) != default]
            return [f"{name} is only used with num_experts; set that or remove it" for name in given]
        problems = []
        try:
            moe_layers(self.moe_layer_freq, num_layers)
        except ConfigError as error:
            problems.append(str(error))
        if self.moe_router_topk > self.num_experts:
            problems.append(f"moe_router_topk={self.moe_router_topk} is above num_experts={self.num_experts}")
        return [*problems, *self._group_problems(self.num_experts), *self._score_problems(), *self._balance_problems()]

    def _group_problems(self, experts: int) -> list[str]:
        groups, chosen, topk = self.moe_router_num_groups, self.moe_router_group_topk, self.moe_router_topk
        if groups is None and chosen is None:
            return []
        if groups is None or chosen is None:
            return ["moe_router_num_groups and moe_router_group_topk belong together; set both or none"]
        if experts % groups:
            return [f"moe_router_num_groups={groups} does not divide num_experts={experts}"]
        if chosen > groups:
            return [f"moe_router_group_topk={chosen} is above moe_router_num_groups={groups}"]
        if topk % chosen or topk > chosen * (experts // groups):
            return [
                f"moe_router_topk={topk} must be a multiple of moe_router_group_topk={chosen}, and at most {chosen} groups x "
                f"{experts // groups} experts"
            ]
        return []

    def _score_problems(self) -> list[str]:
        problems, softmax = [], self.moe_router_score_function == "softmax"
        kind = self.moe_router_load_balancing_type
        if self.moe_router_pre_softmax and not softmax:
            problems.append("moe_router_pre_softmax needs moe_router_score_function=softmax")
        by_token = kind not in ("sinkhorn", "expert_choice")
        if self.moe_router_topk == 1 and softmax and not self.moe_router_pre_softmax and by_token:
            problems.append("moe_router_topk=1 with softmax needs moe_router_pre_softmax: the softmax of one value is always 1")
        if self.moe_router_enable_expert_bias and softmax:
            problems.append("moe_router_enable_expert_bias needs moe_router_score_function=sigmoid")
        if self.moe_router_enable_expert_bias and not by_token:
            problems.append(f"moe_router_enable_expert_bias does not go with moe_router_load_balancing_type={kind}; leave one of them out")
        if self.moe_router_num_groups is not None and not by_token:
            problems.append(f"moe_router_num_groups does not go with moe_router_load_balancing_type={kind}; leave one of them out")
        return problems

    def _balance_problems(self) -> list[str]:
        problems, kind = [], self.moe_router_load_balancing_type
        if self.moe_aux_loss_coeff and kind not in _LOSS_TYPES:
            problems.append(
                f"moe_aux_loss_coeff={self.moe_aux_loss_coeff:g} needs moe_router_load_balancing_type=aux_loss or seq_aux_loss, got {kind}"
            )
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            problems.append("moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor")
        return problems


def moe_layers(freq: str, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it has experts. Raises ConfigError for what is neither a number nor a pattern of that length."""
    text = freq.strip()
    if text.isascii() and text.isdigit() and int(text):
        return tuple(index % int(text) == 0 for index in range(num_layers))
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"moe_layer_freq={freq!r} is neither a number of at least 1 nor a pattern of 0 and 1 such as [0,1,1] or ([0]*3+[1]*58)"
        ) from None
    if len(pattern) != num_layers:
        raise ConfigError(f"moe_layer_freq={freq!r} is a pattern of {len(pattern)} layers, num_layers={num_layers}")
    return tuple(bool(entry) for entry in pattern)


def _pattern(node: ast.expr) -> list[int]:
    """Lists of 0 and 1, added and multiplied. Raises ValueError."""
    if isinstance(node, ast.List):
        entries = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        if len(entries) == len(node.elts) and all(type(entry) is int and entry in (0, 1) for entry in entries):
            return [int(entry) for entry in entries]  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        if isinstance(right, ast.Constant) and type(right.value) is int and 0 <= right.value <= 10_000:
            return _pattern(left) * right.value
    raise ValueError("not a pattern")
