"""A Sudoku solver that counts solutions and guesses, and a digger that makes puzzles with exactly one solution.

Cells are bits.  A state has one plane per digit: an integer whose bit c says that cell c may still hold the digit, so
that a rule is applied to all cells at once.  A puzzle is a list of digits 0..side-1, row by row, with None for blanks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

Cells = Sequence[int | None]


class Geometry(NamedTuple):
    side: int
    units: tuple[tuple[int, ...], ...]  # the cells of every row, column and box
    masks: tuple[int, ...]  # the same as bits
    peers: tuple[int, ...]  # for each cell, the bits of the other cells in its units


@cache
def geometry(box: int) -> Geometry:
    side, inside = box * box, range(box * box)
    rows = [tuple(side * i + j for j in inside) for i in inside]
    boxes = [tuple(rows[i // box * box + j // box][i % box * box + j % box] for j in inside) for i in inside]
    units = (*rows, *zip(*rows, strict=True), *boxes)
    masks = tuple(sum(1 << cell for cell in unit) for unit in units)
    peers = [0] * side**2
    for unit, mask in zip(units, masks, strict=True):
        for cell in unit:
            peers[cell] |= mask & ~(1 << cell)
    return Geometry(side, units, masks, tuple(peers))


class Solved(NamedTuple):
    grids: list[list[int]]  # the solutions that were found, as many as were asked for
    guesses: int  # cells at which the search branched; 0: every cell was the only one for a digit or had only one


def solve(box: int, puzzle: Cells, at_most: int = 2) -> Solved:
    """The solutions of a puzzle, up to `at_most`."""
    return _search(box, _planes(box, puzzle), at_most)


def _planes(box: int, puzzle: Cells) -> list[int]:
    """[side]: every digit may be in every blank cell."""
    clues = [0] * geometry(box).side
    for cell, digit in enumerate(puzzle):
        if digit is not None:
            clues[digit] |= 1 << cell
    blank = ((1 << len(puzzle)) - 1) & ~sum(clues)
    return [blank | clue for clue in clues]


def _search(box: int, planes: list[int], at_most: int) -> Solved:
    """Singles, and where they do not suffice, guesses."""
    open_cells = _place_singles(box, planes)
    if open_cells is None:
        return Solved([], 0)
    cells = range(len(planes) ** 2)
    if not open_cells:
        return Solved([[next(d for d, plane in enumerate(planes) if plane >> cell & 1) for cell in cells]], 0)
    grids: list[list[int]] = []
    guesses = 1
    for cell, digit in _fewest(box, planes, open_cells):
        if len(grids) < at_most:
            assumed = [plane & ~(1 << cell) for plane in planes]
            assumed[digit] = planes[digit]
            found = _search(box, assumed, at_most - len(grids))
            grids, guesses = grids + found.grids, guesses + found.guesses
    return Solved(grids, guesses)


def _fewest(box: int, planes: list[int], open_cells: int) -> list[tuple[int, int]]:
    """The fewest (cell, digit) of which one is right: the digits of a cell, or the places of a digit in a unit."""
    cells = [cell for cell in range(len(planes) ** 2) if open_cells >> cell & 1]
    fewest = min(([(cell, d) for d, plane in enumerate(planes) if plane >> cell & 1] for cell in cells), key=len)
    if len(fewest) > 2:
        places = ((plane & mask, digit) for digit, plane in enumerate(planes) for mask in geometry(box).masks)
        here, digit = min((some for some in places if some[0] & open_cells), key=lambda some: some[0].bit_count())
        if here.bit_count() < len(fewest):
            fewest = [(cell, digit) for cell in cells if here >> cell & 1]
    return fewest


def _place_singles(box: int, planes: list[int]) -> int | None:
    """Place every digit that has one cell left in a unit and every cell that has one digit left, in `planes`.

    Returns the cells with several digits left, as bits, or None where there is a contradiction.
    """
    side, _, masks, peers = geometry(box)
    full, placed = (1 << side**2) - 1, [0] * side
    while True:
        once = twice = 0  # cells that have at least one digit, and at least two
        for plane in planes:
            twice |= once & plane
            once |= plane
        if once != full:
            return None
        any_new = 0
        for digit in range(side):
            plane = planes[digit]
            if plane == placed[digit]:
                continue
            single = plane & ~twice
            for mask in masks:
                here = plane & mask
                if not here & (here - 1):
                    if not here:
                        return None
                    single |= here
            new = single & ~placed[digit]
            any_new |= new
            placed[digit] |= new
            if new:
                planes[:] = [other & ~new for other in planes]
            while new:
                cell = new.bit_length() - 1
                new ^= 1 << cell
                plane &= ~peers[cell]
            planes[digit] = plane
        if not any_new:
            return twice


def dig(box: int, grid: Sequence[int], order: Sequence[int], clues: int) -> list[int | None]:
    """Blank cells of a solved grid in this order until `clues` are left or none can go with one solution left.

    Without the clue at c the puzzle has a second solution exactly where one with another digit at c exists.
    """
    puzzle: list[int | None] = list(grid)
    left = len(grid)
    for cell in order:
        if left == clues:
            break
        puzzle[cell] = None
        planes = _planes(box, puzzle)
        planes[grid[cell]] &= ~(1 << cell)
        if _search(box, planes, 1).grids:
            puzzle[cell] = grid[cell]
        else:
            left -= 1
    return puzzle
