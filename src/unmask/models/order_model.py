"""Denoiser, selector and scorer together, in a folder: config.json, model.safetensors, tokenizer.json, a manifest.

An order for a denoiser of the user's is kept without it: config.json says where it lies, and its fingerprint.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn

import unmask
from unmask import files
from unmask.decoding.generate import generate
from unmask.decoding.policies import Policy, network_of, parse_policy, trained_steps
from unmask.errors import UserError, require
from unmask.fields import build
from unmask.jsonl import parse_json
from unmask.models import hub
from unmask.models.backbone import BackboneConfig
from unmask.models.frozen import FrozenConfig, FrozenDenoiser
from unmask.models.networks import Denoiser, OrderScorer, Selector, SelectorConfig
from unmask.runtime import require_memory
from unmask.variational.selection import Bernoulli, NonEmpty, OneByOne, Selection

FORMAT_VERSION = 4
SELECTIONS: dict[str, Selection] = {form.name: form for form in (NonEmpty(), Bernoulli(), OneByOne())}
MASK_TOKEN = "[MASK]"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


class ModelFolderError(UserError):
    """A folder that does not hold a model this version can read; the message says what to do."""


@dataclass(frozen=True)
class OrderModelConfig:
    """Everything that is needed to build the networks.  A model without an order has no selector and no scorer."""

    vocab_size: int
    denoiser: BackboneConfig | FrozenConfig
    tied_head: bool = False
    shift: bool = False
    selector: SelectorConfig | None = None
    scorer: BackboneConfig | None = None
    teacher: str = ""  # the rule from whose order the scores start; "": from a random one
    selection: str = "nonempty"
    tau: float = 0.1

    def __post_init__(self) -> None:
        known = ", ".join(SELECTIONS)
        require(self.vocab_size >= 1, f"vocab_size must be at least 1, got {self.vocab_size}")
        require(self.selection in SELECTIONS, f"selection must be one of {known}, got {self.selection!r}")


class OrderModel(nn.Module):
    """The three networks of the bound.  `selector` and `scorer` are None before an order is learned."""

    denoiser: Denoiser | FrozenDenoiser

    def __init__(self, config: OrderModelConfig, tokenizer: Tokenizer, denoiser: FrozenDenoiser | None = None) -> None:
        """denoiser: where the config names one of the user's."""
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        if isinstance(config.denoiser, BackboneConfig):
            self.denoiser = Denoiser(config.denoiser, config.vocab_size, config.tied_head, config.shift)
        else:
            assert denoiser is not None
            self.denoiser = denoiser
        self.selector = Selector(config.selector, config.denoiser.width, self.selection) if config.selector else None
        self.scorer = OrderScorer(config.scorer, config.vocab_size, bool(config.teacher)) if config.scorer else None

    @property
    def selection(self) -> Selection:
        return SELECTIONS[self.config.selection]

    @property
    def block_size(self) -> int:
        return self.denoiser.block_size

    @property
    def stored(self) -> nn.ModuleDict:
        """The networks that are saved."""
        parts = {name: part for name, part in self.named_children() if not isinstance(part, FrozenDenoiser)}
        if isinstance(self.denoiser, FrozenDenoiser) and self.denoiser.lora:
            parts["adapters"] = self.denoiser.adapters
        return nn.ModuleDict(parts)

    def place(self, device: torch.device) -> OrderModel:
        """Move it to a device; a frozen denoiser is bfloat16 on a GPU and float32 on a CPU."""
        if isinstance(self.denoiser, FrozenDenoiser):
            self.denoiser.place(device)
        return self.to(device)

    def save_pretrained(self, folder: str | Path, here: bool = True) -> None:
        """Write the folder.  config.json comes last: where it is, all is on the disk and in the manifest.

        here: note where the denoiser of the user's lies, for an order that is kept without it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files.read_manifest(folder)  # refuses another program's
        (folder / "config.json").unlink(missing_ok=True)
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in self.stored.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private, unlike the files beside it
        self.tokenizer.save(str(folder / "tokenizer.json"))
        noted, own = self.config, self.config.denoiser
        if isinstance(own, FrozenConfig) and not here:
            noted = replace(noted, denoiser=replace(own, folder=""))
        config = json.dumps({"format_version": FORMAT_VERSION, **asdict(noted)}, indent=2) + "\n"
        files.list_files(folder, "model.safetensors", "tokenizer.json", texts={"config.json": config})
        files.write_text(folder / "config.json", config)

    def push_to_hub(
        self, repo_id: str, *, about: str = "", beside: Sequence[Path] = (), private: bool | None = None
    ) -> str:
        """Upload the model with a card to the Hugging Face hub; its address.

        about: Markdown at the end of the card.  beside: files that are uploaded too.  For a run, `unmask push` gives
            its recipe and its records for both.
        private: whether a new model is; None: as the owner's settings say.
        """
        what = "A masked diffusion model" + (" with a learned generation order" if self.selector is not None else "")
        own, denoiser = self.config.denoiser, ""
        if isinstance(own, FrozenConfig):
            what, denoiser = (
                f"A generation order for the denoiser {own.fingerprint}, not in here",
                'denoiser="FOLDER", ',
            )
        facts = {"what": what, "home": hub.HOME, "version": unmask.__version__}
        facts |= {"repo_id": repo_id, "denoiser": denoiser}
        with TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder, here=False)
            for path in beside:
                shutil.copyfile(path, folder / path.name)
            card = hub.CARD.format(name=repo_id.split("/")[-1], about=f"\n{about}" if about else "", **facts)
            files.write_text(folder / "README.md", card)
            return hub.upload(folder, repo_id, private)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        denoiser: Any = None,
        any_denoiser: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> OrderModel:
        """Read a folder written by `save_pretrained`; ModelFolderError in one line if it is not one.

        folder: or the text "owner/name" of a model on the Hugging Face hub.
        denoiser: that of an order which is kept without it, if it does not lie where it lay: a folder, or what
            `load_denoiser` gave.  any_denoiser: run the order on it even if it is another one.
        """
        folder, config = _checked(folder)
        with _damaged(folder / "tokenizer.json", Exception):  # tokenizers raises plain Exception
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        check_memory(config, copies=1)
        model = cls(config, tokenizer, _frozen(config, folder, denoiser, any_denoiser))
        _load_weights(model.stored, folder / "model.safetensors")
        return model.eval().to(device=device, dtype=dtype)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        policy: Policy | str = "learned",
        max_steps: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Prompts and new tokens [B, L + max_new_tokens], as transformers gives them; `unmask.generate` tells more.

        input_ids: [B, L]; mask tokens in it are written too.  attention_mask: [B, L], 0 on padding, on either side.
        policy: a rule or its name; "learned" is this model's own order.
        max_steps: by default the budget of the order; for other rules one step per new token.
        options: those of `unmask.generate`, such as seed and temperature.
        """
        require(input_ids.ndim == 2, f"input_ids must be [B, L], got shape {list(input_ids.shape)}")
        require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
        rule = parse_policy(policy, self.selector) if isinstance(policy, str) else policy
        if max_steps is None:
            max_steps = trained_steps(network_of(rule), max_new_tokens) or max_new_tokens
        new = input_ids.new_full((len(input_ids), max_new_tokens), self.denoiser.mask_token_id)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.bool(), torch.ones_like(new, dtype=torch.bool)], dim=-1)
        prompts = torch.cat([input_ids, new], dim=-1)
        return generate(self.denoiser, prompts, rule, max_steps, attention_mask=attention_mask, **options).tokens


