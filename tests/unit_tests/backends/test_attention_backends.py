"""Choice of the attention backend, and the arguments that each optional package receives (in place of the package: its formula)."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core.backends import attention_choice
from megatron.core.backends.attention_choice import choose_attention_backend
from megatron.core.backends.flash_attention import FlashAttention, packed_lengths
from megatron.core.backends.optional import probe
from megatron.core.backends.torch_backend import FlexAttention, TorchAttention, UnfusedAttention
from megatron.core.backends.transformer_engine import TransformerEngineAttention
from megatron.core.errors import ConfigError
from tests.harness.t0 import t0_transformer_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 4, 4]])


@pytest.fixture(autouse=True)
def fresh_probes() -> Iterator[None]:
    """No remembered import outlives a test."""
    probe.cache_clear()
    yield
    probe.cache_clear()


def heads(kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [s, b, n, d], key and value [s, b, g, d], fp64."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((6, 2, 4, 8), (6, 2, kv_heads, 8), (6, 2, kv_heads, 8))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)  # type: ignore[return-value]


def textbook(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, documents: torch.Tensor | None
) -> torch.Tensor:
    """Attention by loops, [s, b, n x d]."""
    s, b, n, d = query.shape
    out = torch.zeros_like(query)
    for row in range(b):
        for head in range(n):
            group = head // (n // key.size(2))
            for i in range(s):
                seen = [j for j in range(i + 1) if window is None or i - j < window]
                if documents is not None:
                    seen = [j for j in seen if documents[row, i] == documents[row, j]]
                scores = torch.stack([query[i, row, head] @ key[j, row, group] for j in seen]) / d**0.5
                out[i, row, head] = torch.softmax(scores, 0) @ value[seen, row, group]
    return out.flatten(2)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", [TorchAttention, UnfusedAttention])
def test_torch_backends_equal_the_textbook(
    backend: type[TorchAttention], kv_heads: int, window: int | None, documents: torch.Tensor | None
) -> None:
    kernel = backend(t0_transformer_config(num_query_groups=kv_heads, window_size=window))
    inputs = heads(kv_heads)
    got = kernel.attend(*inputs, kernel.prepare(2, 6, documents, CPU), 0.0)
    torch.testing.assert_close(got, textbook(*inputs, window, documents), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 2])
def test_flex_masks_equal_the_textbook(window: int | None, documents: torch.Tensor | None) -> None:
    kernel = FlexAttention(t0_transformer_config(window_size=window, kv_channels=16))
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn((6, 2, n, 16), generator=generator) for n in (4, 2, 2)]
    with torch.no_grad():
        got = kernel.attend(*inputs, kernel.prepare(2, 6, documents, CPU), 0.0)
    torch.testing.assert_close(got, textbook(*inputs, window, documents), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [TorchAttention, UnfusedAttention])
def test_dropout_keeps_the_expected_value(backend: type[TorchAttention]) -> None:
    kernel = backend(t0_transformer_config())
    inputs, prepared = heads(), kernel.prepare(2, 6, None, CPU)
    torch.manual_seed(0)
    mean = torch.stack([kernel.attend(*inputs, prepared, 0.25) for _ in range(2000)]).mean(0)
    # standard error of a mean of 2000 draws is below 0.02 for values of about 1; five of them
    torch.testing.assert_close(mean, kernel.attend(*inputs, prepared, 0.0), rtol=0.0, atol=0.1)


def test_bf16_on_cpu_is_computed_in_fp32() -> None:
    kernel = TorchAttention(t0_transformer_config(bf16=True))
    inputs = [part.bfloat16() for part in heads()]
    expected = kernel.attend(*(part.float() for part in inputs), None, 0.0).bfloat16()
    assert torch.equal(kernel.attend(*inputs, None, 0.0), expected)


# ------------------------------------------------------------------------------------------------------------------- choice


def test_auto_on_cpu_is_torch() -> None:
    assert choose_attention_backend(t0_transformer_config(), CPU).name == "torch"


@pytest.mark.parametrize("name", ["flash", "te", "flex"])
def test_a_backend_asked_for_by_name_must_be_usable(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={name} cannot be used: .* cpu; use auto or torch"):
        choose_attention_backend(t0_transformer_config(attention_backend=name, bf16=True), CPU)


def test_fp32_on_cuda_falls_back_to_torch_for_want_of_fp32_kernels() -> None:
    assert choose_attention_backend(t0_transformer_config(), CUDA).name == "torch"


def test_a_package_that_fails_to_import_in_any_way_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "_log_once", lambda text: logged.append(text))
    logged: list[str] = []

    def broken(name: str) -> Any:
        raise RuntimeError(f"Found empty `{name}` meta package installed\nlong advice")

    monkeypatch.setattr("importlib.import_module", broken)
    assert choose_attention_backend(t0_transformer_config(bf16=True), CUDA).name == "torch"
    (line,) = logged
    assert line.startswith("attention backend: torch (flash_attn: RuntimeError: Found empty `flash_attn` meta package installed; ")
    assert "transformer_engine.pytorch: RuntimeError" in line and "long advice" not in line


def test_flash_is_preferred_on_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert choose_attention_backend(t0_transformer_config(bf16=True), CUDA).name == "flash"


def test_flex_refuses_attention_dropout_and_small_heads() -> None:
    assert "has no dropout" in str(FlexAttention.supports(t0_transformer_config(attention_dropout=0.1), CUDA))
    assert "heads of at least 16" in str(FlexAttention.supports(t0_transformer_config(), CUDA))


# ------------------------------------------------------------------------------------------ optional packages by their formula


def test_packed_lengths_starts_a_sequence_at_every_document_and_row() -> None:
    packed = packed_lengths(torch.tensor([[0, 0, 1], [1, 1, 1], [7, 8, 8]]))
    assert packed.boundaries.tolist() == [0, 2, 3, 6, 7, 9]
    assert packed.boundaries.dtype == torch.int32
    assert packed.longest == 3


def lengths_to_documents(boundaries: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Inverse of packed_lengths."""
    return torch.repeat_interleave(torch.arange(len(boundaries) - 1), boundaries.diff()).view(rows, length)


