"""A denoiser that is only asked: of the user's, as `load_denoiser` gives it.  An order for it is kept without it.

With adapters (LoRA) it learns along: its own weights stay as they are, and the adapters are kept with the order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import UserError
from unmask.models.backbone import Backbone
from unmask.models.packing import Layout
from unmask.runtime import require_memory

ADAPTER = "unmask"  # what peft calls ours
SAMPLED = 1024  # values of a parameter that go into a fingerprint, besides the sum of all


@dataclass(frozen=True)
class FrozenConfig:
    """Which denoiser an order was learned for."""

    folder: str  # where it lay; "": Python gave it
    fingerprint: str  # "": a function has no weights to be told by
    width: int  # of its hidden states; 0: it gives none
    max_length: int  # its context; 0: not known
    bidirectional: bool = False  # how `load_denoiser` reads a causal model
    shift: bool = False
    lora: int = 0  # rank of the adapters that learned along; 0: none


class FrozenDenoiser(nn.Module):
    """Runs without gradients, dropout and autocast, in the precision of its weights: `place` chooses it.

    network: a `LoadedDenoiser`.  Its weights are not saved with an order, and no optimiser sees them.
    After `adapt` it runs with gradients where they are wanted, which only the adapters keep.
    """

    place_word: Tensor

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.mask_token_id = network, network.mask_token_id
        self.eos_token_id, self.tokenizer = network.eos_token_id, network.tokenizer
        self.context_length: int | None = network.context_length
        own: str = getattr(network, "fingerprint", "")  # of what has no weights
        self.fingerprint = weights_fingerprint(network) if isinstance(network, nn.Module) else own
        backbone = getattr(network, "backbone", None)
        self.block_size: int = getattr(network, "block_size", 0)
        self.can_cache: bool = getattr(network, "can_cache", False)
        self.takes_layout, self.lora = isinstance(backbone, Backbone), 0
        self.register_buffer("place_word", torch.zeros(()), persistent=False)  # where it is, if it has no weights
        self.requires_grad_(False).eval()
        self.width, self.vocab_size = 0, getattr(network, "vocab_size", None)  # of hidden states; None: not known
        weight = next(self.parameters(), None)
        if isinstance(backbone, Backbone):
            self.width = backbone.config.width
        elif weight is not None:  # else nothing tells where it runs, and it is taken for a function of logits
            hidden = self.hidden(torch.full((1, 1), self.mask_token_id, device=weight.device))
            logits = self.logits(hidden[0])
            self.vocab_size = self.vocab_size or logits.shape[-1]
            # Where there are no hidden states, logits stand for them (`LogitsDenoiser`).
            self.width = 0 if hidden[0].shape == logits.shape else hidden.shape[-1]

    def config(self, folder: str, **read_as: bool) -> FrozenConfig:
        return FrozenConfig(folder, self.fingerprint, self.width, self.context_length or 0, lora=self.lora, **read_as)

    def adapt(self, rank: int) -> None:
        """Give the linear layers of its network, but those that give logits, adapters of this rank, in place.

        W x + 2 B A x,      A [rank, in] random, B [out, rank] = 0: at first it is what it was
        """
        if rank == self.lora:
            return
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise UserError("adapters (model.lora) are made by peft: pip install 'unmask[lora]'") from None
        linear = {name: part for name, part in self.network.named_modules() if isinstance(part, nn.Linear)}
        inner = [name for name, part in linear.items() if part.out_features != self.vocab_size]
        if not inner:
            raise UserError("the denoiser has no linear layers for adapters: leave model.lora out")
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=inner), self.network, ADAPTER)
        self.lora = rank
        self.requires_grad_(False).eval()

    @property
    def adapters(self) -> nn.ParameterDict:
        """Those of `adapt`, by the names of their layers."""
        named = self.network.named_parameters() if self.lora else ()
        return nn.ParameterDict({name.replace(".", "/"): p for name, p in named if f".{ADAPTER}." in name})

    def requires_grad_(self, requires_grad: bool = True) -> FrozenDenoiser:
        """Of the adapters alone."""
        super().requires_grad_(False)
        self.adapters.requires_grad_(requires_grad)
        return self

    def train(self, mode: bool = True) -> FrozenDenoiser:
        """It stays in eval mode."""
        return super().train(False)

    def place(self, device: torch.device) -> None:
        """Move it: bfloat16 on a GPU, float32 on a CPU.  Buffers, such as rotary frequencies, keep their precision.

        Adapters are in float32: an update may be too small for bfloat16.
        """
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        learning = {id(parameter) for parameter in self.adapters.values()}
        fixed = [p for p in self.parameters() if id(p) not in learning]
        here = (p.itemsize if p.device.type == device.type else 0 for p in fixed)  # files are often in bfloat16
        more = sum(p.numel() * (dtype.itemsize - has) for p, has in zip(fixed, here, strict=True))
        name = "GPU in bfloat16" if device.type == "cuda" else "CPU in float32"
        require_memory(f"to hold the denoiser on the {name} takes", more, device)
        for parameter in fixed:
            parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
        self.to(device)

    def hidden(self, tokens: Tensor, attention_mask: Tensor | Layout | None = None) -> Tensor:
        """[B, L, D] of tokens [B, L].  What trains gives a layout, with padding on either side."""
        with self._gradients(), torch.autocast(tokens.device.type, enabled=False):
            if self.takes_layout or not isinstance(attention_mask, Layout):
                hidden: Tensor = self.network.hidden(tokens, attention_mask)
                return hidden
            attended = attention_mask.attended
            if attended is None:
                return self.hidden(tokens)
            # A function may count positions from the left, so padding goes to the right, as in generation.
            column = attended.long().argsort(dim=-1, descending=True, stable=True)
            hidden = self.hidden(tokens.gather(-1, column), attended.gather(-1, column))
            return hidden.gather(1, column.argsort(-1)[..., None].expand_as(hidden))

    @property
    def hidden_with(self) -> Any:
        """The network's own, where it has one: see `PlacingDenoiser`."""
        own = torch.no_grad()(self.network.hidden_with)
        return torch.autocast(self.place_word.device.type, enabled=False)(own)

    def new_cache(self, rows: int, length: int) -> Tensor:
        cache: Tensor = self.network.new_cache(rows, length)
        return cache

    def cached(self, *given: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            hidden: Tensor = self.network.cached(*given)
            return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] from hidden states [M, D]."""
        with self._gradients(), torch.autocast(hidden.device.type, enabled=False):
            logits: Tensor = self.network.logits(hidden)
            return logits

    def _gradients(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.lora > 0 and torch.is_grad_enabled())


def weights_fingerprint(network: nn.Module) -> str:
    """Twelve hex digits by which a denoiser is known: a SHA-256 of names, shapes and contents of its parameters.

    Of the contents go in the sum of all bytes, eight at a time as one whole number, which is exact in any order, and
    1,024 evenly spaced weights of each parameter.  This reads every weight, at the speed of memory, not at that of
    a hash.  What a function holds is not known.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        flat = parameter.detach().flatten()
        raw = (flat.clone() if flat.storage_offset() else flat).view(torch.uint8)  # from where eight bytes are a number
        whole, rest = raw.tensor_split([len(raw) // 8 * 8])
        sampled = flat[:: max(1, len(flat) // SAMPLED)].clone().view(torch.uint8)
        digest.update(f"{name} {list(parameter.shape)} {int(whole.view(torch.int64).sum())}".encode())
        digest.update(torch.cat([sampled, rest]).cpu().numpy().tobytes())
    return digest.hexdigest()[:12]
