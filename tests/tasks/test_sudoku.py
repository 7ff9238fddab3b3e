"""Sudoku against brute force on all 4 x 4 grids, and against readings of its rule by hand."""

from __future__ import annotations

import itertools
import re
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from unmask import progress
from unmask.errors import UserError
from unmask.evaluation.evaluate import examples_of
from unmask.recipe import load_recipe
from unmask.tasks.sudoku import boards, sudoku
from unmask.tasks.sudoku.solver import dig, geometry, solve
from unmask.tasks.sudoku.sudoku import _TEST_SHARE, CACHE_FILE, Sudoku, _kinds

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
GUESSED = "85...24..72......9..4.........1.7..23.5...9...4...........8..7..17..........36.4."


def right(box, grid):
    """The rule, read slowly."""
    side = box * box
    rows = [grid[side * i : side * i + side] for i in range(side)]
    boxes = [
        [rows[i + k][j + m] for k in range(box) for m in range(box)]
        for i in range(0, side, box)
        for j in range(0, side, box)
    ]
    return all(set(unit) == set(range(side)) for unit in [*rows, *zip(*rows, strict=True), *boxes])


GRIDS = [  # all 4 x 4
    list(itertools.chain(*rows))
    for rows in itertools.product(itertools.permutations(range(4)), repeat=4)
    if right(2, list(itertools.chain(*rows)))
]


def read(text):
    return [None if cell in "0." else int(cell) - 1 for cell in text]


@cache
def seen(box, cell):
    side = box * box
    row, column = divmod(cell, side)
    lines = [side * row + i for i in range(side)] + [side * i + column for i in range(side)]
    corner = side * (row - row % box) + column - column % box
    return [*lines, *(corner + side * i + j for i in range(box) for j in range(box))]


def count(box, puzzle, at_most=2):
    """How many solutions there are, up to `at_most`, by trying digits where the fewest fit; no code of the solver."""
    blanks = [cell for cell, digit in enumerate(puzzle) if digit is None]
    if not blanks:
        return 1
    fitting = ((set(range(box * box)) - {puzzle[other] for other in seen(box, cell)}, cell) for cell in blanks)
    digits, cell = min(fitting, key=lambda some: len(some[0]))
    found = 0
    for digit in digits:
        if found < at_most:
            found += count(box, [*puzzle[:cell], digit, *puzzle[cell + 1 :]], at_most - found)
    return found


def keys(box, number):
    """For `boards.fill`, and an order to dig in."""
    generator = np.random.default_rng(box)
    order = generator.random((number, box**4)).argsort()
    return generator.random((number, box**4, box**2 + 1)), order


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("sudoku"))


@pytest.fixture(params=[2, 3], ids=["4x4", "9x9"])
def task(request, folder):
    return Sudoku(box=request.param, puzzles={2: 300, 3: 40}[request.param], seed=1, cache=folder)


# ---- the solver


def test_all_small_grids_are_found():
    assert len(GRIDS) == 288
    found, _ = solve(2, [None] * 16, at_most=1000)
    assert sorted(found) == sorted(GRIDS)


def test_the_count_of_these_tests_is_right():
    """On small boards against all grids, and on the empty 9 x 9 board it stops."""
    for grid in GRIDS[::17]:
        for blanks in (6, 11, 13):
            puzzle = [None if cell * 7 % 16 < blanks else digit for cell, digit in enumerate(grid)]
            agreeing = [g for g in GRIDS if all(c is None or c == d for c, d in zip(puzzle, g, strict=True))]
            assert count(2, puzzle, at_most=288) == len(agreeing)
    assert count(3, read(PUZZLE)) == 1
    assert count(3, read(PUZZLE[:40] + "." * 41)) == 2


def test_the_solver_agrees_with_brute_force():
    """Also where there is no solution or several, and with fewer asked for than there are."""
    generator = torch.Generator().manual_seed(0)
    counts = set()
    for _ in range(300):
        clues = int(torch.randint(1, 9, (), generator=generator))
        puzzle = [None] * 16
        grid = GRIDS[int(torch.randint(288, (), generator=generator))]
        for cell in torch.randperm(16, generator=generator)[:clues].tolist():
            puzzle[cell] = grid[cell]
        if torch.rand((), generator=generator) < 0.3:
            puzzle[int(torch.randint(16, (), generator=generator))] = 0  # may be against the rule
        expected = [g for g in GRIDS if all(c is None or c == d for c, d in zip(puzzle, g, strict=True))]
        assert sorted(solve(2, puzzle, at_most=288).grids) == sorted(expected)
        assert len(solve(2, puzzle).grids) == min(2, len(expected))
        counts.add(min(2, len(expected)))
    assert counts == {0, 1, 2}


