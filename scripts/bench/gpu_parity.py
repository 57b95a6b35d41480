"""Numerics of a GPU against the CPU: loss and every gradient of one step, attention backends, compiled layers.

The truth is the same model in fp64 on the CPU, with unfused attention and the weights as rounded to the dtype under test. Each
deviation is relative, of a gradient in the L2 norm. A path through the model rounds about N = 24 layers + 8 times, forward and
backward; independent roundings of size u (half the dtype's epsilon) add up to u sqrt(N), in fp32 also those of sums over K terms
(tokens or features): u sqrt(N K). What the CPU itself deviates in that dtype, times two, is allowed as well, since two correct
implementations round differently where terms cancel.
"""

import dataclasses
import math

import torch

from megatron.core.backends.attention_choice import ATTENTION_BACKENDS
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.gpt_builder import compile_model

VOCAB, SEQUENCE, BATCH = 1000, 128, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to compute the step."""

    device: torch.device
    bf16: bool
    attention: str = "torch"
    compiled: bool = False
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """Loss and gradients by parameter name, fp64 on the CPU."""

    loss: float
    grads: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Relative deviation of the loss and of the gradient that deviates most."""

    loss: float
    grad: float
    parameter: str


def config_of(case: Case) -> TransformerConfig:
    """A small Llama-like model with grouped queries; heads of 32."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=256,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation_func="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=case.attention,
        bf16=case.bf16,
    )


def build(case: Case) -> GPTModel:
    """The model of a case; its weights depend on the seed only."""
    groups = ProcessGroupCollection.single_process()
    return GPTModel(
        config_of(case), vocab_size=VOCAB, max_sequence_length=SEQUENCE, pg_collection=groups, device=case.device
    )


def batch(packed: bool) -> dict[str, torch.Tensor]:
    """Tokens, labels int64 [b, s]; packed: three documents per row."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    values = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    if packed:
        cuts = torch.tensor([SEQUENCE // 3, SEQUENCE // 2])
        values["document_ids"] = torch.bucketize(torch.arange(SEQUENCE), cuts, right=True).expand(BATCH, -1).contiguous()
    return values


def step_of(model: GPTModel, device: torch.device, packed: bool) -> Step:
    """Mean loss of the batch, and its gradients."""
    values = {name: value.to(device) for name, value in batch(packed).items()}
    loss = model(values.pop("input_ids"), **values).mean()
    loss.backward()
    grads = {name: param.grad.detach().cpu().double() for name, param in model.named_parameters() if param.grad is not None}
    return Step(float(loss.detach()), grads)


def computed(case: Case) -> Step:
    """The step as the case computes it."""
    model = build(case)
    if case.compiled:
        compile_model(model)
    return step_of(model, case.device, case.packed)


def truth(bf16: bool, packed: bool) -> Step:
    """The step in fp64 on the CPU, with the weights of the dtype under test."""
    model = build(Case(torch.device("cpu"), bf16, attention="unfused")).double()
    return step_of(model, torch.device("cpu"), packed)


def deviation(step: Step, true: Step) -> Deviation:
    """Of `step` from `true`. A gradient that is missing deviates infinitely."""
    by_name = {}
    for name, value in true.grads.items():
        own = step.grads.get(name)
        by_name[name] = math.inf if own is None else float((own - value).norm() / value.norm())
    worst = max(by_name, key=lambda name: by_name[name] if by_name[name] == by_name[name] else math.inf)
    return Deviation(abs(step.loss - true.loss) / true.loss, by_name[worst], worst)


def tolerance(bf16: bool) -> float:
    """See the head of this file; sums are accumulated in fp32 also for bf16."""
    roundings = 24 * 4 + 8
    if bf16:
        return 2.0**-9 * math.sqrt(roundings)
    return 2.0**-24 * math.sqrt(roundings * BATCH * SEQUENCE)


class ParityCheck:
    """Runs cases against the truth; CPU results in the same dtype are kept for the allowance."""

    def __init__(self) -> None:
        self._true: dict[tuple[bool, bool], Step] = {}
        self._cpu: dict[tuple[bool, bool], Deviation] = {}

    def __call__(self, case: Case) -> tuple[bool, str]:
        """(within tolerance, what was found)."""
        key = (case.bf16, case.packed)
        if key not in self._true:
            self._true[key] = truth(*key)
            own = Case(torch.device("cpu"), case.bf16, packed=case.packed)
            self._cpu[key] = deviation(computed(own), self._true[key])
        found, cpu = deviation(computed(case), self._true[key]), self._cpu[key]
        allowed = max(tolerance(case.bf16), 2 * cpu.grad)
        allowed_loss = max(tolerance(case.bf16), 2 * cpu.loss)
        good = found.grad <= allowed and found.loss <= allowed_loss
        text = f"gradients {found.grad:.1e} at most ({found.parameter}), loss {found.loss:.1e}; allowed {allowed:.1e}"
        return good, f"{text}; CPU itself {cpu.grad:.1e}"


def attention_cases(device: torch.device) -> list[tuple[str, Case | None, str]]:
    """(name, case, "") of each backend that runs here, in bf16 and, where it can, fp32, plain and packed; else (name, None, reason)."""
    cases: list[tuple[str, Case | None, str]] = []
    for name, backend in ATTENTION_BACKENDS.items():
        reasons = []
        for bf16 in (False, True):
            reason = backend.supports(config_of(Case(device, bf16, name)), device)
            reasons.append(reason)
            if reason is None:
                for packed in (False, True):
                    title = f"attention {name}, {'bf16' if bf16 else 'fp32'}{', packed' if packed else ''}"
                    cases.append((title, Case(device, bf16, name, packed=packed), ""))
        if all(reason is not None for reason in reasons):
            cases.append((f"attention {name}", None, str(reasons[-1])))
    return cases
