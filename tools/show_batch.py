"""Show what a global batch of a run holds, as the run will see it: sample ids, documents, tokens, masks, positions, text.

    python tools/show_batch.py --config configs/debug_cpu.yaml [flags of pretrain_gpt.py] --step 0 [--json]

Steps count from 0: step K is the global batch of iteration K + 1. Nothing is trained; the index cache is filled as by the run.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import AnyGPTDataset, GPTDataset, Span, build_gpt_datasets
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import RunConfig, parse_command_line
from megatron.training.data import dataset_config
from megatron.training.plan import TrainingPlan
from megatron.training.run_tokenizer import build_run_tokenizer


def run_config(flags: Sequence[str]) -> RunConfig:
    """The configuration of the run, from the flags of pretrain_gpt.py. ConfigError for those that ask for something else."""
    command = parse_command_line(flags)
    if command.resolution is None or command.print_config or command.dry_run:
        raise ConfigError("help, --print-config and --dry-run belong to pretrain_gpt.py; leave them out here")
    return command.resolved.config


def batch_ids(config: RunConfig, step: int, world_size: int) -> tuple[range, int]:
    """(sample ids of the step's global batch, samples of the whole run). ConfigError for a step that the run does not have."""
    parallel = config.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    # A stated global batch is the same for every number of ranks; only its default depends on them.
    data_parallel = 1 if config.training.global_batch_size else max(1, world_size // model_ranks)
    plan = TrainingPlan.of(config, data_parallel)
    if not 0 <= step < plan.train_iters:
        raise ConfigError(f"--step {step} is not a step of this run, which has {plan.train_iters}, counted from 0")
    first = plan.calculator.samples_after(step)
    return range(first, first + plan.global_batch_size(first)), plan.train_samples


def describe_sample(dataset: AnyGPTDataset, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One sample as plain values; tokens are the seq_length + 1 ids (without padding)."""
    part, number = dataset.locate(index) if isinstance(dataset, BlendedDataset) else (dataset, index)
    spans: list[Span] = part.spans(number) if isinstance(part, GPTDataset) else []
    item, ids = dataset[index], dataset.ids(index).tolist()
    positions = item["position_ids"].tolist()
    sample = {
        "id": index,
        "dataset": part.tokens.prefix if isinstance(part, GPTDataset) else "mock",
        "sample_of_dataset": number,
        "documents": [dataclasses.asdict(span) for span in spans],
        "tokens": ids,
        "loss_mask": item["loss_mask"].tolist(),
        "position_ids": positions,
        "position_resets": [k for k, position in enumerate(positions) if k and position == 0],
    }
    if "document_ids" in item:
        sample["document_ids"] = item["document_ids"].tolist()
    return {**sample, "text": tokenizer.detokenize(ids)}


def show(batch: dict[str, Any]) -> None:
    """Print a batch for people."""
    print(f"step {batch['step']} (iteration {batch['step'] + 1}): {len(batch['samples'])} samples")
    for sample in batch["samples"]:
        documents = ", ".join(f"{d['document']}[{d['start']}:{d['stop']}]" for d in sample["documents"])
        masked = [k for k, weight in enumerate(sample["loss_mask"]) if not weight]
        print(
            f"\nsample {sample['id']}: number {sample['sample_of_dataset']} of {sample['dataset']}, "
            f"documents: {documents or '-'}"
        )
        print(f"  tokens           {' '.join(map(str, sample['tokens']))}")
        print(f"  no loss at       {' '.join(map(str, masked)) or '-'}")
        print(f"  positions reset  {' '.join(map(str, sample['position_resets'])) or '-'}")
        print(f"  text             {sample['text']!r}")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 2 wrong configuration or data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--step", type=int, required=True, metavar="K", help="which global batch, counted from 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--world-size", type=int, default=1, help="ranks of the run, where no global batch size is set (default 1)"
    )
    options, run_flags = parser.parse_known_args(argv)
    try:
        config = run_config(run_flags)
        ids, train_samples = batch_ids(config, options.step, options.world_size)
        tokenizer = build_run_tokenizer(config)
        dataset = build_gpt_datasets(dataset_config(config, tokenizer), (train_samples, 0, 0))[0]
        if dataset is None:
            raise ConfigError("the run has no training data; its split gives the training set no documents")
        batch = {"step": options.step, "samples": [describe_sample(dataset, index, tokenizer) for index in ids]}
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(batch))
    else:
        show(batch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
