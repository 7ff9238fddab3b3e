"""Texts of your own, from files that may be larger than memory: whole texts, or responses to prompts."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from unmask.display import say
from unmask.errors import UserError, require
from unmask.jsonl import parse_json
from unmask.models.importers.pretrained import find_source, read_by_transformers
from unmask.models.importers.vocabulary import vocabulary_of
from unmask.own_code import call_own, import_class
from unmask.progress import progress
from unmask.rng import Purpose, signed, uniforms
from unmask.tasks.cache import Ragged, alone_in, cache_folder
from unmask.tasks.diversity import distinct, entropy
from unmask.tasks.task import (
    LONGEST,
    Examples,
    Task,
    around,
    asked,
    check_choice,
    check_range,
    check_split,
    prompt_kept,
    random_spans,
)
from unmask.tasks.text.shards import (
    DATASET,
    FORMAT_VERSION,
    Hashes,
    Visits,
    parts_of,
    read_cache,
    read_texts,
    write_cache,
)

ENDS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "[SEP]")  # usual names of an end of text
GAP = "<mask>"  # in a prompt: what is to be written
_GAP, _PADDING = -1, -2  # in the place of tokens, where there are none


@dataclass(frozen=True)
class Text(Task):
    """Sequences of at most `length` tokens; a longer text is cut into several.  Every `test_every`th is held out.

    With `prompt` and `response`, each object is a pair: the prompt is given, and the response is written.

        [padding] prompt | response EOS EOS ...

    Prompts are padded on the left, the response has `response_length` of the `length` tokens and is filled with EOS.
    Pairs that are too long are left out.

    With form = "infill", a random span of up to half of each text is written, and what stands around it is given.  It
    is another span in every epoch.  In the prompt that the checker gets, <mask> stands for the span.
    """

    # A path, * and ** allowed; .jsonl: one object per line, a folder of the package datasets: one per row, other files:
    # one text per line.
    files: str = ""
    field: str = "text"  # the key of the text in an object
    prompt: str = ""  # the keys of the prompt and of the response in an object; "": texts without a prompt
    response: str = ""
    form: str = "whole"  # or infill, of texts without a prompt
    response_length: int = 0  # tokens of a response with its EOS; 0: half of `length`
    tokenizer: str = ""  # a tokenizer.json, or a folder with one; "": one token per byte
    chat: bool = False  # a prompt is a message of the user's, in the chat template that lies beside the tokenizer
    eos: str = ""  # the token that ends a response; "": that of the chat, or the first usual name that is known
    length: int = 128
    test_every: int = 100
    window: int = 65536  # of the shuffle
    bucket: int = 64  # so many consecutive sequences have about the same length; 0: any length
    checker: str = ""  # module:function(prompt, response, reference) -> bool, of your own; "": nothing is checked
    cache: str = ""  # a folder for the tokens; "": unmask/text in the user's cache

    name = "text"

    def __post_init__(self) -> None:
        check_range(self, "length", 1, LONGEST)
        check_range(self, "test_every", 2, 1_000_000)
        check_range(self, "window", 1, 2**31)
        check_range(self, "bucket", 0, 1_000_000)
        check_range(self, "response_length", 0, self.length - 1)
        both = "task text: prompt and response are the two keys of a pair: set both, or none"
        require(bool(self.prompt) == bool(self.response), both)
        check_choice(self, "form", ("whole", "infill"))
        whole = "task text: form = 'infill' is for texts without a prompt: leave out prompt and response, or form"
        require(not (self._infills and self._has_prompt), whole)
        of_pairs = "task text: chat = true is for pairs: set prompt and response"
        require(not self.chat or self._has_prompt, of_pairs)

    @cached_property
    def shards(self) -> list[Path]:
        named = [Path(path) for path in sorted(glob.glob(os.path.expanduser(self.files), recursive=True))]
        for path in named:
            splits = ", ".join(sorted(part.parent.name for part in path.glob(f"*/{DATASET}")))
            require(not splits, f"task text: {path} has the splits {splits}: give one of these folders")
        found = [path for path in named if path.is_file() or (path / DATASET).is_file()]
        give = "give yours, --set task.files=PATH; for a run, go to the folder where it was trained"
        require(bool(found), f"task text: no file is called {self.files!r}: {give}")
        plain = [path for path in found if path.is_file() and path.suffix != ".jsonl"] if self._has_prompt else []
        only = "pairs are read from .jsonl files and folders of the package datasets only"
        require(not plain, f"task text: {plain and plain[0]} has no keys: {only}")
        return found

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        if not self.tokenizer:
            return byte_tokenizer(ENDS[:1] if self._has_prompt else ())
        path = Path(self.tokenizer).expanduser()
        try:
            return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"task text: {self.tokenizer} is no tokenizer.json ({error})") from None

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary_of(self.text_tokenizer)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Texts without a prompt have the length that they have, and no end."""
        if not self._has_prompt:
            return None
        own = self.eos or (self._chat.eos_token if self.chat else "")
        names = (own,) if own else ENDS
        known = (self.text_tokenizer.token_to_id(name) for name in names)
        found = next((token for token in known if token is not None), None)
        lacks = f"task text: the tokenizer has no {' or '.join(names)}: set eos to its token for the end of a text"
        require(found is not None, lacks)
        return found

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        first = self._prompt_length
        return tuple(tuple(part) for part in (range(first), range(first, self.length)) if part)

    @property
    def test_examples(self) -> int:
        return self._count("test")

    def order(self, seed: int, stage: int, positions: Tensor) -> Tensor:
        """Every text once per epoch, shuffled; to infill, with another id, which names another span."""
        rows, count = torch.from_numpy(self._visits(seed, stage).at(positions.numpy())), self._count("train")
        return rows + positions // count * count if self._infills else rows

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        cached, rows, place = self._splits[split], ids.numpy() % self._count(split), torch.arange(self.length)
        if self.eos_token_id is None:
            tokens = torch.from_numpy(cached.first(rows, self.length, 0))
            real = place < torch.from_numpy(cached.lengths(rows))[:, None]
            if not self._infills:
                return Examples(tokens, response=real, attention_mask=real.clone())
            words = Purpose.DATA, int(split == "train"), ids[:, None], torch.arange(2)
            u = uniforms(0, *words, dtype=torch.float64)  # [B, 2]
            return Examples(tokens, random_spans(u, real.sum(-1), self.length), real)
        first, eos = self._prompt_length, self.eos_token_id
        prompts, responses = cached.last(2 * rows, first, eos), cached.first(2 * rows + 1, self.length - first, eos)
        tokens = torch.cat([torch.from_numpy(prompts), torch.from_numpy(responses)], dim=1)
        real = place >= first - torch.from_numpy(cached.lengths(2 * rows))[:, None]
        return Examples(tokens, response=(place >= first).repeat(len(ids), 1), attention_mask=real)

    def prompted(self, prompt: str) -> Examples:
        """Without prompts in the texts, it is the beginning of one that is as long as there is room for.

        To infill, it is a whole text, with <mask> for each token that is to be written.
        """
        if self._infills:
            return self._with_gaps(prompt)
        tokens = self._encoded(self._in_chat(prompt))
        return asked(self, tokens, self._prompt_length or min(len(tokens), self.length - 1))

    @property
    def has_checker(self) -> bool:
        return bool(self.checker)

    def check(self) -> None:
        super().check()
        require(not self.checker or callable(self._checker), f"checker {self.checker!r} is no function")

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        """What the checker says; without one, whether exactly the held-out text was generated."""
        if not self.checker:
            return ((tokens == examples.tokens) | ~examples.attention_mask).all(-1)
        right = prompt_kept(tokens, examples)
        for row in right.nonzero()[:, 0].tolist():
            prompt = (GAP if self._infills else "").join(around(self, examples, row))
            answers = [self.text(of[row][examples.response[row]].tolist()) for of in (tokens, examples.tokens)]
            found = call_own("checker", self.checker, self._checker, prompt, *answers)
            require(isinstance(found, bool), f"checker {self.checker!r} must return True or False, got {found!r}")
            right[row] = found
        return right

    def codes(self, tokens: Tensor, examples: Examples) -> list[str]:
        """The texts that were generated."""
        return [self.text(row[here].tolist()) for row, here in zip(tokens, examples.response, strict=True)]

    def overall(self, codes: list[str]) -> dict[str, float]:
        """How varied the words of all texts are (`diversity`): 0 where they are all the same."""
        words = [text.split() for text in codes]
        pairs = {"distinct-2": round(distinct(words, 2), 6)} if any(len(text) > 1 for text in words) else {}
        return pairs | {"entropy": round(entropy([word for text in words for word in text]), 6)}

    def _with_gaps(self, prompt: str) -> Examples:
        require(GAP in prompt, f"write {GAP} in --prompt for each token that is to be written")
        first, *others = (self._encoded(part) for part in prompt.split(GAP))
        found = first + [token for part in others for token in (_GAP, *part)]
        long = f"the prompt has {len(found)} tokens, and task text has room for {self.length}: give a shorter --prompt"
        require(len(found) <= self.length, long)
        tokens = torch.tensor([found + [_PADDING] * (self.length - len(found))])
        return Examples(tokens.clamp(min=0), tokens == _GAP, tokens != _PADDING)

    @cached_property
    def _checker(self) -> Callable[..., Any]:
        found: Callable[..., Any] = import_class("checker", self.checker)
        return found

    @property
    def _has_prompt(self) -> bool:
        return bool(self.prompt)

    @property
    def _infills(self) -> bool:
        return self.form == "infill"

    @property
    def _prompt_length(self) -> int:
        return self.length - (self.response_length or (self.length + 1) // 2) if self._has_prompt else 0

    def _count(self, split: str) -> int:
        return len(self._splits[split]) // (2 if self._has_prompt else 1)

    @cached_property
    def _visits(self) -> Callable[[int, int], Visits]:
        rows, count = self._splits["train"], self._count("train")
        lengths = (lambda pairs: rows.lengths(2 * pairs)) if self._has_prompt else rows.lengths  # responses are alike
        return cache(lambda seed, stage: Visits(count, self.window, signed(seed * 7919 + stage), lengths, self.bucket))

    @cached_property
    def _chat(self) -> Any:
        """The tokenizer as transformers reads it, with its chat template."""
        require(bool(self.tokenizer), "task text: chat = true needs a chat model's tokenizer: set task.tokenizer")
        found = read_by_transformers(find_source(self.tokenizer), "PreTrainedTokenizerFast")
        none = f"task text: no chat template lies beside {self.tokenizer}: give a chat model's tokenizer, or no chat"
        require(bool(found.chat_template), none)
        return found

    def _in_chat(self, prompt: str) -> str:
        """The prompt up to where the answer begins."""
        if not self.chat:
            return prompt
        message, in_template = [{"role": "user", "content": prompt}], self._chat.apply_chat_template
        try:
            return str(in_template(message, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template raises
            raise UserError(f"task text: the chat template beside {self.tokenizer} fails: {error}") from None

    def _encoded(self, text: str) -> list[int]:
        if not self.tokenizer:
            return list(text.encode())
        # A pair has an end of its own, and nothing else around its two texts; a span is never one of the marks.
        marks = not (self._has_prompt or self._infills)
        return list(self.text_tokenizer.encode(text, add_special_tokens=marks).ids)

    @cached_property
    def _splits(self) -> dict[str, Ragged]:
        """The sequences of both splits from the cache, which is made where it is missing or not whole.

        Of a pair, the prompt is one row and the response the next; EOS is put behind it when it is read.
        """
        root = cache_folder(self.cache, self.name)
        hashes = Hashes(root / "hashes.json")
        rules = self.text_tokenizer.to_str() if self.tokenizer else "bytes"
        facts = [
            FORMAT_VERSION,
            [hashes.of(part) for path in self.shards for part in parts_of(path)],
            ["rows" if path.is_dir() else path.suffix == ".jsonl" for path in self.shards],  # what a line means
            *(rules, self.field, self.length, self.test_every),
            *((self.prompt, self.response, self._prompt_length) if self._has_prompt else ()),
            *((self._chat.chat_template,) if self.chat else ()),
            *(("infill",) if self._infills and self.tokenizer else ()),  # without marks around a text
        ]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        found = {}
        for split in ("train", "test"):
            folder = root / f"{name}-{split}"
            if (cached := read_cache(folder, hashes.of)) is None:
                with alone_in(root):
                    if read_cache(folder, hashes.of) is None:  # no other process has made it in the meantime
                        about = {"files": [path.name for path in self.shards], "split": split, "left_out": 0}
                        write_cache(folder, self._sequences(split, about), len(self.vocabulary), about)
                cached = read_cache(folder, hashes.of)
                assert cached is not None
            too_long = self._left_out(folder, split)
            more = too_long or ": give more, or lower task.test_every"
            too_few = f"task text: {self.files!r} has too few texts, none is left for the {split} split{more}"
            require(len(cached) > 0, too_few)
            if too_long:
                say(f"task text{too_long}", err=True)
            found[split] = cached
        hashes.save()
        return found

    def _left_out(self, folder: Path, split: str) -> str:
        """What is said of the pairs that were too long; "" where none was."""
        count = parse_json((folder / "cache.json").read_text(encoding="utf-8")).get("left_out", 0)
        room = f"prompts have {self._prompt_length} tokens, responses {self.length - self._prompt_length} with EOS"
        return f": {count} of the {split} pairs left out as too long ({room})" if count else ""

    def _sequences(self, split: str, about: dict[str, Any]) -> Iterator[Sequence[int]]:
        """The tokens of a split; `about` counts the pairs that are left out."""
        size, reached = sum(part.stat().st_size for path in self.shards for part in parts_of(path)), 0
        fields = (self.prompt, self.response) if self._has_prompt else (self.field,)
        with progress(f"tokens of the {split} split, bytes", size, transient=True) as advance:
            for number, (texts, position) in enumerate(read_texts(self.shards, fields)):
                if number % 1000 == 0:
                    advance(position - reached)
                    reached = position
                if (number % self.test_every == self.test_every - 1) != (split == "test"):
                    continue
                tokens = [self._encoded(text) for text in [self._in_chat(texts[0]), *texts[1:]]]
                if self.eos_token_id is None:
                    yield from (tokens[0][i : i + self.length] for i in range(0, len(tokens[0]), self.length))
                elif len(tokens[0]) <= self._prompt_length and len(tokens[1]) < self.length - self._prompt_length:
                    yield from tokens
                else:
                    about["left_out"] += 1


def byte_tokenizer(marks: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, whose id is the byte; then the marks.

    The names are those of byte-level encodings: the byte's own letter, and for bytes without a visible one, in their
    order, the letters from 256 on.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter) for letter in letters}
    others = iter([letter for letter in letters if ord(letter) > 255])
    names = [chr(byte) if byte in own else next(others) for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    return tokenizer
