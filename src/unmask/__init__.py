"""Learn the order in which a masked diffusion model writes.

    import unmask

    model = unmask.OrderModel.from_pretrained("runs/demo")
    policy = unmask.policies.Learned(model.selector)
    out = unmask.generate(model.denoiser, prompts, policy=policy, max_steps=2, seed=0)

The names are imported when they are first used: `import unmask` itself does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask.decoding import policies
    from unmask.decoding.generate import Engine, Generation, generate
    from unmask.decoding.tokens import TokenChoice
    from unmask.evaluation.plan import evaluate
    from unmask.models.importers.causal import adapt_causal
    from unmask.models.importers.masked import load_denoiser
    from unmask.models.importers.pretrained import load_causal
    from unmask.models.importers.vocabulary import cut_tokenizer
    from unmask.models.order_model import OrderModel
    from unmask.recipe import load_recipe
    from unmask.tasks import make_task
    from unmask.tasks.task import Task
    from unmask.training.run import train

    __version__: str

_HOMES = {
    "OrderModel": "unmask.models.order_model",
    "adapt_causal": "unmask.models.importers.causal",
    "cut_tokenizer": "unmask.models.importers.vocabulary",
    "load_causal": "unmask.models.importers.pretrained",
    "load_denoiser": "unmask.models.importers.masked",
    "Engine": "unmask.decoding.generate",
    "TokenChoice": "unmask.decoding.tokens",
    "generate": "unmask.decoding.generate",
    "Generation": "unmask.decoding.generate",
    "Task": "unmask.tasks.task",
    "evaluate": "unmask.evaluation.plan",
    "make_task": "unmask.tasks",
    "load_recipe": "unmask.recipe",
    "train": "unmask.training.run",
}

__all__ = [
    "Engine",
    "Generation",
    "OrderModel",
    "Task",
    "TokenChoice",
    "adapt_causal",
    "cut_tokenizer",
    "evaluate",
    "generate",
    "load_causal",
    "load_denoiser",
    "load_recipe",
    "make_task",
    "policies",
    "train",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("unmask")
        except PackageNotFoundError:  # run from source, not installed
            return "source"
    if name == "policies":
        return import_module("unmask.decoding.policies")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'unmask' has no attribute {name!r}")
