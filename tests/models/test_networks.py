from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from unmask.errors import UserError
from unmask.models.backbone import SIZES, BackboneConfig
from unmask.models.networks import Denoiser, OrderScorer, Selector, SelectorConfig
from unmask.models.packing import padding_stays
from unmask.recipe import load_recipe
from unmask.variational.posterior import sample_trajectories

V = 5
TRUNK = BackboneConfig(width=16, layers=1, heads=2, intermediate=24, max_length=16)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- denoiser ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_mask_token_never_gets_mass():
    for tied in [False, True]:
        torch.manual_seed(0)
        denoiser = Denoiser(TRUNK, V, tied_head=tied)
        assert denoiser.mask_token_id == V
        logits = denoiser(torch.full((2, 6), V))  # a canvas of mask tokens can be read
        assert logits.shape == (2, 6, V)  # and there is no logit to write one with
        assert torch.isfinite(logits).all()


@torch.no_grad()
def test_a_tied_head_is_the_embedding_without_the_mask():
    torch.manual_seed(0)
    denoiser = Denoiser(TRUNK, V, tied_head=True)
    assert denoiser.head is None
    x = torch.randint(V + 1, (2, 6), generator=generator())
    hidden, embedding = denoiser.hidden(x), denoiser.backbone.embedding.weight
    for token in range(V):
        assert torch.allclose(denoiser(x)[..., token], hidden @ embedding[token], atol=1e-6)


@torch.no_grad()
def test_logits_of_some_positions_are_those_of_the_whole():
    for tied in [False, True]:
        torch.manual_seed(0)
        denoiser = Denoiser(TRUNK, V, tied_head=tied)
        x = torch.randint(V + 1, (3, 6), generator=generator())
        assert torch.allclose(denoiser.logits(denoiser.hidden(x)[x == V]), denoiser(x)[x == V], atol=1e-6)


