"""Generation of text, token by token, for a batch of prompts of different length; with or without a key/value cache.

    prompts  a b c . .     prefill: one pass over the prompts, padded on the right     row 0: logits at c, row 1: logits at h
             d e f g h     then one token per row and pass, each at its own position
    A row that has ended (EOD, or enough tokens) keeps its place in the batch; its result is closed and nothing is added.

The result of a row depends on its prompt and its sample id alone: not on the other rows, their number, or the cache.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from megatron.core.errors import ConfigError
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.sampling import RowStreams, Sampling, choose

# What is added to a row's logits before a token is chosen, given the row and its new tokens so far: {token: bias}.
LogitBias = Callable[[int, Sequence[int]], Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class GeneratedToken:
    """One token of a stream. index: its number among the row's new tokens. finish_reason: set on the row's last token."""

    row: int
    index: int
    token: int
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """A finished row.

    tokens: prompt and new tokens. new_tokens: the new ones; the EOD that ended the row is the last of them.
    finish_reason: `eod`, or `length` when max_new_tokens were made.
    """

    tokens: list[int]
    new_tokens: list[int]
    finish_reason: str


def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    eod: int | None = None,
    start_token: int | None = None,
    use_cache: bool = True,
    logit_bias: LogitBias | None = None,
    sample_ids: Sequence[int] | None = None,
) -> list[Generation]:
    """Continue each prompt; see `generate_stream` for the arguments and errors. With max_new_tokens=0 the prompts come back."""
    new: list[list[int]] = [[] for _ in prompts]
    reasons = ["length"] * len(prompts)
    for made in generate_stream(
        model,
        prompts,
        max_new_tokens,
        sampling=sampling,
        eod=eod,
        start_token=start_token,
        use_cache=use_cache,
        logit_bias=logit_bias,
        sample_ids=sample_ids,
    ):
        new[made.row].append(made.token)
        reasons[made.row] = made.finish_reason or reasons[made.row]
    return [
        Generation([*prompt, *added], added, reason) for prompt, added, reason in zip(prompts, new, reasons, strict=True)
    ]


def generate_stream(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    eod: int | None = None,
    start_token: int | None = None,
    use_cache: bool = True,
    logit_bias: LogitBias | None = None,
    sample_ids: Sequence[int] | None = None,
) -> Iterator[GeneratedToken]:
    """Yield new tokens as they are made, row by row within a step.

    Args:
        model: a `GPTModel`, whole on this rank.
        prompts: token ids, of any lengths.
        max_new_tokens: tokens per row at most; a row ends earlier with `eod`.
        sampling: default greedy. eod: the token that ends a row, if any.
        start_token: put before an empty prompt, for the model only (BOS or EOD); it is not part of the result.
        use_cache: keep keys and values instead of computing the whole row anew for each token; the result is the same.
        logit_bias: see `LogitBias`.
        sample_ids: number of each row's random stream; default 0, 1, ... Give a row the same id to get the same text elsewhere.

    Raises ConfigError (a ValueError) at the call: a negative count, an empty prompt without start_token, a token outside of the
    vocabulary, or a prompt that with its new tokens is longer than the model's max_sequence_length (which with rotary positions costs
    nothing to raise when the model is built).
    """
    rows = [list(prompt) for prompt in prompts]
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    ids = list(range(len(rows))) if sample_ids is None else list(sample_ids)
    if len(ids) != len(rows):
        raise ConfigError(f"sample_ids must be one per prompt: {len(ids)} for {len(rows)} prompts")
    for index, row in enumerate(rows):
        if not row and start_token is None:
            raise ConfigError(f"prompt {index} is empty and there is no BOS or EOD token to start from; give at least one token")
        if not row:
            row.append(start_token)  # type: ignore[arg-type]
    _check_tokens(model, rows)
    _check_lengths(model, rows, max_new_tokens)
    if not rows or not max_new_tokens:
        return iter(())
    return _run(model, rows, max_new_tokens, sampling or Sampling(greedy=True), eod, use_cache, logit_bias, ids)


def _check_tokens(model: torch.nn.Module, rows: list[list[int]]) -> None:
    for index, row in enumerate(rows):
        for token in row:
            if not 0 <= token < model.vocab_size:  # type: ignore[operator]
                raise ConfigError(f"prompt {index} holds token {token}, outside of the vocabulary of {model.vocab_size} tokens")


def _check_lengths(model: torch.nn.Module, rows: list[list[int]], max_new_tokens: int) -> None:
    limit = int(model.max_sequence_length)  # type: ignore[arg-type]
    for index, row in enumerate(rows):
        if len(row) + max_new_tokens > limit:
            raise ConfigError(
                f"prompt {index} has {len(row)} tokens; with max_new_tokens={max_new_tokens} that is {len(row) + max_new_tokens}, "
                f"more than the model's {limit} positions; use at most {max(0, limit - len(row))} new tokens"
            )


def _run(
    model: torch.nn.Module,
    rows: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eod: int | None,
    use_cache: bool,
    logit_bias: LogitBias | None,
    sample_ids: list[int],
) -> Iterator[GeneratedToken]:
    device = next(model.parameters()).device
    decoder: Decoder = CachedDecoder(model, rows, max_new_tokens, device) if use_cache else PlainDecoder(model, rows, device)
    streams = RowStreams(sampling.seed, sample_ids)
    new: list[list[int]] = [[] for _ in rows]
    reasons: list[str | None] = [None] * len(rows)
    while None in reasons:
        logits = decoder.logits()
        for row, bias in _biases(logit_bias, new, reasons):
            _add_bias(logits, row, bias)
        chosen = choose(logits, sampling, None if sampling.takes_best else streams.uniform()).tolist()
        for row, token in enumerate(chosen):
            if reasons[row] is not None:
                continue
            new[row].append(token)
            decoder.append(row, token)
            reasons[row] = "eod" if token == eod else "length" if len(new[row]) == max_new_tokens else None
            yield GeneratedToken(row, len(new[row]) - 1, token, reasons[row])


def _biases(
    logit_bias: LogitBias | None, new: list[list[int]], reasons: list[str | None]
) -> Iterator[tuple[int, Mapping[int, float]]]:
    if logit_bias is not None:
        yield from ((row, logit_bias(row, tokens)) for row, tokens in enumerate(new) if reasons[row] is None)


def _add_bias(logits: torch.Tensor, row: int, bias: Mapping[int, float]) -> None:
    for token, value in bias.items():
        if not 0 <= token < logits.shape[-1]:
            raise ConfigError(f"logit bias for token {token}, but the vocabulary has {logits.shape[-1]} tokens")
        logits[row, token] += value


class Decoder(Protocol):
    """Rows that grow, and the logits of the token that follows each."""

    def logits(self) -> torch.Tensor:
        """fp32 [b, V], V the true vocabulary, for the token after each row's last."""
        ...

    def append(self, row: int, token: int) -> None:
        """Put a token behind a row; at most one per row between two calls of `logits`."""
        ...


