"""Denoisers of others: half precision, logits that all but tie, a mask token among those of the head, tensors kept."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tests.decoding.small import PROMPTS, REPRESENTATIVE, all_results, results, small_denoiser
from tests.training.small import randomised
from unmask.decoding.generate import generate
from unmask.decoding.policies import NetworkPolicy, parse_policy

RULES = [name for name, policy in REPRESENTATIVE.items() if not isinstance(policy, NetworkPolicy)]
MARGIN = REPRESENTATIVE["margin"]
TOKENS = {"greedy": {}, "sampled": {"temperature": 1.0}, "guided": {"temperature": 1.0, "guidance": 0.5}}


@dataclass(frozen=True)
class Table:
    """The same logits [V] at every position, whatever stands around it."""

    row: torch.Tensor
    mask_token_id: int

    def hidden(self, tokens, attention_mask=None):
        return self.row.expand(*tokens.shape, -1)

    def logits(self, hidden):
        return hidden.clone()


pytestmark = pytest.mark.usefixtures("uncompiled")


# --- one arg-max for all ----------------------------------------------------------------------------------------------


def test_the_greedy_token_is_the_largest_logit():
    """Where log p ties and logits do not: by the logits at every step, the last too, in any batch, compiled or not."""
    for name in ("iid", "threshold:0.9", "p2"):
        row = torch.tensor([0, 1e-18, -8, -8], dtype=torch.float64)
        assert row.argmax() == 1
        assert row.log_softmax(-1).argmax() == 0, "it would tie"
        denoiser, policy = Table(row, mask_token_id=4), parse_policy(name)
        prompts = [
            torch.tensor([4] * size) for size in (5, 2, 7, 1, 4, 3)
        ]  # one begins when another is at its last step
        alone = [
            results(generate(denoiser, [prompt], policy, 3, ids=[number]), 0) for number, prompt in enumerate(prompts)
        ]
        for got, prompt in zip(alone, prompts, strict=True):
            assert got["tokens"] == [1] * len(prompt)
        for options in ({}, {"batch_size": 2}, {"compile": True}, {"batch_size": 2, "compile": True}):
            assert all_results(generate(denoiser, prompts, policy, 3, **options)) == alone, options


# --- half precision ---------------------------------------------------------------------------------------------------


def test_sound_logits_whose_sum_is_beyond_float16():
    """65504 is the largest: sums over 600 positions, or over those of a batch, are larger, and nothing is wrong."""
    for peak, sequences in ((20.0, 6), (200.0, 1), (60000.0, 2), (-60000.0, 2)):
        for name in ("iid", "top-prob"):
            low = -torch.inf if peak < 0 else 0.0
            denoiser = Table(torch.tensor([low, peak, low], dtype=torch.float16), mask_token_id=3)
            assert abs(peak) * 600 * sequences > 65504
            prompts = torch.full((sequences, 600), 3)
            for max_steps, compile in ((1, False), (2, False), (2, True)):
                out = generate(denoiser, prompts, parse_policy(name), max_steps, compile=compile)
                assert (out.tokens == 1).all()


def test_unsound_logits_of_float16_are_still_seen():
    for bad in (torch.nan, torch.inf):
        for name in ("iid", "top-prob"):
            denoiser = Table(torch.tensor([0.0, bad, 0.0], dtype=torch.float16), mask_token_id=3)
            with pytest.raises(ValueError, match=r"the denoiser's logits are not finite for sequence 0 at step 0$"):
                generate(denoiser, torch.full((2, 6), 3), parse_policy(name), 1)


# --- a mask token that the head knows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mask"), list(zip(RULES, [0, 2, 4, 0, 2, 4, 0], strict=True)))
def test_the_mask_is_never_written(name, mask):
    """Not even where it has the largest logit by far; and no rule sees its mass."""
    others = [token for token in range(5) if token != mask]
    row = torch.tensor([0.5, 0.1, 0.7, 0.3, 0.2], dtype=torch.float64)
    row[mask] = 30.0
    denoiser, without, policy = Table(row, mask), Table(row[others], 4), REPRESENTATIVE[name]
    for choice, compile in product(TOKENS, (False, True)):
        options = {"seed": 3, "batch_size": 2, "compile": compile, **TOKENS[choice]}
        out = generate(denoiser, torch.full((3, 6), mask), policy, 3, **options)
        assert (out.tokens != mask).all(), choice
        assert (out.reveal_step >= 0).all()
        expected = generate(without, torch.full((3, 6), 4), policy, 3, **options)
        assert torch.equal(out.tokens, torch.tensor(others)[expected.tokens]), f"{choice}: as a head without it"
        assert torch.equal(out.reveal_step, expected.reveal_step)
        assert torch.equal(out.revisions, expected.revisions)


# --- positions that count from the left -------------------------------------------------------------------------------


class Bert(nn.Module):
    """As people wrap it: absolute positions from 0 on, whatever is padding."""

    mask_token_id = 5

    def __init__(self):
        super().__init__()
        bert = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        config = bert.BertConfig(vocab_size=8, max_position_embeddings=18, **sizes)
        self.model = randomised(bert.BertForMaskedLM(config).double().eval().requires_grad_(False), std=0.8)

    def hidden(self, tokens, attention_mask=None):
        return self.model.bert(tokens, attention_mask=attention_mask).last_hidden_state

    def logits(self, hidden):
        return self.model.cls(hidden)


def test_absolute_positions_are_those_of_the_sequence_alone():
    """Next to longer prompts, and with padding of the caller's own on either side or in between."""
    denoiser = Bert()
    prompts = [torch.tensor([1, 5, 5, 2]), torch.tensor([5, 5, 5, 3, 5, 5, 7, 5, 5]), torch.tensor([5, 0, 5, 5, 6, 5])]

    def written(prompts, policy, **options):
        return all_results(generate(denoiser, prompts, policy, 3, temperature=1.0, **options))

    for policy in ("top-prob", "p2"):
        alone = [written(prompt[None], policy, ids=[row])[0] for row, prompt in enumerate(prompts)]
        assert written(prompts, policy) == alone
        for side in ("left", "right"):
            canvas, attention_mask = (
                pad_sequence(each, batch_first=True, padding_side=side)
                for each in (prompts, [torch.ones_like(prompt) for prompt in prompts])
            )
            assert written(canvas, policy, attention_mask=attention_mask) == alone
        between = torch.stack([attention_mask, torch.zeros_like(attention_mask)], dim=-1).flatten(1)
        assert written(canvas.repeat_interleave(2, dim=1), policy, attention_mask=between) == alone


