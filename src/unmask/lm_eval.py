"""lm-evaluation-harness: the model type `unmask`.

    lm_eval --model unmask --model_args pretrained=RUN,policy=learned,max_steps=8 --tasks ...

Releases of lm-eval that do not look for model types in other packages (0.4.13 does not) run it with
`python -m unmask.lm_eval` in the place of `lm_eval`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from unmask.display import say
from unmask.errors import UserError, did_you_mean, require
from unmask.evaluation.text_run import TextRun


class UnmaskLM(LM):
    """The run folder `pretrained`; the other arguments are those of `unmask.evaluation.text_run.TextRun`.

    Log-likelihoods are lower bounds.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "",
        max_steps: int = 0,
        samples: int = 8,
        seed: int = 0,
        trust_task: bool = False,
        denoiser: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,  # given to every model; only batch_size=auto would need it
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        for name in unknown:
            known = "policy", "max_steps", "samples", "seed", "trust_task", "denoiser"
            raise UserError(f"no model argument {name!r}; {did_you_mean(name, known)}choose from {', '.join(known)}")
        require(str(batch_size).isdigit(), f"batch_size must be a whole number from 1 on, got {batch_size!r}")
        if str(device).startswith("cuda") and not torch.cuda.is_available():  # the harness asks for it by default
            device = "cpu"
        options: dict[str, Any] = {"samples": samples, "seed": seed, "trust_task": trust_task, "device": device}
        options |= {"batch_size": int(batch_size), "denoiser": denoiser}
        self.run = TextRun(pretrained, policy, max_steps, **options)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        return self.run.write([request.args for request in requests])

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        ids = [request.doc_id or 0 for request in requests]
        return self.run.log_likelihoods([request.args for request in requests], ids)

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        return self.run.text_log_likelihoods([request.args[0] for request in requests])

    def get_model_info(self) -> dict[str, Any]:
        """What the file of results says of the model."""
        bound = f"lower bounds, each from {self.run.samples} orders"
        return {"policy": self.run.rule.name, "max_steps": self.run.max_steps, "loglikelihood": bound}


def main() -> None:
    """The command `lm_eval`, with this model type."""
    from lm_eval.__main__ import cli_evaluate

    register_model("unmask")(UnmaskLM)
    try:
        cli_evaluate()
    except UserError as error:
        say(f"unmask: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
