"""Strings out of a long line of JSON: what `json` says, whatever is escaped and wherever the parts end."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data import long_json_lines
from megacp.data.long_json_lines import string_chunks, string_spans

fragments = st.sampled_from(["\\", '"', "\n", "é", "😀", "a", "abc" * 20, "\u2028", "\\u", "{", "}", ",", "漢", "\x7f", " "])
texts = st.lists(fragments, max_size=60).map("".join)
values = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts), st.lists, max_leaves=5)


@settings(max_examples=200, deadline=None)
@given(
    fields=st.dictionaries(texts, st.one_of(values, st.dictionaries(texts, values, max_size=2)), max_size=4),
    ascii=st.booleans(), indent=st.sampled_from([None, 1]), units=st.integers(1, 6),
)  # fmt: skip
def test_as_json_reads_it(fields, ascii, indent, units):
    line = json.dumps(fields, ensure_ascii=ascii, indent=indent).encode() + b"\n"
    spans = string_spans(line)
    short = re.compile(long_json_lines._PART.pattern.replace(b"1,32768", b"1,%d" % units))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json_lines, "_PART", short)
        found = {
            key: "".join(json.loads(chunk) for chunk in string_chunks(line, value)) if isinstance(value, slice) else value
            for key, value in spans.items()
        }
    assert found == fields and list(found) == list(fields)


def test_a_later_value_of_a_key_wins():
    assert string_spans(b'{"a": "x", "a": 1}') == {"a": 1} == json.loads(b'{"a": "x", "a": 1}')


@pytest.mark.parametrize(
    "line",
    [b"", b'{"a": "x"', b'{"a": "x}', b'{"a" "x"}', b'{"a": "x",}', b'{"a": }', b'{"a": tru}', b'{"a": [1}', b'{"a": 1} x',
     b'{"a": [1]]}', b"{1: 2}", b'{"a\\q": 1}'],
)  # fmt: skip
def test_what_json_refuses(line):
    with pytest.raises(ValueError):
        json.loads(line)
    with pytest.raises(ValueError):
        string_spans(line)


def test_parts_are_short():
    text = "漢\n" * 2_000_000
    line = json.dumps({"text": text}).encode()
    sizes = [len(chunk) for chunk in string_chunks(line, string_spans(line)["text"])]
    assert len(sizes) > 10 and max(sizes) < 1_100_000