# --- training before and after ----------------------------------------------------------------------------------------


class Lazy(nn.Module):
    """Makes a table when it first needs it, and keeps it."""

    mask_token_id = 5

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.table = nn.Embedding(6, 16), nn.Linear(16, 5), None
        self.seen = set()  # whether passes ran in inference mode

    def hidden(self, tokens, attention_mask=None):
        self.seen.add(torch.is_inference_mode_enabled())
        if self.table is None:
            self.table = torch.ones(16)
        return self.embedding(tokens) * self.table

    def logits(self, hidden):
        return self.head(hidden)


def test_a_denoiser_that_keeps_a_tensor_can_be_trained_afterwards():
    for compile in (False, True):
        denoiser = Lazy()
        out = generate(denoiser, torch.full((2, 4), 5), MARGIN, 2, compile=compile)
        assert denoiser.seen == {False}
        assert not denoiser.table.is_inference()
        logits = denoiser.logits(denoiser.hidden(out.tokens))
        logits.log_softmax(-1).gather(-1, out.tokens[..., None]).sum().backward()
        assert denoiser.embedding.weight.grad.abs().sum() > 0


def test_generation_leaves_no_graph():
    out = generate(Lazy(), torch.full((2, 4), 5), MARGIN, 2)
    assert not any(value.requires_grad for value in vars(out).values() if torch.is_tensor(value))


def test_a_denoiser_that_keeps_nothing_may_say_so():
    """Inference mode launches kernels faster.  A class speaks for itself, not for those derived from it."""

    class Keeping(Lazy):
        keeps_no_tensors = True

    class Derived(Keeping):
        pass

    for kind, inference in ((Keeping, True), (Derived, False)):
        denoiser = kind()
        generate(denoiser, torch.full((2, 4), 5), MARGIN, 2)
        assert denoiser.seen == {inference}


def test_what_comes_out_can_be_trained_on():
    """With our own denoiser, which runs in inference mode: its tensors cannot take part in training, copies can."""
    for options in ({}, {"batch_size": 2}, {"batch_size": 2, "compile": True}):
        denoiser = small_denoiser().requires_grad_(True)
        assert denoiser.keeps_no_tensors
        out = generate(denoiser, PROMPTS, REPRESENTATIVE["p2"], 3, **options)
        tensors = {name: value for name, value in vars(out).items() if torch.is_tensor(value)}
        assert len(tensors) >= 7
        assert not any(value.is_inference() for value in tensors.values())
        embedding = nn.Embedding(12, 3)
        weight = out.reveal_step.float() + out.num_steps[:, None] + out.revisions
        (embedding(out.tokens).sum(-1) * weight * out.attention_mask).sum().backward()
        assert embedding.weight.grad.abs().sum() > 0
        denoiser(out.tokens, out.attention_mask).logsumexp(-1).sum().backward()
        assert all(parameter.grad is not None for parameter in denoiser.parameters())
        out.tokens[0] = 0  # and be written to
