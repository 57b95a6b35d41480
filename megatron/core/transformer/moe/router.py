"""Router: which experts each token goes to, and with what weights.

    logits = x W^T, in fp32 or wider
    top-k            softmax of the k chosen logits; or softmax or sigmoid of all, then the k largest (sigmoid: normalised to 1)
    group-limited    experts in groups; a token chooses the best groups first, by the sum of their best scores
    expert bias      added to the scores for the choice, not to the weights; moved after each step (Wang et al. 2024)
    sinkhorn         the choice is made on a doubly normalised score matrix; weights as by Megatron-LM (Clark et al. 2022)
    expert choice    each expert chooses its tokens (Zhou et al. 2022)

What depends on several tokens (losses, capacity, sinkhorn, expert choice) is computed over the whole microbatch, also where tensor or
context parallelism cuts it. Capacity, sinkhorn and expert choice are for training: in evaluation and generation every token gets its
top-k experts, so that no result depends on other rows.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from megatron.core.param_init import InitRule, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.transformer.batch_inputs import AuxLossWeight
from megatron.core.transformer.moe.aux_loss import attach, balancing_loss, z_loss
from megatron.core.transformer.moe.microbatch_tokens import MicrobatchTokens
from megatron.core.transformer.moe.router_stats import RouterStats
from megatron.core.transformer.recompute import is_recomputing
from megatron.core.transformer.transformer_config import TransformerConfig

_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_ROUNDS = 100


@dataclasses.dataclass(frozen=True)
class Routing:
    """probs: [n, E], the weights, 0 where not chosen. chosen: bool [n, E]. most: bound on a token's experts, None = not known.
    complete: every token has `most` experts. capacity: most tokens of the microbatch for an expert, None = no bound."""

    probs: torch.Tensor
    chosen: torch.Tensor
    most: int | None
    complete: bool
    capacity: int | None = None


class Router(torch.nn.Module):
    """weight [E, h], and with aux-loss-free balancing the buffer expert_bias [E], fp32. `stats`: what the step's routings amount to."""

    expert_bias: torch.Tensor | None

    def __init__(self, config: TransformerConfig, layer_index: int, *, device: torch.device | None) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.layer_index = config, layer_index
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.weight = new_parameter(
            (self.num_experts, config.hidden_size),
            rule=InitRule(std=config.init_method_std),
            meta=ParamMeta(tp_partial_grad=True),  # each tensor-parallel rank routes its own tokens
            dtype=config.params_dtype,
            device=device,
        )
        bias = torch.zeros(self.num_experts, dtype=torch.float32, device=device) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.stats = RouterStats()

    def forward(self, hidden: torch.Tensor, tokens: MicrobatchTokens, weight: AuxLossWeight) -> Routing:
        """hidden: [n, h] of this rank. weight: of the microbatch's auxiliary losses."""
        precision = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        dtype = torch.promote_types(hidden.dtype, precision)
        logits = F.linear(hidden.to(dtype), self.weight.to(dtype))
        kind = self.config.moe_router_load_balancing_type if self.training else "none"
        if kind == "expert_choice":
            routing = self._expert_choice(logits, tokens)
        else:
            routing = self._token_choice(logits, self._balanced(logits, tokens) if kind == "sinkhorn" else None)
        if not (self.training and torch.is_grad_enabled()):
            return routing
        kept = self._within_capacity(routing, tokens)
        return dataclasses.replace(kept, probs=self._with_losses(logits, routing.chosen, kept, tokens, weight))

    # Choice

    def _token_choice(self, logits: torch.Tensor, balanced: torch.Tensor | None) -> Routing:
        config = self.config
        if balanced is not None or config.moe_router_load_balancing_type == "sinkhorn":
            scores = torch.sigmoid(logits) if self.topk == 1 else torch.softmax(logits, dim=-1)
            index = (logits if balanced is None else balanced).topk(self.topk, dim=-1).indices
            weights = scores.gather(1, index)
        elif config.moe_router_score_function == "sigmoid":
            scores = torch.sigmoid(logits)
            index = self._best(scores if self.expert_bias is None else scores + self.expert_bias)
            weights = scores.gather(1, index)
            if self.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif config.moe_router_pre_softmax or config.moe_router_load_balancing_type == "expert_choice":
            scores = torch.softmax(logits, dim=-1)
            index = self._best(scores)
            weights = scores.gather(1, index)
        else:
            index = self._best(logits)
            weights = torch.softmax(logits.gather(1, index), dim=-1)
        if config.moe_router_topk_scaling_factor is not None:
            weights = weights * config.moe_router_topk_scaling_factor
        probs = torch.zeros_like(logits).scatter(1, index, weights)
        chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(1, index, True)
        return Routing(probs, chosen, self.topk, complete=True)

    @torch.no_grad()
    def _best(self, scores: torch.Tensor) -> torch.Tensor:
        """int64 [n, k]: the experts with the highest scores, of the best groups if there are groups."""
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if groups is not None and chosen is not None:
            by_group = scores.view(scores.size(0), groups, -1)
            of_groups = by_group.topk(self.topk // chosen, dim=-1).values.sum(-1)
            best = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, of_groups.topk(chosen, dim=-1).indices, True)
            scores = by_group.masked_fill(~best[..., None], float("-inf")).flatten(1)
        return scores.topk(self.topk, dim=-1).indices

    def _expert_choice(self, logits: torch.Tensor, tokens: MicrobatchTokens) -> Routing:
        sigmoid = self.config.moe_router_score_function == "sigmoid"
        scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
        capacity = min(self._capacity(tokens), tokens.total)
        chosen = _first_by_value(tokens.whole(scores.detach(), -1.0), capacity)[tokens.place]
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        return Routing(scores.masked_fill(~chosen, 0.0) * factor, chosen, None, complete=False, capacity=capacity)

    @torch.no_grad()
    def _balanced(self, logits: torch.Tensor, tokens: MicrobatchTokens) -> torch.Tensor:
        """exp(logits) scaled by rows and columns until every token and every expert has the same sum (Sinkhorn's iteration)."""
        cost = torch.exp(logits - logits.amax(-1, keepdim=True))
        columns = logits.new_ones(self.num_experts)
        rows = logits.new_ones(logits.size(0))
        for _ in range(_SINKHORN_ROUNDS):
            rows = 1.0 / (tokens.total * (cost @ columns))
            before, columns = columns, 1.0 / (self.num_experts * tokens.sum_over_ranks(rows @ cost))
            if float((columns - before).abs().mean()) <= _SINKHORN_TOLERANCE:
                break
        return rows[:, None] * cost * columns

    # Capacity

    def _capacity(self, tokens: MicrobatchTokens) -> int:
        factor = self.config.moe_expert_capacity_factor or 1.0
        return math.ceil(tokens.total * self.topk / self.num_experts * factor)

    def _within_capacity(self, routing: Routing, tokens: MicrobatchTokens) -> Routing:
        """Without the tokens that are too many for their expert; their weights are not given to others."""
        if self.config.moe_expert_capacity_factor is None or routing.capacity is not None:
            return routing
        capacity, by_probs = self._capacity(tokens), self.config.moe_token_drop_policy == "probs"
        values = routing.probs.detach() if by_probs else torch.ones_like(routing.probs)
        whole = tokens.whole(values.masked_fill(~routing.chosen, -1.0), -2.0)
        kept = routing.chosen & _first_by_value(whole, min(capacity, tokens.total))[tokens.place]
        return Routing(routing.probs.masked_fill(~kept, 0.0), kept, routing.most, complete=False, capacity=capacity)

    # Losses and figures

    def _with_losses(
        self, logits: torch.Tensor, chosen: torch.Tensor, kept: Routing, tokens: MicrobatchTokens, weight: AuxLossWeight
    ) -> torch.Tensor:
        """The weights, with the auxiliary losses attached. chosen: before any drop."""
        config, probs = self.config, kept.probs
        figures: dict[str, torch.Tensor] = {"counts": chosen.sum(0)}
        if config.moe_expert_capacity_factor is not None and kept.chosen is not chosen:
            figures["dropped"] = chosen.sum() - kept.chosen.sum()
        if config.moe_aux_loss_coeff:
            per_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
            loss = balancing_loss(self._loss_scores(logits), chosen, tokens, topk=self.topk, per_sequence=per_sequence)
            probs = attach(probs, loss * config.moe_aux_loss_coeff, weight.gradient)
            figures["balancing"] = loss.detach()
        if config.moe_z_loss_coeff:
            loss = z_loss(logits, tokens)
            probs = attach(probs, loss * config.moe_z_loss_coeff, weight.gradient)
            figures["z"] = loss.detach()
        if not is_recomputing():
            self.stats.add(weight.tokens, figures)
        return probs

    def _loss_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, E], each token's scores summing up to 1."""
        if self.config.moe_router_score_function == "softmax":
            return torch.softmax(logits, dim=-1)
        scores = torch.sigmoid(logits)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _first_by_value(whole: torch.Tensor, count: int) -> torch.Tensor:
    """whole: [T, E] -> bool, of each column the `count` largest values; of equal ones the first."""
    index = torch.argsort(whole, dim=0, descending=True, stable=True)[:count]
    return torch.zeros(whole.shape, dtype=torch.bool, device=whole.device).scatter(0, index, True)
