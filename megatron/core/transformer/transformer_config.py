"""The model's shape: ModelArchitectureConfig (what is computed) and TransformerConfig (that, plus how it is cut over ranks)."""

import dataclasses
import math

from megatron.core.config_field import config_field, field_violations
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.layer_split import PipelinePart, split_layers
from megatron.core.pipeline_parallel.schedule_plan import plan_problem
from megatron.core.transformer.moe.moe_config import MoEConfig, moe_layers

GATED_ACTIVATIONS = ("swiglu", "geglu")
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArchitectureConfig(MoEConfig):
    """Architecture of the decoder. Section `model` of a run's configuration."""

    num_layers: int = config_field(minimum=1, help="Transformer layers.")
    hidden_size: int = config_field(minimum=1, help="Width of the residual stream.")
    num_attention_heads: int = config_field(minimum=1, help="Query heads.")
    ffn_hidden_size: int | None = config_field(
        None, minimum=1, help="Width of the MLP; default 4 x hidden_size, for gated activations int(8h/3/64) x 64."
    )
    group_query_attention: bool = config_field(False, help="Grouped-query attention; num_query_groups gives the number of groups.")
    num_query_groups: int | None = config_field(
        None, minimum=1, help="Key/value heads (1 = multi-query attention); default num_attention_heads."
    )
    kv_channels: int | None = config_field(None, minimum=1, help="Size of one head; default hidden_size / num_attention_heads.")
    max_position_embeddings: int | None = config_field(
        None, minimum=1, help="Longest sequence the model can represent; default: seq_length."
    )
    vocab_size: int | None = config_field(
        None, minimum=1, help="True vocabulary size; default: the tokenizer's. For NullTokenizer: ids 0..N-1, EOD = N."
    )
    make_vocab_size_divisible_by: int = config_field(
        128, minimum=1, help="The embedding is padded to a multiple of this times the tensor-parallel size (invisible to results)."
    )
    position_embedding_type: str = config_field(
        "learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        const_flags={"--use-rotary-position-embeddings": "rope"},
        help="How positions enter.",
    )
    rotary_base: float = config_field(10000.0, exclusive_minimum=0, help="RoPE base (theta).")
    rotary_percent: float = config_field(1.0, exclusive_minimum=0, maximum=1, help="Share of each head that is rotated.")
    rotary_interleaved: bool = config_field(False, help="Rotate pairs (0,1),(2,3).. instead of halves.")
    rope_scaling_type: str = config_field(
        "none",
        choices=("none", "linear", "llama3", "yarn"),
        const_flags={"--use-rope-scaling": "llama3"},
        help="Frequency scaling for contexts longer than trained.",
    )
    rope_scaling_factor: float = config_field(8.0, minimum=1, help="Context extension factor of the scaling.")
    rope_original_max_position_embeddings: int = config_field(
        8192, minimum=1, help="Context length before extension (llama3, yarn)."
    )
    rope_llama3_low_freq_factor: float = config_field(1.0, exclusive_minimum=0, help="llama3: wavelengths above context/this are scaled.")
    rope_llama3_high_freq_factor: float = config_field(4.0, exclusive_minimum=0, help="llama3: wavelengths below context/this are kept.")
    rope_yarn_beta_fast: float = config_field(32.0, exclusive_minimum=0, help="yarn: rotations above which a dimension is kept.")
    rope_yarn_beta_slow: float = config_field(1.0, exclusive_minimum=0, help="yarn: rotations below which a dimension is interpolated.")
    rope_yarn_attention_factor: float | None = config_field(
        None, exclusive_minimum=0, help="yarn: factor on cos and sin; default 0.1 ln(factor) + 1."
    )
    normalization: str = config_field("LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Kind of norm.")
    norm_epsilon: float = config_field(1e-5, aliases=("layernorm_epsilon",), exclusive_minimum=0, help="Epsilon of the norms.")
    activation_func: str = config_field(
        "gelu",
        choices=("gelu", "gelu_tanh", "relu", "squared_relu", "silu", "swiglu", "geglu"),
        value_aliases={"squaredrelu": "squared_relu"},
        const_flags={"--swiglu": "swiglu", "--squared-relu": "squared_relu", "--geglu": "geglu"},
        help="Activation of the MLP; swiglu and geglu are gated.",
    )
    add_bias_linear: bool = config_field(True, negative_flag="--disable-bias-linear", help="Biases in all linear layers.")
    add_qkv_bias: bool = config_field(False, help="Bias in the query/key/value projection even without add_bias_linear.")
    qk_layernorm: bool = config_field(False, help="Norm on each head's query and key.")
    window_size: int | None = config_field(
        None, minimum=1, unit="tokens", help="Sliding window: a query sees itself and the window_size - 1 tokens before it."
    )
    untie_embeddings_and_output_weights: bool = config_field(False, help="Own output matrix instead of the word embedding.")
    hidden_dropout: float = config_field(0.1, minimum=0, exclusive_maximum=1, help="Dropout on embedding and residual branches.")
    attention_dropout: float = config_field(0.1, minimum=0, exclusive_maximum=1, help="Dropout on attention probabilities.")
    attention_softmax_in_fp32: bool = config_field(
        True, help="Softmax in fp32 (all attention backends here do; False is refused)."
    )
    init_method_std: float = config_field(0.02, minimum=0, help="Standard deviation of the normal initial weights.")
    use_scaled_init_method: bool = config_field(
        True,
        negative_flag="--no-scaled-init",
        flag="--use-scaled-init",
        help="Divide the deviation of the layers that write to the residual stream by sqrt(2 x num_layers).",
    )
    attention_backend: str = config_field(
        "auto",
        choices=("auto", "torch", "flex", "unfused", "flash", "te"),
        const_flags={"--use-flash-attn": "flash"},
        help="Attention kernel; auto = flash-attn or Transformer Engine where installed on CUDA, else torch SDPA.",
    )
    torch_compile: bool = config_field(False, help="Compile the model with torch.compile; torch_compile_scope says in what pieces.")
    torch_compile_scope: str = config_field(
        "layer",
        choices=("layer", "model"),
        help="layer = one graph that all layers share, and one for the loss: short compilation, communication overlaps. model = the "
        "whole model in one graph: fastest in one process, compilation grows with num_layers, no overlap of communication.",
    )
    recompute_granularity: str | None = config_field(
        None,
        choices=("selective", "full"),
        const_flags={"--recompute-activations": "selective"},
        help="Recompute activations in the backward: parts of each layer (recompute_modules) or whole layers.",
    )
    recompute_modules: tuple[str, ...] = config_field(
        ("core_attn",), choices=RECOMPUTE_MODULES, help="With selective: which parts are recomputed."
    )
    recompute_method: str | None = config_field(
        None, choices=("uniform", "block"), help="With full: uniform = chunks of recompute_num_layers; block = the first recompute_num_layers."
    )
    recompute_num_layers: int | None = config_field(None, minimum=1, help="With full: layers per chunk, or number recomputed.")
    cpu_offloading: bool = config_field(
        False,
        help="Keep the activations of the first cpu_offloading_num_layers layers of each model chunk in pinned host memory between "
        "forward and backward. Same numbers. Needs a CUDA device.",
    )
    cpu_offloading_num_layers: int = config_field(0, minimum=0, help="With cpu_offloading: layers, of each model chunk.")

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}; "
                "choose a divisor or set kv_channels"
            )
        if self.num_attention_heads % self.num_kv_heads:
            problems.append(
                f"num_query_groups={self.num_kv_heads} does not divide num_attention_heads={self.num_attention_heads}"
            )
        if self.group_query_attention and self.num_query_groups is None:
            problems.append("group_query_attention=True needs num_query_groups")
        if self.position_embedding_type == "rope" and round(self.head_dim * self.rotary_percent) % 2:
            problems.append(f"rotary_percent={self.rotary_percent:g} of head size {self.head_dim} is not an even number")
        if self.rope_scaling_type == "yarn" and self.rotary_base <= 1:
            problems.append(f"rope_scaling_type=yarn needs rotary_base above 1, got {self.rotary_base:g}")
        if self.rope_scaling_type == "llama3" and self.rope_llama3_high_freq_factor <= self.rope_llama3_low_freq_factor:
            problems.append(
                f"rope_llama3_high_freq_factor={self.rope_llama3_high_freq_factor:g} must be above "
                f"rope_llama3_low_freq_factor={self.rope_llama3_low_freq_factor:g}"
            )
        if self.recompute_granularity == "full" and (self.recompute_method is None or self.recompute_num_layers is None):
            problems.append("recompute_granularity=full needs recompute_method (uniform or block) and recompute_num_layers")
        if self.recompute_granularity != "full" and self.recompute_method is not None:
            problems.append("recompute_method is only used with recompute_granularity=full; remove it or set that")
        if self.cpu_offloading and not self.cpu_offloading_num_layers:
            problems.append("cpu_offloading=True needs cpu_offloading_num_layers, the number of layers from the first on")
        if self.cpu_offloading_num_layers and not self.cpu_offloading:
            problems.append("cpu_offloading_num_layers is only used with cpu_offloading=True; remove it or set that")
        if self.cpu_offloading_num_layers > self.num_layers:
            problems.append(f"cpu_offloading_num_layers={self.cpu_offloading_num_layers} is above num_layers={self.num_layers}")
        if self.cpu_offloading and self.recompute_granularity == "full":
            problems.append("cpu_offloading=True excludes recompute_granularity=full, which keeps no activations inside layers; use one")
        if self.cpu_offloading and self.torch_compile:
            problems.append("cpu_offloading=True does not go with torch_compile=True; leave one of them out")
        for module in self.recompute_modules:
            if module not in RECOMPUTE_MODULES:
                problems.append(f"recompute_modules names {module!r}; known are {', '.join(RECOMPUTE_MODULES)}")
        problems += self.moe_problems(self.num_layers)
        if self.moe_layer_recompute and self.recompute_granularity == "full":
            problems.append("moe_layer_recompute does not go with recompute_granularity=full; leave one of them out")
        if "moe" in self.recompute_modules and self.num_experts is None:
            problems.append("recompute_modules names moe, which needs num_experts")
        if self.num_experts is not None and self.torch_compile:
            problems.append("torch_compile=True does not go with num_experts: shapes depend on the routing; leave one of them out")
        if not self.attention_softmax_in_fp32:
            problems.append("attention_softmax_in_fp32=False is not offered: all attention backends use fp32 there")
        return problems

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (its first matrix is then twice as wide: [gate; up])."""
        return self.activation_func in GATED_ACTIVATIONS

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.kv_channels if self.kv_channels is not None else max(1, self.hidden_size // self.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP, defaults resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, int(self.hidden_size * 8 / 3 / 64) * 64) if self.gated else 4 * self.hidden_size

    @property
    def moe_ffn_size(self) -> int:
        """Width of an expert, defaults resolved."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    def is_moe_layer(self, index: int) -> bool:
        """Whether the layer with this global number has experts; layers behind the last one are like the last."""
        return self.num_experts is not None and moe_layers(self.moe_layer_freq, self.num_layers)[min(index, self.num_layers - 1)]

    @property
    def output_init_std(self) -> float:
        """Initial deviation of the matrices that write to the residual stream (GPT-2, section 2.3)."""
        return self.init_method_std / math.sqrt(2.0 * self.num_layers) if self.use_scaled_init_method else self.init_method_std

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of each head that are rotated."""
        return round(self.head_dim * self.rotary_percent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelArchitectureConfig, ModelParallelConfig):
    """What model code receives: architecture, parallel sizes and precision in one value, as in Megatron."""

    def __post_init__(self) -> None:
        ModelArchitectureConfig.__post_init__(self)
        ModelParallelConfig.__post_init__(self)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.num_attention_heads % self.tensor_model_parallel_size:
            sizes = [n for n in range(1, self.num_attention_heads + 1) if self.num_attention_heads % n == 0]
            problems.append(
                f"tensor_model_parallel_size={self.tensor_model_parallel_size} does not divide "
                f"num_attention_heads={self.num_attention_heads}; use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
                if len(sizes) > 1
                else "tensor_model_parallel_size must be 1 with one attention head"
            )
        elif self.num_kv_heads % self.tensor_model_parallel_size:
            problems.append(
                f"tensor_model_parallel_size={self.tensor_model_parallel_size} does not divide num_query_groups={self.num_kv_heads}"
            )
        if self.ffn_size % self.tensor_model_parallel_size:
            problems.append(
                f"tensor_model_parallel_size={self.tensor_model_parallel_size} does not divide ffn_hidden_size={self.ffn_size}"
            )
        problems += self._expert_problems()
        pipeline = plan_problem(self.pipeline_schedule, self.pipeline_model_parallel_size, self.pipeline_chunks, None)
        if pipeline is not None:
            return [*problems, pipeline]
        try:
            self.pipeline_parts  # noqa: B018
        except ConfigError as error:
            problems.append(str(error))
        if self.splits_backward and self.torch_compile:
            problems.append(f"pipeline_schedule={self.pipeline_schedule} does not go with torch_compile=True; leave one of them out")
        if self.pipeline_schedule == "zb_v" and not self.untie_embeddings_and_output_weights:
            problems.append(
                "pipeline_schedule=zb_v has embedding and head on one stage in different chunks, which cannot share a weight; set "
                "untie_embeddings_and_output_weights=True or use another schedule"
            )
        return problems

    def _expert_problems(self) -> list[str]:
        ranks, tensor = self.expert_model_parallel_size, self.expert_tensor_parallel_size
        if self.num_experts is None:
            given = {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": tensor or 1}
            return [f"{name}={size} needs num_experts; set that or leave it out" for name, size in given.items() if size > 1]
        problems = []
        if self.num_experts % ranks:
            sizes = [str(n) for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            problems.append(f"expert_model_parallel_size={ranks} does not divide num_experts={self.num_experts}; use {', '.join(sizes)}")
        tensor = self.tensor_model_parallel_size if tensor is None else tensor
        if self.moe_ffn_size % tensor:
            problems.append(f"expert_tensor_parallel_size={tensor} does not divide moe_ffn_hidden_size={self.moe_ffn_size}")
        shared = self.moe_shared_expert_intermediate_size
        if shared is not None and shared % self.tensor_model_parallel_size:
            problems.append(
                f"tensor_model_parallel_size={self.tensor_model_parallel_size} does not divide moe_shared_expert_intermediate_size={shared}"
            )
        return problems

    @property
    def pipeline_parts(self) -> tuple[PipelinePart, ...]:
        """What each part of the pipeline holds, in model order. Raises ConfigError if the layers can't be split as configured."""
        return split_layers(
            self.num_layers,
            self.pipeline_model_parallel_size * self.pipeline_chunks,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            count_embedding=self.account_for_embedding_in_pipeline_split,
            count_head=self.account_for_loss_in_pipeline_split,
            layout=self.pipeline_model_parallel_layout,
        )
