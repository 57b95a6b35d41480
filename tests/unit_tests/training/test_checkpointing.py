"""Training checkpoints of a toy model under the real optimizers: bit-equal in the same layout, logically equal in another."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed

from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.reader import StepReader
from megatron.core.dist_checkpointing.steps import find_step
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import CheckpointError
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import model_parallel_seed, rng_state
from megatron.core.tokenizers import build_tokenizer
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import Arguments
from megatron.training.checkpointing import copy_tokenizer_files, load_training_checkpoint, open_store, save_training_checkpoint
from megatron.training.config import load_run_config
from megatron.training.train_state import TrainState
from tests.harness.distributed import run_distributed
from tests.harness.t0 import t0_flags


class Run:
    """A toy model of sizes that divide nothing, with dropout, its optimizer and scheduler, and four samples per step."""

    def __init__(self, directory, precision="fp32", distributed=True, seed=1234, **checkpoint):
        flags = t0_flags("unused", use_distributed_optimizer=distributed, bf16=precision == "bf16")
        config = load_run_config(flags).config
        options = dataclasses.replace(config.checkpoint, save=str(directory), **checkpoint)
        self.config = dataclasses.replace(config, checkpoint=options)
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.groups = create_process_groups(RankGrid(dp=world)) if world > 1 else ProcessGroupCollection.single_process()
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(7, 11), torch.nn.Dropout(0.5), torch.nn.LayerNorm(11), torch.nn.Linear(11, 3)]
        module = torch.nn.Sequential(*layers).to(self.config.parallel.params_dtype)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, bucket_size=50, grad_reduce_in_fp32=precision == "bf16"
        )
        self.model = DistributedDataParallel(self.config.transformer_config(), ddp, module, pg_collection=self.groups)
        self.optimizer = get_megatron_optimizer(self.config.optimizer, [self.model], pg_collection=self.groups)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=8,
            lr_decay_steps=40,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=40,
            wd_incr_style="constant",
        )
        model_parallel_seed(seed, self.groups)
        self.state = TrainState()
        self.said = []

    def step(self):
        """One step on this rank's share of four samples that depend on the step only."""
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(self.state.iteration))
        rank, size = self.groups.rank("dp"), self.groups.size("dp")
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(inputs[rank::size].to(self.config.parallel.params_dtype)).float().square().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.scheduler.step(4)
        samples = self.state.consumed_samples + 4
        self.state = dataclasses.replace(self.state, iteration=self.state.iteration + 1, consumed_samples=samples)

    def parts(self):
        """The arguments that save and load share."""
        return {
            "config": self.config,
            "model_chunks": [self.model],
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "groups": self.groups,
        }

    def save(self):
        store = open_store(self.config.checkpoint)
        save_training_checkpoint(store, train_state=self.state, **self.parts())
        store.release()

    def load(self):
        self.state = load_training_checkpoint(say=self.said.append, **self.parts())

    def everything(self):
        """Local state, comparable bit by bit."""
        self.optimizer.finish_param_sync()
        state = {name: p.detach().clone() for name, p in self.model.module.named_parameters()}
        for name, tensor in self.optimizer.sharded_state_dict().items():
            state |= {f"{name}{piece.box}": piece.data.clone() for piece in tensor.pieces}
        state |= rng_state()
        numbers = (self.state, self.optimizer.common_state_dict(), self.scheduler.state_dict())
        return state, numbers


def assert_same(first, second):
    assert first[1] == second[1]
    assert first[0].keys() == second[0].keys()
    different = [name for name in first[0] if not torch.equal(first[0][name], second[0][name])]
    assert different == []


def logical_state(directory, iteration):
    """All logical tensors of a step, merged."""
    step = find_step(Path(directory), iteration)
    with StepReader(step.path, step.manifest) as reader:
        return {name: reader.read(name) for name in step.manifest.tensors if not name.startswith("rng.")}


def manifest(directory, iteration) -> Manifest:
    return find_step(Path(directory), iteration).manifest


