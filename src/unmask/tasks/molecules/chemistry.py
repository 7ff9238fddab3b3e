"""What rdkit and fcd_torch know of SMILES."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from unmask.errors import UserError
from unmask.progress import progress
from unmask.runtime import chosen_device

_INSTALL = "pip install 'unmask[molecules]'"
_BATCH = 512


def canonical(texts: Sequence[str]) -> list[str]:
    """The canonical SMILES of each text, "" where it is no molecule that rdkit can sanitise, or none at all."""
    try:
        from rdkit import Chem
        from rdkit.rdBase import BlockLogs
    except ImportError:
        raise UserError(f"task molecules: rdkit says which SMILES are molecules: {_INSTALL}") from None
    with BlockLogs():
        found = (Chem.MolFromSmiles(text) for text in texts)
        return ["" if molecule is None else Chem.MolToSmiles(molecule) for molecule in found]


def drawn(smiles: str) -> str:
    """The molecule as an SVG; "" where rdkit is not installed or cannot read it."""
    try:
        from rdkit import Chem
        from rdkit.Chem.Draw import rdMolDraw2D
        from rdkit.rdBase import BlockLogs
    except ImportError:
        return ""
    with BlockLogs():
        molecule = Chem.MolFromSmiles(smiles) if smiles else None
    if molecule is None:
        return ""
    canvas = rdMolDraw2D.MolDraw2DSVG(240, 160)
    canvas.drawOptions().clearBackground = False  # type: ignore[assignment]
    rdMolDraw2D.PrepareAndDrawMolecule(canvas, molecule)
    canvas.FinishDrawing()
    text = str(canvas.GetDrawingText())
    return text[text.index("<svg") :]  # what stands before it names another encoding


class Gaussian(NamedTuple):
    mean: np.ndarray  # [D]
    covariance: np.ndarray  # [D, D]


def chemnet() -> tuple[Any, Any]:
    """What loads ChemNet, whose weights are in fcd_torch, and what turns SMILES into its input."""
    try:
        from fcd_torch import FCD
        from fcd_torch.utils import SmilesDataset
    except ImportError:
        raise UserError(f"task molecules: fcd_torch computes the FCD: {_INSTALL}, or leave fcd out") from None
    return FCD, SmilesDataset


def described(smiles: Sequence[str]) -> Gaussian:
    """Mean and covariance of what ChemNet makes of at least two canonical SMILES."""
    device, (network_of, letters_of) = chosen_device(), chemnet()
    network, letters, read = network_of().model.to(device), letters_of(smiles, canonize=False), []
    with progress("ChemNet", len(smiles), transient=True) as advance, torch.no_grad():
        for rows in torch.arange(len(smiles)).split(_BATCH):
            one_hot = torch.from_numpy(np.stack([letters[row] for row in rows.tolist()]))  # [M, 350, letters]
            read.append(network(one_hot.mT.float().to(device)).double().cpu())  # [M, D]
            advance(len(rows))
    features = torch.cat(read).numpy()
    return Gaussian(features.mean(0), np.cov(features.T))


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|m_a - m_b|^2 + tr(A + B - 2 (A B)^1/2) for covariances A and B (Preuer et al. 2018).

    A^1/2 B A^1/2 is symmetric and has the eigenvalues of A B.
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = vectors * values.clip(0) ** 0.5 @ vectors.T
    mixed = np.linalg.eigvalsh(root @ b.covariance @ root).clip(0) ** 0.5
    apart = a.mean - b.mean
    return float(apart @ apart + np.trace(a.covariance) + np.trace(b.covariance) - 2 * mixed.sum())
