"""One-line statements of Python, from the standard library of the interpreter that runs."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from unmask import files
from unmask.display import say
from unmask.errors import UserError, require
from unmask.progress import watched
from unmask.rng import Purpose, uniforms
from unmask.tasks.cache import alone_in, cache_folder, written_whole
from unmask.tasks.diversity import one_of_each, sequence_codes
from unmask.tasks.task import Examples, Task, check_choice, check_range, check_split, prompt_kept, random_spans

# Raise it with every change of the code after which the same files give other statements.
CACHE_VERSION = 1
CACHE_FILE = "statements.txt"

EOS = "<eos>"
_CHARACTERS = tuple(map(chr, range(32, 127)))  # printable ASCII; the rare statements with others are left out
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # folders
_HELD_OUT_SHARE = 0.05  # of each held-out split


@dataclass(frozen=True)
class Statements(Task):
    """Simple statements of at most `length` characters, one token each; valid is what `ast.parse` takes for one.

        whole     all of the sequence is written: a statement, and EOS up to `length`
        infill    a random span of up to half of a statement is written, its characters around it are the prompt

    Every statement is there once, and its hash under `seed` says which split it is in.  Strings and numbers alone are
    no statements here: docstrings would be many.  What stands behind the first EOS is ignored.

    Beside validity, `novel` is the share of samples that are valid and not in the training split, `unique` the share of
    the valid ones that differ from each other, of spans without what stands around them, and `characters` the mean
    length of the valid ones: to end early is an easy way to be valid.
    """

    form: str = "whole"  # or infill
    length: int = 64
    folder: str = ""  # Python files of your own; "": the standard library, without its tests
    seed: int = 0
    held_out: str = "dev"
    cache: str = ""  # a folder for the statements; "": unmask/statements in the user's cache

    name = "statements"
    vocabulary = (EOS, *_CHARACTERS)
    eos_token_id = 0
    held_out_splits = ("dev", "test")

    def __post_init__(self) -> None:
        check_choice(self, "form", ("whole", "infill"))
        check_choice(self, "held_out", self.held_out_splits)
        check_range(self, "length", 8, 512)  # the parser is recursive: it must never be given much more

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=EOS))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer

    @property
    def test_examples(self) -> int:
        return len(self._splits[self.held_out])

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        rows = self._splits["train" if split == "train" else self.held_out]
        tokens = rows[ids % len(rows)].long()
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        if self.form == "whole":
            return Examples(tokens, everywhere, everywhere.clone())
        words = Purpose.DATA, int(split == "train"), ids[:, None], torch.arange(2)
        u = uniforms(self.seed, *words, dtype=torch.float64)  # [B, 2]
        n = (tokens > 0).sum(-1)
        return Examples(tokens, random_spans(u, n, self.length), torch.arange(self.length) < n[:, None])

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        known = ((tokens >= 0) & (tokens < len(self.vocabulary))).all(-1)
        if self.form == "infill":  # a span has no end inside it
            known &= prompt_kept(tokens, examples) & ((tokens > 0) | ~examples.response).all(-1)
        for row in known.nonzero()[:, 0].tolist():
            known[row] = is_statement(self.text(tokens[row].tolist()))
        return known

    def metrics(self, tokens: Tensor, examples: Examples) -> dict[str, Tensor]:
        """novel: valid, and as a text no training statement.  same, of a span: as it was in the statement."""
        known = torch.isin(sequence_codes(_ended(tokens)), self._trained)
        found = {"novel": self.valid(tokens, examples) & ~known}
        return found | ({"same": (tokens == examples.tokens).all(-1)} if self.form == "infill" else {})

    def codes(self, tokens: Tensor, examples: Examples) -> list[str]:
        """The statement, or the span alone, "" for what is not valid."""
        rows = zip(tokens, examples.response, self.valid(tokens, examples).tolist(), strict=True)
        return [self.text(row[written].tolist()) if valid else "" for row, written, valid in rows]

    def overall(self, codes: list[str]) -> dict[str, float]:
        valid = [text for text in codes if text]
        return {"unique": len(set(valid)) / len(valid), "characters": fmean(map(len, valid))} if valid else {}

    def diverse(self, codes: list[str]) -> list[float]:
        return one_of_each(codes)

    @cached_property
    def _trained(self) -> Tensor:
        return sequence_codes(self._splits["train"].long())

    @cached_property
    def _splits(self) -> dict[str, Tensor]:
        """[S, L] uint8 per split: the statements that are short enough in the order of their hashes, then EOS."""
        rows: dict[str, list[bytes]] = {"train": [], "dev": [], "test": []}
        short = [text for text in self._statements if len(text) <= self.length]
        for number, text in sorted((_number(self.seed, text), text) for text in short):
            share = number / 2**64 / _HELD_OUT_SHARE
            rows["dev" if share < 1 else "test" if share < 2 else "train"].append(text.encode("ascii"))
        for split, texts in rows.items():
            none = f"task {self.name}: no statement of at most {self.length} characters is left for {split}"
            require(bool(texts), f"{none}: set length higher, or folder to one with more Python files")
        filled = {split: b"".join(text.ljust(self.length, b"\x1f") for text in texts) for split, texts in rows.items()}
        return {  # a character c has the id c - 31
            split: torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(-1, self.length) - 31
            for split, joined in filled.items()
        }

    @cached_property
    def _statements(self) -> list[str]:
        """Sorted, from the cache or collected now."""
        top = Path(self.folder).expanduser() if self.folder else Path(sysconfig.get_paths()["stdlib"])
        require(top.is_dir(), f"task {self.name}: folder {str(top)!r} is no folder: correct it")
        paths, digest = list(_python_files(top)), hashlib.sha256(f"{CACHE_VERSION} {sys.version_info[:2]}".encode())
        for path in paths:
            digest.update(_read(path))
        root = cache_folder(self.cache, self.name)
        folder = root / digest.hexdigest()[:16]
        found = _cached(folder)
        if found is None:
            with alone_in(root):  # another process may have made it in the meantime
                found = _cached(folder)
                if found is None:
                    say(f"task {self.name}: statements are collected once and kept in {root}", err=True)
                    read = [statements_in(_read(path)) for path in watched(paths, "files")]
                    found = sorted({text for some in read for text in some or ()})
                    with written_whole(folder, CACHE_FILE) as partial:
                        (partial / CACHE_FILE).write_text("\n".join(found), encoding="ascii")
                    broken = f", {read.count(None)} of them do not parse" if None in read else ""
                    say(f"task {self.name}: {len(found)} statements from {len(paths)} files{broken}", err=True)
        none = f"task {self.name}: no statement is in the {len(paths)} Python files of {str(top)!r}"
        require(bool(found), f"{none}: set folder to one with Python code")
        return found


def statements_in(source: bytes) -> list[str] | None:
    """Every simple statement of printable ASCII that stands on one line; None where the file does not parse."""
    tree, found = _parsed(source), []
    if tree is None:
        return None
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    lines = source.decode(encoding).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_simple(node) and node.lineno == node.end_lineno:
            text = lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            if text.isascii() and text.isprintable() and is_statement(text):
                found.append(text)
    return found


def is_statement(text: str) -> bool:
    """Whether this is one simple statement, with nothing behind it but a comment."""
    tree = _parsed(text)
    return tree is not None and len(tree.body) == 1 and _is_simple(tree.body[0])


def _is_simple(node: ast.stmt) -> bool:
    return not hasattr(node, "body") and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _parsed(source: str | bytes) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that of an unknown escape sequence
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: NUL; the last two: nested too deep
        return None


def _number(seed: int, text: str) -> int:
    """64 bits that say which split a statement is in, and where."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest(), "big")


def _ended(tokens: Tensor) -> Tensor:
    """The tokens [B, L] with EOS everywhere behind the first EOS."""
    return torch.where((tokens == 0).cumsum(-1) > 0, 0, tokens)


def _python_files(top: Path) -> Iterator[Path]:
    """In the order of their paths; tests, installed packages and links to nothing are left out."""
    for folder, inside, names in os.walk(top):
        inside[:] = sorted(set(inside) - _LEFT_OUT)
        paths = (Path(folder) / name for name in sorted(names) if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"task {Statements.name}: {path} cannot be read ({error.strerror}): correct folder") from None


def _cached(folder: Path) -> list[str] | None:
    """What was collected earlier, or None where it is not there or not whole."""
    try:
        files.check(folder, CACHE_FILE)
        return (folder / CACHE_FILE).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
