"""Model state by logical name: padding left out, tied parameters once, only persistent buffers, compiled modules alike."""

import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection


class Toy(torch.nn.Module):
    """A padded embedding, a tied head, a persistent and a temporary buffer."""

    def __init__(self, padded: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(padded, 4)
        set_param_meta(self.embedding.weight, ParamMeta(logical_shape=(101, 4)))
        self.head = torch.nn.Linear(4, padded, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("bias", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)


ALONE = ProcessGroupCollection.single_process()


def test_names_and_logical_shapes():
    tensors = model_sharded_tensors(Toy(104), ALONE)
    assert {name: tensor.global_shape for name, tensor in tensors.items()} == {
        "model.embedding.weight": (101, 4),
        "model.norm.weight": (4,),
        "model.norm.bias": (4,),
        "model.bias": (3,),
    }


def test_another_vocabulary_padding_loads_the_same_rows_and_leaves_the_padding_alone(tmp_path):
    torch.manual_seed(1)
    first, second = Toy(104), Toy(128)
    store = CheckpointStore(tmp_path)
    store.save(1, model_sharded_tensors(first, ALONE).values(), {})
    with torch.no_grad():
        second.embedding.weight[101:] = 50.0
    store.load(1, model_sharded_tensors(second, ALONE).values())
    assert torch.equal(second.embedding.weight[:101], first.embedding.weight[:101])
    assert (second.embedding.weight[101:] == 50.0).all()
    assert torch.equal(second.bias, first.bias)


def test_a_compiled_module_has_the_same_names():
    model = Toy(104)
    assert list(model_sharded_tensors(torch.compile(model), ALONE)) == list(model_sharded_tensors(model, ALONE))
