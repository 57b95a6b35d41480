"""tools/show_batch.py: a global batch exactly as the run reads it."""

import json
import pathlib

import pytest

from megatron.core.num_microbatches_calculator import NumMicroBatches
from tests.harness.d0 import EOD, d0_documents
from tests.harness.t0 import t0_flags
from tools import show_batch

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "megatron_core"
D0, D1 = str(FIXTURES / "d0"), str(FIXTURES / "d1")


@pytest.fixture
def shown(tmp_path, capsys):
    """Run the tool on T0 with these changes; returns its JSON."""

    def run(step, path=D0, **changes):
        flags = t0_flags(path, **({"train_iters": 6, "data_cache_path": tmp_path} | changes))
        assert show_batch.main([*flags, "--step", str(step), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_batches_are_megatron_cores_samples_in_order(shown):
    expected = json.loads((FIXTURES / "megatron_sample_order.json").read_text())["d0_48"]
    for step in range(6):
        batch = shown(step)
        assert batch["step"] == step
        assert [sample["id"] for sample in batch["samples"]] == list(range(8 * step, 8 * step + 8))
        assert [sample["tokens"] for sample in batch["samples"]] == expected[8 * step : 8 * step + 8]


def test_a_blend_names_each_samples_data_set(shown):
    expected = json.loads((FIXTURES / "megatron_sample_order.json").read_text())["blend_64"]
    batch = shown(3, path=["0.7", D0, "0.3", D1], train_iters=8)
    assert [sample["tokens"] for sample in batch["samples"]] == expected[24:32]
    assert {sample["dataset"] for sample in batch["samples"]} == {D0, D1}


def test_documents_masks_and_resets_are_those_of_the_tokens(shown):
    batch = shown(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    for sample in batch["samples"]:
        spans = [d0_documents()[d["document"]][d["start"] : d["stop"]] for d in sample["documents"]]
        assert [token for span in spans for token in span] == sample["tokens"]
        inputs = sample["tokens"][:-1]
        assert sample["loss_mask"] == [float(token != EOD) for token in inputs]
        assert sample["position_resets"] == [k + 1 for k, token in enumerate(inputs[:-1]) if token == EOD]
        assert sample["text"].split() == [str(token) for token in sample["tokens"] if token != EOD]


def test_a_ramp_shows_the_batch_of_its_size(shown):
    sizes = [size for size, _ in zip(NumMicroBatches(8, 2, 1, (2, 2, 12)).batch_sizes(), range(6), strict=False)]
    first = 0
    for step, size in enumerate(sizes):
        batch = shown(step, rampup_batch_size=["2", "2", "12"])
        assert [sample["id"] for sample in batch["samples"]] == list(range(first, first + size))
        first += size


def test_mock_data_is_shown(shown):
    batch = shown(0, path=None, split=None, mock_data=True)
    assert [sample["dataset"] for sample in batch["samples"]] == ["mock"] * 8


def test_text_output_names_ids_and_documents(tmp_path, capsys):
    assert show_batch.main([*t0_flags(D0, data_cache_path=tmp_path), "--step", "0"]) == 0
    output = capsys.readouterr().out
    assert "step 0 (iteration 1): 8 samples" in output
    assert f"sample 0: number 0 of {D0}, documents: " in output


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--step", "6"], "6, counted from 0"),
        (["--step", "-1"], "not a step"),
        (["--step", "0", "--dry-run"], "pretrain_gpt.py"),
    ],
)
def test_steps_and_flags_that_make_no_sense_end_with_code_2(tmp_path, capsys, extra, text):
    assert show_batch.main([*t0_flags(D0, train_iters=6, data_cache_path=tmp_path), *extra]) == 2
    assert text in capsys.readouterr().err


def test_damaged_data_ends_with_code_2(tmp_path, capsys):
    assert show_batch.main([*t0_flags(tmp_path / "none", data_cache_path=tmp_path), "--step", "0"]) == 2
    assert str(tmp_path / "none.bin") in capsys.readouterr().err
