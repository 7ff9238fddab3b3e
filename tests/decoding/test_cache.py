"""Block-causal models and caches: the exact cache gives the same tokens, the prefix cache does what it says."""

import pytest
import torch

from tests.decoding.small import MASK, V, small_denoiser
from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.cache import Kept
from unmask.decoding.canvas import blank_canvas
from unmask.decoding.generate import Engine, generate
from unmask.decoding.policies import Blocks, Learned, parse_policy
from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import Denoiser, Selector, SelectorConfig
from unmask.variational.selection import Bernoulli

SIZE = 4


def network(make, seed=0):
    """Far from uniform, in float64."""
    torch.manual_seed(seed)
    module = make().double().requires_grad_(False).eval()
    for parameter in module.parameters():
        parameter.normal_(std=0.6)
    return module


def block_denoiser(size=SIZE, **shape):
    config = BackboneConfig(16, 2, 2, 24, max_length=64, absolute_positions=True, block_size=size, **shape)
    return network(lambda: Denoiser(config, V))


def block_selector(budget=2, prices=()):
    return network(lambda: Selector(SelectorConfig(8, 1, 2, budget, prices=prices, block_size=SIZE), 16), seed=1)


def prompts(rows=5, response=12, seed=0):
    """Prompts of different lengths, the response behind them; in one of them what is given goes on behind it."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.full((response,), MASK)
    all_of = [torch.cat([torch.randint(V, (2 + row,), generator=generator), masks]) for row in range(rows)]
    return [*all_of, torch.cat([all_of[0], torch.tensor([3, 1])])]


def test_a_block_sees_itself_and_what_came_before():
    """By the definition, position by position; given positions see given ones only, wherever they are."""
    response = torch.tensor([[False, True, True, True, False, True]])
    attended = torch.tensor([[True, True, True, True, True, True]])
    block = block_numbers(response, 2)
    assert block.tolist() == [[0, 1, 1, 2, 0, 2]]
    sees = block_causal(block, attended)[0]
    for n in range(6):
        for m in range(6):
            assert sees[n, m] == (block[0, m] <= block[0, n])


@pytest.mark.parametrize("changed", [1, 3, 5])
def test_what_a_position_does_not_see_does_not_change_it(changed):
    denoiser, response = block_denoiser(2), torch.tensor([[False, True, True, True, False, True]])
    tokens, block = torch.tensor([[1, 2, 3, 4, 5, 6]]), block_numbers(response, 2)
    sees = block_causal(block, None)
    other = tokens.clone()
    other[0, changed] = 7
    moved = (denoiser.hidden(tokens, sees) != denoiser.hidden(other, sees)).any(-1)[0]
    assert torch.equal(moved, block[0] >= block[0, changed])


def test_without_a_word_the_whole_sequence_is_the_response():
    denoiser, tokens = block_denoiser(), torch.arange(10)[None]
    told = block_causal(block_numbers(torch.ones_like(tokens).bool(), SIZE), None)
    assert torch.equal(denoiser.hidden(tokens), denoiser.hidden(tokens, told))
    padded = torch.cat([torch.tensor([[0, 0]]), tokens], -1)
    attended = torch.arange(12)[None] >= 2
    torch.testing.assert_close(denoiser.hidden(padded, attended)[:, 2:], denoiser.hidden(tokens))


RULES = ["margin", "threshold:0.5", "iid", "klass", "credit:0.5", "dus", "stochastic(margin,0.5)"]
RULES += ["joint-threshold(0.3,0.1)", "p2", "saber", "rdm(linear,cond)", "remdm-conf"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_exact_cache_gives_the_tokens_of_no_cache(rule, batch_size):
    """In float64, for rows at different blocks and rows that enter when others are finished."""
    denoiser = block_denoiser()
    options = {"seed": 3, "temperature": 1.0, "batch_size": batch_size}
    with_, without = (
        generate(denoiser, prompts(), f"blocks({SIZE},{rule})", 8, cache=cache, **options) for cache in ("auto", "none")
    )
    assert torch.equal(with_.tokens, without.tokens)
    assert torch.equal(with_.reveal_step, without.reveal_step)
    assert torch.equal(with_.num_passes, without.num_passes)


@pytest.mark.parametrize("shape", [{"kv_heads": 1}, {"qk_norm": True}])
def test_the_exact_cache_of_other_shapes(shape):
    denoiser = block_denoiser(**shape)
    with_, without = (generate(denoiser, prompts(), "blocks(4,margin)", 8, cache=cache) for cache in ("auto", "none"))
    assert torch.equal(with_.tokens, without.tokens)


def test_a_learned_order_runs_inside_the_blocks_with_and_without_a_cache():
    """The selector reads the states of the prompt and of finished blocks too; nothing to come."""
    denoiser, selector = block_denoiser(), block_selector()
    results = [
        generate(denoiser, prompts(), policy, 6, cache=cache, temperature=1.0)
        for policy in (Learned(selector), Blocks(SIZE, Learned(selector)))
        for cache in ("auto", "none")
    ]
    for other in results[1:]:
        assert torch.equal(other.tokens, results[0].tokens)
        assert torch.equal(other.reveal_step, results[0].reveal_step)
    assert int(results[0].num_steps.max()) <= 6
    with pytest.raises(UserError, match="T = 2 in each block of 4, of which there are 3, not for 4 steps"):
        generate(denoiser, prompts(), Learned(selector), 4)


def test_the_last_step_of_a_block_is_no_choice_of_nothing():
    """A selector that never selects: T = 3 steps of each of two blocks fall back twice, and reveal the rest."""
    config = SelectorConfig(8, 1, 2, 3, block_size=SIZE)
    selector = network(lambda: Selector(config, 16, selection=Bernoulli()))
    selector.forward = lambda hidden, *rest: hidden.new_full(hidden.shape[:2], -30.0)
    for layout in ({}, {"fixed_shapes": True}):
        out = generate(block_denoiser(), torch.full((2, 2 * SIZE), MASK), Learned(selector), 6, **layout)
        assert out.num_steps.tolist() == [6, 6]
        assert out.nothing_selected.tolist() == [4, 4]


def test_no_block_is_decided_by_what_comes_behind_it():
    """A response that goes on is written the same up to there."""
    denoiser, selector = block_denoiser(), block_selector(prices=(0.1, 1.0))
    short, long = (generate(denoiser, prompts(1, n)[:1], Learned(selector), n // 2, seed=1) for n in (8, 12))
    assert torch.equal(short.tokens[0], long.tokens[0, : len(short.tokens[0])])


class Counting:
    """A denoiser that notes how many positions each of its passes computes."""

    def __init__(self, denoiser):
        self.denoiser, self.mask_token_id, self.can_cache = denoiser, denoiser.mask_token_id, True
        self.block_size, self.logits, self.new_cache = denoiser.block_size, denoiser.logits, denoiser.new_cache
        self.widths = []

    def hidden(self, tokens, attention_mask=None):
        self.widths.append(tokens.shape[1])
        return self.denoiser.hidden(tokens, attention_mask)

    def cached(self, tokens, at, *rest):
        self.widths.append(tokens.shape[1])
        return self.denoiser.cached(tokens, at, *rest)


def test_how_much_a_pass_computes():
    """The prompt once, a block at each of its steps and once more when it is finished."""
    one = [torch.tensor([1, 2, 3, *[MASK] * 12])]
    exact = Counting(block_denoiser())
    generate(exact, one, "blocks(4,margin)", 6)
    assert exact.widths == [7, 4, 8, 4, 8, 4]
    prefix = Counting(small_denoiser())
    generate(prefix, one, "blocks(4,margin)", 6, cache="prefix")
    assert prefix.widths == [15, 12, 15, 8, 15, 4]


def test_the_prefix_cache_keeps_what_the_first_pass_of_a_block_saw():
    """Against its definition: keys and values of the prefix from a pass over the canvas as it was at the block's start.

    A transformer of one layer: its keys and values do not depend on other tokens, so there the cache is exact.
    """
    deep = block_denoiser(0)
    for denoiser, same in ((small_denoiser(), True), (deep, False)):
        with_, without = (
            generate(denoiser, prompts(), "blocks(6,margin)", 6, cache=cache, seed=1) for cache in ("prefix", "none")
        )
        assert torch.equal(with_.tokens, without.tokens) == same
        assert not with_.masked.any()
    canvas = blank_canvas(torch.tensor([[1, 2, 3, *[MASK] * 8]]), None, None, MASK)
    kept = Kept(deep, parse_policy("blocks(4,margin)"), canvas)
    first = kept.passed(canvas).clone()
    torch.testing.assert_close(first, deep.hidden(canvas.tokens))
    start = canvas.tokens.clone()
    canvas.tokens[0, 3], canvas.masked[0, 3], canvas.index[0] = 5, False, 1
    second = kept.passed(canvas)
    assert torch.equal(second[:, :3], first[:, :3])  # the prompt is as it was
    torch.testing.assert_close(second[:, 3:], _with_kept_prefix(deep, start, canvas.tokens, 3))


def test_the_prefix_cache_of_a_block_that_may_still_be_revised():
    """Without masks it is finished only if the rule says so; until then its own tokens are computed anew, as before."""
    deep, canvas = block_denoiser(0), blank_canvas(torch.tensor([[1, 2, 3, *[MASK] * 8]]), None, None, MASK)
    kept = Kept(deep, parse_policy("blocks(4,joint-threshold(0.3,0.1))"), canvas)
    canvas.memory["block"] = torch.tensor([0])
    first, start = kept.passed(canvas).clone(), canvas.tokens.clone()
    canvas.tokens[0, 3:7], canvas.masked[0, 3:7], canvas.index[0] = 5, False, 1
    second = kept.passed(canvas)
    assert torch.equal(second[:, :3], first[:, :3])
    torch.testing.assert_close(second[:, 3:], _with_kept_prefix(deep, start, canvas.tokens, 3))
    canvas.memory["block"], canvas.index[0] = torch.tensor([1]), 2
    torch.testing.assert_close(kept.passed(canvas), deep.hidden(canvas.tokens))  # a new block: all of it anew


def _with_kept_prefix(denoiser, before, now, prefix):
    """Layer by layer: the prefix from `before`, what follows from `now`, which looks at both."""
    backbone = denoiser.backbone
    length = before.shape[1]
    rotary = backbone.cos[:, :length], backbone.sin[:, :length]
    place = backbone.positions(torch.arange(length))
    kept, new = backbone.embedding(before) + place, backbone.embedding(now) + place
    for block in backbone.blocks:
        mixed = torch.cat([kept[:, :prefix], new[:, prefix:]], 1)
        new, kept = block(mixed, rotary, None), block(kept, rotary, None)
    return backbone.norm(new)[:, prefix:]


def test_a_row_of_a_cached_batch_is_as_alone():
    for denoiser, cache in ((block_denoiser(), "auto"), (block_denoiser(0), "prefix")):
        together = generate(denoiser, prompts(), "blocks(4,threshold:0.6)", 12, cache=cache, seed=2)
        for row, prompt in enumerate(prompts()):
            ids = torch.tensor([row])
            alone = generate(denoiser, [prompt], "blocks(4,threshold:0.6)", 12, cache=cache, seed=2, ids=ids)
            assert torch.equal(together.tokens[row][together.attention_mask[row]], alone.tokens[0])


@pytest.mark.parametrize("size", [0, SIZE])
def test_states_of_rows_at_different_blocks_and_of_rows_that_stay(size):
    """Row by row as alone: with fewer positions to compute than others, and where another row has left."""
    denoiser, policy = block_denoiser(size), parse_policy("blocks(4,margin)")
    prompts = torch.arange(45).view(3, 15) % V
    prompts[:, 3:] = MASK
    canvas = blank_canvas(prompts, None, None, MASK)
    for row in range(3):  # so many blocks are finished
        canvas.tokens[row, 3 : 3 + 4 * row], canvas.masked[row, 3 : 3 + 4 * row] = 5, False
    alone = [canvas.take(torch.tensor([row])) for row in range(3)]
    kept, of_one = Kept(denoiser, policy, canvas), [Kept(denoiser, policy, one) for one in alone]

    def advance(rows, canvas):
        """Each row reveals its leftmost mask and a pass is made; the same for the rows by themselves."""
        found = kept.passed(canvas)
        for place, row in enumerate(rows):
            seen = canvas.tokens[place] != MASK
            torch.testing.assert_close(found[place][seen], of_one[row].passed(alone[row])[0][seen])
            for each, at in ((canvas, place), (alone[row], 0)):
                first = int(each.masked[at].int().argmax())
                each.tokens[at, first], each.masked[at, first], each.index[at] = 7, False, 1

    advance([0, 1, 2], canvas)
    advance([0, 1, 2], canvas)
    advance([1, 2], canvas.take(torch.tensor([1, 2])))


@pytest.mark.parametrize("cache", ["auto", "prefix"])
def test_a_sequence_that_enters_finds_nothing_of_the_one_before_it(cache):
    """The same first tokens with another prompt: its keys would have seen what is not there any more."""
    denoiser = block_denoiser(SIZE if cache == "auto" else 0)
    first, second = torch.tensor([1, 2, 3, *[MASK] * 4]), torch.tensor([1, 2, *[MASK] * 5])
    canvas = blank_canvas(first[None], None, None, MASK)
    kept = Kept(denoiser, parse_policy("blocks(4,margin)"), canvas)
    kept.passed(canvas)
    found = kept.passed(blank_canvas(second[None], None, None, MASK))
    fresh = Kept(denoiser, parse_policy("blocks(4,margin)"), canvas).passed(
        blank_canvas(second[None], None, None, MASK)
    )
    torch.testing.assert_close(found[:, :6], fresh[:, :6])


def test_a_sequence_whose_first_step_needs_no_pass_finds_nothing_of_the_one_before_it():
    denoiser, options = block_denoiser(0), {"cache": "prefix", "seed": 1, "batch_size": 1}
    given = torch.randint(V, (6, 3), generator=torch.Generator().manual_seed(0))
    canvas = torch.nn.functional.pad(given, (0, 4), value=MASK)
    together = generate(denoiser, canvas, "blocks(4,iid)", 12, **options)
    for row, prompt in enumerate(canvas):
        alone = generate(denoiser, prompt[None], "blocks(4,iid)", 12, ids=torch.tensor([row]), **options)
        assert torch.equal(together.tokens[row], alone.tokens[0])


def test_a_response_shorter_than_a_block_is_one_block():
    canvas = torch.tensor([[1, 2, MASK, MASK, MASK], [3, MASK, MASK, MASK, 5]])
    with_, without = (
        generate(block_denoiser(), canvas, "blocks(4,margin)", 2, cache=cache) for cache in ("auto", "none")
    )
    assert torch.equal(with_.tokens, without.tokens)
    assert not with_.masked.any()


def test_compiled_and_static_runs_of_a_block_causal_model_have_no_cache():
    denoiser = block_denoiser()
    plain = generate(denoiser, prompts(), "blocks(4,margin)", 8, cache="none")
    static = generate(denoiser, prompts(), "blocks(4,margin)", 8, fixed_shapes=True)
    assert torch.equal(plain.tokens, static.tokens)
    guided = generate(denoiser, prompts(), "blocks(4,margin)", 8, guidance=0.5)
    assert not guided.masked.any()


class Plain:
    mask_token_id = MASK

    def hidden(self, tokens, attention_mask=None):
        return torch.nn.functional.one_hot(tokens, V + 1).double()

    def logits(self, hidden):
        return hidden[:, :V]


@pytest.mark.parametrize(
    ("denoiser", "policy", "options", "message"),
    [
        (small_denoiser(), "p2", {"cache": "prefix"}, r"re-masks anywhere.*such as blocks\(32,p2"),
        (small_denoiser(), "prophet", {"cache": "prefix"}, r"such as blocks\(32,margin\)"),
        (block_denoiser(), "prophet", {}, "blocks cannot hold prophet"),
        (small_denoiser(), "margin", {"cache": "prefix"}, r"writes anywhere.*such as blocks\(32,margin\)"),
        (Plain(), "blocks(4,margin)", {"cache": "prefix"}, "Plain keeps no keys and values: leave cache out"),
        (
            network(lambda: Denoiser(BackboneConfig(16, 1, 2, 16, max_length=64), V, shift=True)),
            "blocks(4,margin)",
            {"cache": "prefix"},
            "a model with shift reads a token from the state before it",
        ),
        (small_denoiser(), "blocks(4,margin)", {"cache": "dual"}, "cache must be auto, none or prefix, got 'dual'"),
        (small_denoiser(), "blocks(4,margin)", {"cache": "prefix", "guidance": 1.0}, "does not go with guidance"),
        (small_denoiser(), "blocks(4,margin)", {"cache": "prefix", "fixed_shapes": True}, "compile or fixed_shapes"),
        (block_denoiser(), "blocks(3,margin)", {}, r"trained for blocks of 4: give the rule as blocks\(4,margin\)"),
        (block_denoiser(), "margin", {}, r"trained for blocks of 4: give the rule as blocks\(4,margin\), not margin"),
        (block_denoiser(), "remdm-cap", {}, "trained for blocks of 4"),
        (block_denoiser(), "blocks(4,wino)", {}, "reads shadows, which a block-causal denoiser does not take"),
        (small_denoiser(), "blocks(4,wino)", {"cache": "prefix"}, "reads shadows: leave cache out"),
    ],
)
def test_bad_input(denoiser, policy, options, message):
    with pytest.raises(UserError, match=message):
        generate(denoiser, prompts(), policy, 8, **options)


@pytest.mark.parametrize("cache", ["auto", "none", "prefix"])
def test_a_sequence_longer_than_the_context_is_refused(cache):
    denoiser = small_denoiser() if cache == "prefix" else block_denoiser()
    with pytest.raises(UserError, match="65 tokens is longer than the model's context of 64: shorten it"):
        generate(denoiser, torch.full((1, 65), MASK), "blocks(4,margin)", 20, cache=cache)


def test_a_selector_of_other_blocks_is_refused():
    with pytest.raises(UserError, match="cannot hold learned"):
        Blocks(3, Learned(block_selector()))
    with pytest.raises(UserError, match="cannot hold learned"):
        Engine(block_denoiser(3), Learned(block_selector()), 6)
    with pytest.raises(UserError, match="set shift = false, or block_size = 0"):
        Denoiser(BackboneConfig(16, 1, 2, 24, block_size=4), V, shift=True)
