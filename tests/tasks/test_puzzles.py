"""Every puzzle against slow, plain readings of its rule and against exact enumeration of small instances."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from unmask.errors import UserError
from unmask.tasks import TASKS, make_task
from unmask.tasks.puzzles.addition import Addition
from unmask.tasks.puzzles.chain import Chain
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.puzzles.latin_square import LatinSquare, latin_squares
from unmask.tasks.puzzles.parity_dag import ParityDag
from unmask.tasks.puzzles.permutation import Permutation
from unmask.tasks.puzzles.waiting_lines import WaitingLines
from unmask.tasks.task import Examples

DEFAULT = [make_task(name) for name, source in TASKS.items() if ".puzzles." in source]
OTHER = [
    Groups(seed=3, groups=3, group_size=2, symbols=26),
    Addition(seed=4, digits=2, ask="sum"),
    Addition(digits=20),  # past the integers that 64 bits hold
    Chain(seed=1, length=1),
    Chain(seed=2, length=9, symbols=3, branching=3),
    Permutation(length=26),
    LatinSquare(clues=0),
    LatinSquare(clues=15),
    ParityDag(seed=5, levels=3, width=6, parents=3),
    ParityDag(width=2, parents=2),  # one parent set for two tokens
    WaitingLines(seed=6, operations="remove-random", min_n=16, max_n=16),
    WaitingLines(operations="shuffle, sort", min_n=3, max_n=4, names=5),
]
SMALL = [  # unconditional, and few enough sequences to list
    Groups(seed=1, groups=2, group_size=2, symbols=3),
    Addition(seed=1, digits=1),
    Chain(seed=1, length=4, symbols=4, branching=2),
    Permutation(seed=1, length=4),
    ParityDag(seed=1, levels=3, width=3, parents=2),
]


def every(tasks):
    return pytest.mark.parametrize("task", tasks, ids=repr)


# ---- the rules, read slowly: x is a list of ints, given the list of prompt positions' tokens (None in the response)


def right(task, x, given):
    if any(clue is not None and token != clue for token, clue in zip(x, given, strict=True)):
        return False
    return all(0 <= token < len(task.vocabulary) for token in x) and RULES[type(task)](task, x)


def groups_rule(task, x):
    shown = task._shown.tolist()
    return all(any(all(x[n] == shown[n][s] for n in group) for s in range(task.symbols)) for group in task.layout)


def addition_rule(task, x):
    a, b, c = (int("".join(str(x[n]) for n in number)) for number in task.layout)
    return a + b == c


def chain_rule(task, x):
    successors = task._successors.tolist()
    return all(after in successors[before] for before, after in itertools.pairwise(x))


def permutation_rule(task, x):
    return len(set(x)) == task.length


def latin_square_rule(task, x):
    rows = [x[4 * i : 4 * i + 4] for i in range(4)]
    return all(set(line) == {0, 1, 2, 3} for line in [*rows, *zip(*rows, strict=True)])


def parity_dag_rule(task, x):
    levels = [[x[n] for n in level] for level in task.layout]
    parents = task._parents.tolist()
    return all(
        levels[i + 1][j] == sum(levels[i][k] for k in parents[i][j]) % 2
        for i in range(task.levels - 1)
        for j in range(task.width)
    )


def waiting_lines_rule(task, x):
    operation, place, name, *words = (task.vocabulary[token] for token in x)
    line, answer = ([word for word in part if word != "."] for part in (words[: task.max_n], words[task.max_n :]))
    if words != line + ["."] * (task.max_n - len(line)) + answer + ["."] * (task.length - task.max_n - 3 - len(answer)):
        return False
    if operation in ("copy", "reverse", "sort"):
        return answer == {"copy": line, "reverse": line[::-1], "sort": sorted(line)}[operation]
    if operation == "shuffle":
        return sorted(answer) == sorted(line) and answer != line
    kind, where = operation.split("-")
    cut = {"insert": (0, [name]), "remove": (1, []), "replace": (1, [name])}[kind]
    places = [int(place) - 1] if where == "index" else range(len(line) + (kind == "insert"))
    return answer in [line[:i] + cut[1] + line[i + cut[0] :] for i in places]


RULES = {
    Groups: groups_rule,
    Addition: addition_rule,
    Chain: chain_rule,
    Permutation: permutation_rule,
    LatinSquare: latin_square_rule,
    ParityDag: parity_dag_rule,
    WaitingLines: waiting_lines_rule,
}


def given(examples):
    return [
        [None if free else token for token, free in zip(tokens, response, strict=True)]
        for tokens, response in zip(examples.tokens.tolist(), examples.response.tolist(), strict=True)
    ]


def all_sequences(task):
    sequences = torch.tensor(list(itertools.product(range(len(task.vocabulary)), repeat=task.length)))
    everywhere = torch.ones_like(sequences, dtype=torch.bool)
    return sequences, Examples(sequences, everywhere, everywhere)


def assert_follows(observed, probabilities):
    """Pearson's chi-square below its quantile of 1 - 1e-4 (Wilson and Hilferty); the streams are fixed."""
    total = observed.sum()
    expected = probabilities * total
    assert expected.min() >= 5
    dof = len(observed) - 1
    limit = dof * (1 - 2 / (9 * dof) + 3.72 * math.sqrt(2 / (9 * dof))) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < limit


