"""The picture of docs/architecture.md as data: the level of each module, and who is a facade."""

# First match wins: a module's level is that of the longest listed prefix.
LEVELS: dict[str, int] = {
    "megatron": 0,
    # 0 facts
    "megatron.core.errors": 0,
    "megatron.core.enums": 0,
    "megatron.core.config_field": 0,
    "megatron.core.model_parallel_config": 0,
    "megatron.core.distributed.distributed_data_parallel_config": 0,
    "megatron.core.optimizer.optimizer_config": 0,
    "megatron.core.transformer.transformer_config": 0,
    "megatron.core.transformer.moe": 3,
    "megatron.core.transformer.moe.moe_config": 0,
    "megatron.core.rank_grid": 0,
    "megatron.core.process_groups_config": 0,
    "megatron.core.param_meta": 0,
    "megatron.core.pipeline_parallel.layer_split": 0,
    "megatron.core.pipeline_parallel.schedule_plan": 0,
    "megatron.core.seeding": 0,
    # 1 tools and pure plans
    "megatron.core.collectives": 1,
    "megatron.core.host_memory": 1,
    "megatron.core.backends": 1,
    "megatron.core.param_init": 1,
    "megatron.core.timers": 1,
    "megatron.core.num_microbatches_calculator": 1,
    "megatron.core.distributed.param_layout": 1,
    "megatron.core.optimizer.matrix_owners": 1,
    "megatron.core.optimizer.shard_map": 1,
    "megatron.core.datasets.sampler": 1,
    "megatron.core.datasets.index_helpers": 1,
    "megatron.core.dist_checkpointing.mapping": 1,
    "megatron.core.dist_checkpointing.reshard": 1,
    # 2 engines
    "megatron.core.tensor_parallel": 2,
    "megatron.core.pipeline_parallel": 2,
    "megatron.core.distributed": 2,
    "megatron.core.dist_checkpointing": 2,
    "megatron.core.datasets": 2,
    "megatron.core.tokenizers": 2,
    # 3 assemblies
    "megatron.core.transformer": 3,
    "megatron.core.optimizer": 3,
    "megatron.core.optimizer_param_scheduler": 3,
    # 4 models, 5 serving, 6 training, 7 entry
    "megatron.core.models": 4,
    "megatron.core.inference": 5,
    "megatron.training": 6,
    "pretrain_gpt": 7,
    "tools": 7,
    # facades of core: read by facades, entry points and tests
    "megatron.core": 0,
    "megatron.core.parallel_state": 6,
    "megatron.core.mpu": 6,
}

FACADES = (
    "megatron.core.parallel_state",
    "megatron.core.mpu",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.training",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.global_vars",
    "megatron.training.initialize",
    "megatron.training.training",
    "megatron.training.yaml_arguments",
)
GLOBALS = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.training.global_vars")

# Optional packages may be imported where they are used; everything else at the top of the file.
OPTIONAL_PACKAGES = (
    "apex", "flash_attn", "google", "huggingface_hub", "matplotlib", "rich", "safetensors", "sentencepiece", "tensorboard", "tiktoken",
    "tokenizers", "transformer_engine", "transformers", "wandb",
)  # fmt: skip


def level_of(module: str) -> int:
    """The level of the longest listed prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LEVELS:
            return LEVELS[prefix]
    raise AssertionError(f"{module} is in no layer; add it to tests/architecture/layers.py and docs/architecture.md")