def test_a_puzzle_of_a_newspaper_and_one_that_needs_guesses():
    assert solve(3, read(PUZZLE)) == ([read(SOLUTION)], 0)
    (grid,), guesses = solve(3, read(GUESSED))
    assert right(3, grid)
    assert guesses > 0
    assert len(solve(3, read("." + PUZZLE[1:20] + "." * 61)).grids) == 2
    assert solve(3, read("5" + PUZZLE[1:8] + "5" + PUZZLE[9:])).grids == []


def test_few_clues_are_settled_soon():
    """A guess at the cell with the fewest digits alone takes minutes for either."""
    ambiguous = ".....6....59.....82....8....45........3........6..3.54...325..6.................."
    impossible = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
    for text, solutions in ((ambiguous, 2), (impossible, 0), ("." * 81, 2)):
        grids, guesses = solve(3, read(text))
        assert len(grids) == solutions
        assert guesses < 1000


def test_a_dug_puzzle_has_one_solution_and_no_clue_too_many():
    for grid in GRIDS[::29]:
        for clues in (0, 7):
            puzzle = dig(2, grid, list(range(16)), clues)
            agreeing = [g for g in GRIDS if all(c is None or c == d for c, d in zip(puzzle, g, strict=True))]
            assert agreeing == [grid]
            given = [cell for cell in range(16) if puzzle[cell] is not None]
            assert clues == 0 or len(given) == clues
            for cell in given if clues == 0 else ():
                assert len(solve(2, [None if n == cell else c for n, c in enumerate(puzzle)]).grids) == 2


# ---- many boards at once


@pytest.mark.parametrize("box", [2, 3])
def test_random_grids_are_right_or_said_not_to_be(box):
    draws, _ = keys(box, 5003)  # of about eight of which a cell keeps two digits
    grids, are_right = boards.fill(box, draws)
    assert [right(box, grid) for grid in grids.tolist()] == are_right.tolist()
    assert 0.4 < are_right.mean() < 0.95
    alone, is_right = boards.fill(box, draws[5:6])
    assert (is_right == are_right[5:6]).all()
    assert (alone == grids[5:6]).all() or not is_right
    different = {tuple(grid) for grid in grids[are_right].tolist()}
    assert len(different) == are_right.sum() if box == 3 else len(different) > 0.97 * len(GRIDS)


@pytest.mark.parametrize("box", [2, 3])
def test_boards_are_dug_as_one_by_one(box):
    """Down to so many clues, as long as the solver needs no guess, whatever the other boards do."""
    draws, orders = keys(box, 30)
    grids, are_right = boards.fill(box, draws)
    grids, orders = grids[are_right], orders[are_right]
    clues = np.arange(len(grids)) % 3 * 2 * box**2
    given = boards.dig(box, grids, orders, clues)
    for grid, order, least, kept in zip(grids.tolist(), orders.tolist(), clues.tolist(), given.tolist(), strict=True):
        puzzle = list(grid)
        for cell in order:
            if len(grid) - puzzle.count(None) > least:
                puzzle[cell] = None
                if solve(box, puzzle) != ([grid], 0):
                    puzzle[cell] = grid[cell]
        assert kept == [digit is not None for digit in puzzle]


# ---- the task


def test_base_puzzles_have_one_solution_and_few_clues():
    """Of Radcliffe's 3 million (see Sudoku), 19 to 31 have each, most 23 to 26."""
    signed, guessed = Sudoku(puzzles=240)._dug()
    clues = (signed > 0).sum(-1)
    assert 19 <= clues.min() <= clues.max() <= 31
    assert 24.2 < clues.double().mean() < 25
    assert ((clues >= 23) & (clues <= 26)).double().mean() > 0.85
    assert not guessed[torch.arange(240) % 8 != 0].any()
    assert 8 <= guessed.sum() <= 25, "about half of the 30 that the search has dug"
    assert len(signed.unique(dim=0)) == len(signed.abs().unique(dim=0)) == 240
    assert all(right(3, grid) for grid in (signed.abs() - 1).tolist())
    for row in signed[:17].tolist():
        assert count(3, [digit - 1 if digit > 0 else None for digit in row]) == 1
    assert zlib.crc32(signed.numpy().tobytes()) == 1156241322, "on every machine"