# ---- what all puzzles promise


def test_examples_have_their_shape_and_are_pure():
    for task in DEFAULT + OTHER:
        examples = task.examples(torch.arange(50), "train")
        assert examples.tokens.shape == examples.response.shape == examples.attention_mask.shape == (50, task.length)
        assert examples.tokens.dtype == torch.int64
        assert examples.response.dtype == examples.attention_mask.dtype == torch.bool
        assert examples.attention_mask.all()
        assert examples.response.any(-1).all()
        assert examples.response.all() == task.unconditional
        assert examples.tokens.min() >= 0
        assert examples.tokens.max() < len(task.vocabulary) == len(set(task.vocabulary))
        assert sorted(itertools.chain(*task.layout)) == list(range(task.length))
        assert len(task.examples(torch.arange(0), "test")) == 0

        ids = torch.tensor([5, 0, 2**40 + 1, 77])
        together = task.examples(ids, "test")
        for i in range(len(ids)):
            alone = replace(task).examples(ids[i : i + 1], "test")  # a new object: nothing cached
            for field in ("tokens", "response", "attention_mask"):
                assert torch.equal(getattr(alone, field)[0], getattr(together, field)[i])


def test_splits_and_seeds_differ():
    ids = torch.arange(20)
    for task in DEFAULT:
        train = task.examples(ids, "train").tokens
        assert not torch.equal(train, task.examples(ids, "test").tokens)
        assert not torch.equal(train, replace(task, seed=1).examples(ids, "train").tokens)
        with pytest.raises(UserError, match=r"^unknown split 'dev': use train or test$"):
            task.examples(ids, "dev")


def test_examples_stay_what_they_are():
    """Published numbers and checkpoints rest on these examples: a change of them must be meant."""
    found = {
        task.name: "".join(task.vocabulary[token] for token in task.examples(torch.tensor([0]), "train").tokens[0])
        for task in DEFAULT
    }
    assert found == {
        "groups": "heegafeaegdccaeg",
        "addition": "1875890776",
        "chain": "bdfdfdbfdfhcaecg",
        "permutation": "aghdcbef",
        "latin-square": "1342423131242413",
        "parity-dag": "0111011111001000",
        "waiting-lines": "reverse..JaneJuanBorisCaraBenAmos"
        "KateGusGretaHalHugoIanInesFinnKaiEmilGinaCarlBeaKimAnnaAsaAbelJoelIrisLarsDov....."
        "DovLarsIrisJoelAbelAsaAnnaKimBeaCarlGinaEmilKaiFinnInesIanHugoHalGretaGusKateAmosBenCaraBorisJuanJane......",
    }


