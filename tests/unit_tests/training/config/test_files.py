"""R23: unknown, misplaced, doubled and abbreviated keys are refused with file, line, full path and the nearest name."""

import pathlib

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config import load_run_config

from .base_config import FLAGS, load_text, write


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("weigth_decay: 0.1", 1, ["weigth_decay: unknown option", "did you mean weight_decay?"]),
        ("optimizer:\n  weigth_decay: 0.1", 2, ["optimizer.weigth_decay: unknown option", "did you mean weight_decay?"]),
        ("model:\n  lr: 1e-4", 2, ["model.lr: misplaced", "lr belongs to section optimizer"]),
        ("language_model:\n  lr: 1e-4", 2, ["language_model.lr: misplaced", "section optimizer"]),
        ("model_parallel:\n  num_layers: 2", 2, ["model_parallel.num_layers: misplaced", "section model"]),
        ("lr: 1e-4\nlr: 1e-4", 2, ["lr: given twice", "line 1"]),
        ("optimizer:\n  lr: 1\n  lr: 1", 3, ["optimizer.lr: given twice", "line 2"]),
        ("optimizer:\n  lr: 1e-4\nlr: 1e-4", 3, ["lr: given twice", "optimizer.lr at"]),
        ("norm_epsilon: 1e-5\nlayernorm_epsilon: 1e-5", 2, ["layernorm_epsilon: given twice"]),
        ("model: {window_size: 2}\nlanguage_model: {window_size: 2}", 2, ["language_model.window_size: given twice"]),
        ("model:\n  seed: 1\nmodel:\n  seed: 1", 3, ["model: given twice"]),
        ("weight-decay: 0.1", 1, ["weight-decay", "underscores", "weight_decay"]),
        ("optimizer:\n  weight-decay: 0.1", 2, ["optimizer.weight-decay", "weight_decay"]),
        ("train_iter: 5", 1, ["train_iter", "abbreviations", "train_iters"]),
        ("optimzer: {lr: 1}", 1, ["optimzer: unknown option", "optimizer"]),
        ("model:\n  weight_decy: 1", 2, ["model.weight_decy", "weight_decay", "section optimizer"]),
        ("model: 5", 1, ["model: is a section"]),
        ("lr: {peak: 1}", 1, ["lr: expected a number", "section"]),
        ("lr: [1, 2]", 1, ["lr: expected a number", "list"]),
        ("data_path: [[a]]", 1, ["data_path", "list"]),
        ("split: [969, 30, 1]", 1, ["split", "969,30,1"]),
        ("lr_decay_style: cosin", 1, ["lr_decay_style: must be one of", "did you mean cosine?"]),
        ("seed: -1", 1, ["seed: must be at least 0"]),
        ("<<: {lr: 1}", 1, ["merge keys", "base:"]),
        ("? [a]\n: 1", 1, ["key must be a name"]),
        ("lr: !!python/object:os.system x", 1, ["tag", "python/object"]),
        ("lr: !!float 1", 1, ["tag"]),
        ("- lr", 1, ["expected options"]),
        ("just text", 1, ["expected options"]),
        ("a: [b", 1, ["not valid YAML"]),
        ("lr: 1\n---\nlr: 2", 2, ["second document"]),
        ("lr: *nowhere", 1, ["alias *nowhere"]),
        ("data_path: &a [*a]", 1, ["alias *a"]),
        ("lr: \t\x07", 1, ["not valid YAML"]),
        ("moe_extended_tp: true", 1, ["moe_extended_tp: known Megatron option", "not supported in this version", "expert_tensor_parallel_size"]),
        ("language_model:\n  fp8: hybrid", 2, ["language_model.fp8: known Megatron option"]),
        ("transformer_impl: transformer_engine", 1, ["known Megatron option", "attention_backend"]),
        ("swiglu: 3", 1, ["swiglu: expected true or false"]),
    ],
)  # fmt: skip
def test_wrong_file_is_refused_with_place_and_path(tmp_path: pathlib.Path, text: str, line: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    message = str(caught.value)
    assert f"{tmp_path / 'c.yaml'}:{line}: " in message, message
    for word in words:
        assert word in message, message


def test_all_errors_of_all_files_and_flags_come_at_once(tmp_path: pathlib.Path) -> None:
    first = write(tmp_path / "a.yaml", "weigth_decay: 1\nlr: abc\nmodel:\n  hidden_sise: 2\n")
    second = write(tmp_path / "b.yaml", "seed: 0777\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["--config", first, f"--config={second}", "--train-iter", "5", "--set", "x=1", "--num-layers=two"], {})
    message = str(caught.value)
    for word in (f"{first}:1", f"{first}:2", f"{first}:4", f"{second}:1", "--train-iter:", "--set x=1", "--num-layers:"):
        assert word in message
    assert "model.num_attention_heads: is required" in message and "--num-attention-heads" in message
    assert "model.num_layers: is required" not in message


def test_contradictions_inside_a_section_name_where_its_values_come_from(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        ConfigError, match=r"num_attention_heads=5 does not divide hidden_size=32.*num_attention_heads: .*c.yaml:1"
    ):
        load_run_config(
            ["--config", write(tmp_path / "c.yaml", "num_attention_heads: 5"), *[f for f in FLAGS if "heads" not in f]], {}
        )


def test_nested_flat_and_megatron_sections_mix(tmp_path: pathlib.Path) -> None:
    text = (
        "language_model:\n  num_layers: 2\n  layernorm_epsilon: 1e-6\n  activation_func: squaredrelu\n  fp8: null\n"
        "  bias_swiglu_fusion: true\n"
        "model_parallel:\n  bf16: true\n  params_dtype: null\nhidden_size: 64\nmodel:\n  num_attention_heads: 4\n"
        "micro_batch_size: 1\ndata:\n  seq_length: 8\n  data_path: [0.3, a, 0.7, b]\noptimizer: sgd\nuse_mcore_models: true\n"
    )
    resolved = load_run_config(["--config", write(tmp_path / "c.yaml", text)], {})
    config = resolved.config
    assert (config.model.num_layers, config.model.hidden_size, config.model.norm_epsilon) == (2, 64, 1e-6)
    assert config.model.activation_func == "squared_relu" and config.optimizer.optimizer == "sgd"
    assert config.parallel.bf16 and config.optimizer.bf16
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert [("mcore" in note or "swiglu" in note) for note in resolved.notes] == [True, True]


def test_one_value_in_two_sections_is_copied_and_must_agree(tmp_path: pathlib.Path) -> None:
    resolved = load_text(tmp_path, "optimizer:\n  use_distributed_optimizer: true")
    assert resolved.config.ddp.use_distributed_optimizer and resolved.config.optimizer.use_distributed_optimizer
    assert resolved.origins["ddp.use_distributed_optimizer"].endswith("c.yaml:2")
    load_text(tmp_path, "optimizer: {bf16: true}\nparallel: {bf16: true}")
    with pytest.raises(ConfigError, match=r"parallel.bf16: given twice, first as optimizer.bf16 at .* with another value"):
        load_text(tmp_path, "optimizer: {bf16: true}\nparallel: {bf16: false}")


def test_precedence_is_default_file_later_file_flag_set(tmp_path: pathlib.Path) -> None:
    first = write(tmp_path / "a.yaml", "lr: 1\nmin_lr: 0.1\nseed: 1\nweight_decay: 1\n")
    second = write(tmp_path / "b.yaml", "optimizer:\n  min_lr: 0.2\nseed: 2\nweight_decay: 2\n")
    argv = [
        "--config",
        first,
        "--yaml-cfg",
        second,
        *FLAGS,
        "--seed=3",
        "--weight-decay=3",
        "--set",
        "optimizer.weight_decay=4",
    ]
    resolved = load_run_config(argv, {})
    optimizer = resolved.config.optimizer
    assert (optimizer.lr, optimizer.min_lr, resolved.config.training.seed, optimizer.weight_decay) == (1, 0.2, 3, 4)
    assert optimizer.clip_grad == 1.0
    assert resolved.origins["optimizer.lr"] == f"{first}:1"
    assert resolved.origins["optimizer.min_lr"] == f"{second}:2"
    assert resolved.origins["training.seed"] == "--seed"
    assert resolved.origins["optimizer.weight_decay"] == "--set optimizer.weight_decay=4"
    assert resolved.origins["optimizer.clip_grad"] == "default"
    assert resolved.files == (first, second)


def test_bases_are_read_first_relative_to_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "root.yaml", "lr: 1\nseed: 1\nclip_grad: 1\n")
    write(tmp_path / "sub" / "other.yaml", "seed: 2\nclip_grad: 2\n")
    top = write(tmp_path / "sub" / "top.yaml", "base: [../root.yaml, '${NAME}.yaml']\nclip_grad: 3\n")
    resolved = load_run_config(["--config", top, *FLAGS], {"NAME": "other"})
    assert (resolved.config.optimizer.lr, resolved.config.training.seed, resolved.config.optimizer.clip_grad) == (1, 2, 3)
    assert len(resolved.files) == 3


@pytest.mark.parametrize(
    ("text", "word"), [("base: c.yaml", "circle"), ("base: gone.yaml", "does not exist"), ("base: {a: 1}", "path")]
)
def test_impossible_bases_are_refused(tmp_path: pathlib.Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"c.yaml:1.*{word}"):
        load_text(tmp_path, text)


def test_two_files_that_include_each_other_are_refused(tmp_path: pathlib.Path) -> None:
    first = write(tmp_path / "a.yaml", "base: b.yaml")
    write(tmp_path / "b.yaml", "seed: 1\nbase: a.yaml")
    with pytest.raises(ConfigError, match=r"b.yaml:2: base: .*circle: .*a.yaml -> .*b.yaml -> .*a.yaml"):
        load_run_config(["--config", first, *FLAGS], {})


def test_environment_is_expanded_before_typing(tmp_path: pathlib.Path) -> None:
    text = "lr: ${LR}\nseed: ${SEED:7}\nsave: ${ROOT:/runs}/a\ntensorboard_dir: '$${x}'\nvocab_file: ${EMPTY:}\n"
    config = load_text(tmp_path, text, environment={"LR": "1e-4"}).config
    assert config.optimizer.lr == 1e-4 and config.training.seed == 7 and config.checkpoint.save == "/runs/a"
    assert config.logging.tensorboard_dir == "${x}" and config.data.vocab_file is None
    assert load_text(tmp_path, text, environment={"LR": "1", "SEED": "8", "ROOT": "r: #x"}).config.checkpoint.save == "r: #x/a"


@pytest.mark.parametrize(
    ("text", "word"), [("${GONE}", "GONE is not set"), ("${A-B}", "malformed"), ("${A:-3}", "shell"), ("${", "malformed")]
)
def test_missing_and_malformed_references_are_refused(tmp_path: pathlib.Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"c.yaml:1: save: .*{word}"):
        load_text(tmp_path, f"save: {text}")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"# nothing\n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"seed: 1\nsave: \xff", ":2: not UTF-8"),
        (b"[" * 100_000, "deeper"),
        (b"a: " + b"{a: " * 10_000, "deeper"),
        (b"x" * 3_000_000, "characters"),
        (b"\0" * 100, "not valid YAML"),
        (b'save: "\\UFFFFFFFF"', "not valid YAML"),
        (b'save: "a\\0b"', "NUL"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: pathlib.Path, data: bytes, word: str) -> None:
    (tmp_path / "c.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=word):
        load_run_config(["--config", str(tmp_path / "c.yaml"), *FLAGS], {})


@pytest.mark.parametrize(
    ("path", "word"),
    [("", "folder"), ("gone.yaml", "does not exist"), ("a\0b", "cannot read|does not exist"), ("x" * 5000, "cannot read")],
)
def test_unreadable_paths_are_refused(tmp_path: pathlib.Path, path: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_run_config(["--config", f"{tmp_path}/{path}", *FLAGS], {})


def test_alias_bomb_is_refused_without_growing(tmp_path: pathlib.Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ConfigError, match="unknown option"):
        load_text(tmp_path, "\n".join(lines))
    with pytest.raises(ConfigError, match=r"data_path.*list"):
        load_text(tmp_path, "base: &b [&a0 [x]]\ndata_path: [*a0, *a0]")


def test_aliases_of_plain_values_are_fine(tmp_path: pathlib.Path) -> None:
    config = load_text(tmp_path, "lr: &rate 1e-3\nmin_lr: *rate\n").config
    assert config.optimizer.min_lr == 1e-3


def test_thousands_of_problems_end_in_a_bounded_message(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "\n".join(f"unknown_{i}: 1" for i in range(5000)))
    assert len(str(caught.value).splitlines()) < 110 and "stopped after 100" in str(caught.value)
