from itertools import product

import pytest
import torch

from tests.statistics import assert_follows
from unmask.rng import Purpose, integers, stratified, uniforms


def test_a_draw_depends_only_on_its_words():
    ids = torch.arange(50)
    together = uniforms(3, Purpose.REVEAL, 7, ids[:, None], torch.arange(20))
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(3, Purpose.REVEAL, 7, ids[shuffled][:, None], torch.arange(20)), together[shuffled])
    assert torch.equal(uniforms(3, Purpose.REVEAL, 7, ids[11], torch.arange(20)), together[11])


def test_every_word_matters_and_so_does_its_place():
    base = uniforms(0, 1, 2, 3)
    others = [uniforms(1, 1, 2, 3), uniforms(0, 2, 2, 3), uniforms(0, 1, 3, 2), uniforms(0, 1, 2), uniforms(0, 1, 2, 4)]
    assert all(base != other for other in others)


def test_uniform_and_independent_along_every_word():
    u = uniforms(5, torch.arange(200)[:, None, None], torch.arange(50)[:, None], torch.arange(50), dtype=torch.float64)
    assert_follows(torch.histc(u, bins=64, min=0, max=1).tolist(), [u.numel() / 64] * 64)
    for axis in range(3):
        left, right = u.narrow(axis, 0, u.shape[axis] - 1).flatten(), u.narrow(axis, 1, u.shape[axis] - 1).flatten()
        assert torch.corrcoef(torch.stack([left, right]))[0, 1].abs() < 5 / left.numel() ** 0.5


def test_never_one_and_the_same_draw_in_both_precisions():
    words = torch.arange(1_000_000)
    single, double = uniforms(0, words), uniforms(0, words, dtype=torch.float64)
    assert single.max() < 1
    assert double.max() < 1
    assert single.min() >= 0
    assert (single.double() - double).abs().max() < 2**-23


def unmix(h):
    """The inverse of SplitMix64's finaliser: the seed whose hash, without any words, is h."""
    h = (h ^ h >> 31 ^ h >> 62) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    h = (h ^ h >> 27 ^ h >> 54) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return h ^ h >> 30 ^ h >> 60


def test_the_smallest_hash_is_above_zero_and_the_largest_below_one():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        lowest, highest = (uniforms(unmix(h), dtype=dtype) for h in (0, 2**64 - 1))
        assert lowest.dtype == highest.dtype == dtype
        assert 0 < lowest < 0.01
        assert 0.99 < highest < 1


def test_words_of_every_integer_dtype_name_the_same_draw():
    words = torch.arange(5)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(uniforms(torch.tensor(3, dtype=dtype), 1, words.to(dtype)), uniforms(3, 1, words))
        assert torch.equal(integers(3, words.to(dtype)), integers(3, words))
    with pytest.raises(TypeError, match="must be integers, got a tensor"):
        uniforms(3, words.float())


def test_integers_do_not_repeat_and_are_not_negative():
    drawn = integers(0, Purpose.EXAMPLE, 1, torch.arange(100_000))
    assert drawn.min() >= 0
    assert len(drawn.unique()) == 100_000
    assert not torch.isin(drawn, integers(1, Purpose.EXAMPLE, 1, torch.arange(100_000))).any()


def test_stratified_fills_every_stratum_once_whoever_draws_it():
    total = 12
    for step in range(20):
        u = stratified(0, Purpose.TIME, step, slots=torch.arange(total), total=total)
        assert sorted((u * total).long().tolist()) == list(range(total))
        half = stratified(0, Purpose.TIME, step, slots=torch.arange(6, 12), total=total)
        assert torch.equal(half, u[6:])


# --- streams never change silently ------------------------------------------------------------------------------------

WORDS = torch.tensor([-1, 0, 1, 2**40])
BITS = [
    5918134674589588,
    5358032359643693,
    2667673005516073,
    1575571877823790,
]  # of uniforms(-3, TOKEN, 5, WORDS, 7), the top 53


def test_pinned_draws():
    """Records name their seeds: another number here is another result there."""
    u = uniforms(0, Purpose.REVEAL, 7, 11, torch.arange(3), dtype=torch.float64)
    assert u.tolist() == [0.3672373858677668, 0.42981547314636837, 0.3081885656875615]
    assert (uniforms(-3, Purpose.TOKEN, 5, WORDS, 7, dtype=torch.float64) * 2**53).long().tolist() == BITS
    assert integers(123, Purpose.EXAMPLE, 1, torch.arange(2)).tolist() == [4384687980236103846, 2715004943864277165]
    assert uniforms(2**63 + 5).item() == 0.29908424615859985
    assert list(Purpose) == list(range(1, 11))


def slow_uniform(seed, *words):
    """The formula of the module's docstring with Python's integers."""
    full = 2**64 - 1

    def mix(h):
        h &= full
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & full
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & full
        return h ^ (h >> 31)

    h = mix(seed)
    for j, word in enumerate(words, start=1):
        h = mix(h ^ mix(word + j * 0x9E3779B97F4A7C15))
    return max(1, h >> 11) * 2.0**-53


def test_a_word_is_a_word_whether_it_is_a_tensor_or_not():
    """The seed as a number and as a tensor; integers before, between and behind tensors."""
    for seed in (0, 1, -1, 2**62 + 12345, -(2**63)):
        for words in ((3, 4, 5), (Purpose.TOKEN, -1, 2**40), (-(2**63), 2**63 - 1, 0), (7,), ()):
            expected = slow_uniform(seed, *(int(word) for word in words))
            for choice in product((False, True), repeat=len(words) + 1):
                one, *others = (
                    torch.tensor(int(word)) if is_tensor else word
                    for word, is_tensor in zip((seed, *words), choice, strict=True)
                )
                assert uniforms(one, *others, dtype=torch.float64).item() == expected
        column, row = torch.arange(4)[:, None], torch.arange(-1, 2)
        drawn = uniforms(torch.tensor(seed), Purpose.REVEAL, column, 9, row, dtype=torch.float64)
        assert drawn.shape == (4, 3)
        assert torch.equal(drawn, uniforms(seed, Purpose.REVEAL, column, 9, row, dtype=torch.float64))
        assert drawn[2, 0].item() == slow_uniform(seed, Purpose.REVEAL, 2, 9, -1)
