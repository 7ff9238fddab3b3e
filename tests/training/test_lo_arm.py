"""LO-ARM as an objective: what it draws and scores, row by row, whatever the padding."""

import pytest
import torch

from tests.training.small import padded, single, small_model
from unmask.training.lo_arm import LoArmObjective, scored_objective
from unmask.training.objectives import OrderObjective
from unmask.variational.estimators import LeaveOneOut

BUDGET, K = 4, 3
IDS, TIMES = torch.tensor([7, 2**40, 3]), torch.tensor([0, 2, 1])


def rows(extra):
    sequences = [[0, 1, 2, 0, 1, 1], [2, 2, 1], [1, 0, 0, 2]]
    responses = [[False, True, True, True, True, True], [True, True, True], [True, False, True, True]]
    return padded(sequences, responses, left=True, extra=extra)


def test_terms_and_log_q_are_those_of_each_sequence_alone():
    model, drawn = small_model(budget=BUDGET, selection="one"), []
    for extra in (0, 2):
        batch, objective = rows(extra), LoArmObjective(model, K, LeaveOneOut(), 5)
        rollout = objective.rollout(batch, IDS, TIMES)
        terms, log_q = objective.bound(rollout)
        assert log_q.requires_grad
        terms, log_q = terms.reconstruction.detach(), log_q.detach()
        for row, t in enumerate(TIMES.tolist()):
            real = batch.attention_mask[row]
            x0, response = single(batch, row)
            alpha = model.scorer(x0[None])[0].detach() / model.config.tau
            for j in range(K):
                when, left, wanted = rollout.drawn.reveal_time[row, j][real], response.clone(), 0.0
                for s in range(BUDGET - 1, t, -1):
                    chosen = (when == s).nonzero()[:, 0].tolist()
                    assert len(chosen) == int(left.any()), "one per step, as long as there is one"
                    for n in chosen:
                        wanted = wanted + alpha[n] - alpha[left].logsumexp(0)
                        left[n] = False
                assert torch.equal(left, rollout.drawn.masked[row, j][real])
                assert float(log_q[row, j]) == pytest.approx(float(wanted), abs=1e-10)
                q = alpha[left].softmax(0) if t > 0 else torch.ones(int(left.sum()))
                x = torch.where(left, model.denoiser.mask_token_id, x0)[None]
                log_mu = model.denoiser(x)[0].log_softmax(-1)[torch.arange(len(x0)), x0][left]
                assert float(terms[row, j]) == pytest.approx(float(q @ log_mu.detach().to(q)), abs=1e-6)
        drawn.append(rollout.drawn.reveal_time[batch.attention_mask[:, None].expand(-1, K, -1)])
    assert torch.equal(*drawn), "the draws do not depend on the padding"


def test_the_form_of_the_selector_says_which_posterior():
    assert scored_objective(small_model(selection="one")) is LoArmObjective
    assert scored_objective(small_model()) is OrderObjective