class PlainDecoder:
    """Computes whole rows each time: the oracle of `CachedDecoder`."""

    def __init__(self, model: torch.nn.Module, rows: list[list[int]], device: torch.device) -> None:
        self.model, self.device = model, device
        self.rows = [list(row) for row in rows]

    def logits(self) -> torch.Tensor:
        """See `Decoder`."""
        tokens, lengths = _padded(self.rows, self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with _inference(self.model):
            return _at(self.model(tokens, positions), lengths - 1)

    def append(self, row: int, token: int) -> None:
        """See `Decoder`."""
        self.rows[row].append(token)


class CachedDecoder:
    """Computes the prompts once, then one new token per row; a row without a new one repeats its last, to no effect."""

    def __init__(self, model: torch.nn.Module, rows: list[list[int]], max_new_tokens: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.cache = KVCache(max(len(row) for row in rows) + max_new_tokens)
        self._prompts: list[list[int]] | None = [list(row) for row in rows]
        self._last = [row[-1] for row in rows]
        self._lengths = [len(row) for row in rows]

    def logits(self) -> torch.Tensor:
        """See `Decoder`."""
        if self._prompts is not None:
            tokens, lengths = _padded(self._prompts, self.device)
            positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
            self._prompts = None
            return self._forward(tokens, positions, lengths - 1)
        tokens = torch.tensor(self._last, device=self.device).unsqueeze(-1)
        positions = torch.tensor(self._lengths, device=self.device).unsqueeze(-1) - 1
        return self._forward(tokens, positions, torch.zeros(len(self._last), dtype=torch.int64, device=self.device))

    def append(self, row: int, token: int) -> None:
        """See `Decoder`."""
        self._last[row] = token
        self._lengths[row] += 1

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.cache.begin(positions)
        with _inference(self.model):
            return _at(self.model(tokens, positions, inference_context=self.cache), index)


def _padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [b, longest], 0 behind each row's end; lengths int64 [b])."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def _at(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """fp32 [b, V]: of logits [b, s, V], each row's at its index [b]."""
    return logits[torch.arange(logits.shape[0], device=logits.device), index].float()


@contextlib.contextmanager
def _inference(model: torch.nn.Module) -> Iterator[None]:
    """No gradients, no dropout; the model's mode comes back afterwards. Never held across a yield of the stream."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
