"""parse_yaml_args, the flat view and the process-wide variables, as Megatron users type them."""

import copy
import pathlib
import pickle

import pytest
import torch

from megatron.core.errors import ConfigError, ParallelStateError
from megatron.training import global_vars
from megatron.training.arguments import Arguments, core_transformer_config_from_args, parse_args, validate_args
from megatron.training.yaml_arguments import core_transformer_config_from_yaml, load_yaml, parse_yaml_args, validate_yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def args() -> Arguments:
    """The shipped GPT-2."""
    return parse_yaml_args(ROOT / "configs" / "gpt2.yaml")


def test_the_promised_snippet_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args = parse_yaml_args("configs/gpt2.yaml")
    args.use_distributed_optimizer = True
    args.overlap_param_gather = True
    args.overlap_param_gather_with_optimizer_step = True
    optimizer, ddp = args.config.optimizer_config(), args.config.ddp_config(1)
    assert optimizer.use_distributed_optimizer and optimizer.overlap_param_gather_with_optimizer_step
    assert ddp.use_distributed_optimizer and ddp.overlap_param_gather and ddp.overlap_grad_reduce


def test_assignment_sets_prerequisites(args: Arguments) -> None:
    assert not args.use_distributed_optimizer
    args.overlap_param_gather_with_optimizer_step = True
    assert args.use_distributed_optimizer and args.overlap_param_gather and args.overlap_grad_reduce
    assert args.config.optimizer.use_distributed_optimizer


def test_assignment_that_contradicts_says_what_to_set_and_changes_nothing(args: Arguments) -> None:
    args.overlap_param_gather = True
    before = args.config
    with pytest.raises(ConfigError, match="overlap_param_gather=True needs use_distributed_optimizer=True"):
        args.use_distributed_optimizer = False
    with pytest.raises(ConfigError, match="fp16, bf16 and fp64"):
        args.fp16 = True
    assert args.config is before
    args.overlap_param_gather = False
    args.use_distributed_optimizer = False


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "1e-4"), ("lr", True), ("lr", float("nan")), ("train_iters", 1.5), ("bf16", 1), ("bf16", "true"), ("seed", None),
     ("seed", -1), ("lr_decay_style", "cosin"), ("data_path", [1]), ("hidden_size", 2**70), ("save", 3)],
)  # fmt: skip
def test_assignment_of_a_wrong_type_or_value_is_a_config_error(args: Arguments, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        setattr(args, name, value)


def test_assignment_normalises_numbers_and_lists(args: Arguments) -> None:
    args.lr = 1
    args.data_path = ["a", "b"]
    args.activation_func = "squaredrelu"
    assert args.lr == 1.0 and type(args.lr) is float and args.data_path == ("a", "b") and args.activation_func == "squared_relu"


def test_unknown_attributes_name_the_nearest(args: Arguments) -> None:
    with pytest.raises(AttributeError, match="did you mean hidden_size"):
        args.hiden_size  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean hidden_size"):
        args.hiden_size = 3
    assert not hasattr(args, "fp8_format")
    assert getattr(args, "fp8_format", 7) == 7


def test_every_flat_name_alias_and_section_reads(args: Arguments) -> None:
    assert args.hidden_size == 768 and args.layernorm_epsilon == args.norm_epsilon == 1e-5
    assert args.optimizer == "adam" and args.model.num_layers == 12 and args.params_dtype is torch.bfloat16
    assert "accumulate_allreduce_grads_in_fp32" in dir(args) and "hidden_size=768" in repr(args)


def test_views_copy_and_pickle(args: Arguments) -> None:
    other = copy.deepcopy(args)
    assert other == args == pickle.loads(pickle.dumps(args))
    other.seed = 5
    assert args.seed == 1234 and other != args


def test_megatron_names_of_the_yaml_functions(args: Arguments) -> None:
    assert load_yaml(ROOT / "configs" / "gpt2.yaml") == args
    assert validate_yaml(args, 2) is args
    assert core_transformer_config_from_yaml(args) == core_transformer_config_from_args(args)
    assert core_transformer_config_from_args(args).num_layers == 12
    args.train_samples = 5
    with pytest.raises(ConfigError, match="train_iters and train_samples"):
        validate_args(args)


def test_parse_args_reads_a_command_line() -> None:
    args = parse_args(["--config", str(ROOT / "configs" / "debug_cpu.yaml"), "--seed", "3"])
    assert args.seed == 3 and args.num_layers == 2


def test_global_variables_are_errors_until_set(args: Arguments) -> None:
    global_vars.unset_global_variables()
    for getter in (global_vars.get_args, global_vars.get_timers, global_vars.get_tokenizer):
        with pytest.raises(ParallelStateError, match="initialize_megatron"):
            getter()
    global_vars.set_global_variables(args)
    assert global_vars.get_args() is args and global_vars.get_timers() is not None
    global_vars.unset_global_variables()
    with pytest.raises(ParallelStateError):
        global_vars.get_args()