def six_straight_and_three_plus_three(directory, precision, distributed):
    straight = Run(f"{directory}/straight", precision, distributed)
    for _ in range(6):
        straight.step()
    first = Run(f"{directory}/resumed", precision, distributed)
    for _ in range(3):
        first.step()
    first.save()
    second = Run(f"{directory}/resumed", precision, distributed, seed=99)
    second.load()
    assert second.state.iteration == 3 and second.state.consumed_samples == 12
    for _ in range(3):
        second.step()
    assert_same(straight.everything(), second.everything())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_in_the_same_layout_is_bitwise_identical(tmp_path, ranks, precision, distributed):
    if ranks == 1:
        six_straight_and_three_plus_three(str(tmp_path), precision, distributed)
    else:
        run_distributed(six_straight_and_three_plus_three, ranks, str(tmp_path), precision, distributed)


def train_and_save(directory, precision, steps):
    run = Run(directory, precision)
    for _ in range(steps):
        run.step()
    run.save()


def load_and_save_elsewhere(source, target, precision):
    run = Run(target, precision, seed=99, load=source)
    run.load()
    run.save()
    return run.said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_data_parallel_sizes_two_three_one_two_keep_every_logical_value(tmp_path, precision):
    folders = [str(tmp_path / name) for name in "abcd"]
    run_distributed(train_and_save, 2, folders[0], precision, 4)
    said = run_distributed(load_and_save_elsewhere, 3, *folders[0:2], precision)
    load_and_save_elsewhere(*folders[1:3], precision)
    run_distributed(load_and_save_elsewhere, 2, *folders[2:4], precision)
    expected = logical_state(folders[0], 4)
    assert sum(name.startswith("optimizer.exp_avg.") for name in expected) == 6
    for folder in folders[1:]:
        state = logical_state(folder, 4)
        assert state.keys() == expected.keys()
        assert [name for name in state if not torch.equal(state[name], expected[name])] == []
        first, again = manifest(folders[0], 4).common, manifest(folder, 4).common
        assert first["optimizer"] == again["optimizer"] and first["scheduler"] == again["scheduler"]
        assert first["train_state"] == again["train_state"]
    assert ["the layout changed (world 2 -> 3, dp 2 -> 3)" in " ".join(texts) for texts in said] == [True] * 3


