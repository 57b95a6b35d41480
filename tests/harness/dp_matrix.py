"""The two matrices of data parallelism: every combination of overlap options against none, every engine against plain torch.

Combinations are compared bit by bit; the oracle is one process, the whole batch at once and torch's own optimizer, in float64.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

from megatron.core.distributed import finalize_model_grads
from tests.unit_tests.optimizer.toy import LENGTH, VOCABULARY, Toy, build

BATCH = 48  # divides by 4 ranks x 4 microbatches, and by 3 x 4
STEPS = 3
BUCKET_SIZES = (1, 150, None)  # one parameter, some, everything
EVALUATED, SAVED = 1, 1  # after this step
ADAM = {"clip_grad": 0.3}


@dataclasses.dataclass(frozen=True)
class Combination:
    """overlap: 0 none, 1 grad reduce, 2 and param gather, 3 and the gather inside the optimizer's step."""

    overlap: int
    align_param_gather: bool
    average_in_collective: bool
    accumulate: int
    evaluates: bool
    saves: bool

    def ddp(self, bucket_size: int | None) -> dict[str, Any]:
        """Options of DistributedDataParallelConfig."""
        return {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": self.overlap >= 1,
            "overlap_param_gather": self.overlap >= 2,
            "align_param_gather": self.align_param_gather,
            "average_in_collective": self.average_in_collective,
            "bucket_size": bucket_size,
        }

    def opt(self) -> dict[str, Any]:
        """Options of OptimizerConfig."""
        return {**ADAM, "overlap_param_gather_with_optimizer_step": self.overlap == 3}

    def reference(self) -> "Combination":
        """The run without overlap that it must equal; it evaluates and saves, so that those can be compared too."""
        return Combination(0, False, self.average_in_collective, self.accumulate, True, True)


VALUES = ((0, 1, 2, 3), (False, True), (False, True), (1, 4), (False, True), (False, True))
ALL = [Combination(*values) for values in itertools.product(*VALUES)]  # type: ignore[arg-type]


