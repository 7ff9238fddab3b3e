"""Sequences that join and leave between steps get what they get alone, bit for bit."""

import random

import pytest
import torch

from tests.decoding.small import DENOISER, MASK, POLICIES, V, results
from tests.decoding.test_engine import Rounds
from tests.training.small import small_model
from unmask.decoding.generate import Engine
from unmask.decoding.open_batch import OpenBatch
from unmask.decoding.policies import Learned
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.models.packing import padding_stays

CPU, L = torch.device("cpu"), 9
CHOICE = TokenChoice(temperature=1.2, eos_token_id=4, stop_at_eos=True)


def prompts(count, padded=False):
    """(prompt [L], attention_mask [L] or None, seed, id) each."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(V, (L,), generator=draw)
        tokens[torch.rand(L, generator=draw) < 0.7] = MASK
        tokens[-3:] = MASK  # what blocks of 3 need
        attended = None
        if padded:
            attended = torch.arange(L) >= 1 + number % 4
            tokens[~attended] = 0
        found.append((tokens, attended, 100 + number % 3, number // 3))
    return found


def alone(engine, prompt, attended, seed, id):
    mask = None if attended is None else attended[None]
    return results(engine.generate(prompt[None], seed=seed, ids=torch.tensor([id]), attention_mask=mask), 0)


def written(batch, asked, chance, leaves=()):
    """What is written for each, joining a few at a time; those in `leaves` go after their first step."""
    waiting, at, found = list(range(len(asked))), {}, {}
    while waiting or at:
        numbers = waiting[: chance.randrange(0 if at else 1, batch.room + 1)]
        if numbers:
            del waiting[: len(numbers)]
            tokens, attended, seeds, ids = zip(*(asked[number] for number in numbers), strict=True)
            mask = None if attended[0] is None else torch.stack(attended)
            at |= dict(zip(batch.join(torch.stack(tokens), seeds, ids, mask), numbers, strict=True))
        assert sorted(at) == batch.busy
        over = batch.step()
        out = batch.result(over) if over else None
        found |= {at[row]: results(out, place) for place, row in enumerate(over)}
        gone = [row for row, number in at.items() if row in over or number in leaves]
        batch.leave(gone)
        at = {row: number for row, number in at.items() if row not in gone}
    return found


def test_a_stop_string_ends_a_sequence_here_too():
    class Letters:
        def decode(self, token_ids):
            return "".join("abcdefghijk"[token] for token in token_ids)  # no letter for a mask

    choice = TokenChoice(temperature=1.2, eos_token_id=4, stop_strings=["b", "d", "gk"], tokenizer=Letters())
    engine = Engine(DENOISER, "left-to-right", 5, choice, batch_size=3, fixed_shapes=True)
    batch, asked = OpenBatch(engine, L, padded=False, device=CPU), prompts(8)
    found = written(batch, asked, random.Random(0))
    assert found == {number: alone(engine, *one) for number, one in enumerate(asked)}
    assert min(one["num_steps"] for one in found.values()) < 5
    assert batch.masks == 0


@pytest.mark.parametrize("compile", [False, True])
def test_a_sequence_gets_what_it_gets_alone(policy, compile, uncompiled):
    denoiser, chance = Rounds(DENOISER), random.Random(0)
    engine = Engine(denoiser, policy, 5, CHOICE, batch_size=3, fixed_shapes=True, compile=compile)
    asked = prompts(14)
    batch = OpenBatch(engine, L, padded=False, device=CPU)
    found = written(batch, asked, chance, leaves=(2, 6, 7))
    for number, one in found.items():
        assert one == alone(engine, *asked[number]), number
    assert len(found) >= 11
    assert {len(seen) for seen in denoiser.passes} == {3}
    assert batch.masks == 0
    assert batch.busy == []


def test_padding_does_not_show():
    """In float32, where leaving padding out would round differently with every batch."""
    torch.manual_seed(0)
    model = small_model(vocab_size=V, longest=16, budget=5).float().eval()
    engine = Engine(model.denoiser, Learned(model.selector), 5, CHOICE, batch_size=4, fixed_shapes=True)
    asked = prompts(24, padded=True)
    with padding_stays():
        found = written(OpenBatch(engine, L, padded=True, device=CPU), asked, random.Random(1))
        assert [found[number] for number in range(24)] == [alone(engine, *one) for one in asked]
    left_out = model.denoiser.hidden(asked[0][0][None], asked[0][1][None])[0, asked[0][1]]
    with padding_stays():
        masked = model.denoiser.hidden(asked[0][0][None], asked[0][1][None])[0, asked[0][1]]
    torch.testing.assert_close(left_out, masked)


def test_what_the_rule_cannot_write_does_not_join():
    engine = Engine(DENOISER, POLICIES["blocks(3,top-prob)"], 4, batch_size=2, fixed_shapes=True)
    batch = OpenBatch(engine, L, padded=False, device=CPU)
    with pytest.raises(UserError):
        batch.join(torch.tensor([[1] * 8 + [MASK]]), [0], [0])
    assert batch.busy == []
    with pytest.raises(UserError, match="3 sequences cannot join: 2 rows idle"):
        batch.join(torch.full((3, L), MASK), [0] * 3, [0] * 3)
    with pytest.raises(UserError, match="fixed_shapes"):
        OpenBatch(Engine(DENOISER, "margin", 4), L, padded=False, device=CPU)