@every(DEFAULT + OTHER)
def test_valid_reads_the_rule(task):
    examples = task.examples(torch.arange(100), "train")
    clues = given(examples)
    assert task.valid(examples.tokens, examples).all()
    assert all(right(task, x, clue) for x, clue in zip(examples.tokens.tolist(), clues, strict=True))

    generator = torch.Generator().manual_seed(0)
    for changes in (1, 2):  # two changes may mend each other, and may hit the same position
        corrupted = examples.tokens.clone()
        for _ in range(changes):
            where = torch.randint(task.length, (100, 1), generator=generator)
            shift = torch.randint(1, len(task.vocabulary), (100, 1), generator=generator)
            corrupted.scatter_(1, where, (corrupted.gather(1, where) + shift) % len(task.vocabulary))
        expected = [right(task, x, clue) for x, clue in zip(corrupted.tolist(), clues, strict=True)]
        assert task.valid(corrupted, examples).tolist() == expected
        assert task.log_likelihood(corrupted, examples).isfinite().tolist() == expected

    examples = task.examples(torch.arange(task.length), "train")
    for outside in (len(task.vocabulary), -1):  # no mask is valid anywhere
        tokens = examples.tokens.clone().fill_diagonal_(outside)  # example i has one at position i
        assert not task.valid(tokens, examples).any()
        assert task.log_likelihood(tokens, examples).isneginf().all()


@every(SMALL)
def test_likelihood_and_samples_by_enumeration(task):
    sequences, examples = all_sequences(task)
    log_p = task.log_likelihood(sequences, examples)
    p = log_p.exp()
    assert log_p.dtype == torch.float64
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert torch.special.entr(p).sum() == pytest.approx(task.entropy, abs=1e-12)
    assert torch.equal(task.valid(sequences, examples), log_p.isfinite())
    assert task.valid(sequences, examples).tolist() == [right(task, x, [None] * len(x)) for x in sequences.tolist()]

    radix = len(task.vocabulary) ** torch.arange(task.length - 1, -1, -1)  # product() counts in this radix
    for split in ("train", "test"):
        drawn = (task.examples(torch.arange(10_000), split).tokens * radix).sum(-1)
        observed = drawn.bincount(minlength=len(sequences))
        assert (observed[p == 0] == 0).all()
        assert_follows(observed[p > 0], p[p > 0])


# ---- what each puzzle promises


def test_groups_are_independent_and_known_from_any_member():
    task = Groups()
    tokens = task.examples(torch.arange(8000), "train").tokens
    for one, two in itertools.combinations(range(task.length), 2):
        pairs = (tokens[:, one] * task.symbols + tokens[:, two]).bincount(minlength=task.symbols**2)
        together = any({one, two} <= set(group) for group in task.layout)
        assert (pairs > 0).sum() == (task.symbols if together else task.symbols**2)
    assert task.min_steps == 2
    assert task.entropy == pytest.approx(4 * math.log(8))


def test_asked_for_the_sum_only():
    task = Addition(digits=2, ask="sum")
    example = task.examples(torch.tensor([3]), "test")
    assert example.response.tolist() == [[False] * 4 + [True] * 3]
    a, b = (10 * example.tokens[0, i].item() + example.tokens[0, i + 1].item() for i in (0, 2))
    answers = torch.tensor(list(itertools.product(range(10), repeat=3)))
    tokens = torch.cat([example.tokens[:, :4].expand(1000, 4), answers], dim=-1)
    examples = Examples(
        *(tensor.expand(1000, -1) for tensor in (example.tokens, example.response, example.attention_mask))
    )
    assert task.valid(tokens, examples).nonzero().tolist() == [[a + b]]
    assert task.log_likelihood(tokens, examples)[a + b] == task.entropy == 0
    assert (task.min_steps, task.unconditional) == (1, False)
    assert (Addition().min_steps, Addition().unconditional) == (2, True)

    # Another right addition is not an answer to this prompt.
    other = task.examples(torch.tensor([4]), "test")
    assert not task.valid(other.tokens, example).any()


def test_chain_is_sparse_and_reaches_everything():
    for task in map(Chain, range(5)):
        transitions = task._transitions
        assert ((transitions > 0).sum(-1) == task.branching).all()
        assert torch.allclose(transitions.sum(-1), torch.ones(8, dtype=torch.float64))
        steps = torch.eye(8) + (transitions > 0)
        assert (torch.linalg.matrix_power(steps, 8) > 0).all()
        assert transitions[transitions > 0].unique().numel() > task.symbols  # not uniform
    # a step more each time the length doubles
    assert [Chain(length=n).min_steps for n in (1, 2, 3, 4, 7, 8, 15, 16)] == [1, 2, 2, 3, 3, 4, 4, 5]