def test_random_streams_after_a_change_of_layout_depend_on_seed_and_step_only(tmp_path):
    run_distributed(train_and_save, 2, str(tmp_path), "fp32", 2)
    states = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        run = Run(tmp_path, seed=seed)
        run.load()
        states.append(rng_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_fp32_main_params_are_stored_once_and_bf16_ones_beside_the_weights(tmp_path):
    train_and_save(tmp_path / "fp32", "fp32", 1)
    train_and_save(tmp_path / "bf16", "bf16", 1)
    name = "optimizer.main_param.0.weight"
    assert manifest(tmp_path / "fp32", 1).tensors[name].alias_of == "model.0.weight"
    assert manifest(tmp_path / "bf16", 1).tensors[name].alias_of is None
    assert manifest(tmp_path / "bf16", 1).tensors["model.0.weight"].dtype == "BF16"
    state = logical_state(tmp_path / "bf16", 1)
    assert torch.equal(state[name].bfloat16(), state["model.0.weight"])


def test_finetune_takes_only_the_weights(tmp_path):
    train_and_save(tmp_path / "a", "bf16", 2)
    run = Run(tmp_path / "b", "bf16", seed=99, load=str(tmp_path / "a"), finetune=True)
    fresh = run.optimizer.common_state_dict()
    run.load()
    saved = logical_state(tmp_path / "a", 2)
    assert run.state == TrainState() and run.optimizer.common_state_dict() == fresh
    for name, param in run.model.module.named_parameters():
        assert torch.equal(param, saved[f"model.{name}"])
    for name, tensor in run.optimizer.sharded_state_dict().items():
        for piece in tensor.pieces:
            base = saved[f"model.{tensor.name.removeprefix('optimizer.main_param.')}"] if "main_param" in name else None
            expected = torch.zeros_like(piece.data) if base is None else base[piece.box.slices()].float()
            assert torch.equal(piece.data, expected)


def test_no_save_optim_and_no_load_optim(tmp_path):
    run = Run(tmp_path, no_save_optim=True)
    run.step()
    run.save()
    with pytest.raises(CheckpointError, match="holds no optimizer state; use --no-load-optim"):
        Run(tmp_path).load()
    other = Run(tmp_path, seed=99, no_load_optim=True)
    other.load()
    assert other.state.iteration == 1 and other.scheduler.num_steps == 4
    assert torch.equal(other.model.module[0].weight, run.model.module[0].weight)


def test_no_save_rng_and_no_load_rng(tmp_path):
    run = Run(tmp_path, no_save_rng=True)
    run.step()
    run.save()
    assert not any(name.startswith("rng.") for name in manifest(tmp_path, 1).tensors)
    kept = Run(tmp_path, seed=99, no_load_rng=True)
    before = rng_state()
    kept.load()
    assert all(torch.equal(state, before[name]) for name, state in rng_state().items())
    fresh = Run(tmp_path)
    fresh.load()
    assert "holds no random state" in " ".join(fresh.said)


def test_missing_checkpoints_start_at_zero_or_fail_as_asked(tmp_path):
    run = Run(tmp_path / "new")
    run.load()
    assert run.state == TrainState() and run.said == []
    run = Run(tmp_path / "new", load=str(tmp_path / "nowhere"))
    run.load()
    assert run.state == TrainState() and "no checkpoint in" in run.said[0]
    with pytest.raises(CheckpointError, match="check --load"):
        Run(tmp_path / "new", load=str(tmp_path / "nowhere"), exit_on_missing_checkpoint=True).load()


def test_ckpt_step_and_damage_of_the_newest_step(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
        run.save()
    chosen = Run(tmp_path, ckpt_step=1)
    chosen.load()
    assert chosen.state.iteration == 1
    chosen.step()
    expected = chosen.everything()
    path = tmp_path / "iter_0000002" / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fallen = Run(tmp_path, seed=99)
    fallen.load()
    assert fallen.state.iteration == 1
    assert "step 2 cannot be loaded" in fallen.said[0] and "1 step is lost" in fallen.said[0]
    fallen.step()
    assert_same(expected, fallen.everything())
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        Run(tmp_path, ckpt_step=2).load()


def test_a_parameter_that_was_not_gathered_is_never_saved(tmp_path, monkeypatch):
    run = Run(tmp_path, distributed=False)
    run.step()
    tensors = run.optimizer.sharded_state_dict()
    stale = tensors["optimizer.main_param.0.bias"]
    piece = dataclasses.replace(stale.pieces[0], data=stale.pieces[0].data + 1)
    tensors[stale.name] = dataclasses.replace(stale, pieces=(piece,))
    monkeypatch.setattr(run.optimizer, "sharded_state_dict", lambda: tensors)
    with pytest.raises(CheckpointError, match=r"main_param\.0\.bias differs from model\.0\.bias"):
        run.save()
    assert not (tmp_path / "iter_0000001").exists()


def test_tokenizer_files_are_copied_beside_the_checkpoints(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")

    class Files:
        def files(self):
            return [tmp_path / "vocab.json"]

    for _ in range(2):
        folder = copy_tokenizer_files(Files(), tmp_path / "run")
    assert (folder / "vocab.json").read_text() == "{}"
    copy_tokenizer_files(build_tokenizer("NullTokenizer", vocab_size=10), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["tokenizer"]


def test_megatrons_calls_save_and_load(tmp_path):
    run = Run(tmp_path)
    run.step()
    global_vars.set_args(Arguments(run.config))
    try:
        checkpointing.save_checkpoint(1, [run.model], run.optimizer, run.scheduler, 7.0)
        other = Run(tmp_path, seed=99)
        assert checkpointing.load_checkpoint([other.model], other.optimizer, other.scheduler) == (1, 7.0)
    finally:
        global_vars.unset_global_variables()
    assert_same(({}, run.everything()[1][1:]), ({}, other.everything()[1][1:]))
    assert torch.equal(run.model.module[3].weight, other.model.module[3].weight)
    assert manifest(tmp_path, 1).common["train_state"]["consumed_samples"] == 8
