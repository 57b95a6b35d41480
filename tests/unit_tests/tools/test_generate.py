"""The generate tool: the saved model's text, whatever the batching; errors in one line with the right exit code."""

import json
import pathlib
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.inference.engine import generate
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import build_tokenizer
from megatron.training.config import dump_yaml, load_run_config
from megatron.training.saved_model import find_saved_model
from tests.harness.t0 import EOD, TRUE_VOCAB_SIZE, t0_flags
from tools.generate import main

PROMPTS = ["7", "3 1 4 1 5", "2 7 1 8 2 8 1 8 2"]


def save_run(folder: pathlib.Path, *, steps: tuple[int, ...] = (3,), true_vocab_size: int = TRUE_VOCAB_SIZE, **flags: Any) -> None:
    """A run's save directory with random weights: step n has the seed n."""
    config = load_run_config(t0_flags("unused", max_position_embeddings=20, init_method_std=0.3, **flags)).config
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    for step in steps:
        CheckpointStore(folder).save(step, model_sharded_tensors(random_model(config, true_vocab_size, step), alone()).values(), {})


def random_model(config: Any, vocab_size: int, seed: int) -> GPTModel:
    return GPTModel(config.transformer_config(), vocab_size=vocab_size, max_sequence_length=20, seed=seed)


def alone() -> ProcessGroupCollection:
    return ProcessGroupCollection.single_process()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save_run(folder, steps=(3, 5))
    return folder


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def results(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output(capsys, *arguments, "--json").splitlines()]


