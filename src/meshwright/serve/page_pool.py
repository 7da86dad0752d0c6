"""Which pages of key-value memory belong to which sequence. Pure bookkeeping: pages are numbers, and nothing here knows tensors.

[Note: pages]
Key-value memory is divided into pages of a fixed number of tokens; a sequence has a list of pages, in order. A full page whose tokens are known can
be shared: a prompt that begins as an earlier one did takes that one's pages instead of computing them (prefix reuse). A page is known by the page
before it and its own tokens, so that equal text at another place is another page. Pages that nobody uses any more keep their content until they are
needed, the one that was released first goes first; a sequence's last page is released before its first.

A sequence's pages follow one another where that is possible: attention then reads them in place, without collecting them first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_ROOT = 0  # the page before a sequence's first


@dataclass
class PageList:
    """A sequence's pages. `shared` of them, from the first on, were filled by others; `registered` can be shared with others."""

    pages: list[int] = field(default_factory=list)
    registered: int = 0
    serial: int = _ROOT  # of the last registered page
    room: int = 0  # how many pages the sequence may need in all

    def is_contiguous(self) -> bool:
        return not self.pages or self.pages[-1] - self.pages[0] == len(self.pages) - 1


class PagePool:
    """`count` pages of `page_tokens` tokens. `shares` turns prefix reuse on, `in_runs` the search for pages that follow one another."""

    def __init__(self, count: int, page_tokens: int, *, shares: bool = True, in_runs: bool = True) -> None:
        self.count, self.page_tokens, self._shares, self._in_runs = count, page_tokens, shares, in_runs
        self._free = set(range(count))  # without content
        self._idle: OrderedDict[int, None] = OrderedDict()  # with content that may be shared, used by nobody; the oldest first
        self._users = [0] * count
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (serial of the page before, tokens) → page
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # page → its key in `_known`
        self._serials: dict[int, int] = {}  # page → serial of its content
        self._next_serial = _ROOT + 1
        self._reserved: dict[int, range] = {}  # by sequence: the pages that it is to grow into, if they stay free
        self.reused_tokens = 0  # since the start, by prefix reuse

    @property
    def available(self) -> int:
        """Pages that can be had."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def open(self, tokens: Sequence[int], room: int) -> tuple[PageList, int]:
        """Pages for a sequence that begins with `tokens` and may grow to `room` tokens, and how many of its tokens are in memory already. The last
        token is never among them: the model has to compute something."""
        held = PageList(room=self.pages_for(room))
        while self._shares and (len(held.pages) + 1) * self.page_tokens < len(tokens):
            first = len(held.pages) * self.page_tokens
            page = self._known.get((held.serial, tuple(tokens[first : first + self.page_tokens])))
            if page is None:
                break
            self._take(page)
            held.pages.append(page)
            held.serial = self._serials[page]
            held.registered += 1
        reused = len(held.pages) * self.page_tokens
        self.reused_tokens += reused
        return held, reused

    def extend(self, held: PageList, tokens: int) -> bool:
        """Give a sequence pages for `tokens` tokens in all. False, and nothing changed, if there are not enough."""
        needed = self.pages_for(tokens) - len(held.pages)
        if needed > self.available:
            return False
        for _ in range(needed):
            page = self._choose(held)
            self._take(page)
            self._forget(page)
            held.pages.append(page)
        return True

    def register(self, held: PageList, tokens: Sequence[int], computed: int) -> None:
        """Make the full pages among the first `computed` tokens known, so that others can share them."""
        while self._shares and (held.registered + 1) * self.page_tokens <= computed:
            first, page = held.registered * self.page_tokens, held.pages[held.registered]
            key = (held.serial, tuple(tokens[first : first + self.page_tokens]))
            known = self._known.get(key)
            if known is None:
                self._known[key], self._keys[page] = page, key
                self._serials[page] = self._next_serial
                self._next_serial += 1
                known = page
            held.serial = self._serials[known]  # where two sequences computed the same page at once, one of them is known
            held.registered += 1

    def release(self, held: PageList) -> None:
        """Give a sequence's pages back."""
        for page in reversed(held.pages):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.add(page)
        held.pages, held.registered, held.serial = [], 0, _ROOT
        self._reserved.pop(id(held), None)

    def forget_all(self) -> None:
        """Drop what could be shared, as when the weights change."""
        for page in list(self._keys):
            self._forget(page)
        self._free.update(self._idle)
        self._idle.clear()

    def _take(self, page: int) -> None:
        self._free.discard(page)
        self._idle.pop(page, None)
        self._users[page] += 1

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._known[key]
            del self._serials[page]

    def _choose(self, held: PageList) -> int:
        """The page after the sequence's last if it is free, else the start of a run that has room for the rest of it, else the oldest idle one."""
        if not self._free:
            return next(iter(self._idle))
        if held.pages and held.pages[-1] + 1 in self._free:
            return held.pages[-1] + 1
        if not self._in_runs:
            return next(iter(self._free))
        room = max(held.room - len(held.pages), 1)
        first = self._best_run(room)
        self._reserved[id(held)] = range(first, first + room)
        return first

    def _best_run(self, room: int) -> int:
        """The first page of the shortest run that has `room`, or of the longest run, of free pages into which no other sequence is to grow; of all
        free pages if there are no such."""
        taken = {page for pages in self._reserved.values() for page in pages}
        runs = list(_runs(self._free - taken)) or list(_runs(self._free))
        fitting = [run for run in runs if len(run) >= room]
        return min(fitting, key=len).start if fitting else max(runs, key=len).start


def _runs(pages: set[int]) -> Iterator[range]:
    """Runs of pages that follow one another."""
    first = last = -2
    for page in sorted(pages):
        if page != last + 1:
            if first >= 0:
                yield range(first, last + 1)
            first = page
        last = page
    if first >= 0:
        yield range(first, last + 1)
