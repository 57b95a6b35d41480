"""Checks across sections (R29's sizes among them): each contradiction is named by its options, all at once."""

import pathlib

import pytest

from megatron.training.config import check_run_config, load_run_config

from .base_config import RUNNABLE

ROOT = pathlib.Path(__file__).resolve().parents[4]


def problems(*flags: str, world_size: int | None = 1, without: tuple[str, ...] = ()) -> str:
    argv = [flag for flag in RUNNABLE if not flag.startswith(without or ("?",))]
    return "\n".join(check_run_config(load_run_config([*argv, *flags], {}).config, world_size))


@pytest.mark.parametrize("world_size", [None, 1, 2, 3])
def test_a_good_configuration_has_no_problem(world_size: int | None) -> None:
    assert problems(world_size=world_size) == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--global-batch-size=8 --set training.micro_batch_size=3", "global_batch_size=8 micro_batch_size=3"),
        ("--context-parallel-size=2", "context_parallel_size=2 not_supported use_1"),
        ("--tensor-model-parallel-size=3", "tensor_model_parallel_size=3 num_attention_heads=4 ranks"),
        ("--tensor-model-parallel-size=4 --num-query-groups=2", "tensor_model_parallel_size=4 num_query_groups=2"),
        ("--tensor-model-parallel-size=2 --ffn-hidden-size=65", "tensor_model_parallel_size=2 ffn_hidden_size=65"),
        ("--torch-compile-scope=model", "torch_compile_scope torch_compile=True"),
        (
            "--torch-compile --torch-compile-scope=model --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            "torch_compile_scope=layer overlap_grad_reduce overlap_param_gather",
        ),
        (
            "--torch-compile --torch-compile-scope=model --recompute-granularity=selective",
            "torch_compile_scope=layer recompute_granularity",
        ),
        ("--tensor-model-parallel-size=2 --set model.torch_compile=true", "torch_compile tensor_model_parallel_size=1"),
        ("--sequence-parallel", "sequence_parallel=True tensor_model_parallel_size"),
        ("--pipeline-model-parallel-size=2 --set num_layers=5", "num_layers=5 pipeline_model_parallel_size=2"),
        ("--virtual-pipeline-model-parallel-size=2", "virtual_pipeline_model_parallel_size pipeline_model_parallel_size"),
        ("--context-parallel-size=4 --set data.seq_length=18", "seq_length=18 context_parallel_size=4 8"),
        ("--sequence-parallel --tensor-model-parallel-size=2 --set data.seq_length=15", "seq_length=15 sequence_parallel"),
        ("--expert-model-parallel-size=2", "expert_model_parallel_size=2 num_experts"),
        ("--train-samples=100", "train_iters train_samples exclude"),
        ("--rampup-batch-size 2 2 12", "rampup_batch_size train_samples global_batch_size"),
        ("--data-path a", "data_path mock_data exclude"),
        ("--train-data-path a", "train/valid/test_data_path mock_data"),
        ("--split 1,x", "split '1,x'"),
        ("--tokenizer-type GPT2BPETokenizer", "vocab_file merge_file GPT2BPETokenizer"),
        ("--tokenizer-type HuggingFaceTokenizer", "tokenizer_model"),
        ("--tokenizer-model a", "tokenizer_model NullTokenizer"),
        ("--lr-decay-samples 10", "lr_decay_samples train_iters lr_decay_iters"),
        ("--lr-decay-iters 5 --lr-decay-samples 10", "lr_decay_iters lr_decay_samples exclude"),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "lr_warmup_fraction lr_warmup_iters"),
        ("--lr-decay-iters 5 --lr-warmup-iters 5", "lr_warmup_iters=5 lr_decay_iters=5"),
        ("--lr-warmup-init 1", "lr_warmup_init=1 lr=0.001"),
        ("--lr-decay-style WSD", "WSD lr_wsd_decay_iters"),
        ("--lr-wsd-decay-iters 5", "lr_wsd_decay WSD linear"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "lr_wsd_decay_iters=11 train_iters=10"),
        ("--start-weight-decay 0", "start_weight_decay=0 end_weight_decay=0.01 constant"),
        ("--decoupled-min-lr 1e-5", "decoupled_min_lr decoupled_lr"),
        ("--loss-scale 4", "loss_scale fp16"),
        ("--save-interval 5", "save_interval save"),
        ("--save-keep-last 5", "save_keep_last save"),
        ("--ckpt-step 5", "ckpt_step load"),
        ("--finetune", "finetune load"),
        ("--tensorboard-log-interval 5", "tensorboard_log_interval tensorboard_dir"),
        ("--trace-overlap-step 5", "trace_overlap_step trace_overlap"),
        ("--wandb-exp-name a", "wandb_exp_name wandb_project"),
        ("--wandb-project a", "wandb_project wandb_save_dir"),
        ("--max-position-embeddings 8", "max_position_embeddings=8 seq_length=16"),
        ("--use-rope-scaling", "rope_scaling_type=llama3 position_embedding_type=rope"),
        ("--manual-gc-interval 5", "manual_gc_interval manual_gc"),
        ("--align-param-gather", "align_param_gather"),
    ],
)
def test_contradictions_name_their_options(flags: str, words: str) -> None:
    given = flags.split()
    without = ("--micro-batch",) if "micro" in flags else ()
    for name in ("num_layers", "seq_length"):
        without += (f"--{name.replace('_', '-')}",) if f"{name}=" in flags else ()
    text = problems(*given, without=without)
    for word in words.split():
        assert word.replace("_", " ") in text or word in text, text


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("--lr", "lr is required"),
        ("--train-iters", "train_iters"),
        ("--mock-data", "data_path"),
        ("--vocab-size", "tokenizer_type"),
    ],
)
def test_what_is_missing_is_named(without: str, words: str) -> None:
    assert words in problems(without=(without,))


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (["--global-batch-size=8"], 3, ["global_batch_size=8", "micro_batch_size=2", "3"]),
        (["--tensor-model-parallel-size=4"], 2, ["2 ranks", "tensor_model_parallel_size=4"]),
        (["--tensor-model-parallel-size=3"], 4, ["4 ranks", "tensor_model_parallel_size=3"]),
        (
            ["--use-distributed-optimizer", "--num-distributed-optimizer-instances=2"],
            3,
            ["num_distributed_optimizer_instances=2", "3"],
        ),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_named(flags: list[str], world_size: int, words: list[str]) -> None:
    text = problems(*flags, world_size=world_size)
    for word in words:
        assert word in text


