"""T0, the tiny reference job of the whole suite: as a TransformerConfig, as command-line flags, and run in processes of its own.

Decoder of 4 layers, hidden 32, 4 heads, 2 KV heads, SwiGLU ffn 64, RMSNorm, RoPE, seq 16, 101 true ids (EOD 100), untied, no
dropout, fp32; global batch 8, micro batch 2, AdamW at a constant 1e-3, decay 0.1, clip 1, seed 1234.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SEQ_LENGTH = 16
TRUE_VOCAB_SIZE = 101
EOD = 100
PADDED_VOCAB_SIZE = 104


def t0_transformer_config(**changes: Any) -> TransformerConfig:
    """T0's model; `changes` replace fields."""
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "max_position_embeddings": SEQ_LENGTH,
        "make_vocab_size_divisible_by": 8,
        "position_embedding_type": "rope",
        "rotary_base": 10000.0,
        "normalization": "RMSNorm",
        "activation_func": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**(fields | changes))


def t0_flags(data_path: str | os.PathLike[str] | None, **changes: Any) -> list[str]:
    """Flags of `pretrain_gpt.py` for T0 on the data set with this prefix (None: none): 10 steps, every step logged, no evaluation.

    changes: flag names with underscores; True = the bare flag, False or None = not given, a list or tuple = several values.
    `t0_flags(prefix, train_iters=3, save=folder, use_distributed_optimizer=True, swiglu=False)`
    """
    flags: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "max_position_embeddings": SEQ_LENGTH,
        "make_vocab_size_divisible_by": 8,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "seq_length": SEQ_LENGTH,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "train_iters": 10,
        "eval_iters": 0,
        "seed": 1234,
        "optimizer": "adam",
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "data_path": data_path,
        "split": "100,0,0",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": TRUE_VOCAB_SIZE - 1,
        "num_workers": 0,
        "log_interval": 1,
    }
    return to_flags(flags | changes)


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """`{"train_iters": 3, "swiglu": True, "save": None}` -> ["--train-iters", "3", "--swiglu"]."""
    flags = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            flags += [str(item) for item in value]
        elif value is not True:
            flags.append(str(value))
    return flags


def run_pretrain(
    flags: Sequence[str],
    nproc: int = 1,
    *,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `pretrain_gpt.py` to its end, with torchrun when `nproc` > 1; stdout and stderr are captured as text.

    env: added to this process's environment. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    return subprocess.run(
        pretrain_command(flags, nproc),
        timeout=timeout,
        env=pretrain_environment(env),
        cwd=cwd or REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def pretrain_command(flags: Sequence[str], nproc: int = 1) -> list[str]:
    """The command of a run: plain python for one process, torchrun for several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    return [sys.executable, *launcher, str(REPOSITORY / "pretrain_gpt.py"), *flags]


def pretrain_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, one thread per process, the repository importable."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith("SLURM_")
    }
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | dict(changes or {})


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, training and evaluation, in file order."""
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