@torch.no_grad()
def test_finished_where_it_is_read_it_is_the_hidden_state():
    """Of any positions; whole, padded (packed and masked), block-causal, shifted and cached."""
    tokens = torch.randint(V + 1, (3, 8), generator=generator())
    padded = torch.arange(8) < torch.tensor([[8], [3], [5]])
    read = torch.rand(3, 8, generator=generator(1)) < 0.4  # a different number in each row
    for shape, shift in ((TRUNK, False), (TRUNK, True), (replace(TRUNK, layers=3, block_size=2), False)):
        torch.manual_seed(0)
        denoiser = Denoiser(shape, V, shift=shift).double()
        for mask in (None, padded):
            for layout in (nullcontext, padding_stays):
                with layout():
                    whole, states = denoiser.hidden(tokens, mask), denoiser.hidden(tokens, mask, finish=False)
                there = slice(None) if mask is None else mask
                torch.testing.assert_close(denoiser.finish(states)[there], whole[there], rtol=0, atol=1e-12)
                asked = read if mask is None else read & mask
                torch.testing.assert_close(denoiser.finish(states[asked]), whole[asked], rtol=0, atol=1e-12)
                assert (states[asked] - whole[asked]).abs().max() > 1e-3  # something was left to do
    at, rows, sees = torch.tensor([[1, 4], [0, 6]]), torch.tensor([2, 0]), torch.ones(2, 2, 8).bool()
    cached = [
        denoiser.cached(tokens[rows].gather(1, at), at, sees, torch.ones(3, 2, 3, 8, 2, 8).double(), rows, finish)
        for finish in (True, False)
    ]
    torch.testing.assert_close(denoiser.finish(cached[1]), cached[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_compiled_a_pass_is_one_program():
    """What the compiler cannot follow it would leave to Python without a word."""
    denoiser, tokens = Denoiser(TRUNK, V), torch.full((2, 8), V)
    for hidden in (denoiser.hidden, partial(denoiser.hidden, finish=False)):
        torch._dynamo.reset()
        compiled = torch.compile(hidden, backend="eager", fullgraph=True)
        assert torch.equal(compiled(tokens, None), hidden(tokens, None))


@torch.no_grad()
def test_a_shifted_denoiser_reads_the_token_before_whatever_the_padding():
    for side in ["left", "right"]:
        torch.manual_seed(0)
        plain = Denoiser(TRUNK, V).double()
        shifted = Denoiser(TRUNK, V, shift=True).double()
        shifted.load_state_dict(plain.state_dict())
        alone = torch.randint(V + 1, (1, 6), generator=generator())
        wanted = plain(alone)[:, [0, 0, 1, 2, 3, 4]]  # the first has none before it
        assert torch.allclose(shifted(alone), wanted, rtol=0, atol=1e-12)
        assert not torch.allclose(shifted(alone)[:, 1:], plain(alone)[:, 1:], atol=1e-3)
        rest = torch.randint(V + 1, (1, 3), generator=generator(1))
        attention_mask = torch.ones(1, 9, dtype=torch.bool)
        attention_mask[:, :3] = side == "right"
        attention_mask[:, 6:] = side == "left"
        padded = torch.cat([alone, rest] if side == "right" else [rest, alone], dim=1)
        assert torch.allclose(shifted(padded, attention_mask)[attention_mask], wanted[0], rtol=0, atol=1e-12)


# --- selector ---------------------------------------------------------------------------------------------------------


def selector_input(*shape, seed=0):
    """hidden, confidences, masked of [B, L]."""
    source = generator(seed)
    hidden = torch.randn(*shape, TRUNK.width, dtype=torch.float64, generator=source)
    confidences = torch.rand(*shape, 3, dtype=torch.float64, generator=source)
    return hidden, confidences, torch.rand(*shape, generator=source) < 0.6


def selector(trained=True, positions=0, budget=9, reads="hidden"):
    """A trained one has its last layer drawn at random: at zero it would hide what the layers below do."""
    torch.manual_seed(1)
    config = SelectorConfig(width=8, layers=1, heads=2, budget=budget, positions=positions, reads=reads)
    network = Selector(config, TRUNK.width).double()
    if trained:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.5)
    return network


@torch.no_grad()
def test_an_untrained_selector_is_the_iid_rule():
    """t steps follow this one, so each mask is revealed now with probability 1 / (t + 1)."""
    for positions in [0, 7]:
        hidden, confidences, masked = selector_input(9, 6)
        t = torch.arange(1, 10)
        p = selector(trained=False, positions=positions)(hidden, confidences, masked, t).sigmoid()
        expected = (1 / (t + 1)).to(p)[:, None].expand_as(p)
        assert torch.allclose(p[masked], expected[masked], rtol=0, atol=1e-7)


@torch.no_grad()
def test_everything_the_selector_is_given_matters():
    hidden, confidences, masked = selector_input(1, 6)
    t, network = torch.tensor([3]), selector()
    before = network(hidden, confidences, masked, t)
    without_shift = before + t.log()
    later = network(hidden, confidences, masked, t + 1) + (t + 1).log()
    changed = {
        "hidden": network(hidden + 0.1, confidences, masked, t),
        "budget": selector(budget=4)(hidden, confidences, masked, t),
        "masked": network(hidden, confidences, ~masked, t),
        **{f"confidence {j}": network(hidden, confidences + 0.1 * torch.eye(3)[j], masked, t) for j in range(3)},
    }
    for name, logits in changed.items():
        assert (logits - before).abs().max() > 1e-4, name
    assert (later - without_shift).abs().max() > 1e-4


@torch.no_grad()
def test_a_selector_of_logits_reads_no_hidden_states():
    hidden, confidences, masked = selector_input(2, 6)
    t, network = torch.tensor([3, 5]), selector(reads="logits")
    before = network(hidden, confidences, masked, t)
    assert torch.equal(network(torch.randn(2, 6, 1).double(), confidences, masked, t), before), "of any width"
    assert not torch.allclose(network(hidden, confidences + 0.1, masked, t), before)
    with pytest.raises(UserError, match="reads must be hidden or logits, got 'both'"):
        selector(reads="both")
    for name in ("order-for-your-model", "gsm8k-30m-self"):
        shape = load_recipe(name, ["init=run"] if name == "gsm8k-30m-self" else []).model.selector
        config = SelectorConfig(shape.width, shape.layers, shape.heads, 16, prices=(0.1, 1.0), reads="logits")
        assert sum(parameter.numel() for parameter in Selector(config, 4096).parameters()) <= 1_000_000


@torch.no_grad()
def test_positions_of_the_selector_look_at_each_other():
    hidden, confidences, masked = selector_input(1, 6)
    t, network = torch.tensor([3]), selector()
    before = network(hidden, confidences, masked, t)
    for n in range(6):
        shifted = hidden.clone()
        shifted[0, n, 0] += 1
        assert ((network(shifted, confidences, masked, t) - before).abs() > 1e-7).all()


@torch.no_grad()
@pytest.mark.parametrize("positions", [0, 7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_selector_sees_neither_padding_nor_other_rows(side, positions):
    network, lengths, L = selector(positions=positions), (4, 7, 2), 7
    hidden, confidences, masked = selector_input(3, L, seed=7)  # what stands on the padding is junk
    times = torch.tensor([1, 3, 8])
    attention_mask = torch.zeros(3, L, dtype=torch.bool)
    rows = []
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(L - length, L)
        own = selector_input(1, length, seed=row)
        attention_mask[row, where] = True
        for canvas, values in zip((hidden, confidences, masked), own, strict=True):
            canvas[row, where] = values[0]
        rows.append(network(*own, times[row : row + 1])[0])
    batch = network(hidden, confidences, masked, times, attention_mask)
    for row, alone in enumerate(rows):
        assert torch.allclose(batch[row, attention_mask[row]], alone, rtol=0, atol=1e-6)  # logits leave as float32


@torch.no_grad()
def test_only_positions_of_its_own_tell_equal_positions_apart():
    """What the denoiser says of an all-mask canvas may be the same everywhere."""
    hidden, confidences, t = torch.ones(1, 6, TRUNK.width).double(), torch.full((1, 6, 3), 0.3), torch.tensor([3])
    masked = torch.ones(1, 6, dtype=torch.bool)
    without = selector(positions=0)(hidden, confidences, masked, t)[0]
    assert torch.allclose(without, without[:1].expand(6), atol=1e-6)
    with_them = selector(positions=6)(hidden, confidences, masked, t)[0]
    assert len(set(with_them.round(decimals=3).tolist())) == 6


def test_too_long_for_the_positions_of_the_selector_is_said_in_one_line():
    with pytest.raises(UserError, match=r"8 tokens .* positions of 7"):
        selector(positions=7)(*selector_input(1, 8), torch.tensor([3]))
    selector(positions=0)(*selector_input(1, 8), torch.tensor([3]))


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_selector_is_small_beside_the_denoiser():
    config = SIZES["85m"]
    with torch.device("meta"):
        trunk = Denoiser(config, V).backbone.blocks
        shape = SelectorConfig(config.width // 4, layers=1, heads=5, budget=5, positions=1024)
        network = Selector(shape, config.width)
    assert parameters(network) < 0.06 * parameters(trunk)


def test_bad_shapes_of_a_selector_are_refused():
    for shape in [{"heads": 3}, {"positions": -1}, {"budget": 0}]:
        with pytest.raises(ValueError, match=r"must be|needs"):
            Selector(SelectorConfig(**{"width": 8, "layers": 1, "heads": 2, "budget": 3, **shape}), TRUNK.width)


# --- scorer -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_scores_lie_between_zero_and_one_even_where_logits_are_huge():
    torch.manual_seed(0)
    scorer = OrderScorer(TRUNK, V)
    scorer.out.weight.mul_(1000)
    scores = scorer(torch.randint(V, (8, 10), generator=generator()))
    assert scores.shape == (8, 10)
    assert scores.dtype == torch.float32
    assert scores.min() >= 0
    assert scores.max() <= 1


@torch.no_grad()
def test_scores_depend_on_the_prompt_and_not_on_padding():
    torch.manual_seed(0)
    scorer = OrderScorer(TRUNK, V).double()
    x = torch.randint(V, (1, 8), generator=generator())
    other_prompt, other_padding = x.clone(), x.clone()
    other_prompt[0, 0] = (x[0, 0] + 1) % V
    other_padding[0, 6:] = (x[0, 6:] + 1) % V
    assert ((scorer(other_prompt) - scorer(x))[0, 1:].abs() > 1e-7).all()
    attention_mask = torch.arange(8)[None] < 6
    assert torch.equal(scorer(other_padding, attention_mask)[0, :6], scorer(x, attention_mask)[0, :6])
    assert torch.allclose(scorer(x, attention_mask)[0, :6], scorer(x[:, :6])[0], atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "config",
    [BackboneConfig(48, 2, 4, 128), BackboneConfig(128, 4, 4, 512, absolute_positions=True)],
    ids=["width 48", "width 128"],
)
def test_the_first_trajectories_take_several_steps(config, seed):
    """With scores all alike every q would be near one and the first step would reveal the whole sequence."""
    torch.manual_seed(seed)
    B, k, N, budget = 16, 8, 16, 16
    scores = OrderScorer(config, vocab_size=32)(torch.randint(32, (B, N)))
    response = torch.ones(B, N, dtype=torch.bool)
    drawn = sample_trajectories(
        scores, response, torch.zeros(B, dtype=torch.long), budget, tau=0.1, uniforms=torch.rand(budget - 1, B, k, N)
    )
    last = torch.where(drawn.masked, 0, drawn.reveal_time).amin(-1)  # time runs down from T - 1
    steps = (budget - last).double()
    assert steps.mean() >= 3, f"{steps.mean():.2f} steps"


@torch.no_grad()
def test_scores_and_logits_are_not_rounded_to_bfloat16():
    """Under autocast the trunk may run in bfloat16, but eight bits of a score would tie its neighbours."""
    torch.manual_seed(0)
    shape = BackboneConfig(width=16, layers=1, heads=2, intermediate=16, max_length=256)
    network = OrderScorer(shape, vocab_size=50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = network(torch.randint(0, 50, (1, 256)))
        logits = selector()(*selector_input(1, 256), torch.tensor([3]))
    for values in (scores, logits):
        assert values.dtype != torch.bfloat16
        assert (values != values.bfloat16().to(values.dtype)).float().mean() > 0.9


def test_a_selector_in_bfloat16_tells_sure_from_surer():
    """0.9965 and 0.9975 are one number in bfloat16; their log-odds are not."""
    torch.manual_seed(0)
    selector = Selector(SelectorConfig(8, 1, 2, 3), 16).to(torch.bfloat16)
    torch.nn.init.normal_(selector.out.weight)

    def told(top):
        said = torch.tensor([[[top, 0.99, 0.01]]])
        return selector(torch.zeros(1, 1, 16), said, torch.tensor([[True]]), torch.tensor([1])).item()

    assert torch.tensor(0.9965).bfloat16() == torch.tensor(0.9975).bfloat16()
    assert told(0.9965) != told(0.9975)