def prompts(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--prompt", text)]


def test_text_is_that_of_the_saved_weights(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_run_config(["--config", str(run / "config.yaml")]).config
    for step, options in ((5, []), (3, ["--ckpt-step", "3"])):
        (expected,) = generate(random_model(config, TRUE_VOCAB_SIZE, step), [[3, 1, 4]], 6, eod=EOD)
        (made,) = results(capsys, "--load", str(run), "--prompt", "3 1 4", "--max-new-tokens", "6", *options)
        assert made["new_tokens"] == expected.new_tokens
        assert made["tokens"] == [3, 1, 4, *expected.new_tokens]
        assert made["finish_reason"] == expected.finish_reason
    (newest,) = results(capsys, "--load", str(run / "iter_0000005"), "--prompt", "3 1 4", "--max-new-tokens", "6")
    (older,) = results(capsys, "--load", str(run / "iter_0000003"), "--prompt", "3 1 4", "--max-new-tokens", "6")
    assert older == made
    assert newest != older


@pytest.mark.parametrize("sampling", [["--greedy"], ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.95", "--seed", "3"]])
def test_batching_and_cache_change_no_text(run: pathlib.Path, capsys: pytest.CaptureFixture[str], sampling: list[str]) -> None:
    common = ["--load", str(run), *prompts(*PROMPTS), "--max-new-tokens", "6", *sampling]
    together = results(capsys, *common)
    assert [made["prompt"] for made in together] == PROMPTS
    assert results(capsys, *common, "--batch-size", "2") == together
    assert results(capsys, *common, "--batch-size", "1", "--no-cache") == together


def test_stream_prints_the_same_text(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--load", str(run), *prompts(*PROMPTS), "--max-new-tokens", "4", "--ignore-eod"]
    plain = output(capsys, *common)
    assert output(capsys, *common, "--stream") == plain
    first = plain.splitlines()[0].split()
    assert first[0] == "7"
    assert len(first) == 5


def test_prompts_come_from_a_file_too(run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("1 2\n3 4\n")
    made = results(
        capsys, "--load", str(run), "--prompt", "9", "--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "0"
    )
    assert [m["tokens"] for m in made] == [[9], [1, 2], [3, 4]]
    assert [m["text"] for m in made] == ["", "", ""]


def test_empty_prompt_starts_a_document(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = results(capsys, "--load", str(run), "--prompt", "", "--max-new-tokens", "3", "--ignore-eod")
    assert len(made["tokens"]) == 3


def test_rotary_models_go_beyond_the_trained_length(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = results(capsys, "--load", str(run), "--prompt", "7", "--max-new-tokens", "30", "--ignore-eod")
    assert len(made["new_tokens"]) == 30


def test_learned_positions_end_with_an_error_that_has_the_numbers(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", position_embedding_type="learned_absolute")
    assert main(["--load", str(tmp_path / "run"), "--prompt", "7", "--max-new-tokens", "20"]) == 2
    assert "1 tokens; with max_new_tokens=20 that is 21, more than the model's 20 positions" in capsys.readouterr().err


def test_byte_level_text_continues_the_prompt(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = build_tokenizer("ByteLevelTokenizer").vocab_size
    save_run(tmp_path / "run", true_vocab_size=size, vocab_size=None, tokenizer_type="ByteLevelTokenizer")
    text = output(capsys, "--load", str(tmp_path / "run"), "--prompt", "Grüße </s>", "--max-new-tokens", "5", "--temperature", "1")
    assert text.startswith("Grüße </s>")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--load", "RUN"], 2, "there is no prompt"),
        (["--load", "RUN", "--prompt", "1", "--max-new-tokens", "-1"], 2, "--max-new-tokens must be 0 or more, got -1"),
        (["--load", "RUN", "--prompt", "1", "--temperature", "-1"], 2, "temperature must be 0 or more"),
        (["--load", "RUN", "--prompt", "1", "--greedy", "--top-k", "3"], 2, "so --top-k would have no effect"),
        (["--load", "RUN", "--prompt", "1", "--stream", "--json"], 2, "choose one"),
        (["--load", "RUN", "--prompt", "1", "--batch-size", "0"], 2, "--batch-size must be 1 or more"),
        (["--load", "RUN", "--prompt", "1", "--ckpt-step", "4"], 1, "has no checkpoint of step 4; available: 3, 5"),
        (["--load", "RUN/iter_0000003", "--prompt", "1", "--ckpt-step", "5"], 2, "is the checkpoint of step 3"),
        (["--load", "RUN/none", "--prompt", "1"], 2, "is not a folder"),
        (["--load", "RUN", "--prompt", "101"], 2, "101"),
        (["--load", "RUN", "--prompt-file", "RUN/none"], 2, "cannot be read"),
    ],
)
def test_errors_are_one_line(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main([argument.replace("RUN", str(run)) for argument in arguments]) == code
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


def test_unknown_options_are_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--load", "x", "--promt", "1"])
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_folder_without_a_checkpoint_or_configuration_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_saved_model(tmp_path)
    save_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml is missing, and step 3 holds no copy of it"):
        find_saved_model(tmp_path / "run")


def test_configuration_comes_from_the_checkpoint_where_the_file_is_missing(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path / "run")
    expected = find_saved_model(tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    tensors = model_sharded_tensors(expected.load(torch.device("cpu")), alone())
    CheckpointStore(tmp_path / "run").save(4, tensors.values(), {"config": text})
    (tmp_path / "run" / "config.yaml").unlink()
    assert find_saved_model(tmp_path / "run").config == expected.config


def test_tokenizer_files_beside_the_checkpoint_are_used(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path / "run", vocab_size=None, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/gone/tokenizer.json")
    with pytest.raises(ConfigError, match=r"/gone/tokenizer\.json"):
        find_saved_model(tmp_path / "run")
    words = {"[UNK]": 0, "</s>": 1, "a": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    added = [{"id": 1, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]
    (tmp_path / "run" / "tokenizer").mkdir()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": added, "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    assert find_saved_model(tmp_path / "run").tokenizer.tokenize("a") == [2]


def test_parallel_sizes_of_the_run_do_not_matter(tmp_path: pathlib.Path) -> None:
    save_run(tmp_path / "run", steps=(2,))
    text = (tmp_path / "run" / "config.yaml").read_text()
    changed = text.replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: 2")
    assert changed != text
    (tmp_path / "run" / "config.yaml").write_text(changed)
    saved = find_saved_model(tmp_path / "run")
    model = saved.load(torch.device("cpu"))
    assert (saved.iteration, model.vocab_size, model.training) == (2, TRUE_VOCAB_SIZE, False)
