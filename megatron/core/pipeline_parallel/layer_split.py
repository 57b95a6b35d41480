"""Which layers each part of a pipelined model holds. Pure arithmetic.

A part is what one model chunk of one stage holds: a run of layers, perhaps the embedding before them, perhaps the head after
them. Parts are numbered in the order in which a microbatch passes them.

    8 layers, 2 stages, 2 chunks each       E 0 1 | 2 3 | 4 5 | 6 7 H        4 parts
    the same as a layout string             Ett|tt|tt|ttL
"""

import dataclasses
import re
from collections.abc import Sequence

from megatron.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PipelinePart:
    """layers: global numbers from 0, perhaps none. embedding, head: whether the part holds them."""

    layers: range
    embedding: bool
    head: bool


def whole_model(num_layers: int) -> PipelinePart:
    """Everything in one part."""
    return PipelinePart(range(num_layers), True, True)


def split_layers(
    num_layers: int,
    parts: int,
    *,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_head: bool = False,
    layout: str | None = None,
) -> tuple[PipelinePart, ...]:
    """The parts of a model of `num_layers` layers, in model order.

    Args:
        parts: stages x chunks per stage.
        first, last: layers of the first and of the last part (decoder_first_pipeline_num_layers, decoder_last_...); the others
            share the rest evenly.
        count_embedding, count_head: the embedding (the head) weighs as much as a layer in an even split.
        layout: explicit; E = embedding, t = one layer, L = head and loss, `|` ends a part, `x*n` and `(xy)*n` repeat, commas are
            ignored.

    Raises ConfigError, naming the options, where the layers can't be split so.
    """
    if layout is not None:
        if first is not None or last is not None or count_embedding or count_head:
            raise ConfigError(
                "pipeline_model_parallel_layout says where every layer is; leave decoder_first_pipeline_num_layers, "
                "decoder_last_pipeline_num_layers, account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split out"
            )
        return _parse_layout(layout, num_layers, parts)
    return _from_counts(_counts(num_layers, parts, first, last, count_embedding, count_head))


def _counts(
    num_layers: int, parts: int, first: int | None, last: int | None, count_embedding: bool, count_head: bool
) -> list[int]:
    given = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    if parts == 1:
        counted = ["account_for_embedding_in_pipeline_split"] * count_embedding + ["account_for_loss_in_pipeline_split"] * count_head
        if named or counted:
            raise ConfigError(f"{', '.join(named + counted)} needs pipeline_model_parallel_size > 1; leave it out")
        return [num_layers]
    if named and (count_embedding or count_head):
        raise ConfigError(
            f"{', '.join(named)} and account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split exclude each other"
        )
    shared = num_layers - (first or 0) - (last or 0) + count_embedding + count_head
    among = parts - (first is not None) - (last is not None)
    if shared < 0 or (among == 0 and shared) or (among and shared % among):
        what = f"num_layers={num_layers}" + (f" less {', '.join(named)}" if named else "")
        what += " plus the embedding" * count_embedding + " plus the head" * count_head
        raise ConfigError(
            f"{what} leaves {shared} to share among {among} of the {parts} parts (pipeline_model_parallel_size x chunks), which must "
            "come out even; choose decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers, or give "
            f"pipeline_model_parallel_layout (such as {example_layout(num_layers, parts)!r})"
        )
    counts = [shared // among if among else 0] * parts
    counts[0] = counts[0] - count_embedding if first is None else first
    counts[-1] = counts[-1] - count_head if last is None else last
    if min(counts) < 0:
        raise ConfigError(f"num_layers={num_layers} is too few for {parts} parts that also count the embedding and the head")
    return counts


def example_layout(num_layers: int, parts: int) -> str:
    """A valid layout string: as even as can be, longer parts in the middle."""
    counts = [num_layers // parts] * parts
    for index in sorted(range(parts), key=lambda part: abs(2 * part - (parts - 1)))[: num_layers % parts]:
        counts[index] += 1
    return "|".join(
        "E" * (part == 0) + (f"t*{count}" if count > 1 else "t" * count) + "L" * (part == parts - 1)
        for part, count in enumerate(counts)
    )


def _from_counts(counts: Sequence[int]) -> tuple[PipelinePart, ...]:
    parts, start = [], 0
    for index, count in enumerate(counts):
        parts.append(PipelinePart(range(start, start + count), index == 0, index == len(counts) - 1))
        start += count
    return tuple(parts)


def _parse_layout(layout: str, num_layers: int, parts: int) -> tuple[PipelinePart, ...]:
    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"pipeline_model_parallel_layout={layout!r} {why}; E is the embedding, t a layer, L the head, | ends a part, *n repeats "
            f"(such as {example_layout(num_layers, parts)!r})"
        )

    plain = re.sub(r"[\s,]", "", layout)
    while "*" in plain:
        expanded = re.sub(r"(?:\(([EtL|]*)\)|([EtL|]))\*(\d{1,4})", lambda m: (m[1] or m[2] or "") * int(m[3]), plain, count=1)
        if expanded == plain or len(expanded) > 100_000:
            raise refuse("has a repetition that cannot be read")
        plain = expanded
    plain = plain.replace("(", "").replace(")", "")
    wrong = sorted(set(plain) - set("EtL|"))
    if wrong:
        raise refuse(f"has {', '.join(map(repr, wrong))}")
    texts = plain.split("|")
    if len(texts) != parts:
        raise refuse(f"has {len(texts)} part(s), pipeline_model_parallel_size x chunks per stage is {parts}")
    if plain.count("t") != num_layers:
        raise refuse(f"has {plain.count('t')} layer(s), num_layers is {num_layers}")
    if not texts[0].startswith("E") or plain.count("E") != 1:
        raise refuse("must have one E, at the very beginning")
    if not texts[-1].endswith("L") or plain.count("L") != 1:
        raise refuse("must have one L, at the very end")
    return _from_counts([text.count("t") for text in texts])
