"""GPT data sets: megatron-core's samples bit for bit, blends, splits, document boundaries, mock data."""

import collections
import json
import logging
import pathlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import Blend, GPTDatasetConfig, build_gpt_datasets
from megatron.core.datasets.packed_sample import SampleFormat
from megatron.core.errors import ConfigError, DataError
from tests.harness.d0 import EOD, VOCAB_SIZE, d0_documents, write_d0, write_documents

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "megatron_core"
D0, D1 = str(FIXTURES / "d0"), str(FIXTURES / "d1")


def config(cache, **changes):
    fields = {"seq_length": 16, "split": "100,0,0", "blend": Blend((D0,)), "eod": EOD, "vocab_size": VOCAB_SIZE}
    return GPTDatasetConfig(**(fields | {"cache_path": str(cache)} | changes))


def train(cache, size, **changes):
    return build_gpt_datasets(config(cache, **changes), (size, 0, 0))[0]


def all_ids(dataset):
    return [dataset.ids(i).tolist() for i in range(len(dataset))]


def megatron_samples(name):
    return json.loads((FIXTURES / "megatron_sample_order.json").read_text())[name]


# --- the order of megatron-core


@pytest.mark.parametrize("mmap", [True, False])
def test_one_set_gives_megatron_cores_samples_in_its_order(tmp_path, mmap):
    assert all_ids(train(tmp_path, 48, mmap=mmap)) == megatron_samples("d0_48")


def test_a_blend_gives_megatron_cores_samples_in_its_order(tmp_path):
    assert all_ids(train(tmp_path, 64, blend=Blend((D0, D1), (0.7, 0.3)))) == megatron_samples("blend_64")


def test_a_path_per_split_gives_the_same_samples(tmp_path):
    per_split = (Blend((D0, D1), (0.7, 0.3)), Blend((D0,)), None)
    train_set, valid, test = build_gpt_datasets(
        config(tmp_path, blend=None, split=None, blend_per_split=per_split), (64, 48, 5)
    )
    assert all_ids(train_set) == megatron_samples("blend_64")
    assert all_ids(valid) == megatron_samples("d0_48")
    assert test is None


def test_cached_indices_give_the_same_samples(tmp_path):
    for _ in range(2):
        assert all_ids(train(tmp_path, 64, blend=Blend((D0, D1), (0.7, 0.3)))) == megatron_samples("blend_64")


# --- items


def test_an_item_is_the_ids_shifted_by_one(tmp_path):
    dataset = train(tmp_path, 48)
    for k in (0, 7, 47):
        item, ids = dataset[k], megatron_samples("d0_48")[k]
        assert item["tokens"].tolist() == ids[:-1]
        assert item["labels"].tolist() == ids[1:]
        assert item["sample_id"] == k
        assert {name: item[name].dtype for name in ("tokens", "labels", "position_ids", "loss_mask")} == {
            "tokens": np.int64,
            "labels": np.int64,
            "position_ids": np.int64,
            "loss_mask": np.float32,
        }
        assert "document_ids" not in item


def test_items_outside_the_data_set_do_not_exist(tmp_path):
    for dataset in (train(tmp_path, 48), train(tmp_path, 48, blend=Blend((D0, D1)))):
        for index in (48, -1):
            with pytest.raises(IndexError):
                dataset[index]


def test_spans_name_the_documents_of_a_sample(tmp_path):
    dataset = train(tmp_path, 48)
    documents = d0_documents()
    for k in range(48):
        assert [t for s in dataset.spans(k) for t in documents[s.document][s.start : s.stop]] == megatron_samples("d0_48")[k]


def test_ids_beyond_the_vocabulary_are_refused_by_name(tmp_path):
    dataset = train(tmp_path, 48, vocab_size=100, eod=None)
    with pytest.raises(DataError, match=r"token id 100.*another tokenizer") as caught:
        dataset[0]
    assert D0 in str(caught.value)


# --- R15: document boundaries