def load_selector(folder: str | Path) -> Selector:
    """The selector of a run without its denoiser, in eval mode.  folder: as that of `from_pretrained`."""
    folder, config = _checked(folder)
    if config.selector is None:
        raise ModelFolderError(f"{folder} has no learned order: give the run folder of one")
    selector = Selector(config.selector, config.denoiser.width, SELECTIONS[config.selection])
    _load_weights(selector, folder / "model.safetensors", "selector.")
    return selector.eval()


def check_memory(config: OrderModelConfig, copies: int) -> None:
    """Raise MemoryError, before networks of this shape are built, if there is no room for so many copies of them."""
    own, weights = config.denoiser if isinstance(config.denoiser, BackboneConfig) else None, 0
    weights += sum(network.num_weights(config.vocab_size + 1) for network in (own, config.scorer) if network)
    weights += 0 if config.tied_head or own is None else config.vocab_size * own.width
    weights += config.selector.shape.num_weights(config.selector.drawn) if config.selector else 0
    require_memory(f"a model with {weights:,} weights takes", 4 * copies * weights)


def word_level_tokenizer(vocabulary: Sequence[str]) -> Tokenizer:
    """One token per word of `vocabulary`, in the order of the ids, and the mask token as the last id."""
    words = {word: index for index, word in enumerate([*vocabulary, MASK_TOKEN])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=MASK_TOKEN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def with_mask_token(tokenizer: Tokenizer) -> Tokenizer:
    """A copy with the mask token as the last id."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens([MASK_TOKEN])
    return copy


def _frozen(config: OrderModelConfig, folder: Path, given: Any, any_denoiser: bool) -> FrozenDenoiser | None:
    """The denoiser of an order that is kept without it; None where the folder holds one."""
    named = config.denoiser
    if not isinstance(named, FrozenConfig):
        if given is not None:
            raise ModelFolderError(f"{folder} has a denoiser of its own: leave the other one out (--denoiser)")
        return None
    from unmask.models.importers.masked import load_denoiser  # which reads folders of this module too

    source = given or named.folder
    if not source:
        raise ModelFolderError(f"the order in {folder} has its denoiser elsewhere: give it with denoiser= (--denoiser)")
    name = source if isinstance(source, str | Path) else "the one given"
    if isinstance(source, str | Path):
        if not Path(source).expanduser().is_dir():
            raise ModelFolderError(
                f"the denoiser of {folder} is not in {source}: give its folder with denoiser= (--denoiser)"
            )
        source = load_denoiser(source, bidirectional=named.bidirectional, shift=named.shift)
        given = None
    if not isinstance(source, FrozenDenoiser):
        source = FrozenDenoiser(copy.deepcopy(source) if given is not None and named.lora else source)
    frozen: FrozenDenoiser = source
    if frozen.fingerprint != named.fingerprint and not any_denoiser:
        raise ModelFolderError(
            f"the order in {folder} was learned for another denoiser ({named.fingerprint}) than {name} "
            f"({frozen.fingerprint}): give that one with --denoiser, or run it on this one with --any-denoiser"
        )
    known = max(frozen.vocab_size or config.vocab_size, frozen.mask_token_id + 1)
    if known < config.vocab_size:
        raise ModelFolderError(
            f"{name} knows {known} tokens, and the order in {folder} was learned with {config.vocab_size}: give a "
            "denoiser with the same tokenizer (--denoiser)"
        )
    frozen.adapt(named.lora)
    return frozen


def _checked(folder: str | Path) -> tuple[Path, OrderModelConfig]:
    """The folder of a finished model, here or from the hub, and its configuration; ModelFolderError if it is none."""
    folder = hub.local_folder(folder)
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise ModelFolderError(f"{folder}: {what}; give the run folder of a finished `unmask train`")
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise ModelFolderError(
                f"{folder}: {name} is missing, so no finished model is here: finish its training, or restore the "
                "file from a copy"
            )
    try:
        files.check(folder, *MODEL_FILES)
    except files.ChecksumError as error:
        raise ModelFolderError(str(error)) from None
    return folder, _read_config(folder / "config.json")


def _load_weights(network: nn.Module, path: Path, prefix: str = "") -> None:
    """Those whose names have this prefix."""
    with _damaged(path, SafetensorError):
        tensors = load_file(path)
    try:
        network.load_state_dict(
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelFolderError(f"{path} does not fit config.json: {reason}") from None


def _read_config(path: Path) -> OrderModelConfig:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        version = values.pop("format_version")
    except (ValueError, KeyError, AttributeError, TypeError):  # no JSON, no such key, no object, a list
        raise ModelFolderError(f"{path} is not the config of an unmask model (no format_version)") from None
    if version != FORMAT_VERSION:
        raise ModelFolderError(
            f"{path} has format version {version}, this unmask reads version {FORMAT_VERSION}: "
            "use the unmask that wrote it, or train again"
        )
    try:
        return build(OrderModelConfig, values)
    except UserError as error:
        raise ModelFolderError(
            f"{path} does not fit this version ({error}): restore it from a copy, or use the unmask that wrote it"
        ) from None


def weights_hash(network: nn.Module) -> str:
    """Twelve hex digits of the SHA-256 of a network's weights: two records with the same one ran the same weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


@contextmanager
def _damaged(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """ModelFolderError in one line where reading a file fails with one of these errors."""
    try:
        yield
    except errors as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(f"{path} is damaged ({reason}): restore it from a copy, or train again") from None
