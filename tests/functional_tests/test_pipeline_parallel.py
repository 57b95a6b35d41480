"""Training in pipelines: gradients, losses and norms equal one process whatever the schedule (R09, R22, R29, R31, R35)."""

import pathlib
import re
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from tests.functional_tests.test_data_parallel_parity import probe_flags
from tests.functional_tests.test_tensor_parallel import job, true_rows
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job
from tests.harness.t0 import t0_flags

EMPTY: dict[str, Any] = {}
TIED = {"untie_embeddings_and_output_weights": False}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1000}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, options of the model (the reference's too), options of the layout
    "pp2, tied": (2, TIED, {"pipeline_model_parallel_size": 2}),
    "pp2, tied, learned positions, 3 + 1 layers": (
        2, {**TIED, "position_embedding_type": "learned_absolute"},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
    ),
    "pp2 interleaved, tied": (2, TIED, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "pp2 zb_h1, tied": (2, TIED, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"}),
    "pp2 zb_v": (2, EMPTY, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_v"}),
    "pp4, embedding and head alone": (
        4, EMPTY, {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|t*2|tt|L"},
    ),
    "pp2dp2, tied, overlap": (4, TIED, {"pipeline_model_parallel_size": 2, **OVERLAP}),
    "pp2dp2 interleaved, overlap, aligned": (
        4, EMPTY,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "align_param_gather": True, **OVERLAP},
    ),
    "pp2dp2 zb_h1, tied, overlap": (4, TIED, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1", **OVERLAP}),
    "tp2pp2 zb_v, SP": (
        4, EMPTY,
        {
            "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb_v",
        },
    ),
    "tp2pp2, tied": (4, TIED, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}  # fmt: skip
MODEL: dict[str, Any] = {"num_layers": 4, "global_batch_size": 8, "micro_batch_size": 1}


def assert_equal_step(reference: Job, got: Job) -> None:
    """Losses, norm, gradients. A gradient that is read off updated weights is known to half a unit of their last place each."""
    expected, gradient = true_rows(reference.gradient()), true_rows(got.gradient())
    before, after = true_rows(reference.initial), true_rows(reference.final)
    assert gradient.keys() == expected.keys()
    for name, grad in expected.items():
        reading = 2.0**-24 * float(before[name].abs().max() + after[name].abs().max())
        assert float((gradient[name] - grad).abs().max()) <= 1e-5 * float(grad.abs().max()) + reading, name
    assert got.losses == pytest.approx(reference.losses, abs=1e-6)
    assert got.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    for name, weight in true_rows(reference.initial).items():
        assert torch.equal(true_rows(got.initial)[name], weight), name


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_norm_and_loss_equal_one_process(data: pathlib.Path, layout: str) -> None:
    ranks, model, options = LAYOUTS[layout]
    flags = {**MODEL, **model, "disable_bias_linear": None}
    reference = job(probe_flags(data, **flags))
    same_sums = ranks == options["pipeline_model_parallel_size"]  # neither tensor nor data parallelism adds in another order
    for got in run_distributed(job, ranks, probe_flags(data, **flags, **options)):
        assert_equal_step(reference, got)
        if same_sums:
            for name, weight in true_rows(reference.final).items():
                two_sums = model is not EMPTY and name == "embedding.word_embeddings.weight"  # embedding's and head's, added at the end
                assert torch.equal(true_rows(got.final)[name], weight) or two_sums, name
            assert got.losses == reference.losses


TABLE = {"pp4": [1, 2, 3, 4, 5, 8], "pp2": [1, 2, 3], "pp2 interleaved": [1, 2, 3, 4], "pp4 interleaved": [4, 6, 8], "pp4 zb_v": [1, 2, 5]}


def table_job(flags: list[str]) -> Job | str:
    """Runs on each rank: the job, or why it was refused."""
    try:
        return job(flags)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("layout", list(TABLE))
def test_any_number_of_microbatches_trains_right_or_is_refused(data: pathlib.Path, layout: str) -> None:
    """R22, with 8 layers; each cell either equals one process or names the rule on every rank."""
    stages = int(layout[2])
    options: dict[str, Any] = {"pipeline_model_parallel_size": stages}
    if "interleaved" in layout:
        options["virtual_pipeline_model_parallel_size"] = 2
    if "zb_v" in layout:
        options["pipeline_schedule"] = "zb_v"
    for microbatches in TABLE[layout]:
        flags = {"num_layers": 8, "global_batch_size": microbatches, "micro_batch_size": 1}
        reference = job(probe_flags(data, **flags))
        answers = run_distributed(table_job, stages, probe_flags(data, **flags, **options))
        if "interleaved" in layout and microbatches % stages:
            assert all("to be a multiple of pipeline_model_parallel_size" in str(answer) for answer in answers)
            continue
        for got in answers:
            assert isinstance(got, Job), got
            assert_equal_step(reference, got)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_accumulation_changes_neither_gradient_nor_loss(data: pathlib.Path, micro_batch_size: int) -> None:
    """R35: global batch 8, against one process that takes all 8 samples at once."""
    reference = job(probe_flags(data, global_batch_size=8, micro_batch_size=8))
    flags = {"global_batch_size": 8, "micro_batch_size": micro_batch_size, "pipeline_model_parallel_size": 2}
    for got in run_distributed(job, 2, probe_flags(data, **flags)):
        assert_equal_step(reference, got)


def test_a_frozen_stage_trains_and_resumes(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """R04 (c), (d): nothing to train on one of two stages, 2 data-parallel ranks, overlap."""
    base = {**MODEL, "train_iters": 6, "pipeline_model_parallel_size": 2, **OVERLAP}
    second = ["decoder.layers.[23].*", "decoder.final_layernorm.*", "output_layer.*"]
    for number, frozen in enumerate((second, ["embedding.*", "decoder.layers.[01].*"])):
        reference = job(t0_flags(str(data), **MODEL, train_iters=6, freeze=frozen))
        folder = str(tmp_path / str(number))
        run_distributed(job, 4, t0_flags(str(data), **base, freeze=frozen, exit_interval=3), folder)
        for got in run_distributed(job, 4, t0_flags(str(data), **base, freeze=frozen, load=folder)):
            assert got.losses == pytest.approx(reference.losses[3:], rel=1e-5)


def test_resume_is_exact_and_a_checkpoint_goes_on_in_another_pipeline(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """10 = 5 + 5 with dropout, tied, interleaved, distributed optimizer; then in one process, zb_h1 and tensor parallel."""
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    base = {**MODEL, **TIED, "train_iters": 10, "hidden_dropout": 0.1, "attention_dropout": 0.1, "lr_warmup_iters": 3}
    folder = str(tmp_path / "save")
    straight = run_distributed(job, 4, t0_flags(str(data), **base, **pipeline, **OVERLAP))
    saved = run_distributed(job, 4, t0_flags(str(data), **base, **pipeline, **OVERLAP, exit_interval=5), folder)
    resumed = run_distributed(job, 4, t0_flags(str(data), **base, **pipeline, **OVERLAP, load=folder))
    assert resumed[0].losses == straight[0].losses[5:]
    for name, value in straight[0].final.items():
        assert torch.equal(resumed[3].final[name], value), name
    zero_bubble = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"}
    for ranks, other in ((1, {}), (2, zero_bubble), (2, {"tensor_model_parallel_size": 2})):
        other_flags = t0_flags(str(data), **base, **other, load=folder)
        got = job(other_flags) if ranks == 1 else run_distributed(job, ranks, other_flags)[0]
        for name, value in true_rows(saved[0].final).items():
            assert torch.equal(true_rows(got.initial)[name], value), (other, name)
        assert got.iteration == 10


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "5 layers on 2 stages": ({"num_layers": 5}, r"num_layers=5 leaves 5 to share among 2 .*pipeline_model_parallel_layout"),
    "first and last leave too little": (
        {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 3}, "num_layers=4 less decoder_first",
    ),
    "layers of the last stage without stages": (
        {"pipeline_model_parallel_size": 1, "decoder_last_pipeline_num_layers": 1}, "needs pipeline_model_parallel_size > 1",
    ),
    "layout of another model": ({"pipeline_model_parallel_layout": "Ett|tL"}, "has 3 layer"),
    "layout of other stages": ({"pipeline_model_parallel_layout": "Et|t|ttL"}, r"has 3 part\(s\)"),
    "layout without head": ({"pipeline_model_parallel_layout": "Ett|tt"}, "one L, at the very end"),
    "zb_v, tied": ({**TIED, "pipeline_schedule": "zb_v"}, "cannot share a weight"),
    "zb_h1 with chunks": ({"pipeline_schedule": "zb_h1", "virtual_pipeline_model_parallel_size": 2}, "one model chunk per stage"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_an_impossible_pipeline_is_refused_with_the_rule(data: pathlib.Path, case: str) -> None:
    """R29, on every rank."""
    options, text = BAD[case]
    for answer in run_distributed(table_job, 2, probe_flags(data, **{"pipeline_model_parallel_size": 2, **options})):
        assert re.search(text, str(answer)), answer


@pytest.mark.parametrize("first", [3, 2])
def test_five_layers_on_two_stages(data: pathlib.Path, first: int) -> None:
    """R29: 3 + 2 and 2 + 3 are the model asked for."""
    reference = job(probe_flags(data, num_layers=5))
    options = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": first}
    for got in run_distributed(job, 2, probe_flags(data, num_layers=5, **options)):
        assert_equal_step(reference, got)
