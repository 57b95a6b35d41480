"""Splits of the layers: every layer once, in order; impossible ones are refused with the option names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.layer_split import PipelinePart, example_layout, split_layers


def counts(parts: tuple[PipelinePart, ...]) -> list[int]:
    """Layers of each part, after checking that the parts make up one model."""
    assert [index for part in parts for index in part.layers] == list(range(parts[-1].layers.stop))
    assert [part.embedding for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.head for part in parts] == [False] * (len(parts) - 1) + [True]
    return [len(part.layers) for part in parts]


@given(st.integers(0, 40), st.integers(1, 8))
def test_the_example_layout_is_valid_for_any_sizes(layers: int, parts: int) -> None:
    split = counts(split_layers(layers, parts, layout=example_layout(layers, parts)))
    assert sum(split) == layers and max(split) - min(split) <= 1


@given(st.integers(1, 6), st.integers(2, 8), st.integers(0, 5), st.integers(0, 5))
def test_first_and_last_are_as_given(each: int, parts: int, first: int, last: int) -> None:
    layers = first + last + each * (parts - 2)
    assert counts(split_layers(layers, parts, first=first, last=last)) == [first, *[each] * (parts - 2), last]


def test_embedding_and_head_count_as_layers() -> None:
    assert counts(split_layers(6, 4, count_embedding=True, count_head=True)) == [1, 2, 2, 1]
    assert counts(split_layers(7, 4, count_head=True)) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("Ett|tt", None),
        ("E|tt|tt|L", [0, 2, 2, 0]),
        ("Et*2|t,t | (t)*1|t*0L", [2, 2, 1, 0]),
        ("E|(t|)*3L", [0, 1, 1, 1, 0]),
        ("E(tt|t)*2L", [2, 3, 1]),
    ],
)
def test_layout_strings(layout: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="one L, at the very end"):
            split_layers(4, 2, layout=layout)
    else:
        assert counts(split_layers(sum(expected), len(expected), layout=layout)) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_layers": 30, "parts": 4}, "num_layers=30 leaves 30 to share among 4"),
        ({"num_layers": 4, "parts": 2, "first": 5}, "leaves -1 to share"),
        ({"num_layers": 4, "parts": 2, "first": 1, "last": 2}, "leaves 1 to share among 0"),
        ({"num_layers": 4, "parts": 1, "last": 1}, "decoder_last_pipeline_num_layers=1 needs pipeline_model_parallel_size > 1"),
        ({"num_layers": 4, "parts": 1, "count_head": True}, "account_for_loss_in_pipeline_split needs pipeline"),
        ({"num_layers": 4, "parts": 2, "first": 2, "count_head": True}, "exclude each other"),
        ({"num_layers": 4, "parts": 2, "first": 2, "layout": "Ett|ttL"}, "leave decoder_first_pipeline_num_layers"),
        ({"num_layers": 4, "parts": 2, "layout": "Ett|txL"}, "has 'x'"),
        ({"num_layers": 4, "parts": 2, "layout": "Et*|ttL"}, "repetition that cannot be read"),
        ({"num_layers": 4, "parts": 2, "layout": "E(((t*9999)*9999)*9999|L"}, "repetition that cannot be read"),
        ({"num_layers": 4, "parts": 2, "layout": "tEt|ttL"}, "one E, at the very beginning"),
    ],
)
def test_impossible_splits(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split_layers(**arguments)  # type: ignore[arg-type]