def covering_pairs(combinations: Sequence[Combination] = tuple(ALL)) -> list[Combination]:
    """A few of them that contain every pair of values of two options (greedy)."""
    missing = {pair for combination in combinations for pair in pairs(combination)}
    chosen = []
    while missing:
        best = max(combinations, key=lambda combination: len(missing & pairs(combination)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(combination: Combination) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two options with their values."""
    return set(itertools.combinations(dataclasses.asdict(combination).items(), 2))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [48, 6], mask [48, 5])."""
    generator = torch.Generator().manual_seed(700 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens, (torch.rand(BATCH, LENGTH, generator=generator) < 0.6).to(torch.float64)


def loss_sum(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, step: int) -> torch.Tensor:
    """Sum over unmasked tokens, in the model's dtype."""
    logits = model(tokens[:, :-1], use_sometimes=step % 2 == 1)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * mask.to(losses.dtype).flatten()).sum()


def train(
    ddp: dict[str, Any],
    opt: dict[str, Any],
    accumulate: int,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    evaluates: bool = False,
    saves: bool = False,
) -> dict[str, Any]:
    """Train on this rank; everything that must agree: losses, norms, weights, optimizer state, and what was evaluated and saved."""
    model, optimizer = build(ddp, opt, dtype)
    size, rank = model.data_parallel_size, model.pg_collection.rank("dp_cp")
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        tokens, mask = batch(step)
        rows = torch.arange(BATCH).view(accumulate, size, -1)[:, rank]
        model.zero_grad_buffer(overwrite=True)
        total = torch.zeros((), dtype=dtype)
        for index in range(accumulate):
            if index < accumulate - 1:
                with model.no_sync():
                    total += _backward(model, optimizer, tokens[rows[index]], mask[rows[index]], step)
            else:
                total += _backward(model, optimizer, tokens[rows[index]], mask[rows[index]], step)
        finalize_model_grads([model], mask[rows.flatten()].sum().to(torch.int64))
        success, norm, _ = optimizer.step()
        assert success
        seen["losses"].append(total)
        seen["norms"].append(norm)
        if evaluates and step == EVALUATED:
            model.eval()
            with torch.no_grad():
                seen["evaluated"] = loss_sum(model, *batch(99), step)
            model.train()
        if saves and step == SAVED:
            seen["saved"] = _saved(model, optimizer)
    optimizer.finish_param_sync()
    return seen | {"weights": weights(model), "state": optimizer.state_dict()["state"]}


def _backward(model: Any, optimizer: Any, tokens: torch.Tensor, mask: torch.Tensor, step: int) -> torch.Tensor:
    loss = loss_sum(model, tokens, mask, step)
    optimizer.scale_loss(loss).backward()
    return loss.detach()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def _saved(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """What this rank would give a checkpoint."""
    tensors = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    for name, tensor in optimizer.sharded_state_dict().items():
        for index, piece in enumerate(tensor.pieces):
            tensors[f"{name} {index}"] = piece.shaped().clone()
    return tensors


def differences(got: Any, expected: Any, path: str = "") -> list[str]:
    """Where two nested results are not bit-equal. Keys that only `expected` has are passed over at the top."""
    if isinstance(expected, dict):
        keys = got.keys() if not path else got.keys() | expected.keys()
        return [text for key in keys for text in _differences_at(got, expected, key, path)]
    if isinstance(expected, list):
        lengths = [] if len(got) == len(expected) else [f"{path}: {len(got)} instead of {len(expected)}"]
        return lengths + [text for index, pair in enumerate(zip(got, expected, strict=False)) for text in differences(*pair, f"{path}[{index}]")]
    same = torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected
    return [] if same else [f"{path}: {got} instead of {expected}"]


def _differences_at(got: dict[str, Any], expected: dict[str, Any], key: str, path: str) -> list[str]:
    if key not in got or key not in expected:
        return [f"{path}.{key} is missing on one side"]
    return differences(got[key], expected[key], f"{path}.{key}")


def compare_combinations(combinations: Iterable[Combination], bucket_size: int | None) -> dict[Combination, list[str]]:
    """Each combination's differences from its run without overlap, on this rank."""
    references: dict[Combination, dict[str, Any]] = {}
    found = {}
    for combination in combinations:
        quiet = combination.reference()
        if quiet not in references:
            references[quiet] = _run(quiet, bucket_size)
        found[combination] = differences(_run(combination, bucket_size), references[quiet])
    return found


def _run(combination: Combination, bucket_size: int | None) -> dict[str, Any]:
    return train(
        combination.ddp(bucket_size),
        combination.opt(),
        combination.accumulate,
        evaluates=combination.evaluates,
        saves=combination.saves,
    )


# ------------------------------------------------------------------------------------------- engines against plain torch


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Of one data-parallel size, bucket size and accumulation, on one rank.

    plain_differs: where plain and distributed optimizer are not bit-equal (fp32, AdamW with clipping). The others: largest
    deviation from one process in plain torch, float64: gradients (SGD, lr 1; absolute, of numbers of about 1e-2), weights after
    AdamW (absolute, of numbers of about 1), norms and losses (relative).
    """

    plain_differs: list[str]
    gradient: float
    update: float
    norm: float
    loss: float

    @property
    def worst(self) -> float:
        """The largest deviation."""
        return max(self.gradient, self.update, self.norm, self.loss)


SGD64 = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
# Clip factors pass through fp32 arguments of the kernel. An epsilon of 1e-3 keeps Adam's first steps from being the sign of a gradient
# that is zero but for rounding.
ADAM64 = {"lr": 1e-2, "weight_decay": 0.1, "adam_eps": 1e-3, "clip_grad": 0.0}


def compare_engines(bucket_size: int | None, accumulate: int) -> Agreement:
    """Plain and distributed optimizer, all overlap, against each other and against the oracle; runs on every rank."""
    plain = {"overlap_grad_reduce": True, "bucket_size": bucket_size}
    sharded = Combination(3, False, False, accumulate, False, False)
    first, second = train(plain, ADAM, accumulate), train(sharded.ddp(bucket_size), sharded.opt(), accumulate)
    for seen in (first, second):
        del seen["state"]  # whole parameters here, shards there
    norms = [seen.pop("norms") for seen in (first, second)]
    differs = differences(second, first)
    differs += [f"norm: {a} and {b}" for a, b in zip(*norms, strict=True) if abs(a - b) > 1e-14 * a]  # one fp64 sum, two orders
    worst = {"gradient": 0.0, "update": 0.0, "norm": 0.0, "loss": 0.0}
    for ddp, extra in ((plain, {}), (sharded.ddp(bucket_size), {"overlap_param_gather_with_optimizer_step": True})):
        step = train(ddp, {**SGD64, **extra}, accumulate, dtype=torch.float64, steps=1)
        _note(worst, "gradient", step, oracle("sgd", 1))
        _note(worst, "update", train(ddp, {**ADAM64, **extra}, accumulate, dtype=torch.float64), oracle("adam", STEPS))
    return Agreement(differs, **worst)


def _note(worst: dict[str, float], key: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    deviation = max(float((got["weights"][name] - value).abs().max()) for name, value in expected["weights"].items())
    worst[key] = max(worst[key], deviation)
    for index, norm in enumerate(expected["norms"]):
        worst["norm"] = max(worst["norm"], abs(got["norms"][index] / norm - 1))
        local = got["losses"][index].clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(local)
        worst["loss"] = max(worst["loss"], abs(local.item() / expected["losses"][index] - 1))


def oracle(kind: str, steps: int) -> dict[str, Any]:
    """One process, the whole batch, torch's optimizer, float64. Unused matrices get a zero gradient."""
    model = Toy(torch.float64)
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=1.0)
    else:
        decayed = [param for param in trained if param.dim() >= 2]
        others = [param for param in trained if param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": ADAM64["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=ADAM64["lr"], eps=ADAM64["adam_eps"], foreach=False)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        for param in trained:
            param.grad = torch.zeros_like(param)
        tokens, mask = batch(step)
        total = loss_sum(model, tokens, mask, step)
        (total / mask.sum()).backward()
        seen["losses"].append(total.item())
        seen["norms"].append(torch.cat([param.grad.flatten() for param in trained if param.grad is not None]).norm().item())
        optimizer.step()
    return seen | {"weights": {name: param.detach().clone() for name, param in model.named_parameters()}}
