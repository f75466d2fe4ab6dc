"""Averages of products B·A of thin factors, without ever forming a product.

The mean of products is not the product of means: Σ cᵢ BᵢAᵢ has a rank up to k·r. Stacked factors
X = [c₁B₁ … c_kB_k] [m, kr] and Y = [A₁; …; A_k] [kr, n] give it as X·Y, and with thin QRs of both,
X = Q R and Yᵀ = P S, all that matters is in the small core R Sᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def refactor(
    Bs: Sequence[Tensor], As: Sequence[Tensor], coefficients: Sequence[float]
) -> tuple[Tensor, Tensor, float]:
    """The B [m, r] and A [r, n] whose product is closest to Σ cᵢ BᵢAᵢ, and how far it is.

    The distance is relative, ‖BA − Σ cᵢ BᵢAᵢ‖ / ‖Σ cᵢ BᵢAᵢ‖ (Frobenius). float32; factors with more
    than two dimensions (convolutions) are taken as matrices, and given back in their shapes.
    """
    X, Y = _stack(Bs, As, coefficients)
    Q, R = torch.linalg.qr(X)
    P, S = torch.linalg.qr(Y.T)
    U, sigma, Vt = torch.linalg.svd(R @ S.T, full_matrices=False)
    rank = As[0].shape[0]
    kept = sigma[:rank].sqrt()
    B, A = Q @ (U[:, :rank] * kept), (kept[:, None] * Vt[:rank]) @ P.T
    if B.shape[1] < rank:  # a layer thinner than the rank: the rest is zero
        B = torch.nn.functional.pad(B, (0, rank - B.shape[1]))
        A = torch.nn.functional.pad(A, (0, 0, 0, rank - A.shape[0]))
    whole = float(sigma.double().norm())
    error = float(sigma[rank:].double().norm()) / whole if whole else 0.0
    return B.reshape(Bs[0].shape), A.reshape(As[0].shape), error


def factor_gap(Bs: Sequence[Tensor], As: Sequence[Tensor], coefficients: Sequence[float]) -> float:
    """‖B̄Ā − Σ cᵢ BᵢAᵢ‖ / ‖Σ cᵢ BᵢAᵢ‖: how far the product of means is from the mean of products."""
    X, Y = _stack(Bs, As, coefficients)
    c = torch.tensor(list(coefficients), dtype=torch.float32)
    mean_B = torch.einsum("i,imr->mr", c, torch.stack([_matrix(B) for B in Bs]))
    mean_A = torch.einsum("i,irn->rn", c, torch.stack([_matrix(A) for A in As]))
    whole = _product_norm(X, Y)
    gap = _product_norm(torch.cat([X, -mean_B], 1), torch.cat([Y, mean_A], 0))
    return gap / whole if whole else 0.0


def _stack(
    Bs: Sequence[Tensor], As: Sequence[Tensor], coefficients: Sequence[float]
) -> tuple[Tensor, Tensor]:
    X = torch.cat([c * _matrix(B) for c, B in zip(coefficients, Bs, strict=True)], 1)
    return X, torch.cat([_matrix(A) for A in As], 0)


def _matrix(factor: Tensor) -> Tensor:
    return factor.to(torch.float32).flatten(1)


def _product_norm(X: Tensor, Y: Tensor) -> float:
    """‖X·Y‖ from the triangles of both: nothing larger than X and Y is made."""
    R = torch.linalg.qr(X, mode="r").R
    S = torch.linalg.qr(Y.T, mode="r").R
    return float((R @ S.T).double().norm())
