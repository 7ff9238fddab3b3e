"""GSM8K, with the numbers of its training problems resampled."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
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
from unmask.errors import require
from unmask.models.importers.pretrained import find_source, load_tokenizer
from unmask.models.importers.vocabulary import cut_tokenizer, vocabulary_of
from unmask.tasks.cache import Ragged, alone_in, cache_folder, written_whole
from unmask.tasks.gsm8k.byte_pairs import EOS, MARKS, SMALLEST, encode, train_tokenizer
from unmask.tasks.gsm8k.held_out import HELD_OUT, SPLITS, make_splits
from unmask.tasks.gsm8k.word_problems import FORMS, HUB, SCORINGS, answer_in, file_of, read_problems, without_numbers
from unmask.tasks.task import LONGEST, Examples, Task, asked, check_choice, check_range, check_split, prompt_kept

# Raise it with every change of the code after which the same problems and options give other splits, texts or tokens.
CACHE_VERSION = 1
CACHE_FILES = ("tokenizer.json", "tokens.safetensors")

_EOS = MARKS.index(EOS)  # the first id, of a cut tokenizer too
TRAIN_ON = ("train", "new-templates")
_RESPONSE_LENGTHS = {"equations": 72, "solution": 320}


class Pairs(NamedTuple):
    """The tokens of a split, row by row."""

    prompts: Ragged
    responses: Ragged


@dataclass(frozen=True)
class GSM8K(Task):
    """Grade-school word problems: the question is the prompt, the rationale and the answer are one response.

        [padding] question | <<48/2=24>> <<48+24=72>> #### 72 EOS EOS ...

    Prompts are padded on the left to `prompt_length`, the response has `response_length` tokens and is filled with EOS.
    `train` has the training problems and `resample` copies of each of their templates with other numbers; copies exist
    in the `equations` form only, the `solution` form has the problems as they came.  `held_out` says what the split
    `test` means: new-numbers-dev, new-numbers, new-templates, or test: the test file itself, read for that only.
    With train_on = new-templates an order learns from problems whose templates its denoiser has not seen.

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
    train_on: str = "train"  # or new-templates
    scoring: str = "strict"  # the number after ####; flexible: the last number
    cache: str = ""  # a folder for the tokenizer and the tokens; "": unmask/gsm8k in the user's cache

    name = "gsm8k"
    eos_token_id = _EOS
    held_out_splits = HELD_OUT

    def __post_init__(self) -> None:
        check_range(self, "resample", 0, 10_000)
        check_range(self, "vocab_size", SMALLEST, 1_000_000)
        check_range(self, "prompt_length", 1, LONGEST)
        check_range(self, "response_length", 0, LONGEST)
        check_choice(self, "answers", FORMS)
        check_choice(self, "held_out", HELD_OUT)
        check_choice(self, "train_on", TRAIN_ON)
        check_choice(self, "scoring", SCORINGS)
        trained_on = f"task {self.name}: {self.held_out} was trained on: evaluate on another split"
        require(self.train_on != self.held_out, trained_on)
        require(
            not self.held_out.startswith("new-numbers") or (self.answers == "equations" and self.resample > 0),
            f"task {self.name}: {self.held_out} needs copies with new numbers: set held_out to new-templates or test, "
            "or answers to equations and resample to at least 1",
        )

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary_of(self.text_tokenizer)

    @property
    def text_tokenizer(self) -> Tokenizer:
        return self._tokens[0]

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
        return len(self._pairs(self.held_out).prompts)

    @cached_property
    def _tokens(self) -> tuple[Tokenizer, dict[str, Pairs]]:
        """The tokenizer and the tokens of all splits but the test file, from the cache or made now."""
        hashed, root = fingerprint(self), cache_folder(self.cache, self.name)
        found = _read(root / hashed, hashed)
        if found is None:
            with alone_in(root):  # another process may have made it in the meantime
                found = _read(root / hashed, hashed) or _make(root / hashed, hashed, self)
        return found

    @cached_property
    def _test_file(self) -> Pairs:
        problems = read_problems(self.folder, "test")
        return _encoded(self.text_tokenizer, [(one.question, one.written(self.answers)) for one in problems])

    def _pairs(self, split: str) -> Pairs:
        return self._test_file if split == "test" else self._tokens[1][split]

    def leaks(self) -> list[str]:
        """The training questions that, but for their numbers, are in the test file.  GSM8K has none; other data may."""
        tested = {without_numbers(problem.question) for problem in read_problems(self.folder, "test")}
        questions = [problem.question for problem in read_problems(self.folder, "train")]
        return [question for question in questions if without_numbers(question) in tested]

    def _too_long(self, split: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """[rows] bool: the question or its answer has more tokens than there is room for."""
        prompts, responses = self._pairs(split)
        return (prompts.lengths(rows) > self.prompt_length) | (responses.lengths(rows) > self._response_length)

    @cached_property
    def _trained(self) -> np.ndarray:
        """The rows of `train_on` that are not too long."""
        too_long = self._too_long(self.train_on)
        require(len(too_long) > 0, f"task {self.name}: {self.train_on} is empty: give more problems")
        if too_long.any():
            say(
                f"task {self.name}: {int(too_long.sum())} of {len(too_long)} training problems are longer than "
                f"prompt_length {self.prompt_length} or response_length {self._response_length} and left out",
                err=True,
            )
        require(not too_long.all(), f"task {self.name}: no training problem is short enough: set prompt_length higher")
        return np.flatnonzero(~too_long)

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        source = self.train_on if split == "train" else self.held_out
        rows = self._trained if split == "train" else np.arange(self.test_examples)
        require(len(rows) > 0, f"task {self.name}: {source} is empty: give more problems, or another held_out")
        chosen = rows[ids.numpy() % len(rows)]
        prompts, responses = self._pairs(source)
        answer = responses.first(chosen, self._response_length, _EOS)
        answer[self._too_long(source, chosen)] = _EOS
        tokens = np.concatenate([prompts.last(chosen, self.prompt_length, _EOS), answer], axis=1)
        place, prompt_lengths = torch.arange(self.length), torch.from_numpy(prompts.lengths(chosen))
        response = (place >= self.prompt_length).repeat(len(ids), 1)
        return Examples(torch.from_numpy(tokens), response, place >= self.prompt_length - prompt_lengths[:, None])

    def prompted(self, prompt: str) -> Examples:
        return asked(self, self.text_tokenizer.encode(prompt).ids, self.prompt_length)

    def answer_text(self, tokens: Tensor) -> str:
        """The text of one response, up to its first EOS; tokens [L] or [response_length]."""
        return self.text(tokens[-self._response_length :].tolist())

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return self._right(tokens, examples, self.scoring)

    def metrics(self, tokens: Tensor, examples: Examples) -> dict[str, Tensor]:
        """flexible: valid if the last number is taken for the answer.  overlong: too long for the model, so wrong."""
        overlong = (examples.tokens[:, self.prompt_length :] == _EOS).all(-1)
        return {"flexible": self._right(tokens, examples, "flexible"), "overlong": overlong}

    def _right(self, tokens: Tensor, examples: Examples, scoring: str) -> Tensor:
        right = prompt_kept(tokens, examples) & ((tokens >= 0) & (tokens < len(self.vocabulary))).all(-1)
        for row in right.nonzero()[:, 0].tolist():
            wanted = answer_in(self.answer_text(examples.tokens[row]), "strict")  # none where it is too long
            right[row] = wanted is not None and wanted == answer_in(self.answer_text(tokens[row]), scoring)
        return right


def fingerprint(task: GSM8K) -> str:
    """Sixteen hex digits that name what the tokens are made from."""
    path = file_of(task.folder, "train")
    rows = [] if path else [(row.question, row.solution) for row in read_problems(task.folder, "train")]
    sources = find_source(task.tokenizer).files if task.tokenizer else []
    facts = [
        *(CACHE_VERSION, tokenizers.__version__),
        *(task.answers, task.resample, task.seed, task.vocab_size),
        [files.fingerprint(source) for source in sources],
        [path.suffix, files.fingerprint(path)] if path else rows,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _encoded(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> Pairs:
    return Pairs(*(encode(tokenizer, [pair[part] for pair in pairs]) for part in (0, 1)))


def _make(folder: Path, hashed: str, task: GSM8K) -> tuple[Tokenizer, dict[str, Pairs]]:
    """Make the tokens and write them into the cache."""
    say(f"task {task.name}: problems and tokens are made once and kept in {folder.parent}", err=True)
    made = make_splits(read_problems(task.folder, "train"), task.answers, task.resample, task.seed)
    left = bool(made.pairs["train"])
    require(left, f"task {task.name}: no training problem is left ({made.left_out}): give more of them")
    if task.tokenizer:
        whole, eos = load_tokenizer(task.tokenizer)
        tokenizer = cut_tokenizer(whole, [text for pair in made.pairs["train"] for text in pair], [eos])
    else:
        # The copies have the words of the problems that they are copies of, and digits are single: they add nothing.
        originals = made.pairs["train"][: made.as_they_came]
        tokenizer = train_tokenizer([text for pair in originals for text in pair], task.vocab_size)
    splits = {split: _encoded(tokenizer, made.pairs[split]) for split in SPLITS}
    with written_whole(folder, *CACHE_FILES) as partial:
        tokenizer.save(str(partial / "tokenizer.json"))
        arrays = {
            f"{split}/{name}/{part}": array
            for split, pairs in splits.items()
            for name, rows in pairs._asdict().items()
            for part, array in vars(rows).items()  # ids and offsets
        }
        save_file(arrays, partial / "tokens.safetensors", metadata={"fingerprint": hashed})
    sizes = ", ".join(f"{len(made.pairs[split])} {split}" for split in SPLITS)
    without = f"; left out: {made.left_out}" if made.left_out else ""
    say(f"task {task.name}: {sizes}, from {made.templates} templates{without}", err=True)
    return tokenizer, splits


def _read(folder: Path, hashed: str) -> tuple[Tokenizer, dict[str, Pairs]] | None:
    """What `_make` wrote, or None where it is not there, not whole, or made from something else."""
    try:
        files.check(folder, *CACHE_FILES)
        with safe_open(folder / "tokens.safetensors", framework="numpy") as file:
            if file.metadata()["fingerprint"] != hashed:
                return None

            def rows(key: str) -> Ragged:
                return Ragged(file.get_tensor(f"{key}/ids"), file.get_tensor(f"{key}/offsets"))

            splits = {split: Pairs(rows(f"{split}/prompts"), rows(f"{split}/responses")) for split in SPLITS}
        return Tokenizer.from_file(str(folder / "tokenizer.json")), splits
    except Exception:  # whatever a missing, damaged or foreign file makes the two libraries raise
        return None
