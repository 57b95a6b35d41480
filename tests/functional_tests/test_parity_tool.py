"""tools/parity.py: two layouts that agree are found equal; faults that are put into a run are found where they are."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.param_meta import param_meta, set_param_meta
from megatron.training.parity.ranks import record
from megatron.training.parity.records import RankStep, merge
from megatron.training.parity.reduce_config import Run, comparable, longest_sum
from megatron.training.parity.verdict import Line, compare, rounding_bound
from tests.harness.distributed import run_distributed
from tests.harness.t0 import REPOSITORY
from tools.parity import load, main

PRECISIONS = ("fp32", "fp64")
TP2 = str(REPOSITORY / "configs" / "tp2_sp.yaml")
SINGLE = ["parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]


def _doubled_gradient(trainer: Any) -> None:
    """The gradient behind one layer's MLP is twice what it should be."""
    mlp = trainer.model.module.decoder.layers["1"].mlp
    mlp.register_forward_hook(lambda module, inputs, output: output.register_hook(lambda grad: 2 * grad) and None)


def _unreduced_norm(trainer: Any) -> None:
    """A norm's weight that sequence parallelism leaves in parts."""
    weight = trainer.model.module.decoder.layers["0"].input_layernorm.weight
    set_param_meta(weight, dataclasses.replace(param_meta(weight), tp_partial_grad=False))


def _wrong_rope_offset(trainer: Any) -> None:
    """Positions of the second half of a row are one too far."""
    rotary = trainer.model.module.rotary
    right = rotary.cos_sin

    def shifted(position_ids: torch.Tensor | None, length: int, *rest: Any) -> Any:
        positions = torch.arange(length)[None] if position_ids is None else position_ids
        later = (positions + (torch.arange(length) >= length // 2)).clamp(max=length - 1)
        return right(later, length, *rest)

    rotary.cos_sin = shifted


def _wrong_learning_rate(trainer: Any) -> None:
    """One group of parameters takes a hundredth more."""
    group = next(group for group in trainer.optimizer.param_groups if not group["wd_mult"])
    group["lr"] *= 1.01


def _narrow_layer(trainer: Any) -> None:
    """A layer that computes in fp32 whatever the precision."""
    layer = trainer.model.module.decoder.layers["1"]
    layer.register_forward_hook(lambda module, inputs, output: output.float().to(output.dtype))


FAULTS: dict[str, tuple[Callable[[Any], None] | None, tuple[int, str, str] | None]] = {
    "none": (None, None),
    "doubled gradient": (_doubled_gradient, (1, "gradient", "decoder.layers.1.mlp.linear_fc2.weight")),
    "norm not reduced": (_unreduced_norm, (1, "gradient", "decoder.layers.0.input_layernorm.weight")),
    "rope offset": (_wrong_rope_offset, (1, "activation", "decoder.layers.0.self_attention")),
    "learning rate": (_wrong_learning_rate, (1, "weight", "decoder.layers.0.input_layernorm.weight")),
    "narrow layer": (_narrow_layer, (1, "activation", "decoder.layers.1")),
}


def recorded(run: Run, fault: str | None) -> dict[str, list[RankStep]]:
    """Runs on each rank: the steps of the run in each precision."""
    found: dict[str, list[RankStep]] = {}
    for precision in PRECISIONS:
        found[precision] = []
        prepare = None if fault is None else FAULTS[fault][0]
        record(run.in_precision(precision), torch.device("cpu"), found[precision].append, prepare=prepare)
    return found


@functools.cache
def pair() -> tuple[Run, Run]:
    """One process, and 2 tensor-parallel ranks with sequence parallelism."""
    return comparable(load(TP2, SINGLE), load(TP2, []))


@functools.cache
def alone() -> dict[str, list[RankStep]]:
    """The single process's steps."""
    return recorded(pair()[0], None)


def lines_of(fault: str) -> list[Line]:
    """The comparison of the two runs, step by step."""
    a, b = pair()
    by_rank = run_distributed(recorded, 2, b, fault)
    bounds = {name: rounding_bound(name, a.config.model.num_layers, longest_sum(a.config)) for name in PRECISIONS}
    lines = []
    for step in range(len(alone()["fp32"])):
        one = {name: merge([alone()[name][step]]) for name in PRECISIONS}
        two = {name: merge([rank[name][step] for rank in by_rank]) for name in PRECISIONS}
        lines += compare(one, two, bounds)
    return lines


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_told_from_rounding_and_named_where_it_begins(fault: str) -> None:
    lines = lines_of(fault)
    assert {line.step for line in lines} == {0, 1, 2}
    wanted = FAULTS[fault][1]
    faults = [line for line in lines if line.verdict == "fault"]
    if wanted is None:
        assert not faults and any(line.verdict == "rounding" for line in lines)
        assert all(line.verdict == "equal" for line in lines if line.kind == "initial")
    else:
        assert (faults[0].step, faults[0].kind, faults[0].name) == wanted
    if fault == "doubled gradient":
        assert faults[0].ratio == pytest.approx(2.0)
    if fault == "norm not reduced":
        assert "rank 1 holds other numbers" in faults[0].why


def test_layers_are_compared_in_forward_order_and_gradients_backwards() -> None:
    lines = [line for line in lines_of("none") if line.step == 1]
    names = [line.name for line in lines if line.kind == "activation"]
    expected = ["embedding"]
    for layer in range(pair()[0].config.model.num_layers):
        expected += [f"decoder.layers.{layer}.{part}" for part in ("self_attention", "mlp")] + [f"decoder.layers.{layer}"]
    assert names == [*expected, "decoder.final_layernorm", "loss of each token"]
    gradients = [line.name for line in lines if line.kind == "gradient"]
    assert gradients[0] == "output_layer.weight" and gradients[-1] == "embedding.word_embeddings.weight"


def test_the_command_finds_two_layouts_equal(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "pp2_interleaved.yaml")
    single = [
        word
        for change in ("parallel.pipeline_model_parallel_size=1", "parallel.virtual_pipeline_model_parallel_size=null")
        for word in ("--set-a", change)
    ]
    assert main([config, config, *single, "--steps", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] and report["first_fault"] is None
    assert report["runs"]["A"]["ranks"] == 1 and report["runs"]["B"]["ranks"] == 2
    kinds = {line["kind"] for line in report["tensors"]}
    assert kinds == {"initial", "activation", "loss", "gradient", "norm", "weight", "final"}
    assert {line["verdict"] for line in report["tensors"]} == {"equal"}  # a pipeline forms one process's sums


def test_two_models_are_wrong_usage_and_a_wrong_weight_decay_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "debug_cpu.yaml")
    common = [config, config, "--steps", "1", "--precision", "fp64"]
    assert main([*common, "--set-b", "model.qk_layernorm=true"]) == 2
    assert "different models: decoder.layers.0.self_attention.q_layernorm.weight is [8] in B, not there in A" in capsys.readouterr().err
    assert main([*common, "--set-b", "optimizer.weight_decay=0.5"]) == 1
    printed = capsys.readouterr().out
    assert "FAULT, first at step 1, weight embedding.word_embeddings.weight" in printed


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--steps", "0"], "--steps"),
        (["--ranks-b", "3", "--set-b", "parallel.tensor_model_parallel_size=2"], "3 ranks cannot be divided"),
        (["--set-b", "parallel.tensor_model_parallel_size=3"], "tensor_model_parallel_size=3 does not divide"),
    ],
)
def test_wrong_usage_is_exit_code_2(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "debug_cpu.yaml")
    assert main([config, config, *flags]) == 2
    assert text in capsys.readouterr().err
