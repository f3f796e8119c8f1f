"""FLOP counts against plain loops; documents; flags."""

import argparse

import pytest

from megacp.argument_checks import ArgumentError
from megacp.benchmark.flags import check_documents, check_ranks, head_shape, heads_per_stage, query_chunk, short_tokens, token_count
from megacp.benchmark.work import attention_flops, equal_borders, head_model_flops, layer_model_flops, uneven_borders
from megacp.model.config import preset
from megacp.training.metrics import causal_pairs, model_flops_per_step

TINY = preset("llama-tiny")  # d 256, F 768, 8 heads and 4 KV heads of 32, V 4096


def test_a_layers_flops_by_a_plain_count():
    borders, ranks, tokens = (0, 3, 12), 4, 3
    multiply_adds = 0
    q, k, v, o, gate, up, down = (256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (768, 256), (256, 768)
    for rows, columns in (q, k, v, o, gate, up, down):
        multiply_adds += rows * columns * tokens
    for start, stop in zip(borders, borders[1:]):
        for query in range(start, stop):
            for _ in range(start, query + 1):  # keys up to its own
                multiply_adds += 8 * 2 * 32 / ranks  # q·k and p·v of every head, shared by the ranks
    assert layer_model_flops(TINY, tokens, causal_pairs(borders), ranks) == 3 * 2 * multiply_adds


def test_layers_and_head_make_a_step():
    pairs, tokens, ranks = causal_pairs((0, 4096)), 4096, 4
    whole = TINY.num_layers * ranks * layer_model_flops(TINY, tokens // ranks, pairs, ranks) + head_model_flops(TINY, tokens)
    assert whole == model_flops_per_step(TINY, tokens, pairs)


def test_attention_executes_five_products_backward_where_the_forward_has_two():
    forward, backward = attention_flops(heads=2, head_dim=16, pairs=10)
    assert (forward, backward) == (2 * 2 * 2 * 16 * 10, 5 * 2 * 2 * 16 * 10)


def test_documents_cover_the_stream():
    assert equal_borders(10, 3) == (0, 3, 6, 10)
    borders = uneven_borders(1000, 50, seed=1)
    lengths = [stop - start for start, stop in zip(borders, borders[1:])]
    assert len(lengths) == 50 and sum(lengths) == 1000 and min(lengths) > 0 and max(lengths) > 40
    assert borders == uneven_borders(1000, 50, seed=1) != uneven_borders(1000, 50, seed=2)
    assert uneven_borders(10, 1, seed=1) == (0, 10)


def test_lengths_are_read_and_shown():
    assert [token_count(text) for text in ("128K", "1M", "1m", "5000")] == [131072, 1048576, 1048576, 5000]
    assert [short_tokens(tokens) for tokens in (131072, 1048576, 5242880, 5000)] == ["128K", "1M", "5M", "5000"]
    assert (query_chunk("all"), query_chunk("16K"), heads_per_stage("a2a"), heads_per_stage("8")) == (None, 16384, None, 8)
    assert head_shape("8:2") == (8, 2)


@pytest.mark.parametrize(
    "parse, text, works",
    [
        (token_count, "1G", "128K"), (token_count, "0", "128K"), (token_count, "-5", "128K"), (query_chunk, "some", "all"),
        (heads_per_stage, "all", "a2a"), (head_shape, "3:2", "4:1"), (head_shape, "4", "4:1"),
    ],
)  # fmt: skip
def test_what_is_no_number_says_what_is(parse, text, works):
    with pytest.raises(argparse.ArgumentTypeError, match=works) as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_what_does_not_divide_names_flag_value_and_remedy():
    with pytest.raises(ArgumentError, match="--ranks 3 does not fit 8 query heads.* 1 or 2 or 4 or 8 do"):
        check_ranks(TINY, 3, [3], [3000])
    with pytest.raises(ArgumentError, match="--heads-per-stage 6 must be a multiple .* 4 or 8 do"):
        check_ranks(TINY, 4, [4, 6], [4096])
    with pytest.raises(ArgumentError, match="--seq-length 4098 is not a multiple of --ranks 4; 4096 is"):
        check_ranks(TINY, 4, [4], [4096, 4098])
    with pytest.raises(ArgumentError, match="--documents 4097 are more than --seq-length 4096"):
        check_documents([1, 4097], [4096])
