"""Chat templates, and text that comes out token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from coldpage.engine.messages import ChatMessage
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.model.model import LoadedModel
from coldpage.engine.text import IncrementalText, encode_chat, encode_text, render_chat
from coldpage.errors import ModelError
from tests.engine.tiny_tokenizers import byte_level, space_marker

TOKENIZERS = {"byte_level": byte_level(), "space_marker": space_marker()}
# Few words, so that stop strings are hit often; characters of one to four bytes.
TEXTS = st.lists(
    st.sampled_from(["stop", "sto", " s", "STOP", "é", "日本", "😀", "👩‍👧", " ", "a", "\n", "∑"]),
    max_size=12,
).map("".join)
STOPS = st.lists(
    st.sampled_from(["stop", "stops", "top", "STOP", "😀", "é日", "\n\n", " a"]), max_size=3
)


def model_with(tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    return LoadedModel(
        model=None,  # type: ignore[arg-type]  # text needs the tokenizer only
        tokenizer=tokenizer,
        name="tiny",
        context_tokens=64,
        dtype=torch.float32,
        layers=(),
        eos_token_ids=frozenset(),
        hot_types=HotTypes.plain(torch.float32),
        fingerprint=b"",
    )


def token_of(character: str) -> int:
    (token,) = TOKENIZERS["byte_level"](character, add_special_tokens=False)["input_ids"]
    return int(token)


def run(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: list[str]
) -> tuple[list[str], bool]:
    text = IncrementalText(tokenizer, stop)
    pieces, hit = [], False
    for token in tokens:
        piece, hit = text.push(token)
        pieces.append(piece)
    pieces.append(text.flush())
    return pieces, hit


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(text=TEXTS)
def test_the_pieces_make_the_whole_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, hit = run(tokenizer, tokens, [])
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert not hit
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(text=TEXTS, stop=STOPS)
def test_text_ends_before_the_first_stop_string_and_no_beginning_of_it_comes_out(
    text: str, stop: list[str]
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, hit = run(tokenizer, tokens, stop)
    starts = [text.find(s) for s in stop if s in text]
    expected = text[: min(starts)] if starts else text
    # Of two stop strings that both end in one token's text the earlier start wins; one that is
    # complete before the other's end is seen ends the answer first.
    assert text.startswith("".join(pieces))
    assert hit == bool(starts)
    if len(stop) == 1 or not starts:
        assert "".join(pieces) == expected
    given_out = ""
    for piece in pieces:
        given_out += piece
        assert not any(s in given_out for s in stop)


def test_a_stop_string_across_tokens_is_held_back_until_it_is_decided() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = IncrementalText(tokenizer, ["end!"])
    pieces = [stream.push(token_of(c))[0] for c in "the end? end"]
    assert pieces == ["t", "h", "", "e ", "", "", "", "end?", " ", "", "", ""]
    assert stream.push(token_of("!")) == ("", True)
    assert stream.push(token_of("x")) == ("", True)
    assert stream.flush() == ""


def test_of_stop_strings_that_end_together_the_one_that_starts_first_counts() -> None:
    stream = IncrementalText(TOKENIZERS["byte_level"], ["dog", "the dog"])
    pieces = [stream.push(token_of(c)) for c in "a the dog"]
    assert "".join(piece for piece, _ in pieces) == "a "
    assert [hit for _, hit in pieces] == [False] * 8 + [True]


def test_what_is_held_back_comes_with_flush() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = IncrementalText(tokenizer, ["end!"])
    for c in "an en":
        stream.push(token_of(c))
    assert stream.flush() == "en"
    half = tokenizer("😀", add_special_tokens=False)["input_ids"][:1]
    pieces, _ = run(tokenizer, half, [])
    assert pieces == ["", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_never_become_a_character_do_not_hold_up_the_answer() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    lead = tokenizer("é", add_special_tokens=False)["input_ids"][0]
    if len(tokenizer("é", add_special_tokens=False)["input_ids"]) == 1:
        lead = tokenizer("😀", add_special_tokens=False)["input_ids"][0]
    word = tokenizer("dog", add_special_tokens=False)["input_ids"]
    stream = IncrementalText(tokenizer)
    out = [stream.push(lead)[0] for _ in range(40)]
    assert sum(len(piece) for piece in out) >= 24
    assert "".join(stream.push(t)[0] for t in word).endswith("dog")


def test_the_first_word_of_an_answer_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["space_marker"]
    prompt = tokenizer("The quick", add_special_tokens=False)["input_ids"]
    # Not the rest of the whole text's tokens: which pairs training merges is not always the same,
    # and one may reach over the end of the prompt.
    answer = tokenizer("brown fox", add_special_tokens=False)["input_ids"]
    stream = IncrementalText(tokenizer, prompt_tail=prompt)
    pieces = [stream.push(t)[0] for t in answer]
    assert "".join(pieces) + stream.flush() == " brown fox"


def test_work_per_token_does_not_grow_with_the_answer() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    longest = 0

    class Counting:
        def decode(self, tokens: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            text: str = tokenizer.decode(tokens, **options)
            return text

    stream = IncrementalText(Counting(), ["zzz"])  # type: ignore[arg-type]  # counts what the real one is given
    for token in tokenizer("the lazy dog jumps " * 50)["input_ids"]:
        stream.push(token)
    assert longest <= 18


def test_a_chat_is_rendered_and_encoded_with_its_special_tokens_once() -> None:
    model = model_with(TOKENIZERS["byte_level"])
    messages = (
        ChatMessage("user", "the dog"),
        ChatMessage("assistant", "é"),
        ChatMessage("user", "x"),
    )
    text = render_chat(model, messages)
    assert text == "<s>user: the dog</s><s>assistant: é</s><s>user: x</s><s>"
    ids = encode_chat(model, messages)
    assert ids.dtype == np.int32
    assert (ids == 0).sum() == 4
    assert model.tokenizer.decode(ids) == text
    assert model.tokenizer.decode(encode_text(model, "the dog")) == "<s>the dog"


def test_a_model_without_template_and_a_refused_conversation_are_told_in_a_sentence() -> None:
    bare = model_with(TOKENIZERS["space_marker"])
    with pytest.raises(ModelError, match=r"tiny has no chat template.*plain text"):
        render_chat(bare, [ChatMessage("user", "hi")])
    model = replace(bare, tokenizer=TOKENIZERS["byte_level"])
    with pytest.raises(ModelError, match=r"refuses these messages: no such role"):
        encode_chat(model, [ChatMessage("bad", "hi")])
