"""Continue texts with a trained model, from a checkpoint of any layout.

    python tools/generate.py --load runs/a/checkpoints --prompt "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-k 40

Without --temperature, --top-k or --top-p the most probable token is taken each time (--greedy). The same seed gives the same
text, whatever other prompts there are and however they are batched. A text ends at the tokenizer's end-of-document token.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron.core.errors import ConfigError, MegatronError
from megatron.core.inference.engine import Generation, generate, generate_stream
from megatron.core.inference.sampling import Sampling
from megatron.training.saved_model import find_saved_model


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help lists the options\n")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--load", required=True, help="a run's save directory, or one iter_* folder in it")
    parser.add_argument("--ckpt-step", type=int, help="step to load (default: the newest)")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompt-file", help="text file with one prompt per line")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to add at most (default: 100)")
    parser.add_argument("--greedy", action="store_true", help="take the most probable token (the default)")
    parser.add_argument("--temperature", type=float, help="draw, with logits divided by this (default: 1 when drawing)")
    parser.add_argument("--top-k", type=int, help="draw from the K most probable tokens")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens that together have this probability")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts computed together (default: 8); changes no text")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole text anew for each token (slow; the same text)")
    parser.add_argument("--add-bos", action="store_true", help="begin each prompt with the tokenizer's BOS, as in the training data")
    parser.add_argument("--allow-special-tokens", action="store_true", help="let the literal text of special tokens become their ids")
    parser.add_argument("--ignore-eod", action="store_true", help="go on after an end-of-document token")
    parser.add_argument("--stream", action="store_true", help="print the text while it is made, one prompt after the other")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt: prompt, text, tokens, new_tokens, finish_reason")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: cuda if there is one)")
    return parser.parse_args(argv)


def sampling_of(options: argparse.Namespace) -> Sampling:
    """How tokens are chosen. Raises ConfigError for contradictory or wrong options."""
    drawing = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p") if getattr(options, name) is not None}
    if options.greedy and drawing:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in drawing)
        raise ConfigError(f"--greedy draws nothing, so {given} would have no effect; leave one of them out")
    return Sampling(greedy=not drawing, seed=options.seed, **drawing)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts, those of --prompt first. Raises ConfigError if there are none."""
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        try:
            prompts += Path(options.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from error
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    return prompts


def check_options(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go together or are out of range."""
    problems = []
    if options.max_new_tokens < 0:
        problems.append(f"--max-new-tokens must be 0 or more, got {options.max_new_tokens}")
    if options.batch_size < 1:
        problems.append(f"--batch-size must be 1 or more, got {options.batch_size}")
    if options.stream and options.json:
        problems.append("--stream prints text as it comes and --json whole results; choose one")
    if options.device == "cuda" and not torch.cuda.is_available():
        problems.append("--device cuda, but torch sees no CUDA device; use cpu or auto")
    if problems:
        raise ConfigError("; ".join(problems))


class Session:
    """A loaded model and the options of this command."""

    def __init__(self, options: argparse.Namespace) -> None:
        check_options(options)
        self.options, self.sampling, self.prompts = options, sampling_of(options), read_prompts(options)
        saved = find_saved_model(options.load, options.ckpt_step)
        self.tokenizer = saved.tokenizer
        self.rows = [
            self.tokenizer.tokenize(prompt, add_bos=options.add_bos, allow_special=options.allow_special_tokens)
            for prompt in self.prompts
        ]
        self.start_token = self.tokenizer.eod if self.tokenizer.bos is None else self.tokenizer.bos
        self.eod = None if options.ignore_eod else self.tokenizer.eod
        use_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
        longest = max(len(row) for row in self.rows) or 1
        self.model = saved.load(torch.device("cuda" if use_cuda else "cpu"), longest + options.max_new_tokens)

    def results(self) -> Iterator[tuple[int, Generation]]:
        """(number of the prompt, result), in the order of the prompts, batch by batch."""
        for first in range(0, len(self.rows), self.options.batch_size):
            numbers = range(first, min(first + self.options.batch_size, len(self.rows)))
            yield from zip(numbers, generate(prompts=[self.rows[n] for n in numbers], sample_ids=numbers, **self._request()), strict=True)

    def pieces(self, number: int) -> Iterator[str]:
        """The text that follows a prompt, piece by piece, as it is made."""
        made = generate_stream(prompts=[self.rows[number]], sample_ids=[number], **self._request())
        return self._decoded(self.rows[number], (token.token for token in made))

    def text(self, number: int, new_tokens: Sequence[int]) -> str:
        """The text that new tokens add to a prompt's."""
        return "".join(self._decoded(self.rows[number], new_tokens))

    def _request(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_new_tokens": self.options.max_new_tokens,
            "sampling": self.sampling,
            "eod": self.eod,
            "start_token": self.start_token,
            "use_cache": not self.options.no_cache,
        }

    def _decoded(self, prompt: Sequence[int], new_tokens: Iterable[int]) -> Iterator[str]:
        """Text of the new tokens as it reads behind the prompt: a first word keeps its space. Special ids give nothing."""
        decoder = self.tokenizer.stream_decoder()
        for token in prompt:
            decoder.push(token)
        for token in new_tokens:
            yield decoder.push(token)
        yield decoder.finish()


def print_stream(session: Session) -> None:
    """Each prompt and, as it comes, its continuation."""
    for number, prompt in enumerate(session.prompts):
        print(("\n" if number else "") + prompt, end="", flush=True)
        for piece in session.pieces(number):
            print(piece, end="", flush=True)
        print(flush=True)


def print_json(session: Session) -> None:
    """One object per line."""
    for number, made in session.results():
        record = {
            "prompt": session.prompts[number],
            "text": session.text(number, made.new_tokens),
            "tokens": made.tokens,
            "new_tokens": made.new_tokens,
            "finish_reason": made.finish_reason,
        }
        print(json.dumps(record), flush=True)


def print_text(session: Session) -> None:
    """Prompt and continuation, an empty line between two prompts."""
    for number, made in session.results():
        print(("\n" if number else "") + session.prompts[number] + session.text(number, made.new_tokens), flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 2 for wrong options or configuration, 1 for any other failure."""
    options = parse_arguments(argv)
    try:
        session = Session(options)
        (print_stream if options.stream else print_json if options.json else print_text)(session)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegatronError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
