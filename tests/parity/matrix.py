"""The matrix: which layouts and features there are, as axes for a covering spread and as a table for the whole.

A case is a row of AXES: the layout (tp, sequence parallelism, pipeline, data parallelism, engine) and what is trained on it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tests.harness.t0 import t0_flags
from tests.parity.covering import Row, covering_rows

SAMPLES, STEPS, LENGTH = 8, 2, 16

PIPELINES: dict[str, dict[str, Any]] = {
    "none": {},
    "1f1b": {},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2},
    "zb_h1": {"pipeline_schedule": "zb_h1"},
    "zb_v": {"pipeline_schedule": "zb_v"},
}
_OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 2000}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce overlapped": {"overlap_grad_reduce": True, "ddp_bucket_size": 2000},
    "distributed": {"use_distributed_optimizer": True},
    "all overlapped": {**_OVERLAP, "overlap_param_gather": True, "overlap_param_gather_with_optimizer_step": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute_granularity": "selective"},
    "all parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
FEATURES: dict[str, dict[Any, dict[str, Any]]] = {
    "attention": {"MHA": {"num_query_groups": None, "group_query_attention": None}, "GQA": {}},
    "qk_norm": {False: {}, True: {"qk_layernorm": True}},
    "biases": {False: {}, True: {"disable_bias_linear": None}},
    "tied": {False: {}, True: {"untie_embeddings_and_output_weights": None}},
    "positions": {"rope": {}, "learned": {"position_embedding_type": "learned_absolute"}},
    "norm": {"RMSNorm": {}, "LayerNorm": {"normalization": "LayerNorm"}},
    "mlp": {"swiglu": {}, "gelu": {"swiglu": None, "activation_func": "gelu"}},
    "packed": {False: {}, True: {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}},
    "window": {None: {}, 5: {"window_size": 5}},
}
AXES: dict[str, tuple[Any, ...]] = {
    "pipeline": tuple(PIPELINES),
    "recompute": tuple(RECOMPUTE),
    "engine": tuple(ENGINES),
    "tp": (1, 2),
    "dp": (1, 2),
    "sequence_parallel": (False, True),
    "micro_batch": (1, 2),
    "fusion": (True, False),
    **{name: tuple(values) for name, values in FEATURES.items()},
}
BASE: Row = {
    "pipeline": "none", "recompute": "none", "engine": "plain", "tp": 1, "dp": 1, "sequence_parallel": False, "micro_batch": 2,
    "fusion": True, "attention": "GQA", "qk_norm": False, "biases": False, "tied": False, "positions": "rope", "norm": "RMSNorm",
    "mlp": "swiglu", "packed": False, "window": None,
}  # fmt: skip


def stages(row: Row) -> int:
    """Pipeline stages of a row: 2, or as it says."""
    return 1 if row.get("pipeline", "none") == "none" else row.get("stages", 2)


def ranks(row: Row) -> int:
    """Processes of a row."""
    return row.get("tp", 1) * stages(row) * row.get("dp", 1)


def allowed(row: Row, most_ranks: int = 4) -> bool:
    """Whether what a row says so far is a legal run."""
    if ranks(row) > most_ranks:
        return False
    if row.get("sequence_parallel") and row.get("tp", 2) == 1:
        return False
    if row.get("pipeline") == "zb_v" and row.get("tied"):
        return False
    microbatches = SAMPLES // (row.get("micro_batch", 1) * row.get("dp", 1))
    return not (row.get("pipeline") == "interleaved" and microbatches % stages(row))


def spread() -> list[Row]:
    """Rows of at most 4 processes with every value of every axis, and every pair of values, at least once."""
    return covering_rows(AXES, allowed)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row that can be run. key: names it in tables and files."""

    row: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What differs from the plain run."""
        told = {name: value for name, value in self.row.items() if value != BASE.get(name)}
        return ", ".join(f"{name}={value}" for name, value in told.items()) or "plain"

    @property
    def ranks(self) -> int:
        """Processes."""
        return ranks(dict(self.row))

    @property
    def layers(self) -> int:
        """Layers of the model: one for each part of the pipeline, at least 4."""
        parts = stages(dict(self.row)) * (2 if self.row["pipeline"] in ("interleaved", "zb_v") else 1)
        return max(4, parts)

    @property
    def model_key(self) -> tuple[Any, ...]:
        """What the reference depends on."""
        return (self.layers, *(self.row[name] for name in FEATURES))

    def flags(self, precision: str, *, layout: bool = True) -> list[str]:
        """Of `pretrain_gpt.py`; without the layout those of one process."""
        row = dict(self.row)
        changes: dict[str, Any] = {
            "split": None, "mock_data": True, "num_layers": self.layers, "num_attention_heads": 8,
            "num_query_groups": 4, "ffn_hidden_size": 48, "global_batch_size": SAMPLES, "micro_batch_size": row["micro_batch"],
            "train_iters": STEPS, "adam_eps": 1e-3, "clip_grad": 0.5, "fp64": precision == "fp64", "log_interval": STEPS,
            "peak_tflops": 1,
        }  # fmt: skip
        for name, values in FEATURES.items():
            changes |= values[row[name]]
        if layout:
            changes |= {
                "tensor_model_parallel_size": row["tp"], "sequence_parallel": row["sequence_parallel"],
                "pipeline_model_parallel_size": stages(row), "no_gradient_accumulation_fusion": not row["fusion"],
                **PIPELINES[row["pipeline"]], **ENGINES[row["engine"]], **RECOMPUTE[row["recompute"]],
            }  # fmt: skip
        return t0_flags(None, **changes)


# ------------------------------------------------------------------------------------------------------------ the whole matrix

# One feature at a time, and the two families that real models take them from.
FEATURE_ROWS: dict[str, Row] = {
    "Llama": {},
    "GPT-2": {"attention": "MHA", "positions": "learned", "norm": "LayerNorm", "mlp": "gelu", "biases": True, "tied": True},
    "MHA": {"attention": "MHA"},
    "QK-norm": {"qk_norm": True},
    "biases, QK-norm, LayerNorm": {"biases": True, "qk_norm": True, "norm": "LayerNorm"},
    "tied": {"tied": True},
    "packed documents": {"packed": True},
    "sliding window": {"window": 5},
    "packed, window, learned positions": {"packed": True, "window": 5, "positions": "learned"},
    "recompute core_attn": {"recompute": "core_attn"},
    "recompute all parts": {"recompute": "all parts"},
    "recompute uniform": {"recompute": "uniform"},
    "recompute block": {"recompute": "block", "biases": True},
    "one sample per microbatch": {"micro_batch": 1},
    "unfused accumulation": {"fusion": False, "micro_batch": 1},
}


def layouts(most_ranks: int) -> Iterator[Row]:
    """Every legal product of tensor, sequence, pipeline and data parallelism."""
    for tp, sp, dp in itertools.product((1, 2, 4), (False, True), (1, 2, 4, 8)):
        for pipeline, count in [("none", 1), *itertools.product(list(PIPELINES)[1:], (2, 4))]:
            row = {"tp": tp, "sequence_parallel": sp, "dp": dp, "pipeline": pipeline, "stages": count}
            if allowed({**row, "micro_batch": 1}, most_ranks):
                yield row


def whole_matrix(most_ranks: int) -> list[Case]:
    """Every layout with every feature; the engines take turns, so that each layout meets all of them."""
    cases = []
    for number, layout in enumerate(layouts(most_ranks)):
        for index, feature in enumerate(FEATURE_ROWS.values()):
            engine = list(ENGINES)[(number + index) % len(ENGINES)]
            row = {**BASE, "engine": engine, **layout, **feature}
            if row["pipeline"] == "interleaved" or SAMPLES // (row["micro_batch"] * row["dp"]) < 1:
                row = row if allowed(row, most_ranks) else {**row, "micro_batch": 1}
            if allowed(row, most_ranks) and SAMPLES % (row["micro_batch"] * row["dp"]) == 0:
                cases.append(Case(row))
    return cases