def test_all_problems_come_at_once() -> None:
    text = problems("--save-interval=5", "--loss-scale=2", "--split=x", "--train-samples=5", "--global-batch-size=3")
    assert all(word in text for word in ("save_interval", "loss_scale", "split", "train_samples", "global_batch_size"))


@pytest.mark.parametrize("name", ["gpt2", "gpt2_data", "debug_cpu", "llama_1b"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_shipped_configurations_are_complete(name: str, world_size: int) -> None:
    resolved = load_run_config(["--config", str(ROOT / "configs" / f"{name}.yaml")], {"DATA_PATH": "/data/x"})
    assert check_run_config(resolved.config, world_size) == []


def test_derived_values_follow_megatron() -> None:
    config = load_run_config([*RUNNABLE, "--bf16"], {}).config
    ddp = config.ddp_config(64)
    assert ddp.grad_reduce_in_fp32 and ddp.bucket_size == 64_000_000 and ddp.check_for_nan_in_grad
    assert config.optimizer_config().bf16 and config.global_batch_size(4) == 8
    assert config.data_parallel_size(6) == 6 and config.max_position_embeddings == 16
    fp16 = load_run_config([*RUNNABLE, "--fp16", "--ddp-bucket-size=10"], {}).config.ddp_config(1)
    assert not fp16.check_for_nan_in_grad and fp16.bucket_size == 10 and not fp16.grad_reduce_in_fp32
