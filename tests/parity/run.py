"""Runs cases of the matrix: the product on the case's ranks in fp64 and fp32, against the plain-torch reference.

Bounds, relative to the largest number of each tensor (at least a thousandth of the largest of its kind, because a gradient that is
zero but for rounding has no scale of its own): 1e-10 in fp64; in fp32 `rounding_bound`, 2^-24 x matrix products in a row x
sqrt(longest sum).
"""

import dataclasses
import functools
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config import RunConfig, parse_command_line
from megatron.training.data import build_data
from megatron.training.gpt_builder import build_gpt_model
from megatron.training.parity.ranks import record
from megatron.training.parity.records import RankStep, Step, difference, merge
from megatron.training.parity.verdict import rounding_bound
from megatron.training.run_tokenizer import build_run_tokenizer
from tests.harness.distributed import run_distributed
from tests.harness.t0 import TRUE_VOCAB_SIZE
from tests.parity.matrix import LENGTH, SAMPLES, STEPS, Case
from tests.reference.gpt_training import Recipe, ReferenceStep, Tensors, train

PRECISIONS = ("fp64", "fp32")
MEASURES = ("loss", "norm", "gradient", "weight")


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Of one case in one precision: the largest relative difference by measure, and the tensor it is in."""

    precision: str
    bound: float
    largest: dict[str, float]
    where: dict[str, str]
    problems: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether everything is within the bound."""
        return not self.problems and all(value <= self.bound for value in self.largest.values())


def run_cases(cases: list[Case], timeout: float = 120.0) -> dict[str, list[Deviation]]:
    """All cases, which have the same number of ranks; by key."""
    world = cases[0].ranks
    assert all(case.ranks == world for case in cases)
    found: dict[str, list[Deviation]] = {case.key: [] for case in cases}
    for case in cases:
        for precision in PRECISIONS:
            flags = case.flags(precision)
            start = start_of(case)
            if world == 1:
                by_rank = [_record(flags, start)]
            else:
                by_rank = run_distributed(_record, world, flags, start, timeout=timeout)
            steps = [merge(of_rank) for of_rank in zip(*by_rank, strict=True)]
            found[case.key].append(deviation(case, precision, steps))
    return found


def _record(flags: list[str], start: Tensors) -> list[RankStep]:
    """Runs on each rank."""
    config = parse_command_line(flags).resolved.config
    steps: list[RankStep] = []
    record(config, torch.device("cpu"), steps.append, start=start, activations=False)
    return steps


def deviation(case: Case, precision: str, steps: list[Step]) -> Deviation:
    """The run's steps (the first is its start) against the reference's."""
    bound = rounding_bound(precision, case.layers, SAMPLES * LENGTH)
    largest, where = dict.fromkeys(MEASURES, 0.0), dict.fromkeys(MEASURES, "")
    problems = [f"rank {p.rank} holds other numbers of {p.kind} {p.name}" for step in steps for p in step.replicas]
    for number, (expected, got) in enumerate(zip(reference(case.model_key), steps[1:], strict=True), start=1):
        wanted = {
            "loss": {"lm loss": torch.tensor(expected.loss, dtype=torch.float64)},
            "norm": {"grad norm": torch.tensor(expected.norm, dtype=torch.float64)},
            "gradient": expected.gradients,
            "weight": expected.weights,
        }
        for kind, tensors in wanted.items():
            own = got.of_kind(kind)
            if own.keys() != tensors.keys():
                problems.append(f"step {number}: {kind}s of {sorted(own.keys() ^ tensors.keys())} on one side only")
                continue
            floor = 1e-3 * max(float(tensor.abs().max()) for tensor in tensors.values())
            for name, tensor in tensors.items():
                value = difference(tensor, own[name].double(), floor)
                if value > largest[kind]:
                    largest[kind], where[kind] = value, f"step {number} {name}"
        if number == STEPS and any(not torch.equal(got.of_kind("final")[n], w) for n, w in got.of_kind("weight").items()):
            problems.append("the model's weights after the last step are not the optimizer's")
    return Deviation(precision, bound, largest, where, tuple(dict.fromkeys(problems)))


# ------------------------------------------------------------------------------------------------------------------ reference


@functools.lru_cache(maxsize=256)
def _config_of(model_key: tuple[Any, ...]) -> RunConfig:
    return parse_command_line(_CASES[model_key].flags("fp64", layout=False)).resolved.config


_CASES: dict[tuple[Any, ...], Case] = {}


def start_of(case: Case) -> Tensors:
    """Whole weights to begin with, in fp32, no two alike: a bias that is added twice, or shifted, shows at once."""
    _CASES.setdefault(case.model_key, case)
    return _start(case.model_key)


@functools.lru_cache(maxsize=256)
def _start(model_key: tuple[Any, ...]) -> Tensors:
    config = _config_of(model_key)
    single = ProcessGroupCollection.single_process()
    model = build_gpt_model(config, vocab_size=TRUE_VOCAB_SIZE, device=torch.device("cpu"), pg_collection=single)
    generator = torch.Generator().manual_seed(7)
    start = {}
    for name, param in model.named_parameters():
        whole = param.detach().float()
        whole = whole[:TRUE_VOCAB_SIZE] if name in ("embedding.word_embeddings.weight", "output_layer.weight") else whole
        start[name] = whole + 0.1 * torch.randn(whole.shape, generator=generator)
    return start


@functools.lru_cache(maxsize=256)
def reference(model_key: tuple[Any, ...]) -> list[ReferenceStep]:
    """Two steps in plain torch."""
    config = _config_of(model_key)
    return train(_start(model_key), config.transformer_config(), _batches(config), recipe_of(_CASES[model_key]))


def recipe_of(case: Case) -> Recipe:
    """The case's optimizer."""
    optimizer = config_of(case).optimizer
    return Recipe(
        TRUE_VOCAB_SIZE, optimizer.lr or 0.0, optimizer.weight_decay, optimizer.clip_grad, optimizer.adam_beta1,
        optimizer.adam_beta2, optimizer.adam_eps,
    )  # fmt: skip


def config_of(case: Case) -> RunConfig:
    """The case without its layout."""
    _CASES.setdefault(case.model_key, case)
    return _config_of(case.model_key)


def _batches(config: RunConfig) -> list[Tensors]:
    """All samples of each step."""
    calculator = NumMicroBatches(SAMPLES, SAMPLES, 1)
    whole = dataclasses.replace(config, training=dataclasses.replace(config.training, micro_batch_size=SAMPLES))
    data = build_data(
        whole, build_run_tokenizer(config), dp_rank=0, dp_size=1, train_samples=SAMPLES * STEPS, calculator=calculator
    )
    return [data.train_step(step * SAMPLES)[0] for step in range(STEPS)]
