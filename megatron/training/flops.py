"""FLOPs of the real architecture, and the dense peak of a device: the two halves of MFU.

Counted are matrix multiplications, 2 FLOPs per multiply-add, forward once and backward twice. Attention counts the whole
s x s square (no halving for the causal mask), as Megatron does; recomputation is not counted, biases, norms and softmax neither.
"""

import functools
import re
import time

import torch

from megatron.core.transformer.transformer_config import ModelArchitectureConfig


def flops_per_token(
    config: ModelArchitectureConfig, seq_length: int, padded_vocab_size: int, *, causal: bool = False
) -> int:
    """Model FLOPs of one token, forward and backward.

    Per layer, with h hidden, a heads, g key/value heads, d head size, s sequence, f MLP width:
    2h(a+2g)d qkv + 2adh output projection + 4ads scores and values + 4hf (6hf gated) MLP; once 2hV for the logits; all x 3.
    A layer with E experts has 2hE for the router, and of the experts the k that a token goes to and the shared ones.

    Args:
        padded_vocab_size: V, with the padding rows, because they are multiplied too.
        causal: count only the visible half of the attention square.
    """
    h, d, s = config.hidden_size, config.head_dim, seq_length
    a, g, f = config.num_attention_heads, config.num_kv_heads, config.ffn_size
    span = s if config.window_size is None else min(s, config.window_size)
    attention = 2 * h * (a + 2 * g) * d + 2 * a * d * h + (2 if causal else 4) * a * d * span
    dense, experts = _mlp(config, f), 0
    if config.num_experts is not None:
        width = config.moe_router_topk * config.moe_ffn_size + (config.moe_shared_expert_intermediate_size or 0)
        experts = 2 * h * config.num_experts + _mlp(config, width)
    mlps = sum(experts if config.is_moe_layer(layer) else dense for layer in range(config.num_layers))
    return 3 * (config.num_layers * attention + mlps + 2 * h * padded_vocab_size)


def _mlp(config: ModelArchitectureConfig, width: int) -> int:
    return (6 if config.gated else 4) * config.hidden_size * width


# Dense data-sheet peaks, 1e12 FLOP/s: (16-bit with fp32 sums, TF32, fp32). Matched in this order against the device's name.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"\bGB[23]00\b", (2500.0, 1250.0, 80.0)),
    (r"\bB[23]00\b", (2250.0, 1125.0, 75.0)),
    (r"\bH[12]00 NVL\b", (835.5, 417.5, 60.0)),
    (r"\bH100 PCIe\b", (756.0, 378.0, 51.2)),
    (r"\b(GH200|H200|H100|H800)\b", (989.4, 494.7, 66.9)),
    (r"\bH20\b", (148.0, 74.0, 44.0)),
    (r"\bA[18]00\b", (312.0, 156.0, 19.5)),
    (r"\bA30\b", (165.0, 82.0, 10.3)),
    (r"\bA40\b", (149.7, 74.8, 37.4)),
    (r"\bRTX A6000\b", (154.8, 77.4, 38.7)),
    (r"\bA10G\b", (70.0, 35.0, 31.5)),
    (r"\bA10\b", (125.0, 62.5, 31.2)),
    (r"\bL40S\b", (362.0, 183.0, 91.6)),
    (r"\bL40\b", (181.0, 90.5, 90.5)),
    (r"\bL4\b", (121.0, 60.0, 30.3)),
    (r"\bRTX 5090\b", (209.5, 104.8, 104.8)),
    (r"\bRTX 4090\b", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b", (71.0, 35.6, 35.6)),
    (r"\bV100\b", (125.0, 15.7, 15.7)),
    (r"\bT4\b", (65.0, 8.1, 8.1)),
    (r"\bMI3[02]\d[AX]\b", (1307.4, 653.7, 163.4)),
    (r"\bMI250X?\b", (191.5, 47.9, 47.9)),  # torch sees one of the two dies
    (r"\bMI210\b", (181.0, 45.3, 22.6)),
)


def peak_tflops(device: torch.device, dtype: torch.dtype, override: float | None = None) -> float | None:
    """Dense peak of one device in 1e12 FLOP/s for matrix products in `dtype`; None where it is not known.

    override: the user's value, taken as it is. CUDA: the data sheet (fp32 is TF32 where torch is allowed to use it).
    CPU: measured with this process's threads, about 0.2 s, once per dtype and thread count.
    """
    if override is not None:
        return override
    if device.type == "cpu":
        return _measured_cpu_tflops(dtype, torch.get_num_threads())
    if device.type == "cuda":
        return known_peak_tflops(torch.cuda.get_device_name(device), dtype, torch.backends.cuda.matmul.allow_tf32)
    return None


def known_peak_tflops(device_name: str, dtype: torch.dtype, allow_tf32: bool = False) -> float | None:
    """The data sheet's dense peak for a device name as torch gives it; None if not listed, or for a slice (MIG) of a device."""
    if re.search(r"\bMIG\b", device_name):
        return None
    for pattern, (half, tf32, single) in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            if dtype in (torch.float16, torch.bfloat16):
                return half
            return tf32 if allow_tf32 else single
    return None


@functools.cache
def _measured_cpu_tflops(dtype: torch.dtype, threads: int) -> float:
    """Best rate of a 768 x 768 product within 0.2 s. threads: part of the key only; the call uses torch's setting."""
    size, budget = 768, 0.2
    own = torch.Generator().manual_seed(0)  # a measurement must not advance the run's random numbers
    left = torch.randn(size, size, generator=own).to(dtype)
    right = torch.randn(size, size, generator=own).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(left, right, out=out)  # warm-up: first use plans and allocates
    best, end = float("inf"), time.perf_counter() + budget
    while True:
        begun = time.perf_counter()
        torch.mm(left, right, out=out)
        now = time.perf_counter()
        best = min(best, now - begun)
        if now >= end:
            return 2.0 * size**3 / best / 1e12