@pytest.mark.parametrize("box", [2, 3])
def test_base_puzzles_do_not_depend_on_how_many_are_made_together(box, monkeypatch):
    task = Sudoku(box=box, puzzles=20, seed=8)  # where 0, 8 and 16 need guesses
    signed, guessed = task._dug()
    monkeypatch.setattr(sudoku, "_TOGETHER", 7)
    for a, b in zip(task._dug(), (signed, guessed), strict=True):
        assert torch.equal(a, b)
    assert all(count(box, [digit - 1 if digit > 0 else None for digit in row]) == 1 for row in signed[:4].tolist())


def test_many_puzzles_are_made_with_few_searches_and_told_in_a_log(monkeypatch, capsys):
    dug = []
    monkeypatch.setattr(sudoku, "dig", lambda *args: dug.append(args) or dig(*args))
    monkeypatch.setattr(sudoku, "_MOST_SEARCHED", 4)
    monkeypatch.setattr(sudoku, "_TOGETHER", 50)
    monkeypatch.setattr(progress, "EVERY", 0)
    Sudoku(box=2, puzzles=100)._dug()
    assert len(dug) == 4
    assert "puzzles 50/100" in capsys.readouterr().err
    train = 1 - 1 / _TEST_SHARE
    assert load_recipe("sudoku").task["puzzles"] * train > 300_000


def test_examples_are_puzzles_with_one_solution(task):
    for split in ("train", "test", "hard"):
        chosen = task if split == "train" else replace(task, held_out=split)
        examples = chosen.examples(torch.arange(15), "train" if split == "train" else "test")
        assert examples.tokens.shape == examples.response.shape == (15, task.length)
        assert examples.response.any(-1).all()
        assert task.valid(examples.tokens, examples).all()
        assert (task.log_likelihood(examples.tokens, examples) == 0).all()
        for grid, blank in zip(examples.tokens.tolist(), examples.response.tolist(), strict=True):
            assert right(task.box, grid)
            puzzle = [None if free else digit for digit, free in zip(grid, blank, strict=True)]
            solved = solve(task.box, puzzle)
            assert solved.grids == [grid]
            assert (solved.guesses > 0) == (task.box == 3 and split == "hard")
            assert (puzzle.count(None) == 12) == (task.box == 2 and split == "hard")
        is_test = _kinds(task.box, torch.where(examples.response, -1, 1) * (examples.tokens + 1)) % _TEST_SHARE == 0
        assert split == "hard" or (is_test == (split == "test")).all(), "a symmetry never leads out of its split"
    assert task.entropy == 0
    assert len(set(map(tuple, task.examples(torch.arange(200), "train").tokens.tolist()))) > 100


def test_examples_are_functions_of_seed_split_and_id(task, tmp_path):
    ids = torch.tensor([5, 0, 2**40 + 1, 77])
    again = replace(task, cache=str(tmp_path)) if task.box == 2 else replace(task)  # made anew, or read
    for split in ("train", "test"):
        together = task.examples(ids, split)
        for i in range(len(ids)):
            alone = again.examples(ids[i : i + 1], split)
            for field in ("tokens", "response", "attention_mask"):
                assert torch.equal(getattr(alone, field)[0], getattr(together, field)[i])
        assert len(task.examples(torch.arange(0), split)) == 0
    if task.box == 2:
        other = replace(again, seed=2)
        assert not torch.equal(other.examples(ids, "train").tokens, task.examples(ids, "train").tokens)
        assert not torch.equal(other._base["test"][:5], task._base["test"][:5])


def test_examples_stay_what_they_are(task):
    example = task.examples(torch.tensor([0]), "train")
    shown = "".join(
        "." if blank else task.vocabulary[digit]
        for digit, blank in zip(example.tokens[0].tolist(), example.response[0].tolist(), strict=True)
    )
    assert (
        shown
        == {
            2: ".13.2.1.....32..",
            3: ".1.......4..5..3..83..7.6.....154..8..4..8.2.....6.....6.4....95..71........39.74",
        }[task.box]
    )


