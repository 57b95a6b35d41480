"""A toy language model with awkward parts, trained by the engine or by plain torch on the same global batches."""

import torch
import torch.nn.functional as F

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection

VOCABULARY, WIDTH = 11, 9
GLOBAL_BATCH, LENGTH = 12, 5


class Toy(torch.nn.Module):
    """Tied head, sub-modules registered in another order than they run, a frozen, an unused and a sometimes used matrix."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.unused = torch.nn.Linear(7, 3)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.sometimes = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.frozen = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.to(dtype)
        set_param_meta(self.embedding.weight, ParamMeta(is_embedding_or_output=True, shared_embedding=True))

    def forward(self, tokens, use_sometimes=True):
        hidden = self.embedding(tokens)
        hidden = hidden + self.frozen(torch.tanh(self.first(hidden)))
        if use_sometimes:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.norm(self.last(hidden) + hidden)
        return F.linear(hidden, self.embedding.weight)


def token_loss_sum(model, tokens, mask, step):
    """Sum of the losses of unmasked tokens."""
    logits = model(tokens[:, :-1], use_sometimes=step % 2 == 1)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def batch(step):
    """(tokens [12, 6], mask [12, 5]): rows have different numbers of unmasked tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    return tokens, (torch.rand(GLOBAL_BATCH, LENGTH, generator=generator) < 0.6).float()


def groups_of_all_ranks():
    """Data parallel over all ranks; nothing else is split."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return ProcessGroupCollection.single_process()
    world = torch.distributed.group.WORLD
    return ProcessGroupCollection(world=world, dp=world, dp_cp=world, intra_dp_cp=world, expt_dp=world)


def build(ddp=None, opt=None, dtype=torch.float32, reduce_op="sum", groups=None, module=None):
    """(wrapped model, optimizer). ddp, opt: options of the two configurations."""
    ddp, opt = dict(ddp or {}), dict(opt or {})
    opt.setdefault("lr", 1e-2)
    opt.setdefault("weight_decay", 0.1)
    opt["use_distributed_optimizer"] = ddp.get("use_distributed_optimizer", False)
    opt.update(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    ddp_config = DistributedDataParallelConfig(**ddp)
    groups = groups or groups_of_all_ranks()
    model = DistributedDataParallel(None, ddp_config, module or Toy(dtype), pg_collection=groups, reduce_op=reduce_op)
    return model, get_megatron_optimizer(OptimizerConfig(**opt), [model])


def run_step(model, optimizer, step, accumulate=1):
    """One training step on this rank's part of the global batch; returns (loss sum, tokens, success, norm, zeros)."""
    tokens, mask = batch(step)
    size, rank = model.data_parallel_size, model.pg_collection.rank("dp_cp")
    rows = torch.arange(GLOBAL_BATCH).view(accumulate, size, -1)[:, rank]
    model.zero_grad_buffer(overwrite=step % 2 == 0)
    total = torch.zeros(())

    def backward(index):
        loss = token_loss_sum(model, tokens[rows[index]], mask[rows[index]], step)
        optimizer.scale_loss(loss).backward()
        total.add_(loss.detach())

    with model.no_sync():
        for index in range(accumulate - 1):
            backward(index)
    backward(accumulate - 1)
    count = sum(mask[rows[index]].sum() for index in range(accumulate)).to(torch.int64)
    finalize_model_grads([model], count)
    return (total, count, *optimizer.step())


def train(steps=4, accumulate=1, ddp=None, opt=None, dtype=torch.float32, **kwargs):
    """Train on every rank; returns (logical parameters, norms, per-step results)."""
    model, optimizer = build(ddp, opt, dtype, **kwargs)
    results = [run_step(model, optimizer, step, accumulate) for step in range(steps)]
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    return params, [result[3] for result in results], results


def train_plain(steps=4, lr=1e-2, weight_decay=0.1, clip=1.0, dtype=torch.float32, sgd=None, betas=(0.9, 0.999)):
    """The oracle: one process, the whole batch at once, torch's own optimizer. Unused matrices get a zero gradient."""
    model = Toy(dtype)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    if sgd is None:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=sgd, fused=True)
    norms = []
    for step in range(steps):
        for param in trained:
            param.grad = torch.zeros_like(param)
        tokens, mask = batch(step)
        (token_loss_sum(model, tokens, mask, step) / mask.sum()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip if clip else 1e30).item())
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}, norms
