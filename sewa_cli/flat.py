"""A model whose parameters are views into one flat vector, and their gradients into another.

Setting all weights is then one copy, reading all gradients is one vector, and any `nn.Module`
works: no `functional_call`, no per-tensor loop inside the solver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Where each floating-point tensor of a model stands in the flat vector [P].

    Parameters first, then buffers; inside each, tensors of one dtype stand together. Tied tensors
    stand once, under the first of their names.
    """

    slices: dict[str, slice]
    shapes: dict[str, tuple[int, ...]]
    parameters: int  # the first so many of the P are parameters, the rest buffers
    size: int  # P

    def slice_of(self, name: str) -> slice:
        return self.slices[name]


@dataclass(frozen=True)
class _Cast:
    """A stretch of the flat vector that the model keeps in another dtype."""

    where: slice
    values: Tensor
    gradients: Tensor | None


class FlatModel:
    """`model`, moved to `device` in eval mode, its floating-point state bound to `flat` [P].

    `flat` and `grad` [parameters] are float32. State that the model keeps in another dtype (a bf16
    model, say) has a copy in that dtype, refreshed by `set` and read by `collect_gradients`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.aliases = _tied_names(model)
        self.module = model.to(device).eval()
        self.device = device
        state = _state(self.module)
        self.shapes = {names[0]: tuple(state[names[0]].shape) for names in self.aliases}
        self._first = {name: names[0] for names in self.aliases for name in names}
        floats = [names for names in self.aliases if state[names[0]].is_floating_point()]
        groups: dict[tuple[bool, str], list[tuple[str, ...]]] = {}
        for names in floats:
            tensor = state[names[0]]
            is_buffer = not isinstance(tensor, nn.Parameter)
            groups.setdefault((is_buffer, str(tensor.dtype)), []).append(names)
        ordered = [groups[key] for key in sorted(groups)]

        slices: dict[str, slice] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        offset = parameters = 0
        for names in (names for group in ordered for names in group):
            tensor = state[names[0]]
            slices[names[0]] = slice(offset, offset + tensor.numel())
            shapes[names[0]] = tuple(tensor.shape)
            offset += tensor.numel()
            if isinstance(tensor, nn.Parameter):
                parameters = offset
        self.layout = Layout(slices, shapes, parameters, offset)
        self.flat = torch.zeros(offset, dtype=torch.float32, device=device)
        self.grad = torch.zeros(parameters, dtype=torch.float32, device=device)
        self._casts: list[_Cast] = []
        for group in ordered:
            self._bind(group, state)

    def _bind(self, group: list[tuple[str, ...]], state: dict[str, Tensor]) -> None:
        """Make every tensor of a one-dtype group a view into the flat vector, or into its copy."""
        first = state[group[0][0]]
        where = slice(self.layout.slices[group[0][0]].start, self.layout.slices[group[-1][0]].stop)
        trainable = isinstance(first, nn.Parameter)
        values = self.flat[where]
        gradients = self.grad[where] if trainable else None
        if first.dtype != torch.float32:
            values = values.to(first.dtype)
            gradients = torch.zeros_like(values) if trainable else None
            self._casts.append(_Cast(where, values, gradients))
        for names in group:
            own = self.layout.slices[names[0]]
            here = slice(own.start - where.start, own.stop - where.start)
            shape = self.layout.shapes[names[0]]
            with torch.no_grad():
                self.flat[own] = state[names[0]].detach().reshape(-1).to(self.flat.dtype)
            for name in names:
                tensor = state[name]
                tensor.data = values[here].view(shape)
                if gradients is not None:
                    # a frozen parameter may differ between checkpoints: the mask needs its gradient
                    tensor.requires_grad_(True)
                    tensor.grad = gradients[here].view(shape)
        if first.dtype != torch.float32:
            values.copy_(self.flat[where])

    def canonical(self, name: str) -> str:
        """The layout's name of a tensor that may be tied to others."""
        return self._first[name]

    def name_of(self, tensor: Tensor | None) -> str | None:
        """The layout's name of a parameter or buffer of the module; None if it has none."""
        state = _state(self.module).items()
        return next((self._first[name] for name, own in state if own is tensor), None)

    def value(self, name: str) -> Tensor:
        """A copy of a floating-point tensor as it stands in `flat`; float32."""
        first = self.canonical(name)
        return self.flat[self.layout.slices[first]].view(self.layout.shapes[first]).clone()

    def set(self, flat: Tensor) -> None:
        """All floating-point state at once; flat: [P], any device."""
        self.flat.copy_(flat)
        self._refresh()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Named tensors, floating point or integer, each cast to what the model holds."""
        state = _state(self.module)
        with torch.no_grad():
            for name, tensor in tensors:
                first = self.canonical(name)
                if first in self.layout.slices:
                    self.flat[self.layout.slices[first]].copy_(tensor.reshape(-1))
                else:
                    state[name].copy_(tensor)
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for cast in self._casts:
                cast.values.copy_(self.flat[cast.where])

    def zero_gradients(self) -> None:
        self.grad.zero_()
        for cast in self._casts:
            if cast.gradients is not None:
                cast.gradients.zero_()

    def collect_gradients(self) -> Tensor:
        """The gradient of all that was back-propagated since `zero_gradients`; [parameters]."""
        for cast in self._casts:
            if cast.gradients is not None:
                self.grad[cast.where].copy_(cast.gradients)
        return self.grad

    def absorb_buffers(self) -> None:
        """After layers have changed their own buffers (BatchNorm): bring `flat` up to date."""
        for cast in self._casts:
            self.flat[cast.where].copy_(cast.values)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves; extra state that is no tensor is not ours."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the model's state, in its order, those of one and the same tensor together."""
    groups: dict[object, list[str]] = {}
    for name, tensor in _state(model).items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; build the model with real weights")
        if tensor.is_complex():
            raise ValueError(f"{name} is complex; complex weights cannot be averaged here")
        shared = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        groups.setdefault(shared if tensor.numel() else id(tensor), []).append(name)
    return [tuple(names) for names in groups.values()]
