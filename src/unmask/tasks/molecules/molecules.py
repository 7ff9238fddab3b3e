"""Molecules, written as SMILES."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from unmask import files
from unmask.display import say
from unmask.errors import UserError, prefixed, require
from unmask.progress import progress
from unmask.rng import Purpose, uniforms
from unmask.tasks.cache import Ragged, alone_in, cache_folder, written_whole
from unmask.tasks.diversity import one_of_each, sequence_codes
from unmask.tasks.molecules.chemistry import Gaussian, canonical, chemnet, described, drawn, frechet_distance
from unmask.tasks.molecules.smiles import TOKEN, Molecule, moses_files, parts_of, read_molecules
from unmask.tasks.puzzles.puzzle import unpadded
from unmask.tasks.task import LONGEST, Examples, Task, check_choice, check_range, check_split

# Raise it with every change of the code after which the same files give other tokens.
CACHE_VERSION = 1
CACHE_FILE = "molecules.safetensors"

_SPLITS = ("train", "dev", "test", "scaffolds")
_EOS, _EOS_NAME = 0, "<eos>"
_MOST_TOKENS = 256  # they are kept as bytes
_CHUNK = 2**16  # molecules at a time, to bound memory
_LOOKED_AT = 1000  # training molecules, before training: can rdkit read them?

_Tokens = tuple[tuple[str, ...], dict[str, Ragged], int]  # the vocabulary, every split, how many were left out


@dataclass(frozen=True)
class Molecules(Task):
    """A SMILES in tokens (atoms, bonds, branches, ring bonds) and EOS behind it; nothing is given, all is written.

        train      the file's, or those of MOSES
        dev        one in a hundred of them, held out
        test       the file's, or one in ten of a file without the column SPLIT; by the text, so that a molecule that
                   the file writes in two ways may be in two splits
        scaffolds  the split test_scaffolds of MOSES: their ring systems are not in train

    The vocabulary is that of train.  An answer is what stands before its first EOS, and valid if rdkit can read it.
    `overall` counts different molecules; how many of so many true ones would be different is not known, so the task
    is not `unconditional`.
    """

    file: str = ""  # .csv or .tsv with a column SMILES, or one per line; .gz too; "": MOSES in the package molsets
    length: int = 56
    held_out: str = "test"
    fcd: int = 0  # held-out molecules from which to compute the distance FCD of the valid samples; 0: not computed
    cache: str = ""  # a folder for the tokens; "": unmask/molecules in the user's cache

    name = "molecules"
    eos_token_id = _EOS
    held_out_splits = _SPLITS[1:]

    def __post_init__(self) -> None:
        check_range(self, "length", 1, LONGEST)
        check_range(self, "fcd", 0, 10_000_000)
        require(self.fcd != 1, f"task {self.name}: set fcd to 0 or to at least 2: one molecule has no covariance")
        check_choice(self, "held_out", self.held_out_splits)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self._tokens[0]

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token=_EOS_NAME))
        tokenizer.decoder = decoders.Fuse()
        return tokenizer

    def check(self) -> None:
        canonical([])  # an evaluation needs rdkit, and perhaps fcd_torch: better told now than after training
        if self.fcd:
            chemnet()
        self._rows(self.held_out)
        super().check()
        first = self.examples(torch.arange(min(_LOOKED_AT, len(self._rows("train")))), "train")
        texts = self.codes(first.tokens, first)
        unread = [text for text, found in zip(texts, canonical(texts), strict=True) if not found]
        if unread:
            found = f"rdkit cannot read {len(unread)} of the first {len(texts)} training molecules, such as {unread[0]}"
            say(f"task {self.name}: {found}: they are trained on all the same", err=True)

    def kind(self, token: int) -> str:
        text = self.vocabulary[token]
        if token == _EOS:
            return "EOS"
        if text.lstrip("%").isdigit():
            return "ring digit"
        return "bracket" if text in "()" else "bond" if text in "-=#$:/\\~." else "atom"

    def drawing(self, tokens: Sequence[int]) -> str:
        return drawn(self.text(tokens))

    @property
    def test_examples(self) -> int:
        return len(self._rows(self.held_out))

    def examples(self, ids: Tensor, split: str) -> Examples:
        check_split(split)
        source = "train" if split == "train" else self.held_out
        rows = self._rows(source)
        return unpadded(
            torch.from_numpy(self._tokens[1][source].first(rows[ids.numpy() % len(rows)], self.length, _EOS))
        )

    def valid(self, tokens: Tensor, examples: Examples) -> Tensor:
        return torch.tensor([bool(found) for found in canonical(self.codes(tokens, examples))], dtype=torch.bool)

    def codes(self, tokens: Tensor, examples: Examples) -> list[str]:
        """The SMILES, "" where a token is none."""
        written = ((tokens >= 0) & (tokens < len(self.vocabulary))).all(-1).tolist()
        return [self.text(row) if whole else "" for row, whole in zip(tokens.tolist(), written, strict=True)]

    def overall(self, codes: Sequence[str]) -> dict[str, float]:
        """Of the valid samples: the part of different molecules, of these the part not trained on, length and FCD.

        The FCD falls with the number of molecules, so that of as many true ones stands beside it.
        A molecule was trained on if the file has it as it was written here, or in the canonical form.
        """
        valid = [(found, text) for found, text in zip(canonical(codes), codes, strict=True) if found]
        distinct = {found for found, _ in valid}
        figures = {"valid x unique": len(distinct) / len(codes)}
        if not valid:
            return figures
        trained = self._was_trained_on([text for pair in valid for text in pair]).view(-1, 2).any(-1).tolist()
        known = {found for (found, _), old in zip(valid, trained, strict=True) if old}
        figures |= {"unique": len(distinct) / len(valid), "novel": 1 - len(known) / len(distinct)}
        figures["characters"] = fmean(len(text) for _, text in valid)
        if self.fcd and len(valid) > 1:
            figures["FCD"] = frechet_distance(described([found for found, _ in valid]), self._reference)
            if self.test_examples >= self.fcd + len(valid):
                as_many = described(self._held_out(self.fcd, len(valid)))
                figures["FCD of true ones"] = frechet_distance(as_many, self._reference)
        return {name: round(figure, 6) for name, figure in figures.items()}

    def diverse(self, codes: Sequence[str]) -> list[float]:
        return one_of_each(canonical(codes))

    def _was_trained_on(self, texts: Sequence[str]) -> Tensor:
        """[M] bool."""
        rows = [[self._ids.get(part, -1) for part in parts_of(text)] for text in texts]
        length, unknown = self.length, [-1] * self.length
        padded = [row + [_EOS] * (length - len(row)) if len(row) <= length else unknown for row in rows]
        codes = sequence_codes(torch.tensor(padded))
        return self._trained[torch.searchsorted(self._trained, codes).clamp(max=len(self._trained) - 1)] == codes

    @cached_property
    def _trained(self) -> Tensor:
        """[P]: the codes of the training molecules, in ascending order."""
        ids = torch.arange(len(self._rows("train"))).split(_CHUNK)
        return torch.cat([sequence_codes(self.examples(some, "train").tokens) for some in ids]).sort().values

    @cached_property
    def _reference(self) -> Gaussian:
        return described(self._held_out(0, self.fcd))

    def _held_out(self, start: int, count: int) -> list[str]:
        """Held-out molecules from `start` on, as many as there are."""
        examples = self.examples(torch.arange(start, min(start + count, self.test_examples)), "test")
        return [found for found in canonical(self.codes(examples.tokens, examples)) if found]

    def _rows(self, split: str) -> np.ndarray:
        """The molecules of a split that are not too long."""
        rows = self._short_enough[split]
        mend = "set length higher" if len(self._tokens[1][split]) else "give more molecules"
        if split != "train" and any(len(self._short_enough[other]) for other in self.held_out_splits):
            mend += ", or choose another held_out"
        require(len(rows) > 0, f"task {self.name}: no molecule is left for {split}: {mend}")
        return rows

    @cached_property
    def _short_enough(self) -> dict[str, np.ndarray]:
        fits = {split: rows.lengths() <= self.length for split, rows in self._tokens[1].items()}
        too_long, total = sum(int((~rows).sum()) for rows in fits.values()), sum(map(len, fits.values()))
        if too_long:
            found = f"{too_long} of {total} molecules are longer than length {self.length} and left out"
            say(f"task {self.name}: {found}", err=True)
        rows = {split: np.flatnonzero(some) for split, some in fits.items()}
        return {split: some if split == "train" else _shuffled(some) for split, some in rows.items()}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.vocabulary)}

    @cached_property
    def _tokens(self) -> _Tokens:
        """From the cache or made now."""
        root, paths = cache_folder(self.cache, self.name), self._paths
        try:
            facts = [CACHE_VERSION, [[path.name, split, files.fingerprint(path)] for path, split in paths.items()]]
        except OSError as error:
            raise UserError(f"task {self.name}: {self.file} cannot be read ({error.strerror}): correct file") from None
        folder = root / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        found = _read(folder)
        if found is None:
            with alone_in(root):  # another process may have made it in the meantime
                found = _read(folder) or self._make(folder)
        if found[2]:
            say(f"task {self.name}: left out: {found[2]} with characters or atoms that are unknown", err=True)
        return found

    @cached_property
    def _paths(self) -> dict[Path, str]:
        """The files, each with the split of its molecules; "": it says that itself."""
        with prefixed(f"task {self.name}"):
            moses = {path: path.name.removesuffix(".csv.gz") for path in moses_files()} if not self.file else {}
        return moses or {Path(self.file).expanduser(): ""}

    def _molecules(self, purpose: str) -> Iterator[Molecule]:
        sizes = sum(path.stat().st_size for path in self._paths)
        with prefixed(f"task {self.name}"), progress(f"{purpose}, bytes", sizes, transient=True) as advance:
            for path, split in self._paths.items():
                reached = 0
                for molecule in read_molecules(path, split):
                    if molecule.position > reached:
                        advance(molecule.position - reached)
                        reached = molecule.position
                    yield molecule

    def _make(self, folder: Path) -> _Tokens:
        say(f"task {self.name}: tokens are made once and kept in {folder.parent}", err=True)
        counts: Counter[str] = Counter()
        for smiles, split, _ in self._molecules("vocabulary"):
            if split == "train":
                counts.update(parts_of(smiles))
        known = [part for part, _ in counts.most_common() if TOKEN.fullmatch(part)][: _MOST_TOKENS - 1]
        vocabulary = (_EOS_NAME, *sorted(known))
        ids = {token: number for number, token in enumerate(vocabulary)}
        rows = {split: (bytearray(), array("q", [0])) for split in _SPLITS}
        left_out: Counter[str] = Counter()
        for smiles, split, _ in self._molecules("tokens"):
            tokens, offsets = rows[split]
            try:
                tokens += bytes([ids[part] for part in parts_of(smiles)])
                offsets.append(len(tokens))
            except KeyError:
                left_out[split] += 1
        made = {
            split: Ragged(np.frombuffer(ids, np.uint8), np.array(offsets)) for split, (ids, offsets) in rows.items()
        }
        unknown = f"all {left_out['train']} have unknown characters: write them as SMILES"
        mend = unknown if left_out["train"] else "give more molecules"
        require(len(made["train"]) > 0, f"task {self.name}: {self.file} has no molecule to train on: {mend}")
        with written_whole(folder, CACHE_FILE) as partial:
            arrays = {f"{split}/{part}": array for split, some in made.items() for part, array in vars(some).items()}
            facts = {"vocabulary": json.dumps(vocabulary), "left_out": str(left_out.total())}
            save_file(arrays, partial / CACHE_FILE, metadata=facts)
        sizes = ", ".join(f"{len(some)} {split}" for split, some in made.items())
        say(f"task {self.name}: {sizes} molecules of {len(vocabulary)} tokens", err=True)
        return vocabulary, made, left_out.total()


def _shuffled(rows: np.ndarray) -> np.ndarray:
    """Always in the same order: the files of MOSES are sorted, and their first molecules are much alike."""
    draws = uniforms(0, Purpose.EXAMPLE, torch.arange(len(rows)), dtype=torch.float64)
    shuffled: np.ndarray = rows[draws.argsort(stable=True).numpy()]
    return shuffled


def _read(folder: Path) -> _Tokens | None:
    """What was made earlier, or None where it is not there or not whole."""
    try:
        files.check(folder, CACHE_FILE)
        with safe_open(folder / CACHE_FILE, framework="numpy") as file:
            parts = {split: [file.get_tensor(f"{split}/{part}") for part in ("ids", "offsets")] for split in _SPLITS}
            facts = file.metadata()
        splits = {split: Ragged(*arrays) for split, arrays in parts.items()}
        return tuple(json.loads(facts["vocabulary"])), splits, int(facts.get("left_out", 0))
    except Exception:  # whatever a missing or damaged file makes the library raise
        return None
