"""Cross entropy equals torch's and the definition, ignores padding, and keeps one copy of the logits."""

import functools

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy


@pytest.fixture(params=[None, 16])
def block_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with blocks of a few rows."""
    if request.param is not None:
        monkeypatch.setattr(cross_entropy, "_CPU_BLOCK_ELEMENTS", request.param)


def sample(dtype: torch.dtype, padded: int = 8, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [5, 2, padded] and targets [5, 2]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((5, 2, padded), generator=generator, dtype=torch.float64).mul(4).to(dtype)
    return logits.requires_grad_(), torch.randint(vocab, (5, 2), generator=generator)


@pytest.mark.parametrize("vocab", [7, 8])
def test_gradcheck_in_float64(block_elements: None, vocab: int) -> None:
    logits, targets = sample(torch.float64, vocab=vocab)
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, targets, vocab_size=vocab), (logits,))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_loss_and_gradient_equal_torch(
    block_elements: None, dtype: torch.dtype, tolerance: float, reuse: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:  # the graph as the compiler gets it, without the minute that a C++ compiler takes
        monkeypatch.setattr(cross_entropy, "_compiled", functools.partial(torch.compile, backend="aot_eager"))
    logits, targets = sample(dtype)
    wide = logits.detach().double()[..., :7].requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(5, 2)
    weights = torch.linspace(0.0, 1.0, 10, dtype=torch.float64).view(5, 2)
    (expected * weights).sum().backward()
    losses = vocab_parallel_cross_entropy(logits * 1, targets, vocab_size=7, reuse_logits=reuse, compiled=compiled)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # the losses themselves are fp32-exact even from bf16 logits; only the gradient is rounded to the logits' dtype
    torch.testing.assert_close(losses.double(), expected, rtol=min(tolerance, 1e-6), atol=min(tolerance, 1e-6))
    (losses * weights.to(losses.dtype)).sum().backward()
    assert logits.grad is not None and wide.grad is not None
    torch.testing.assert_close(logits.grad[..., :7].double(), wide.grad, rtol=tolerance, atol=tolerance)
    assert not logits.grad[..., 7:].any()


def test_padding_columns_do_not_count_however_large(block_elements: None) -> None:
    logits, targets = sample(torch.float32)
    poisoned = logits.detach().clone()
    poisoned[..., 7] = 1e4
    clean = vocab_parallel_cross_entropy(logits, targets, vocab_size=7)
    assert torch.equal(vocab_parallel_cross_entropy(poisoned, targets, vocab_size=7), clean)


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    logits = torch.tensor([[3e4, 3e4 - 1.0, 0.0]])
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1]), vocab_size=3)
    assert float(loss) == pytest.approx(1.0 + 0.3132617, rel=1e-5)  # 1 + log(1 + e^-1)


def test_target_outside_of_the_vocabulary_is_an_error() -> None:
    logits, targets = sample(torch.float32)
    targets[0, 0] = 7  # a padding column
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocab_parallel_cross_entropy(logits, targets, vocab_size=7)


def test_backward_reuses_the_memory_of_the_logits_and_refuses_a_second_run() -> None:
    source, targets = sample(torch.float32)
    logits = source * 1
    memory = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    losses = vocab_parallel_cross_entropy(logits, targets, vocab_size=7, reuse_logits=True)
    losses.sum().backward(retain_graph=True)
    assert seen == [memory]
    with pytest.raises(RuntimeError, match="allows one backward"):
        losses.sum().backward()


def test_forward_keeps_nothing_of_the_size_of_the_logits_but_the_logits() -> None:
    source, targets = sample(torch.float32)
    logits = source * 1
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, targets, vocab_size=7, reuse_logits=True)
    large = {t.data_ptr() for t in saved if t.numel() >= logits.numel()}
    assert large == {logits.data_ptr()}
