"""Sudoku against brute force on all 4 x 4 grids, and against readings of its rule by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from unmask.errors import UserError
from unmask.evaluation.evaluate import examples_of
from unmask.tasks.sudoku.solver import dig, geometry, solve
from unmask.tasks.sudoku.sudoku import _TEST_SHARE, CACHE_FILE, Sudoku, _kind

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


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("sudoku"))


@pytest.fixture(params=[2, 3], ids=["4x4", "9x9"])
def task(request, cache):
    return Sudoku(box=request.param, puzzles={2: 300, 3: 40}[request.param], seed=1, cache=cache)


# ---- the solver


def test_all_small_grids_are_found():
    assert len(GRIDS) == 288
    found, _ = solve(2, [None] * 16, at_most=1000)
    assert sorted(found) == sorted(GRIDS)


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


# ---- the task


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
            is_test = _kind(task.box, puzzle) % _TEST_SHARE == 0
            assert split == "hard" or is_test == (split == "test"), "a symmetry never leads out of its split"
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
            2: ".2344...2....42.",
            3: "....12.8..87...6.2....6..4.....86...4..2.3..6.6.17...387.6..2...4...79....63...74",
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
    assert torch.equal(examples.tokens, answer)
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


def test_symmetries_keep_the_kind():
    task = Sudoku(box=3)
    vars(task)["_base"] = {"train": torch.tensor([[d + 1 if c is not None else -d - 1 for c, d in zip(
        read(PUZZLE), read(SOLUTION), strict=True)]])}  # fmt: skip
    examples = task.examples(torch.arange(50), "train")
    kinds = {
        _kind(3, [None if free else digit for digit, free in zip(grid, blank, strict=True)])
        for grid, blank in zip(examples.tokens.tolist(), examples.response.tolist(), strict=True)
    }
    assert kinds == {_kind(3, read(PUZZLE))}
    assert task.valid(examples.tokens, examples).all()
    assert len(set(map(tuple, examples.response.tolist()))) == 50
    assert geometry(3).units[0] == task.layout[0] == tuple(range(9))


# ---- files of one's own


def test_a_file_with_and_without_solutions(tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text(f"{PUZZLE.replace('.', '0')},{SOLUTION}\n\n{GUESSED}\n")
    task = Sudoku(file=str(file), cache=str(tmp_path), held_out="hard")
    assert task.test_examples == 1
    assert sum(map(len, task._base.values())) == 2
    hard = task.examples(torch.arange(1), "test")
    assert (~hard.response[0]).tolist() == [cell is not None for cell in read(GUESSED)]


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
        with pytest.raises(UserError, match=r"\A[^\n]+\Z") as error:
            task.examples(torch.arange(1), "train")
        assert f"mine.txt, line 3: {said}" in str(error.value)
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
        said = f"no puzzle is left for {split}: give more puzzles{', or choose held_out test' * (split == 'hard')}"
        for use in (Sudoku.check, lambda task: examples_of(task, None, 10)):
            with pytest.raises(UserError, match=rf"\Atask sudoku: {said}\Z"):
                use(task.on_split(split))
    file.write_text(f"{PUZZLE}\n{PUZZLE[:10]}{SOLUTION[10]}{PUZZLE[11:]}\n")  # the second one is in test
    replace(task).check()  # without a hard one
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
    with pytest.raises(UserError, match="no puzzle is left for train"):
        Sudoku(file=str(file), cache=str(tmp_path)).examples(torch.arange(1), "train")
