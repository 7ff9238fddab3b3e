import torch

from tests.statistics import assert_follows
from unmask.streams import Purpose, integers, stratified, uniforms


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
