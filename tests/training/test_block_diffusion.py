"""Block diffusion against its definition: every mask of every block by itself, and every block by itself."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from tests.training.small import padded, randomised
from unmask.decoding.blocks import block_causal, block_numbers
from unmask.decoding.generate import generate
from unmask.decoding.policies import Learned
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer
from unmask.tasks.task import Examples
from unmask.training import block_diffusion
from unmask.training.block_diffusion import BlockDenoiseObjective, block_log_mu, block_mask_counts, mask_blocks
from unmask.training.objectives import OrderObjective
from unmask.training.reading import one_block, with_layout
from unmask.training.self_posterior import SelfObjective
from unmask.variational.estimators import LeaveOneOut

SIZE = 2
# A prompt at the start, in the middle and nowhere; blocks of 2 and 2, 2 and 1, 2 and 1, and one of 1.
SEQUENCES = [[2, 0, 1, 1, 0], [1, 2, 0, 1], [0, 2, 1], [1, 0]]
RESPONSES = [[False, True, True, True, True], [True, False, True, True], [True, True, True], [False, True]]


def block_model(size=SIZE, budget=2, prices=(), scorer=True):
    shape = BackboneConfig(16, 2, 2, 16, max_length=8, absolute_positions=True, block_size=size)
    selector = SelectorConfig(8, 1, 2, budget, positions=8, prices=prices, block_size=size)
    config = OrderModelConfig(3, shape, selector=selector, scorer=shape if scorer else None, tau=0.3)
    return randomised(OrderModel(config, word_level_tokenizer(["w0", "w1", "w2"])).double())


def spread(rows):
    return (torch.arange(rows).double() + 0.5) / rows


def log_mu_of_a_block(denoiser, tokens, block, masked, b):
    """[n]: log mu of the true tokens of block b where masked, from a pass that ends with this block."""
    here = (block <= b).nonzero()[:, 0]
    x = torch.where(masked & (block == b), denoiser.mask_token_id, tokens)[here][None]
    # The places keep their positions: what is left out stands behind, or is given to a later block.
    sees = block_causal(block[here][None], None)
    if len(here) == int(here[-1]) + 1:
        log_p = denoiser.logits(denoiser.hidden(x, sees)).log_softmax(-1)[0]
    else:  # a later block stands before a given token: it is there, and nothing sees it
        x = torch.where(masked & (block == b), denoiser.mask_token_id, tokens)[None]
        log_p = denoiser.logits(denoiser.hidden(x, block_causal(block[None], None))).log_softmax(-1)[0, here]
    return {int(n): log_p[i, tokens[n]] for i, n in enumerate(here) if masked[n] and block[n] == b}


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_one_pass_over_two_copies_is_a_pass_for_each_block(left):
    denoiser, examples = block_model().denoiser, padded(SEQUENCES, RESPONSES, left=left, extra=1)
    block = block_numbers(examples.response, SIZE)
    for seed in range(4):
        masked = examples.response & (torch.rand(block.shape, generator=torch.Generator().manual_seed(seed)) < 0.6)
        found = block_log_mu(denoiser, examples, block, masked)
        assert torch.equal(found != 0, masked)
        for row in range(len(examples)):
            real = examples.attention_mask[row]
            tokens, blocks, holes = (part[row][real] for part in (examples.tokens, block, masked))
            for b in range(1, int(blocks.max()) + 1):
                for n, value in log_mu_of_a_block(denoiser, tokens, blocks, holes, b).items():
                    torch.testing.assert_close(found[row][real][n], value)


def every_mask(N):
    """A response of two blocks, of 2 and N - 2, their sizes, and every mask with how likely it is.

    No block is without masks: each has a count that is uniform in 1, ..., N_b, then a uniform mask of it.
    """
    one = padded([SEQUENCES[0][: N + 1]], [RESPONSES[0][: N + 1]])
    sizes, found = [2, N - 2], []
    for chosen in product(*(list(product([False, True], repeat=size))[1:] for size in sizes)):
        likely = math.prod(1 / (size * math.comb(size, sum(part))) for size, part in zip(sizes, chosen, strict=True))
        found.append((torch.tensor([[False, *chosen[0], *chosen[1]]]), likely))
    return one, block_numbers(one.response, SIZE), sizes, found


@pytest.mark.parametrize("N", [3, 4])
@torch.no_grad()
def test_the_objective_is_its_definition(monkeypatch, N):
    """Its mean over all draws = 1/N sum_b int_0^1 dt sum_A t^|A| (1-t)^(N_b-|A|) 1/t sum_{n in A} -log mu^n,

    where A are the masks of block b, each by a pass that ends with this block; by Gauss-Legendre quadrature.
    """
    denoiser, (one, block, sizes, masks) = block_model().denoiser, every_mask(N)
    nodes, node_weights = np.polynomial.legendre.leggauss(8)
    defined = 0.0
    for b, size in enumerate(sizes, 1):
        inside = (block[0] == b).nonzero()[:, 0]
        for chosen in list(product([False, True], repeat=size))[1:]:
            masked, m = torch.zeros(N + 1, dtype=torch.bool), sum(chosen)
            masked[inside] = torch.tensor(chosen)
            t = (nodes + 1) / 2
            weight = float((node_weights / 2 * t ** (m - 1) * (1 - t) ** (size - m)).sum())
            defined -= weight * sum(log_mu_of_a_block(denoiser, one.tokens[0], block[0], masked, b).values()) / N
    objective, total = BlockDenoiseObjective(denoiser, seed=0), 0.0
    for masked, likely in masks:
        drawn = torch.stack([(masked & (b == block)).sum(-1) for b in (1, 2)], -1), torch.tensor([sizes])
        monkeypatch.setattr(block_diffusion, "block_mask_counts", lambda *_, drawn=drawn: drawn)
        monkeypatch.setattr(block_diffusion, "mask_blocks", lambda *_, masked=masked: masked)
        total += likely * objective(one, torch.arange(1), torch.tensor([0.5])).loss
    torch.testing.assert_close(total, defined)


@pytest.mark.parametrize("N", [3, 4])
def test_masks_are_drawn_as_the_definition_says(N):
    B, (one, _, _, masks) = 4096, every_mask(N)
    many = Examples(*(part.expand(B, -1) for part in (one.tokens, one.response, one.attention_mask)))
    counts, _ = block_mask_counts(spread(B), many.num_response, SIZE, seed=0)
    block = block_numbers(many.response, SIZE)
    masked = mask_blocks(many, block, counts.gather(-1, (block - 1).clamp(min=0)), torch.arange(B), SIZE, seed=0)
    for mask, likely in masks:
        assert abs(int((masked == mask).all(-1).sum()) - B * likely) < 5 * (B * likely) ** 0.5


def test_counts_and_masks():
    """A last block may be smaller, a sequence may have fewer blocks; every block of every row has its count."""
    examples = padded(SEQUENCES, RESPONSES)
    counts, sizes = block_mask_counts(spread(4), examples.num_response, SIZE, seed=1)
    assert sizes.tolist() == [[2, 2], [2, 1], [2, 1], [1, 0]]
    assert ((counts >= (sizes > 0).long()) & (counts <= sizes)).all()
    block = block_numbers(examples.response, SIZE)
    masked = mask_blocks(examples, block, counts.gather(-1, (block - 1).clamp(min=0)), torch.arange(4), SIZE, seed=1)
    for b in (1, 2):
        assert torch.equal((masked & (block == b)).sum(-1), counts[:, b - 1])


def test_a_block_that_is_the_whole_response_is_the_plain_objective_with_a_prompt_that_sees_itself():
    """One block: x_<1 is the prompt, and the bound that of the masked-diffusion objective."""
    denoiser, examples = block_model(size=8).denoiser, padded(SEQUENCES[:1], RESPONSES[:1])
    block = block_numbers(examples.response, 8)
    masked = examples.response & torch.tensor([[False, True, False, True, True]])
    _, layout = with_layout(examples, denoiser)
    log_p = denoiser.logits(denoiser.hidden(torch.where(masked, 3, examples.tokens), layout)).log_softmax(-1)
    expected = torch.where(masked, log_p.gather(-1, examples.tokens[..., None])[..., 0], 0.0)
    torch.testing.assert_close(block_log_mu(denoiser, examples, block, masked), expected)


def test_one_block_is_drawn_as_often_as_it_is_large():
    """So that the mean over blocks of bound_b / N_b is the bound per token; later blocks are there and unseen."""
    B = 3000
    one = padded(SEQUENCES[2:3], RESPONSES[2:3])
    many = Examples(*(part.expand(B, -1) for part in (one.tokens, one.response, one.attention_mask)))
    cut = one_block(many, spread(B), SIZE, seed=0)
    assert torch.equal(cut.num_response, cut.response.sum(-1))
    first = float((cut.num_response == 2).double().mean())
    assert abs(first - 2 / 3) < 5 * (2 / 9 / B) ** 0.5
    assert torch.equal(cut.block, block_numbers(many.response, SIZE))


@pytest.mark.parametrize("kind", ["scorer", "selector"])
@torch.no_grad()
def test_an_order_in_a_block_does_not_depend_on_later_blocks(kind):
    """Values of the objective with the tokens behind the block changed, block by block."""
    model, ids = block_model(), torch.arange(1)
    examples = padded(SEQUENCES[:1], RESPONSES[:1])
    objective = (
        OrderObjective(model, 4, LeaveOneOut(), seed=0) if kind == "scorer" else SelfObjective(model, 4, 2, seed=0)
    )
    seen = set()
    for u in (torch.tensor([u]) for u in (0.1, 0.3, 0.5, 0.7, 0.9)):
        cut = one_block(examples, u, SIZE, seed=0)
        chosen = int(cut.block[cut.response][0])
        other = examples.tokens.clone()
        other[cut.block > chosen] = (other[cut.block > chosen] + 1) % 3
        earlier = examples.tokens.clone()
        earlier[cut.block < chosen] = (earlier[cut.block < chosen] + 1) % 3
        changed, moved = (Examples(tokens, examples.response, examples.attention_mask) for tokens in (other, earlier))
        value = objective(examples, ids, u).metrics["elbo"]
        assert torch.equal(objective(changed, ids, u).metrics["elbo"], value)
        assert objective(moved, ids, u).metrics["elbo"] != value
        seen.add(chosen)
    assert seen == {1, 2}


@torch.no_grad()
def test_the_selector_is_asked_in_training_what_it_is_asked_in_generation():
    """The logits of the selector at the first step of each block are the same: block by block, as written."""
    model = block_model(scorer=False)
    prompt = torch.tensor([[2, 1, 3, 3, 3, 3]])
    asked = []
    model.selector.register_forward_hook(lambda module, given, s: asked.append((given[2], s)))
    out = generate(model.denoiser, prompt, Learned(model.selector), 4, cache="auto")
    examples = Examples(out.tokens, prompt == 3, torch.ones_like(prompt).bool())
    decoded, asked[:] = list(asked), []
    objective = SelfObjective(model, 2, 2, seed=0)
    for u in (0.1, 0.3, 0.5, 0.7, 0.9):
        objective(examples, torch.arange(1), torch.tensor([u]))
    matched = 0
    for masked, s in asked:
        for theirs, expected in decoded:
            if torch.equal(masked[:1], theirs) and int(masked[0].sum()) == SIZE:
                torch.testing.assert_close(s[0][masked[0]], expected[0][masked[0]])
                matched += 1
    assert matched >= 2
