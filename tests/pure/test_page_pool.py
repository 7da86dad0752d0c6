"""Pages of key-value memory: nobody gets a page that another uses, and what is shared is what it is taken for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serve.page_pool import PageList, PagePool


class Model:
    """Key-value memory as it would be: for each page, the tokens that were written to it, and all tokens before."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.content: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # page → (all tokens before it, its own)
        self.live: dict[int, tuple[PageList, list[int], int]] = {}

    def write(self, held: PageList, tokens: list[int], first: int, end: int) -> None:
        size = self.pool.page_tokens
        for place in range(first // size, -(-end // size)):
            begin = place * size
            self.content[held.pages[place]] = (tuple(tokens[:begin]), tuple(tokens[begin : min(begin + size, end)]))

    def check(self, held: PageList, tokens: list[int], computed: int) -> None:
        size = self.pool.page_tokens
        for place in range(computed // size):
            begin = place * size
            assert self.content[held.pages[place]] == (tuple(tokens[:begin]), tuple(tokens[begin : begin + size]))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(1, 40), page_tokens=st.integers(1, 5), shares=st.booleans(), in_runs=st.booleans())
def test_random_sequences_read_what_they_wrote(seed: int, count: int, page_tokens: int, shares: bool, in_runs: bool) -> None:
    draw = random.Random(seed)
    pool = PagePool(count, page_tokens, shares=shares, in_runs=in_runs)
    model = Model(pool)
    for number in range(60):
        if draw.random() < 0.5 or not model.live:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 4 * page_tokens + 2))]  # two tokens: prefixes are often equal
            held, reused = pool.open(tokens, len(tokens) + draw.randrange(20))
            assert reused < len(tokens) and (shares or not reused)
            model.check(held, tokens, reused)
            if not pool.extend(held, len(tokens)):
                pool.release(held)
                continue
            model.write(held, tokens, reused, len(tokens))
            pool.register(held, tokens, len(tokens))
            model.live[number] = (held, tokens, len(tokens))
        elif draw.random() < 0.6:
            held, tokens, _ = model.live[draw.choice(list(model.live))]
            before = list(held.pages)
            tokens.append(draw.randrange(2))
            if not pool.extend(held, len(tokens)):
                assert held.pages == before
                tokens.pop()
                continue
            model.write(held, tokens, len(tokens) - 1, len(tokens))
            pool.register(held, tokens, len(tokens))
        else:
            held, _, _ = model.live.pop(draw.choice(list(model.live)))
            pool.release(held)
        for held, tokens, _ in model.live.values():
            model.check(held, tokens, len(tokens))
        used = {page for held, _, _ in model.live.values() for page in held.pages}
        assert pool.used == len(used) and pool.available == count - len(used)
    for held, _, _ in model.live.values():
        pool.release(held)
    assert pool.available == count


def test_a_prompt_that_was_there_is_reused_up_to_its_last_token() -> None:
    pool = PagePool(10, 4)
    held, reused = pool.open(list(range(12)), 20)
    assert reused == 0 and pool.extend(held, 12)
    pool.register(held, list(range(12)), 12)
    pool.release(held)
    assert pool.open(list(range(12)), 20)[1] == 8  # the last page holds the token that must be computed
    assert pool.open([*range(12), 99], 20)[1] == 12
    assert pool.open([5, *range(12)], 20)[1] == 0
    pool.forget_all()
    assert pool.open(list(range(12)), 20)[1] == 0


def test_pages_follow_one_another_where_they_can() -> None:
    pool = PagePool(64, 4)
    lists = [pool.open([number], 64)[0] for number in range(4)]
    for length in range(1, 65):
        for held in lists:
            assert pool.extend(held, length)
    assert all(held.pages == list(range(held.pages[0], held.pages[0] + 16)) for held in lists)


@pytest.mark.parametrize("in_runs", [True, False])
def test_what_is_shared_goes_when_nothing_else_is_left(in_runs: bool) -> None:
    pool = PagePool(4, 2, in_runs=in_runs)
    held, _ = pool.open([1, 2, 3, 4], 4)
    assert pool.extend(held, 4)
    pool.register(held, [1, 2, 3, 4], 4)
    pool.release(held)
    other, reused = pool.open([9] * 8, 8)
    assert reused == 0 and pool.extend(other, 8) and pool.available == 0
    assert not pool.extend(pool.open([1, 2, 3], 4)[0], 3)
    pool.release(other)
    assert pool.open([1, 2, 3, 4, 5], 8)[1] == 0
