"""The matrix's reference against the one that walks token by token, and its AdamW with clipping against torch's."""

import pytest
import torch

from tests.parity.matrix import BASE, Case, Row
from tests.parity.run import SAMPLES, config_of, recipe_of, start_of
from tests.reference.gpt_reference import reference_loss
from tests.reference.gpt_training import token_losses, train

ROWS: dict[str, Row] = {
    "Llama": {},
    "GPT-2": {"attention": "MHA", "positions": "learned", "norm": "LayerNorm", "mlp": "gelu", "biases": True, "tied": True},
    "packed documents in a window": {"qk_norm": True, "packed": True, "window": 5},
}


@pytest.mark.parametrize("name", list(ROWS))
def test_losses_equal_those_of_the_reference_that_walks_token_by_token(name: str) -> None:
    case = Case({**BASE, **ROWS[name]})
    config = config_of(case).transformer_config()
    params = {name: value.double() for name, value in start_of(case).items()}
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(100, (2, 2, 12), generator=generator)
    batch = {"tokens": tokens, "labels": labels}
    if ROWS[name].get("packed"):
        batch["position_ids"] = torch.tensor([[*range(5), *range(7)], [*range(12)]])
        batch["document_ids"] = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    got = token_losses(params, config, batch, 100)
    wanted = reference_loss(
        params, config, tokens, labels, batch.get("position_ids"), batch.get("document_ids"), vocab_size=100
    )
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_steps_equal_torchs_adamw_with_clipping() -> None:
    case = Case({**BASE, "biases": True})
    config, recipe = config_of(case).transformer_config(), recipe_of(case)
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(2):
        tokens = torch.randint(100, (SAMPLES, 9), generator=generator)
        mask = (torch.rand(SAMPLES, 8, generator=generator) < 0.8).float()
        batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask})
    steps = train(start_of(case), config, batches, recipe)
    assert all(step.norm > recipe.clip_grad for step in steps), "clipping must be at work"

    params = {name: torch.nn.Parameter(value.double()) for name, value in start_of(case).items()}
    decayed = [p for p in params.values() if p.dim() >= 2]
    others = [p for p in params.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.lr, betas=(recipe.adam_beta1, recipe.adam_beta2), eps=recipe.adam_eps, weight_decay=recipe.weight_decay,
    )  # fmt: skip
    for batch, step in zip(batches, steps, strict=True):
        loss = (token_losses(params, config, batch, recipe.vocab_size) * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(params.values()), recipe.clip_grad)
        optimizer.step()
        assert (loss.item(), float(norm)) == pytest.approx((step.loss, step.norm), rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(step.weights[name], param.detach(), rtol=1e-12, atol=1e-13, msg=name)