def test_a_damaged_cache_is_made_again(tmp_path):
    task = Sudoku(box=2, puzzles=30, cache=str(tmp_path))
    before = task.examples(torch.arange(5), "train")
    (file,) = tmp_path.glob(f"*/{CACHE_FILE}")
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(replace(task).examples(torch.arange(5), "train").tokens, before.tokens)


def test_valid_by_hand(tmp_path):
    file = tmp_path / "puzzles.txt"
    file.write_text(f"{PUZZLE}\n")
    task = Sudoku(file=str(file), cache=str(tmp_path))
    (split,) = [split for split, base in task._base.items() if len(base)]
    signed = task._base[split]
    examples = replace(task.examples(torch.arange(1), "train"), tokens=signed.abs() - 1, response=signed < 0)
    answer = torch.tensor([read(SOLUTION)])
    assert torch.equal(examples.tokens, answer.to(torch.int8))
    assert task.valid(answer, examples).all()

    def changed(*cells):
        tokens = answer.clone()
        for cell, digit in cells:
            tokens[0, cell] = digit
        return tokens

    for wrong in (
        changed((2, 0)),  # twice in its row
        changed((2, 5), (3, 3)),  # two cells of the first row exchanged: the columns and boxes are wrong
        changed((2, 9)),  # the mask
        changed((2, -1)),
        (answer + 1) % 9,  # a right grid with other clues
        answer.view(1, 9, 9).mT.flatten(1),
    ):
        assert not task.valid(wrong, examples).any()
        assert task.log_likelihood(wrong, examples).isneginf().all()

    rows_and_columns = torch.tensor([[(i + j) % 9 for i in range(9) for j in range(9)]])
    free = replace(examples, response=torch.ones_like(examples.response))
    assert not task.valid(rows_and_columns, free).any(), "boxes count too"
    assert task.valid((answer + 1) % 9, free).all()


@pytest.mark.parametrize("text", [PUZZLE, GUESSED], ids=["newspaper", "guessed"])
def test_symmetries_keep_the_kind(text):
    task, (grid,) = Sudoku(box=3), solve(3, read(text)).grids
    base = torch.tensor([[d + 1 if c is not None else -d - 1 for c, d in zip(read(text), grid, strict=True)]])
    vars(task)["_base"] = {"train": base}
    examples = task.examples(torch.arange(50), "train")
    signed = torch.where(examples.response, -1, 1) * (examples.tokens + 1)
    assert (_kinds(3, signed) == _kinds(3, base)).all()
    assert task.valid(examples.tokens, examples).all()
    assert len(set(map(tuple, examples.response.tolist()))) == 50
    assert geometry(3).units[0] == task.layout[0] == tuple(range(9))


# ---- files of one's own


