"""Random grids, and puzzles that singles solve, for thousands of boards at once.

Boards are bits.  A state [side, box, box, box, box, W] of bytes has for every digit, band, row in it, stack, column in
it and board one bit, which says that the digit may still be there; a byte has eight boards.  So a rule is a few
operations on arrays for all boards, each of which goes at its own pace.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

Bits = np.ndarray  # of uint8

_KINDS = ((0,), (3, 4), (1, 2), (2, 4))  # the axes of the digits of a cell, and of a digit in a row, column and box


@cache
def _parts(box: int, axes: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Where the parts of a state along these axes are."""
    sizes = (box**2, box, box, box, box)
    places = product(*(range(size) if axis in axes else [None] for axis, size in enumerate(sizes)))
    return [tuple(slice(None) if at is None else slice(at, at + 1) for at in place) for place in places]


def _pack(bits: np.ndarray, box: int) -> Bits:
    """[side, cells, B] -> a state."""
    return np.packbits(bits, axis=-1).reshape(box * box, box, box, box, box, -1)


def _unpack(words: Bits, boards: int) -> np.ndarray:
    """[..., W] -> [..., B]"""
    return np.unpackbits(words, axis=-1, count=boards).view(bool)


def _any(words: Bits) -> Bits:
    """[W]: the boards that have a bit somewhere."""
    return np.asarray(np.bitwise_or.reduce(words.reshape(-1, words.shape[-1])))


def _place_singles(box: int, state: Bits) -> tuple[Bits, Bits, Bits]:
    """The state after a round, the cells [cells, W] whose digit was known, and the boards [W] with a contradiction.

    single = the only digit of its cell, or in the only place of its digit in a row, column or box
    after  = single, or no single is in the same cell, nor of the same digit in the same row, column or box
    """
    several, wrong = state.copy(), np.zeros(state.shape[-1], np.uint8)
    for axes in _KINDS:
        first, *others = _parts(box, axes)
        once = state[first].copy()
        twice = np.zeros_like(once)
        for part in others:
            twice |= once & state[part]
            once |= state[part]
        several &= twice
        wrong |= _any(~once)
    single = state ^ several
    taken = [np.bitwise_or.reduce(single, axis=axes, keepdims=True) for axes in _KINDS]
    for some in taken:
        several &= ~some
    return several | single, taken[0].reshape(box**4, -1), wrong


def fill(box: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grids [B, cells] and whether they are right [B]; keys [B, cells, side + 1] in (0, 1).

    The boxes on the diagonal do not see each other and get random digits.  Then, after the singles, the cell with the
    fewest digits left gets the one with the lowest key, ties by the last key.  A contradiction ends it (9 x 9: one in
    ten); one is that a cell keeps two digits, each in the only place of some unit.
    """
    boards, cells, side = len(keys), box**4, box**2
    numbered = np.arange(cells).reshape(box, box, box, box)
    free = np.ones((side, cells, boards), bool)
    for i in range(box):
        here = numbered[i, :, i].ravel()
        free[:, here] = np.arange(side)[:, None, None] == keys[:, here, 0].argsort().T
    by_digit, ties = keys[..., :-1].transpose(2, 1, 0), keys[..., -1].T
    state = _pack(free, box)
    dead = np.zeros(state.shape[-1], np.uint8)
    while True:
        before = state
        state, known, wrong = _place_singles(box, before)
        dead |= wrong
        moved, unknown = _any(state ^ before), _any(~known)
        if not ((moved | unknown) & ~dead).any():
            break
        stuck = _unpack(unknown & ~moved & ~dead, boards).nonzero()[0]
        if len(stuck):
            free = _unpack(state.reshape(side, cells, -1), boards)
            some = free[..., stuck]  # [side, cells, stuck]
            left = some.sum(0, dtype=np.int16)
            cell = np.where(left > 1, left + ties[:, stuck], np.inf).argmin(0)
            digit = np.where(some[:, cell, np.arange(len(stuck))], by_digit[:, cell, stuck], np.inf).argmin(0)
            free[:, cell, stuck] = False
            free[digit, cell, stuck] = True
            state = _pack(free, box)
    free = _unpack(state.reshape(side, cells, -1), boards)
    return free.argmax(0).T, ~_unpack(dead, boards) & (free.sum((0, 1)) == cells)


def dig(box: int, grids: np.ndarray, order: np.ndarray, clues: np.ndarray) -> np.ndarray:
    """[B, cells]: where clues stay.  Cells are blanked in this order where singles then suffice, down to `clues` [B].

    Without the clue at c singles suffice exactly where they find the digit at c: then they go on as with the clue.
    """
    boards, cells = grids.shape
    solution = _pack(np.arange(box**2)[:, None, None] == grids.T, box)
    turns = order.argsort().T.astype(np.int8)  # [cells, B]
    turn, left = np.zeros(boards, np.int8), np.full(boards, cells)
    given = np.full((cells, solution.shape[-1]), 255, np.uint8)
    state, done = solution, np.full_like(given[0], 255)
    while True:
        turn[left <= clues] = cells
        if (turn == cells).all():
            return _unpack(given, boards).T
        tried = np.packbits(turns == turn, axis=-1)
        start = solution | ~(given & ~tried).reshape(state.shape[1:])
        before = state ^ ((state ^ start) & done)
        state, known, _ = _place_singles(box, before)
        found = _any(known & tried)
        done = found | ~_any(state ^ before)
        given &= ~(tried & found)
        left -= _unpack(found, boards)
        turn += _unpack(done, boards) & (turn < cells)
