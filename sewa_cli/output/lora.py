"""Averages of LoRA adapters: factors apart, with the gap measured, or the products, re-factored.

ΔW = scaling · B·A, and the mean of products is not the product of means: Σ cᵢ BᵢAᵢ has a rank up to
k·r. `factors` averages A and B apart, which every tool does and which loads like any average.
`merged` averages the products and finds the closest adapter of the same rank, pair by pair.

No product is ever formed. Stacked factors X = [c₁B₁ … c_kB_k] [m, kr] and Y = [A₁; …; A_k] [kr, n]
give the mean of products as X·Y, and with thin QRs of both, X = Q R and Yᵀ = P S, all that matters
is in the small core R Sᵀ. (Torch is imported late: other averages do without it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from sewa_cli.checkpoints import Checkpoint, pairs
from sewa_cli.dtypes import Array, as_array, torch_dtype
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.events import Events
from sewa_cli.report.shared import Lora

if TYPE_CHECKING:
    from torch import Tensor

    from sewa_cli.output.average import Average

Mode = Literal["factors", "merged"]


def warn_of_factors(lora: Lora, events: Events) -> None:
    """`factors` is a choice that a user should know of."""
    if lora.mode == "factors" and lora.largest >= 1e-6:
        events.warn(
            "A and B averaged apart; the product is off the mean of products by "
            f"{lora.largest:.2%} at most; --set lora=merged averages the products"
        )


def average_factors(average: Average, mode: Mode) -> tuple[dict[str, Array], Lora | None]:
    """Return the factors of the averaged products (`merged`), or only how much that would gain.

    No Lora: these are no LoRA adapters.
    """
    merged, errors = {}, []
    for (a, b), As, Bs in _factors(average):
        if mode == "merged":
            B, A, error = refactor(Bs, As, average.coefficients)
            merged[b] = as_array(B.to(torch_dtype(average.dtype_of(b))))
            merged[a] = as_array(A.to(torch_dtype(average.dtype_of(a))))
        else:
            error = factor_gap(Bs, As, average.coefficients)
        errors.append(error)
    if not errors:
        return {}, None
    mean = sum(errors) / len(errors)
    return merged, Lora(mode=mode, pairs=len(errors), largest=max(errors), mean=mean)


def _factors(average: Average) -> Iterator[tuple[tuple[str, str], list[Tensor], list[Tensor]]]:
    """Output names of each pair, and its factors in every source; one pair at a time."""
    written = {source: name for name, source in average.names.items()}
    for a, b in pairs(average.sources[0].tensors):
        if a not in written or b not in written:
            raise ConfigError(
                f"lora: {a} and {b} are not both in the model; add the adapter in build_model()"
            )
        As = [_finite(checkpoint, a) for checkpoint in average.sources]
        Bs = [_finite(checkpoint, b) for checkpoint in average.sources]
        yield (written[a], written[b]), As, Bs


def _finite(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read(name)
    if not tensor.double().isfinite().all():  # torch cannot tell of 8 bits
        raise CheckpointError(f"{checkpoint.path}: {name} holds NaN or Inf; leave it out")
    return tensor


def refactor(
    Bs: Sequence[Tensor], As: Sequence[Tensor], coefficients: Sequence[float]
) -> tuple[Tensor, Tensor, float]:
    """The B [m, r] and A [r, n] whose product is closest to Σ cᵢ BᵢAᵢ, and how far it is.

    The distance is relative, ‖BA − Σ cᵢ BᵢAᵢ‖ / ‖Σ cᵢ BᵢAᵢ‖ (Frobenius). float32; factors with more
    than two dimensions (convolutions) are taken as matrices, and given back in their shapes.
    """
    import torch

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
    import torch

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
    import torch

    X = torch.cat([c * _matrix(B) for c, B in zip(coefficients, Bs, strict=True)], 1)
    return X, torch.cat([_matrix(A) for A in As], 0)


def _matrix(factor: Tensor) -> Tensor:
    return factor.float().flatten(1)


def _product_norm(X: Tensor, Y: Tensor) -> float:
    """‖X·Y‖ from the triangles of both: nothing larger than X and Y is made."""
    import torch

    R = torch.linalg.qr(X, mode="r").R
    S = torch.linalg.qr(Y.T, mode="r").R
    return float((R @ S.T).double().norm())
