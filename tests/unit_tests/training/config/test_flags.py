"""The command line: exact flags, both spellings of values, lists, switches, --set, help, and what is refused."""

import pathlib
import subprocess
import sys

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config import load_run_config, parse_command_line, render_with_origins
from megatron.training.config.megatron_options import MEGATRON_BY_FLAG, MEGATRON_BY_NAME
from megatron.training.config.options import BY_NAME, CONSTANT_NAMES, FLAGS

from .base_config import FLAGS as BASE
from .base_config import RUNNABLE


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--train-iter", "5"], ["--train-iter: unknown option", "abbreviations", "--train-iters"]),
        (["--optimzer.lr", "1"], ["--optimzer.lr", "optimizer"]),
        (["--model.lr", "1"], ["--model.lr: misplaced", "section optimizer"]),
        (["--optimizer.weigth_decay=1"], ["--optimizer.weigth_decay", "weight_decay"]),
        (["--hidden_size", "8"], ["--hidden_size: unknown option", "--hidden-size"]),
        (["--lr", "1", "--lr", "1"], ["--lr: given twice"]),
        (["--lr=1", "--optimizer.lr=1"], ["--optimizer.lr: given twice, first as --lr"]),
        (["--swiglu", "--squared-relu"], ["--squared-relu: given twice, first as --swiglu"]),
        (["--bf16", "--no-bf16"], ["--no-bf16: given twice, first as --bf16"]),
        (["--bf16", "--bf16"], ["--bf16: given twice"]),
        (["--bf16", "true"], ["--bf16: takes no value, got 'true'", "--bf16=true"]),
        (["--swiglu=true"], ["--swiglu: takes no value"]),
        (["--lr"], ["--lr: needs a value", "number"]),
        (["--lr", "1", "2"], ["--lr: takes one value, unexpected '2'"]),
        (["--lr=1", "2"], ["--lr: unexpected argument '2'"]),
        (["--data-path"], ["--data-path: needs a value"]),
        (["stray", "--lr", "1"], ["unexpected argument 'stray'"]),
        (["-lr", "1"], ["unexpected argument '-lr'", "two dashes"]),
        (["--set", "optimizer.lr"], ["--set optimizer.lr", "name=value"]),
        (["--set", "optimzer.lr=1"], ["--set optimzer.lr=1: optimzer.lr", "optimizer"]),
        (["--set", "optimizer.lr=abc"], ["--set optimizer.lr=abc: optimizer.lr: expected a number", "'abc'"]),
        (["--set", "lr=1", "--set", "optimizer.lr=2"], ["optimizer.lr: given twice"]),
        (["--set", "data.data_path=[a"], ["data.data_path", "not valid YAML"]),
        (["--set", "swiglu=true"], ["model.activation_func=swiglu"]),
        (["--set", "model.fp8=hybrid"], ["known Megatron option"]),
        (["--set"], ["--set: needs a value"]),
        (["--config"], ["--config: needs a value"]),
        (["--config", "a", "b"], ["--config: needs exactly one value"]),
        (["--dry-run", "--dry-run"], ["--dry-run: given twice"]),
        (["--dry-run=yes"], ["--dry-run: takes no value"]),
        (["--dry-run", "--world-size", "0"], ["--world-size", "at least 1"]),
        (["--world-size", "2"], ["--world-size", "--dry-run"]),
        (["--use-torch-fsdp2"], ["--use-torch-fsdp2: known Megatron option", "not supported in this version"]),
        (["--fp8-format", "hybrid"], ["--fp8-format: known Megatron option", "fp8"]),
        (["--transformer-impl", "transformer_engine"], ["--transformer-impl: known Megatron option", "attention_backend"]),
        (["--tokenizer-type", "SentencePiece"], ["--tokenizer-type", "SentencePieceTokenizer"]),
        (["--", "x"], ["unexpected argument"]),
        (["--lr", "\ud800"], ["--lr"]),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_and_named(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line([*argv, *BASE] if argv[0] == "stray" else [*BASE, *argv], {})
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_both_spellings_of_values_lists_and_switches_are_read() -> None:
    argv = [
        *BASE, "--lr", "1e-4", "--min-lr=1e-5", "--data-path", "0.3", "a b", "0.7", "b", "--rampup-batch-size", "2", "2", "12",
        "--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp", "--swiglu", "--disable-bias-linear",
        "--bf16", "--no-mmap-bin-files", "--ddp.bucket_size", "100", "--optimizer.adam_beta2=0.95",
        "--exit-signal-handler=false",
        "--set", "checkpoint.save=/runs/x=1", "training.freeze=['a.*', b]", "--set", "logging.tensorboard_dir='null'",
    ]  # fmt: skip
    config = load_run_config(argv, {}).config
    assert (config.optimizer.lr, config.optimizer.min_lr, config.optimizer.adam_beta2) == (1e-4, 1e-5, 0.95)
    assert config.data.data_path == ("0.3", "a b", "0.7", "b") and config.training.rampup_batch_size == (2, 2, 12)
    assert config.model.recompute_modules == ("core_attn", "mlp") and config.model.activation_func == "swiglu"
    assert config.parallel.bf16 and not config.model.add_bias_linear and not config.data.mmap_bin_files
    assert config.ddp.bucket_size == 100 and not config.training.exit_signal_handler
    assert config.checkpoint.save == "/runs/x=1" and config.training.freeze == ("a.*", "b")
    assert config.logging.tensorboard_dir == "null"


def test_megatron_flags_that_are_satisfied_leave_one_note_each() -> None:
    argv = [
        *BASE,
        "--use-mcore-models",
        "--no-bias-swiglu-fusion",
        "--transformer-impl",
        "local",
        "--use-mcore-models",
    ]
    notes = load_run_config(argv, {}).notes
    assert len(notes) == 3 and all("has no effect here" in note for note in notes)


def test_megatron_tables_and_our_options_do_not_overlap() -> None:
    assert not set(MEGATRON_BY_FLAG) & set(FLAGS)
    assert not set(MEGATRON_BY_NAME) & (set(BY_NAME) | set(CONSTANT_NAMES))
    assert len(MEGATRON_BY_FLAG) >= 150


@pytest.mark.parametrize(
    "flag",
    [
        "--micro-batch-size",
        "--max-position-embeddings",
        "--num-attention-heads",
        "--hidden-size",
        "--tokenizer-type",
        "--seq-length",
        "--ffn-hidden-size",
        "--normalization",
        "--disable-bias-linear",
        "--save-interval",
        "--save",
        "--load",
        "--num-layers",
        "--group-query-attention",
        "--num-query-groups",
        "--position-embedding-type",
        "--rotary-base",
        "--rotary-percent",
        "--untie-embeddings-and-output-weights",
        "--tokenizer-model",
        "--bf16",
        "--tensor-model-parallel-size",
        "--lr",
        "--min-lr",
        "--global-batch-size",
        "--weight-decay",
        "--clip-grad",
        "--pipeline-model-parallel-size",
        "--swiglu",
        "--hidden-dropout",
        "--attention-dropout",
        "--lr-decay-style",
        "--make-vocab-size-divisible-by",
        "--init-method-std",
        "--kv-channels",
        "--adam-beta1",
        "--adam-beta2",
        "--eval-iters",
        "--eval-interval",
        "--log-interval",
        "--use-distributed-optimizer",
        "--tensorboard-dir",
        "--data-path",
        "--split",
        "--attention-softmax-in-fp32",
        "--distributed-timeout-minutes",
        "--sequence-parallel",
        "--exit-duration-in-mins",
        "--norm-epsilon",
        "--train-iters",
        "--train-samples",
        "--timing-log-level",
        "--distributed-backend",
        "--lr-warmup-fraction",
        "--lr-decay-iters",
        "--vocab-file",
        "--merge-file",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--accumulate-allreduce-grads-in-fp32",
        "--no-check-for-nan-in-loss-and-grad",
        "--override-opt_param-scheduler",
        "--mock-data",
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
        "--rampup-batch-size",
        "--recompute-activations",
        "--use-flash-attn",
        "--vocab-size",
        "--seed",
        "--no-load-optim",
        "--no-save-rng",
        "--finetune",
        "--fp16",
    ],
)
def test_the_flags_that_megatron_scripts_use_most_exist(flag: str) -> None:
    assert flag in FLAGS


def test_print_config_dry_run_and_world_size_are_read() -> None:
    command = parse_command_line([*RUNNABLE, "--print-config", "--dry-run", "--world-size", "8"], {})
    assert command.print_config and command.dry_run and command.world_size == 8 and command.help_text is None
    assert parse_command_line(RUNNABLE, {"WORLD_SIZE": "4"}).world_size == 4
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        parse_command_line(RUNNABLE, {"WORLD_SIZE": "four"})


def test_help_names_every_flag_and_needs_no_configuration() -> None:
    text = parse_command_line(["--help"], {}).help_text
    assert text is not None
    for flag in FLAGS:
        assert flag in text, flag


def test_help_config_explains_an_option_with_its_value_and_origin() -> None:
    text = parse_command_line(["--help-config", "lr"], {}).help_text
    assert text is not None and "optimizer.lr: Peak learning rate" in text and "--lr" in text
    text = parse_command_line([*RUNNABLE, "--help-config", "optimizer.lr"], {}).help_text
    assert text is not None and "0.001 (--lr)" in text
    assert "mixture" in str(parse_command_line(["--help-config", "--num-experts"], {}).help_text)
    with pytest.raises(ConfigError, match="did you mean weight_decay"):
        parse_command_line(["--help-config", "weigth_decay"], {})


def test_print_config_shows_where_each_value_comes_from() -> None:
    text = render_with_origins(load_run_config([*RUNNABLE, "--set", "optimizer.clip_grad=2"], {}))
    assert "  hidden_size: 32  # --hidden-size\n" in text
    assert "  clip_grad: 2.0  # --set optimizer.clip_grad=2\n" in text
    assert "  weight_decay: 0.01  # default\n" in text


def test_loading_a_configuration_is_quick_and_imports_no_process_group(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys; from megatron.training.config import parse_command_line; import torch.distributed as d;"
        "parse_command_line(sys.argv[1:], {}); assert not d.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code, *RUNNABLE], check=True, timeout=60)
    assert not list(tmp_path.iterdir())