class FormulaFlash(types.ModuleType):
    """flash-attn 2's two functions, in their documented layouts: [b, s, n, d] and [total, n, d]."""

    def flash_attn_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, causal: bool, window_size: tuple[int, int]
    ) -> torch.Tensor:
        assert causal and dropout_p == 0.0
        return self._run(q, k, v, window_size, None)

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, causal: bool, window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        documents = lengths_to_documents(cu_seqlens_q, 1, q.size(0))
        return self._run(q[None], k[None], v[None], window_size, documents)[0]

    @staticmethod
    def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sides: tuple[int, int], documents: Any) -> torch.Tensor:
        assert sides == (-1, -1) or sides[1] == 0
        window = None if sides[0] < 0 else sides[0] + 1
        out = textbook(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), window, documents)
        return out.transpose(0, 1).reshape(q.shape)


class FormulaEngine(types.ModuleType):
    """transformer_engine.pytorch with DotProductAttention by its formula."""

    class DotProductAttention:
        """`sbhd` or `thd` in, [s, b, n x d] or [total, n x d] out."""

        def __init__(self, heads: int, head_dim: int, *, num_gqa_groups: int, attention_dropout: float) -> None:
            self.sizes = (heads, head_dim, num_gqa_groups)
            assert attention_dropout == 0.0

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            sides = options["window_size"]
            window = None if sides is None else sides[0] + 1
            assert self.sizes == (q.size(-2), q.size(-1), k.size(-2))
            if options["qkv_format"] == "sbhd":
                assert options["attn_mask_type"] == "causal"
                return textbook(q, k, v, window, None)
            assert options["qkv_format"] == "thd" and options["attn_mask_type"] == "padding_causal"
            documents = lengths_to_documents(options["cu_seqlens_q"], 1, q.size(0))
            return textbook(q[:, None], k[:, None], v[:, None], window, documents)[:, 0]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("backend", [FlashAttention, TransformerEngineAttention])
def test_optional_kernels_get_arguments_that_mean_the_same(
    monkeypatch: pytest.MonkeyPatch, backend: type[FlashAttention], window: int | None, documents: torch.Tensor | None
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FormulaFlash("flash_attn"))
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", FormulaEngine("transformer_engine.pytorch"))
    config = t0_transformer_config(bf16=True, window_size=window)
    assert backend.supports(config, CUDA) is None
    kernel, inputs = backend(config), heads()
    got = kernel.attend(*inputs, kernel.prepare(2, 6, documents, CPU), 0.0)
    torch.testing.assert_close(got, textbook(*inputs, window, documents), rtol=1e-12, atol=1e-12)