@every([Chain(seed=1, length=4, symbols=4, branching=2), Chain(seed=2, length=5, symbols=3), Chain(length=1)])
def test_the_posterior_of_a_chain_is_that_of_all_sequences(task):
    """Against a plain sum over every sequence, for every set of masks and every sequence that is possible."""
    (tokens, examples), mask = all_sequences(task), task.symbols
    p = task.log_likelihood(tokens, examples).exp()
    possible = tokens[p > 0]
    for masked in itertools.product([False, True], repeat=task.length):
        state = torch.where(torch.tensor(masked), mask, possible)  # [S, L]
        agrees = p * ((tokens == state[:, None]) | (state[:, None] == mask)).all(-1)  # [S, A]
        at = torch.nn.functional.one_hot(tokens, task.symbols).double()  # [A, L, V]
        expected = torch.einsum("sa,alv->slv", agrees / agrees.sum(-1, keepdim=True), at)
        assert (task.log_posterior(state).exp() - expected).abs().max() < 1e-10


def test_the_posterior_of_a_chain_is_finite_where_nothing_agrees():
    task = Chain(seed=1, length=4, symbols=4, branching=2)
    P = task._transitions
    a, b = (P == 0).nonzero()[0].tolist()
    p = task.log_posterior(torch.tensor([[a, b, 4, 4]])).exp()[0]
    assert torch.equal(p.argmax(-1)[:2], torch.tensor([a, b]))
    assert torch.allclose(p[2], P[b])
    a, b = (P @ P == 0).nonzero()[0].tolist()  # no path of two steps: what follows from the left
    assert torch.allclose(task.log_posterior(torch.tensor([[4, a, 4, b]])).exp()[0, 2], P[a])


def test_latin_squares_are_all_listed():
    squares = latin_squares()
    assert squares.shape == (576, 16)
    assert squares.unique(dim=0).shape == (576, 16)
    assert all(latin_square_rule(None, square) for square in squares.tolist())
    assert LatinSquare(clues=0).entropy == pytest.approx(math.log(576))
    assert LatinSquare(clues=1).entropy is None
    assert LatinSquare().min_steps is None


def test_latin_square_likelihood_sums_to_one():
    squares = latin_squares()
    for task in (LatinSquare(clues=clues) for clues in (0, 1, 6, 15)):
        examples = task.examples(torch.arange(2), "test")
        for i, clue in enumerate(given(examples)):
            repeated = Examples(
                *(t[i].expand(576, -1) for t in (examples.tokens, examples.response, examples.attention_mask))
            )
            p = task.log_likelihood(squares, repeated).exp()
            assert p.sum() == pytest.approx(1, abs=1e-12)
            assert (p > 0).tolist() == [right(task, square, clue) for square in squares.tolist()]
            assert p[p > 0].unique().numel() == 1


def test_latin_squares_and_clues_are_uniform():
    task = LatinSquare()
    examples = task.examples(torch.arange(10_000), "train")
    assert ((~examples.response).sum(-1) == 6).all()
    radix = 4 ** torch.arange(16)
    order = (latin_squares() * radix).sum(-1).sort().values
    drawn = torch.searchsorted(order, (examples.tokens * radix).sum(-1))
    assert_follows(drawn.bincount(minlength=576), torch.full((576,), 1 / 576, dtype=torch.float64))
    # Without replacement the counts vary less than independent ones, so the limit holds all the more.
    assert_follows((~examples.response).sum(0), torch.full((16,), 1 / 16, dtype=torch.float64))


def test_parity_dag_has_no_constant_token_and_no_repeated_parents():
    for task in map(ParityDag, range(30)):
        for level in task._parents.tolist():
            assert all(len(set(parents)) == task.parents for parents in level)
            assert len({frozenset(parents) for parents in level}) == task.width
        tokens = task.examples(torch.arange(200), "train").tokens
        assert (tokens.min(0).values < tokens.max(0).values).all()