E = 100
ROW = np.array([5, 6, E, 7, 8, 9, E, 4, 3])


def sample(ids, **options):
    return SampleFormat(8, E, **options).sample(np.array(ids), 0)


def test_without_options_documents_are_one_text():
    item = sample(ROW)
    assert item["tokens"].tolist() == [5, 6, E, 7, 8, 9, E, 4]
    assert item["labels"].tolist() == [6, E, 7, 8, 9, E, 4, 3]
    assert item["position_ids"].tolist() == list(range(8))
    assert item["loss_mask"].tolist() == [1.0] * 8
    assert "document_ids" not in item


def test_positions_restart_after_each_eod():
    item = sample(ROW, reset_position_ids=True)
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert item["loss_mask"].tolist() == [1.0] * 8
    assert "document_ids" not in item


def test_an_eod_belongs_to_the_document_it_ends():
    item = sample(ROW, reset_attention_mask=True)
    assert item["document_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert item["position_ids"].tolist() == list(range(8))


def test_only_predictions_from_an_eod_are_masked():
    assert sample(ROW, eod_mask_loss=True)["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 0, 1]


@given(ids=st.lists(st.sampled_from([1, 2, E]), min_size=9, max_size=9))
def test_positions_and_documents_equal_a_walk_over_the_tokens(ids):
    item = sample(ids, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    position, document = 0, 0
    for k, token in enumerate(ids[:-1]):
        assert (item["position_ids"][k], item["document_ids"][k], item["loss_mask"][k]) == (position, document, token != E)
        position, document = (0, document + 1) if token == E else (position + 1, document)


def test_a_padded_sample_has_no_loss_on_padding_and_the_next_sample_is_whole():
    padded = sample(ROW[:4], eod_mask_loss=True, reset_attention_mask=True)
    assert padded["tokens"].tolist() == [5, 6, E, 7, 0, 0, 0, 0]
    assert padded["labels"].tolist() == [6, E, 7, 0, 0, 0, 0, 0]
    assert padded["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert sample(np.arange(1, 10))["loss_mask"].tolist() == [1.0] * 8


def test_padding_is_never_taken_for_an_eod():
    item = SampleFormat(8, 0, True, True, True).sample(np.array([3, 4, 5]), 0)
    assert item["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert item["document_ids"].tolist() == [0] * 8
    assert item["position_ids"].tolist() == list(range(8))


def test_changing_an_item_changes_no_later_item(tmp_path):
    dataset = train(tmp_path, 8)
    first = {name: np.array(value) for name, value in dataset[3].items()}
    spoiled = dataset[3]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        spoiled[name][:] = 0
    again = dataset[3]
    assert all(np.array_equal(again[name], first[name]) for name in first)
    assert dataset[4]["loss_mask"].tolist() == [1.0] * 16


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_options_that_need_an_eod_say_so(tmp_path, option):
    with pytest.raises(ConfigError, match=option):
        config(tmp_path, eod=None, **{option: True})


# --- R18: blends


def five_samples(folder):
    """A set of exactly 5 samples of 16 tokens."""
    return write_documents(folder / "five", [[i * 9 + j for j in range(9)] for i in range(9)])


def test_a_set_of_5_samples_asked_for_50_gives_10_permutations(tmp_path):
    dataset = train(tmp_path, 50, blend=Blend((five_samples(tmp_path),)), shuffle="epoch")
    passes = [[tuple(dataset.ids(k).tolist()) for k in range(start, start + 5)] for start in range(0, 50, 5)]
    assert len(set(passes[0])) == 5
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_a_set_of_5_samples_asked_for_50_mixes_epochs_in_megatrons_order(tmp_path):
    dataset = train(tmp_path, 50, blend=Blend((five_samples(tmp_path),)))
    assert len(dataset) == 50
    seen = collections.Counter(span.document for k in range(50) for span in dataset.spans(k))
    assert set(seen) == set(range(9))


@pytest.mark.parametrize("shuffle", ["megatron", "epoch"])
@pytest.mark.parametrize(
    ("weights", "size", "counts"),
    [
        ((0.0005, 0.9995, 0), 100, [1, 99, 0]),
        ((0.5, 0.3, 0.2), 7, [3, 2, 2]),
        ((1 / 3, 1 / 3, 1 / 3), 100, [34, 33, 33]),
        ((0, 1, 0), 30, [0, 30, 0]),
        ((2, 6, 0), 100, [25, 75, 0]),
        ((0.98, 0.01, 0.01), 1000, [980, 10, 10]),
    ],
)
def test_blends_have_exactly_the_samples_asked_for(tmp_path, shuffle, weights, size, counts):
    dataset = train(tmp_path, size, shuffle=shuffle, blend=Blend((D0, D1, five_samples(tmp_path)), weights))
    assert len(all_ids(dataset)) == size
    drawn = collections.Counter(dataset.locate(i)[0].tokens.prefix for i in range(size))
    assert [drawn[prefix] for prefix in (D0, D1, str(tmp_path / "five"))] == counts


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.tuples(*[st.floats(1e-4, 1)] * 3),
    size=st.integers(1, 60),
    shuffle=st.sampled_from(["megatron", "epoch"]),
)
def test_any_weights_give_every_sample_without_error(tmp_path, weights, size, shuffle):
    dataset = train(tmp_path, size, shuffle=shuffle, blend=Blend((D0, D1, five_samples(tmp_path)), weights))
    taken = [dataset.locate(i) for i in range(size)]
    for part in dataset.datasets:
        used = [k for found, k in taken if found is part]
        assert used == list(range(len(used)))
        share = weights[["d0", "d1", "five"].index(pathlib.Path(part.tokens.prefix).name)] / sum(weights)
        assert abs(len(used) - share * size) <= 1.5
    assert {len(ids) for ids in all_ids(dataset)} == {17}


def test_without_weights_sets_count_by_size_and_none_repeats_before_all_are_used(tmp_path):
    one_pass = train(tmp_path, None, blend=Blend((D0, D1)))
    assert len(one_pass) == 958 // 16 + 605 // 16
    assert len({(dataset.tokens.prefix, k) for dataset, k in map(one_pass.locate, range(len(one_pass)))}) == len(one_pass)
    some = train(tmp_path, 50, blend=Blend((D0, D1)))
    assert all_ids(some)[:40] == all_ids(one_pass)[:40]
    many = train(tmp_path, 500, blend=Blend((D0, D1)))
    assert len(all_ids(many)) == 500


@pytest.mark.parametrize("weights", [(-0.1, 1.1), (float("nan"), 1.0), (0.0, 0.0), (1.0,)])
def test_unusable_weights_are_refused_before_files_are_opened(weights):
    with pytest.raises(ConfigError, match="weights"):
        Blend(("no/such", "file"), weights)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ([], None),
        (["a"], Blend(("a",))),
        (["a", "b", "c"], Blend(("a", "b", "c"))),
        (["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
        (["2", "a"], Blend(("a",), (2.0,))),
    ],
)
def test_data_paths_are_prefixes_or_weights_with_prefixes(words, blend):
    assert Blend.parse(words) == blend


@pytest.mark.parametrize("words", [["0.3", "a", "b"], ["a", "0.3"], ["0.3", "a", "b", "0.7"], ["1"], ["nan", "a", "1", "b"]])
def test_data_paths_that_mix_weights_and_prefixes_are_refused(words):
    with pytest.raises(ConfigError):
        Blend.parse(words)


# --- splits and sizes


def documents_of(dataset):
    return {span.document for k in range(len(dataset)) for span in dataset.spans(k)}


def test_splits_share_no_document(tmp_path):
    sets = build_gpt_datasets(config(tmp_path, split="80,15,5"), (200, 40, 40))
    assert [len(s) for s in sets] == [200, 40, 40]
    assert documents_of(sets[0]) == set(range(51))
    assert documents_of(sets[1]) == set(range(51, 61))
    assert documents_of(sets[2]) == set(range(61, 64))


def test_an_empty_test_split_is_left_out_with_a_warning_and_an_empty_train_split_is_an_error(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        sets = build_gpt_datasets(config(tmp_path, split=None), (48, 8, 8))
    assert [s is None for s in sets] == [False, False, True]
    assert "test split covers 0 of its 64 documents" in caplog.text
    with pytest.raises(DataError, match="train split covers 0 of its 64 documents"):
        build_gpt_datasets(config(tmp_path, split="1,1000,1"), (48, 8, 8))


def test_nothing_asked_for_is_nothing_built(tmp_path):
    assert build_gpt_datasets(config(tmp_path), (0, 0, 0)) == [None, None, None]
    assert not list(tmp_path.iterdir())


def test_a_set_shorter_than_one_sample_gives_a_padded_sample_per_epoch(tmp_path):
    prefix = write_documents(tmp_path / "tiny", [[1, 2], [3, E]])
    dataset = train(tmp_path, 3, blend=Blend((prefix,)), shuffle="epoch")
    assert len(dataset) == 3
    for k in range(3):
        item = dataset[k]
        assert sorted([item["tokens"][0], *item["labels"][:3]]) == [1, 2, 3, E]
        assert item["loss_mask"].tolist() == [1.0] * 3 + [0.0] * 13


def test_contradicting_sources_are_refused(tmp_path):
    for changes in (
        {"mock": True},
        {"blend": None},
        {"blend_per_split": (Blend((D0,)), None, None)},
        {"shuffle": "random"},
        {"seq_length": 0},
        {"seed": 2**32},
        {"split": "x"},
    ):
        with pytest.raises(ConfigError):
            config(tmp_path, **changes)


def test_damaged_files_are_refused_before_anything_is_built(tmp_path):
    prefix = write_d0(tmp_path / "d0")
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=r"d0\.bin"):
        train(tmp_path / "cache", 48, blend=Blend((prefix,)))
    assert not (tmp_path / "cache").exists()


# --- mock data


def mock(size=20, **changes):
    fields = {"seq_length": 64, "mock": True, "vocab_size": 101, "eod": 100} | changes
    return build_gpt_datasets(GPTDatasetConfig(**fields), (size, size, 0))


def test_mock_samples_depend_only_on_seed_split_and_number():
    train_set, valid, test = mock()
    assert test is None
    assert all_ids(train_set) == all_ids(mock(size=30)[0])[:20]
    assert all_ids(train_set) != all_ids(valid)
    assert all_ids(train_set) != all_ids(mock(seed=5)[0])


@pytest.mark.parametrize(("vocab_size", "eod"), [(101, 100), (2, 0), (2, None), (50_000, 49_999), (1, None), (600, 3)])
def test_mock_ids_are_in_the_vocabulary(vocab_size, eod):
    ids = np.array(all_ids(mock(vocab_size=vocab_size, eod=eod)[0]))
    assert ids.min() >= 0
    assert ids.max() < vocab_size
    assert eod is None or (ids == eod).any()


def test_mock_data_can_be_learned():
    """Two tokens tell the third: a table of (step so far -> next step) predicts far better than chance."""
    ids = np.array(all_ids(mock(size=200)[0]))
    steps = np.diff(ids, axis=1) % 100
    known = (ids[:, :-2] != 100) & (ids[:, 1:-1] != 100) & (ids[:, 2:] != 100)
    assert (steps[:, 1:] == steps[:, :-1])[known].mean() > 0.7


def test_mock_data_without_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size"):
        mock(vocab_size=None)
    with pytest.raises(ConfigError, match="beside EOD"):
        mock(vocab_size=1, eod=0)


def test_a_single_weighted_set_is_a_blend_of_one(tmp_path):
    dataset = train(tmp_path, 48, blend=Blend((D0,), (2.0,)))
    assert isinstance(dataset, BlendedDataset)
    assert all_ids(dataset) == megatron_samples("d0_48")
