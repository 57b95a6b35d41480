"""SavedModel: a trained model with its configuration and tokenizer, read back from a save directory for use in one process."""

import dataclasses
import re
import tempfile
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import RunConfig, load_run_config
from megatron.training.run_tokenizer import build_run_tokenizer, true_vocab_size


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A step of a run: its configuration (for one process) and tokenizer; `load` reads the weights.

    root: save directory. iteration: the step.
    """

    root: Path
    iteration: int
    config: RunConfig
    tokenizer: Tokenizer

    def load(self, device: torch.device, min_sequence_length: int = 0) -> GPTModel:
        """The whole model on `device`, in evaluation mode, whatever layout wrote its weights.

        min_sequence_length: positions it must have; more than it was trained with is possible unless they are learned.
        Raises CheckpointError if the step is damaged or is not of this model.
        """
        alone = ProcessGroupCollection.single_process()
        model = GPTModel(
            self.config.transformer_config(),
            vocab_size=true_vocab_size(self.config, self.tokenizer),
            max_sequence_length=_positions(self.config, min_sequence_length),
            pg_collection=alone,
            device=device,
        )
        CheckpointStore(self.root).load(self.iteration, model_sharded_tensors(model, alone).values())
        return model.eval()


def find_saved_model(directory: str | Path, step: int | None = None) -> SavedModel:
    """The model of a save directory, or of one `iter_*` folder in it. step: default the newest complete one.

    Raises CheckpointError if there is no complete step, ConfigError if configuration or tokenizer cannot be used.
    """
    root, step = _split(Path(directory), step)
    store = CheckpointStore(root)
    iteration = store.latest_complete() if step is None else step
    if iteration is None:
        raise CheckpointError(f"{root} holds no checkpoint; give the folder that --save named")
    config = one_process(_saved_config(store, iteration))
    return SavedModel(root, iteration, config, build_run_tokenizer(config, copies=root / "tokenizer"))


def _saved_config(store: CheckpointStore, iteration: int) -> RunConfig:
    """From config.yaml of the save directory; where that is missing, from the copy that each checkpoint has of it."""
    file = store.directory / "config.yaml"
    if file.is_file():
        return load_run_config(["--config", str(file)]).config
    text = store.read_common(iteration).get("config")
    if not isinstance(text, str):
        raise ConfigError(f"{file} is missing, and step {iteration} holds no copy of it; copy the run's config.yaml there")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.yaml"
        copy.write_text(text, encoding="utf-8")
        return load_run_config(["--config", str(copy)]).config


def one_process(config: RunConfig) -> RunConfig:
    """The same model on one rank: parallel sizes 1, nothing recomputed or compiled."""
    precision = {name: getattr(config.parallel, name) for name in ("fp16", "bf16")}
    return dataclasses.replace(
        config,
        parallel=type(config.parallel)(**precision),
        model=dataclasses.replace(
            config.model,
            torch_compile=False,
            recompute_granularity=None,
            recompute_method=None,
            recompute_num_layers=None,
        ),
    )


def _split(directory: Path, step: int | None) -> tuple[Path, int | None]:
    """(save directory, step) of a save directory or of an `iter_0000100` folder in it."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; give a run's save directory")
    named = re.fullmatch(r"iter_(\d{7,})", directory.resolve().name)
    if named is None:
        return directory, step
    if step is not None and step != int(named[1]):
        raise ConfigError(f"step {step} is asked for, but {directory} is the checkpoint of step {int(named[1])}")
    return directory.resolve().parent, int(named[1])


def _positions(config: RunConfig, wanted: int) -> int:
    trained = config.model.max_position_embeddings or config.data.seq_length
    return trained if config.model.position_embedding_type == "learned_absolute" else max(trained, wanted)
