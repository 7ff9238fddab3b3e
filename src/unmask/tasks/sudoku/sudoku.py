"""Sudoku with one solution."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask import files
from unmask.display import say
from unmask.errors import UserError, require
from unmask.progress import progress, watched
from unmask.tasks.cache import alone_in, cache_folder, written_whole
from unmask.tasks.puzzles.puzzle import Puzzle, unpadded
from unmask.tasks.sudoku import boards
from unmask.tasks.sudoku.solver import dig, geometry, solve
from unmask.tasks.task import Examples, check_choice, check_range, check_split, prompt_kept

# Raise it with every change of the code after which the same options give other puzzles.
CACHE_VERSION = 2
CACHE_FILE = "puzzles.safetensors"

_CLUES = {2: (4, 8), 3: (0, 0)}  # how many are left at least, uniform in this range
_TEST_SHARE = 5  # one in so many kinds of puzzles is held out
_SEARCHED_SHARE, _MOST_SEARCHED = 8, 3000  # one in so many is dug by the search, which takes 100 times as long
_TOGETHER = 2048  # boards
_COLUMNS = ("puzzle", "quizzes", "solution", "solutions")  # of a CSV file
_LONGEST = 100_000  # characters of a line that are read: csv raises where a field has more than 131,072


@dataclass(frozen=True)
class Sudoku(Puzzle):
    """A grid of box^2 x box^2 cells; the clues are the prompt, the blanks are written, and one answer is right.

    Clues stand inside the sequence and only blanks are masked, as in Kim et al. (2025, "Train for the worst, plan for
    the best").  As theirs, the hard split needs more than any training puzzle does.

    `puzzles` base puzzles are dug out of random grids, once, and kept in a cache.  In 9 x 9 none of their clues can go:
    singles (a cell with one digit left, a digit with one place left in a unit) would no longer solve them or, where the
    search dug, one in eight or fewer, they would have several solutions.  They have about 20 to 30 clues,
    on average 24.6.  Those of Radcliffe on Kaggle, which Kim et al. probably used, have 19 to 31, most 23 to 26.

    A training example is a random base puzzle after a random symmetry (digits renamed; bands, stacks, rows and columns
    permuted; transposed), of which a 9 x 9 puzzle has 9! 6^8 2.  `test` and `hard` have the base puzzles as they are:
        hard    9 x 9: singles do not solve it; 4 x 4: it has only 4 clues
        test    one in five of the others; no symmetry takes a test puzzle to a training puzzle
    """

    box: int = 3
    puzzles: int = 8000
    clues: int = 0  # or more, where no other can go; 0: as few as can be in 9 x 9, uniform from 4 to 8 in 4 x 4
    # Base puzzles of your own: one per line, 0 or . for blanks, then the solution if you like; or a CSV file with the
    # columns puzzle (or quizzes) and solution (or solutions).
    file: str = ""
    held_out: str = "test"
    cache: str = ""  # a folder for the base puzzles; "": unmask/sudoku in the user's cache

    name = "sudoku"
    held_out_splits = ("test", "hard")
    entropy = 0.0
    min_steps = 1

    def __post_init__(self) -> None:
        check_range(self, "box", 2, 3)
        check_range(self, "puzzles", 1, 10_000_000)
        check_range(self, "clues", 0, self.length - 1)
        check_choice(self, "held_out", self.held_out_splits)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple("123456789"[: self.box**2])

    @property
    def length(self) -> int:
        return self.box**4

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return geometry(self.box).units[: self.box**2]  # rows

    @property
    def grid(self) -> tuple[int, int]:
        return self.box**2, self.box

    @property
    def test_examples(self) -> int:
        return len(self._rows(self.held_out))

    def check(self) -> None:
        super().check()
        self._rows(self.held_out)

    def _rows(self, split: str) -> Tensor:
        """[P, L]: the base puzzles of a split, of which there must be some."""
        hard, easy = ("need guesses", "need no guesses") if self.box == 3 else ("have 4 clues", "have 5 clues or more")
        mend = f"give more that {hard if split == 'hard' else easy}" if self.file else "set puzzles higher"
        others = [name for name in self.held_out_splits if split != "train" and len(self._base[name])]
        other = f", or choose held_out {others[0]}" if others else ""
        require(len(self._base[split]) > 0, f"task {self.name}: no puzzle is left for {split}: {mend}{other}")
        return self._base[split]

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        base = self._rows("train" if split == "train" else self.held_out)
        if split == "test":
            signed = base[ids % len(base)].long()  # [B, L]
            return unpadded(signed.abs() - 1, signed < 0)
        box, side = self.box, self.box**2
        counts = (1, 1, side, box, box, side, side)
        u = self.example_uniforms(split, ids, sum(counts)).split(counts, dim=-1)
        which, flip, names, bands, stacks, rows, columns = u  # [B, count] each
        signed = base[(which[:, 0] * len(base)).long()].long()
        rows, columns = (  # [B, side]: a permutation of the bands, and one inside each
            (outer.argsort()[..., None] * box + inner.view(-1, box, box).argsort()).flatten(1)
            for outer, inner in ((bands, rows), (stacks, columns))
        )
        cells = rows[:, :, None] * side + columns[:, None, :]  # [B, side, side]: where each cell comes from
        cells = torch.where(flip[..., None] < 0.5, cells, cells.mT).flatten(1)
        signed = signed.gather(1, cells)
        return unpadded(names.argsort().gather(1, signed.abs() - 1), signed < 0)

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        units = tokens[:, torch.tensor(geometry(self.box).units)]  # [B, rows + columns + boxes, side]
        complete = (units.sort(-1).values == torch.arange(self.box**2)).all(-1).all(-1)
        return complete & prompt_kept(tokens, examples)

    @cached_property
    def _base(self) -> dict[str, Tensor]:
        """[P, L] int8 per split: digit + 1 where it is a clue, -(digit + 1) where the cell is blank."""
        path = Path(self.file).expanduser()
        try:
            source = files.fingerprint(path) if self.file else [self.seed, self.puzzles, self.clues]
        except OSError as error:
            raise UserError(f"task {self.name}: {path} cannot be read ({error.strerror}): correct file") from None
        root = cache_folder(self.cache, self.name)
        folder = root / hashlib.sha256(json.dumps([CACHE_VERSION, self.box, source]).encode()).hexdigest()[:16]
        found = _read(folder)
        if found is None:
            with alone_in(root):  # another process may have made it in the meantime
                found = _read(folder) or self._make(folder)
        return found

    def _make(self, folder: Path) -> dict[str, Tensor]:
        signed, guessed = self._read_file() if self.file else self._dug()
        hard = guessed if self.box == 3 else (signed > 0).sum(-1) == _CLUES[2][0]
        test = _kinds(self.box, signed) % _TEST_SHARE == 0
        made = {"train": signed[~hard & ~test], "test": signed[~hard & test], "hard": signed[hard]}
        with written_whole(folder, CACHE_FILE) as partial:
            save_file(made, partial / CACHE_FILE)
        sizes = ", ".join(f"{len(some)} {split}" for split, some in made.items())
        say(f"task {self.name}: {sizes} base puzzles, made once and kept in {folder.parent}", err=True)
        return made

    def _dug(self) -> tuple[Tensor, Tensor]:
        """The base puzzles [P, L], and which of them need guesses [P]."""
        low, high = (self.clues, self.clues) if self.clues else _CLUES[self.box]
        searched = max(_SEARCHED_SHARE, -(-self.puzzles // _MOST_SEARCHED))
        puzzles, guessed = [], torch.zeros(self.puzzles, dtype=torch.bool)
        with progress("puzzles", self.puzzles, transient=True) as advance:
            for numbers in torch.arange(self.puzzles).split(_TOGETHER):
                grids, u = self._grids(numbers), self.structure_uniforms(numbers, self.length + 1)
                orders, clues = u[:, :-1].argsort(), low + (u[:, -1] * (high - low + 1)).long()
                given = torch.from_numpy(boards.dig(self.box, grids.numpy(), orders.numpy(), clues.numpy()))
                slow = (numbers % searched == 0).nonzero()[:, 0].tolist()
                for i in slow:
                    puzzle = dig(self.box, grids[i].tolist(), orders[i].tolist(), int(clues[i]))
                    given[i] = torch.tensor([digit is not None for digit in puzzle])
                    guessed[numbers[i]] = solve(self.box, puzzle).guesses > 0
                    advance()
                puzzles.append(torch.where(given, grids + 1, -grids - 1))
                advance(len(numbers) - len(slow))
        return torch.cat(puzzles), guessed

    def _grids(self, numbers: Tensor) -> Tensor:
        """[B, L] int8: a random grid for each number; a failed attempt is followed by one with other draws."""
        grids = torch.empty(len(numbers), self.length, dtype=torch.int8)
        left, attempt = torch.arange(len(numbers)), 0
        while len(left):
            attempt += 1
            keys = self.structure_uniforms(numbers[left] + (attempt << 32), self.length, self.box**2 + 1)
            made, right = map(torch.from_numpy, boards.fill(self.box, keys.numpy()))
            grids[left[right]] = made[right].to(torch.int8)
            left = left[~right]
        return grids

    def _read_file(self) -> tuple[Tensor, Tensor]:
        """As `_dug`."""
        signed, guessed = [], []
        digits, cells, mend = f"1-{self.box**2}", self.length, "correct or remove it"
        form = re.compile(rf"([0.{digits}]{{{cells}}})(?:[\s,;]+([{digits}]{{{cells}}}))?")
        with Path(self.file).expanduser().open(encoding="utf-8-sig", errors="replace") as file:
            lines = [line[:_LONGEST] for line in file]
        names = [name.strip().lower() for name in next(csv.reader(lines[:1]), [])]
        by_name = not {"puzzle", "quizzes"}.isdisjoint(names)
        columns = [names.index(name) for name in _COLUMNS if name in names] if by_name else []
        for number, line in enumerate(watched(lines, "puzzles"), start=1):
            if not line.strip() or (number == 1 and (columns or not re.search(r"[\d.]", line))):  # a header
                continue
            row = next(csv.reader([line]))
            text = (" ".join(cell for at in columns for cell in row[at : at + 1]) if columns else line).strip()
            where, read = f"task {self.name}: {self.file}, line {number}", form.fullmatch(text)
            if read is None:
                size, other = len(re.split(r"[\s,;]", text)[0]), 5 - self.box
                where += f" has {size} cells: set task.box to {other}, or" if size == other**4 else ":"
                give = f"give {cells} cells ({digits}, 0 or . for blanks), then their solution"
                raise UserError(f"{where} {give}; a CSV file names its columns puzzle and solution")
            puzzle = [None if cell in "0." else int(cell) - 1 for cell in read[1]]
            grids, guesses = solve(self.box, puzzle)
            require(len(grids) > 0, f"{where}: the puzzle has no solution: {mend}")
            require(len(grids) == 1, f"{where}: the puzzle has more than one solution: {mend}")
            require(None in puzzle, f"{where}: the puzzle has no blanks: {mend}")
            given = [int(digit) - 1 for digit in read[2] or ""]
            require(given in ([], grids[0]), f"{where}: the solution is not that of the puzzle: {mend}")
            pairs = zip(puzzle, grids[0], strict=True)
            signed.append([-digit - 1 if clue is None else digit + 1 for clue, digit in pairs])
            guessed.append(guesses > 0)
        require(bool(signed), f"task {self.name}: {self.file} has no puzzles: give one per line, {cells} cells each")
        return torch.tensor(signed, dtype=torch.int8), torch.tensor(guessed, dtype=torch.bool)


def _kinds(box: int, signed: Tensor) -> Tensor:
    """[P]: a hash that no symmetry changes: of how many clues each row and column, each box and each digit has."""
    side, units, *_ = geometry(box)
    in_units = (signed > 0)[:, torch.tensor(units)].sum(-1).unflatten(1, (3, side))  # rows, columns and boxes
    of_digits = torch.stack([(signed == digit).sum(-1) for digit in range(1, side + 1)], dim=-1)
    facts = torch.cat([in_units, of_digits[:, None]], dim=1).sort(dim=-1).values.tolist()
    return torch.tensor(
        [  # transposition exchanges rows and columns
            zlib.crc32(repr((sorted(lines), boxes, digits)).encode()) for *lines, boxes, digits in facts
        ]
    )


def _read(folder: Path) -> dict[str, Tensor] | None:
    """What was made earlier, or None where it is not there or not whole."""
    try:
        files.check(folder, CACHE_FILE)
        return load_file(folder / CACHE_FILE)
    except Exception:  # whatever a missing or damaged file makes the library raise
        return None