def test_a_file_with_and_without_solutions(tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text(f"quizzes,solutions\n{PUZZLE.replace('.', '0')},{SOLUTION}\n\n{GUESSED}\n")
    task = Sudoku(file=str(file), cache=str(tmp_path), held_out="hard")
    assert task.test_examples == 1
    assert sum(map(len, task._base.values())) == 2
    hard = task.examples(torch.arange(1), "test")
    assert (~hard.response[0]).tolist() == [cell is not None for cell in read(GUESSED)]


@pytest.mark.parametrize(
    ("names", "row"),
    [
        ("id,puzzle,solution,clues", f"7,{PUZZLE},{SOLUTION},30"),
        ('"source","Quizzes","solutions"', f'"a, b","{PUZZLE}","{SOLUTION}"'),
        ("solution,puzzle", f"{SOLUTION},{PUZZLE}"),
        ("id,puzzle,solution", f"7,{PUZZLE},"),
        ("\ufeffpuzzle", f'"{PUZZLE}"'),
    ],
)
def test_columns_of_a_csv_file_are_found_by_name(names, row, tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text(f"{names}\r\n{row}\r\n")
    (clues,) = Sudoku(file=str(file), cache=str(tmp_path))._base["train"] > 0
    assert clues.tolist() == [cell is not None for cell in read(PUZZLE)]
    for wrong in ("8", '"8,' + row, "8" * 200_000, row.replace(PUZZLE, "")):
        file.write_text(f"{names}\n{row}\n{wrong}\n")
        with pytest.raises(UserError, match="line 3: "):
            Sudoku(file=str(file), cache=str(tmp_path)).check()


def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, capsys):
    two = PUZZLE[:40].replace("5", ".") + "." * 41
    for line, said in [
        ("5" + PUZZLE[1:8] + "5" + PUZZLE[9:], "the puzzle has no solution: correct or remove it"),
        (two, "the puzzle has more than one solution: correct or remove it"),
        (SOLUTION, "the puzzle has no blanks: correct or remove it"),
        (f"{PUZZLE} {SOLUTION[::-1]}", "the solution is not that of the puzzle: correct or remove it"),
        (PUZZLE[:-1], "give 81 cells (1-9, 0 or . for blanks), then their solution"),
        ("puzzle,solution", "give 81 cells"),
    ]:
        file = tmp_path / "mine.txt"
        file.write_text(f"{PUZZLE}\n\n{line}\n")
        task = Sudoku(file=str(file), cache=str(tmp_path))
        with pytest.raises(UserError, match=re.escape(f"mine.txt, line 3: {said}")):
            task.examples(torch.arange(1), "train")
    for box, line in [(2, f"{PUZZLE},{SOLUTION}"), (3, "12..34..2.4.4...")]:
        file.write_text(line)
        said = rf"line 1 has {len(line.split(',')[0])} cells: set task.box to {5 - box}, or give {box**4} cells"
        with pytest.raises(UserError, match=said):
            Sudoku(box=box, file=str(file), cache=str(tmp_path)).check()
    assert capsys.readouterr().err == "", "nothing is kept"


def test_a_file_without_a_held_out_puzzle_is_refused_before_training(tmp_path):
    file = tmp_path / "few.txt"
    file.write_text(PUZZLE)  # which is in train
    task = Sudoku(file=str(file), cache=str(tmp_path))
    assert len(task._base["train"]) == 1
    for split in ("test", "hard"):
        kind = "need guesses" if split == "hard" else "need no guesses"
        said = f"no puzzle is left for {split}: give more that {kind}"
        for use in (Sudoku.check, lambda task: examples_of(task, None, 10)):
            with pytest.raises(UserError, match=rf"\Atask sudoku: {said}\Z"):
                use(task.on_split(split))
    file.write_text(f"{PUZZLE}\n{PUZZLE[:10]}{SOLUTION[10]}{PUZZLE[11:]}\n")  # the second one is in test
    replace(task).check()  # without a hard one
    with pytest.raises(UserError, match=r"for hard: give more that need guesses, or choose held_out test\Z"):
        task.on_split("hard").check()
    file.write_text(f"{PUZZLE}\n{GUESSED}\n")
    with pytest.raises(UserError, match=r"for test: give more that need no guesses, or choose held_out hard\Z"):
        replace(task).check()
    task.on_split("hard").check()
    file.write_text(GUESSED)
    for split in ("test", "hard"):
        with pytest.raises(UserError, match=r"for train: give more that need no guesses\Z"):
            replace(task, held_out=split).check()
    with pytest.raises(UserError, match=r"no puzzle is left for test: set puzzles higher\Z"):
        Sudoku(box=2, puzzles=1, cache=str(tmp_path)).check()


def test_wrong_options(tmp_path):
    for options, said in [
        ({"box": 4}, "set box between 2 and 3, not 4"),
        ({"box": 2, "clues": 16}, "set clues between 0 and 15"),
        ({"held_out": "dev"}, "set held_out to test or hard"),
    ]:
        with pytest.raises(UserError, match=said):
            Sudoku(**options)
    with pytest.raises(UserError, match=r"nowhere\.txt cannot be read"):
        Sudoku(file=str(tmp_path / "nowhere.txt"), cache=str(tmp_path)).examples(torch.arange(1), "test")
    file = tmp_path / "one.txt"
    file.write_text(GUESSED)
    with pytest.raises(UserError, match=r"no puzzle is left for train: give more that need no guesses\Z"):
        Sudoku(file=str(file), cache=str(tmp_path)).examples(torch.arange(1), "train")
    for empty in ("", "quizzes,solutions\n\n"):
        file.write_text(empty)
        with pytest.raises(UserError, match=r"one\.txt has no puzzles: give one per line, 81 cells each\Z"):
            Sudoku(file=str(file), cache=str(tmp_path)).check()
    file.write_text("......2..3..1..4")
    with pytest.raises(UserError, match=r"no puzzle is left for train: give more that have 5 clues or more\Z"):
        Sudoku(box=2, file=str(file), cache=str(tmp_path)).check()
