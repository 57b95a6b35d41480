"""The loop that docs/distributed_optimizer.md shows runs as written and learns."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[3] / "docs" / "distributed_optimizer.md"


def test_the_loop_on_the_page_learns():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    tokens, labels = torch.randn(8, 4), torch.randn(8)
    seen = []

    def loss_function(output, target):
        losses = (output.squeeze(-1) - target) ** 2
        seen.append(losses.mean().item())
        return losses

    names = {"torch": torch, "module": torch.nn.Linear(4, 1), "batches": [(tokens, labels)] * 30, "loss_function": loss_function}
    exec(code, names)
    assert names["success"]
    assert seen[-1] < seen[0]
