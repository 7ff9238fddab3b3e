"""GSM8K, with the numbers of its training problems resampled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor

from unmask import files
from unmask.display import say
from unmask.errors import UserError
from unmask.models.importers import pretrained
from unmask.models.importers import vocabulary as cutting
from unmask.models.importers.pretrained import find_source, load_tokenizer
from unmask.models.importers.vocabulary import cut_tokenizer, vocabulary_of
from unmask.progress import watched
from unmask.tasks.gsm8k import arithmetic, byte_pairs, held_out, resampling, word_problems
from unmask.tasks.gsm8k.byte_pairs import EOS, MARKS, SMALLEST, Ragged, decode, train_tokenizer
from unmask.tasks.gsm8k.held_out import HELD_OUT, SPLITS, leaked, make_splits
from unmask.tasks.gsm8k.word_problems import FORMS, HUB, SCORINGS, answer_in, file_of, read_problems
from unmask.tasks.task import LONGEST, Examples, check_range, prompt_kept

_EOS = MARKS.index(EOS)  # the first id, of a cut tokenizer too
_RESPONSE_LENGTHS = {"equations": 72, "solution": 320}
_MODULES = (arithmetic, byte_pairs, held_out, resampling, word_problems, pretrained, cutting)
_SOURCES = (__file__, *(module.__file__ for module in _MODULES))


@dataclass(frozen=True)
class GSM8K:
    """Grade-school word problems: the question is the prompt, the rationale and the answer are one response.

        [padding] question | <<48/2=24>> <<48+24=72>> #### 72 EOS EOS ...

    Prompts are padded on the left to `prompt_length`, the response has `response_length` tokens and is filled with EOS.
    `train` has the training problems and `resample` copies of each of their templates with other numbers; copies exist
    in the `equations` form only, the `solution` form has the problems as they came.  `held_out` says what the split
    `test` means: new-numbers-dev, new-numbers, new-templates, or test: the test file itself, read for that only.

    What is too long is left out of training, and counts as wrong in evaluation: its prompt is cut on the left and its
    response has no answer, so that nothing is valid.
    """

    folder: str = HUB  # train.jsonl and test.jsonl, or the .txt files of GSM8K-Aug; or the id on the Hugging Face hub
    answers: str = "equations"  # or solution
    resample: int = 56  # copies of each template
    seed: int = 0
    vocab_size: int = 4096
    tokenizer: str = ""  # of a pretrained model (a folder, a .gguf file, smollm2-135m), cut; "": one of our own
    prompt_length: int = 192
    response_length: int = 0  # 0: 72 for equations, 320 for solutions
    held_out: str = "new-numbers-dev"
    scoring: str = "strict"  # the number after ####; flexible: the last number
    cache: str = ""  # a folder for the tokenizer and the tokens; "": unmask/gsm8k in the user's cache

    name = "gsm8k"
    unconditional = False
    min_steps = None
    entropy = None
    eos_token_id = _EOS
    held_out_splits = HELD_OUT

    def __post_init__(self) -> None:
        check_range(self, "resample", 0, 10_000)
        check_range(self, "vocab_size", SMALLEST, 1_000_000)
        check_range(self, "prompt_length", 1, LONGEST)
        check_range(self, "response_length", 0, LONGEST)
        for option, choices in (("answers", FORMS), ("held_out", HELD_OUT), ("scoring", SCORINGS)):
            if getattr(self, option) not in choices:
                listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise UserError(f"task {self.name}: set {option} to {listed}, not {getattr(self, option)!r}")
        if self.held_out.startswith("new-numbers") and (self.answers != "equations" or not self.resample):
            raise UserError(
                f"task {self.name}: {self.held_out} needs copies with new numbers: set held_out to new-templates or "
                "test, or answers to equations and resample to at least 1"
            )

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self._tokens.vocabulary

    @property
    def text_tokenizer(self) -> Tokenizer:
        """What turns text into the tokens of this task."""
        return self._tokens.tokenizer

    @property
    def length(self) -> int:
        return self.prompt_length + self._response_length

    @property
    def _response_length(self) -> int:
        return self.response_length or _RESPONSE_LENGTHS[self.answers]

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        return tuple(range(self.prompt_length)), tuple(range(self.prompt_length, self.length))

    @property
    def test_examples(self) -> int:
        return len(self._pairs(self.held_out)[0])

    @property
    def train_examples(self) -> int:
        return len(self._trained)

    @cached_property
    def _tokens(self) -> Tokens:
        return load_tokens(self)

    @cached_property
    def _test_file(self) -> tuple[Ragged, Ragged]:
        problems = read_problems(self.folder, "test")
        pairs = [(problem.question, problem.written(self.answers)) for problem in problems]
        prompts, responses = (Ragged.encode(self._tokens.tokenizer, list(part)) for part in zip(*pairs, strict=True))
        return prompts, responses

    def _pairs(self, split: str) -> tuple[Ragged, Ragged]:
        """The prompts and the responses of a split."""
        if split == "test":
            return self._test_file
        return self._tokens.prompts[split], self._tokens.responses[split]

    def leaks(self) -> list[str]:
        """The training questions that, but for their numbers, are in the test file.  GSM8K has none; other data may."""
        return leaked(read_problems(self.folder, "train"), read_problems(self.folder, "test"))

    def _too_long(self, split: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """[rows] bool: the question or its answer has more tokens than there is room for."""
        prompts, responses = self._pairs(split)
        return (prompts.lengths[rows] > self.prompt_length) | (responses.lengths[rows] > self._response_length)

    @cached_property
    def _trained(self) -> np.ndarray:
        """The rows of train that are not too long."""
        too_long = self._too_long("train")
        if too_long.any():
            say(
                f"task {self.name}: {int(too_long.sum())} of {len(too_long)} training problems are longer than "
                f"prompt_length {self.prompt_length} or response_length {self._response_length} and left out",
                err=True,
            )
        if too_long.all():
            raise UserError(f"task {self.name}: no training problem is short enough: set prompt_length higher")
        return np.flatnonzero(~too_long)

    def examples(self, ids: Tensor, split: str) -> Examples:
        if split not in ("train", "test"):
            raise UserError(f"unknown split {split!r}: use train or test")
        source = "train" if split == "train" else self.held_out
        rows = self._trained if split == "train" else np.arange(self.test_examples)
        if not len(rows):
            raise UserError(f"task {self.name}: {source} is empty: give more problems, or another held_out")
        chosen = rows[ids.numpy() % len(rows)]
        prompts, responses = self._pairs(source)
        answer = responses.first(chosen, self._response_length, _EOS)
        answer[self._too_long(source, chosen)] = _EOS
        tokens = np.concatenate([prompts.last(chosen, self.prompt_length, _EOS), answer], axis=1)
        place = torch.arange(self.length)
        response = (place >= self.prompt_length).expand(len(ids), -1)
        kept = torch.from_numpy(np.minimum(prompts.lengths[chosen], self.prompt_length))
        attention_mask = place >= self.prompt_length - kept[:, None]
        return Examples(torch.from_numpy(tokens), response.clone(), attention_mask)

    def text(self, tokens: Sequence[int]) -> str:
        """How tokens read, up to the first EOS."""
        return decode(self._tokens.tokenizer, tokens)

    def answer_text(self, tokens: Tensor) -> str:
        """The text of one response, up to its first EOS; tokens [L] or [response_length]."""
        return self.text(tokens[-self._response_length :].tolist())

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return self._right(tokens, examples, self.scoring)

    def metrics(self, tokens: Tensor, examples: Examples) -> dict[str, Tensor]:
        """flexible: right where the last number is the answer; overlong: too long, so that it counts as wrong."""
        overlong = (examples.tokens[:, self.prompt_length :] == _EOS).all(-1)
        return {"flexible": self._right(tokens, examples, "flexible"), "overlong": overlong}

    def _right(self, tokens: Tensor, examples: Examples, scoring: str) -> Tensor:
        right = prompt_kept(tokens, examples) & ((tokens >= 0) & (tokens < len(self.vocabulary))).all(-1)
        for row in right.nonzero()[:, 0].tolist():
            wanted = answer_in(self.answer_text(examples.tokens[row]), "strict")  # none where it is too long
            right[row] = wanted is not None and wanted == answer_in(self.answer_text(tokens[row]), scoring)
        return right

    def log_likelihood(self, tokens: Tensor, examples: Examples) -> None:
        return None


class Tokens(NamedTuple):
    """Everything that is read from the cache."""

    tokenizer: Tokenizer
    vocabulary: tuple[str, ...]
    prompts: dict[str, Ragged]
    responses: dict[str, Ragged]


CACHE_FILES = ("tokenizer.json", "tokens.safetensors")


def load_tokens(task: GSM8K) -> Tokens:
    """The tokens of all splits, from the cache where they are; else they are made, and a line says what they are.

    The name of the cached folder is a hash of the problems, of the settings that the tokens depend on and of the code
    that makes them: nothing stale is ever read.
    """
    hashed = fingerprint(task)
    root = Path(task.cache).expanduser() if task.cache else _default_cache()
    folder = root / hashed
    found = _read(folder, hashed)
    if found is None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=root))
        except OSError as error:
            raise UserError(
                f"task {task.name}: no cache can be made in {root} ({error.strerror}): set cache to a folder"
            ) from None
        try:
            _make(unfinished, hashed, task)
            files.discard(folder, *CACHE_FILES, files.MANIFEST)  # what could not be read
            with contextlib.suppress(OSError):  # another process was faster
                unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        found = _read(folder, hashed)
        assert found is not None
    return found


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unmask" / "gsm8k"


def fingerprint(task: GSM8K) -> str:
    """Sixteen hex digits that name what the tokens are made from."""
    digest = hashlib.sha256()
    settings = {key: asdict(task)[key] for key in ("answers", "resample", "seed", "vocab_size")}
    digest.update(json.dumps([settings, tokenizers.__version__]).encode())
    for source in _SOURCES:
        digest.update(Path(str(source)).read_bytes())
    if task.tokenizer:
        for file in find_source(task.tokenizer).files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    path = file_of(task.folder, "train")
    if path is not None:
        data = path.read_bytes()
    else:
        data = json.dumps([(row.question, row.solution) for row in read_problems(task.folder, "train")]).encode()
    digest.update(f"{path.suffix if path else ''} {len(data)} ".encode() + data)
    return digest.hexdigest()[:16]


def _make(folder: Path, hashed: str, task: GSM8K) -> None:
    """Write tokenizer.json and tokens.safetensors."""
    say(f"task {task.name}: problems and tokens are made once and kept in {folder.parent}", err=True)
    splits = make_splits(read_problems(task.folder, "train"), task.answers, task.resample, task.seed, watched)
    pairs = splits.pairs
    if not pairs["train"]:
        raise UserError(f"task {task.name}: no training problem is left ({splits.left_out}): give more of them")
    if task.tokenizer:
        whole, eos = load_tokenizer(task.tokenizer)
        tokenizer = cut_tokenizer(whole, [text for pair in pairs["train"] for text in pair], [eos])
    else:
        # The copies have the words of the problems that they are copies of, and digits are single: they add nothing.
        tokenizer = train_tokenizer(
            [text for pair in pairs["train"][: splits.as_they_came] for text in pair], task.vocab_size
        )
    arrays = {}
    for split in SPLITS:
        for part, name in enumerate(("prompts", "responses")):
            texts = [pair[part] for pair in pairs[split]]
            ragged = Ragged.encode(tokenizer, texts, watched=lambda chunks: watched(chunks, "tokens"))
            arrays[f"{split}/{name}/ids"], arrays[f"{split}/{name}/ends"] = ragged.ids, ragged.ends
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(arrays, folder / "tokens.safetensors", metadata={"fingerprint": hashed})
    files.list_files(folder, *CACHE_FILES)
    sizes = ", ".join(f"{len(pairs[split])} {split}" for split in SPLITS)
    without = f"; left out: {splits.left_out}" if splits.left_out else ""
    say(f"task {task.name}: {sizes}, from {splits.templates} templates{without}", err=True)


def _read(folder: Path, hashed: str) -> Tokens | None:
    """What `_make` wrote, or None where it is not there, not whole, or made from something else."""
    try:
        files.check(folder, *CACHE_FILES)
        with safe_open(folder / "tokens.safetensors", framework="numpy") as file:
            if file.metadata()["fingerprint"] != hashed:
                return None
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # whatever a missing, cut or foreign file makes the two libraries raise
        return None
    parts = [
        {split: Ragged(arrays[f"{split}/{name}/ids"], arrays[f"{split}/{name}/ends"]) for split in SPLITS}
        for name in ("prompts", "responses")
    ]
    return Tokens(tokenizer, vocabulary_of(tokenizer), *parts)
