"""Answers as text while their tokens come: the same text as decoding all tokens at once, whole characters, stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.serve.text import ByteCodec, TextStream


def streamed(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteCodec(), stops)
    parts = []
    for token in text.encode():
        parts.append(stream.add(token))
        if stream.stopped:
            break
    return [*parts, stream.finish()], stream


@given(st.text())
def test_parts_are_the_text_and_hold_whole_characters(text: str) -> None:
    parts, stream = streamed(text)
    assert "".join(parts) == stream.text == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str]) -> None:
    parts, stream = streamed(text, tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first_end = min(ends, default=-1)
    if first_end < 0:
        assert "".join(parts) == text and not stream.stopped
    else:
        begin = min(text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) <= first_end)
        assert "".join(parts) == text[:begin] and stream.stopped in stops


def test_what_may_become_a_stop_string_is_held_back() -> None:
    parts, _ = streamed("one END two", ("END!",))
    assert parts[:7] == ["o", "n", "e", " ", "", "", ""] and "".join(parts) == "one END two"


def test_broken_bytes_at_the_end_are_shown() -> None:
    stream = TextStream(ByteCodec())
    assert stream.add(0xE2) == "" and stream.finish() == "\ufffd"
