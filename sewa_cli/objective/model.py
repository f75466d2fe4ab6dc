"""A model whose parameters are views into one flat vector, and their gradients into another.

Setting all weights is then one copy, reading all gradients is one vector, and any `nn.Module`
works: no `functional_call`, no stacking, no per-tensor arithmetic inside the solver.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective import sharding
from sewa_cli.objective.sharding import Parallelize
from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.trajectory import Layout


@dataclass(frozen=True)
class _Cast:
    """A stretch of the flat vector that the model keeps in another dtype."""

    where: slice
    values: Tensor
    gradients: Tensor | None


@dataclass(frozen=True)
class _Shard:
    """A stretch of the flat vector: the rows of a parameter that this rank holds."""

    where: slice
    parameter: Tensor  # the model's own, which FSDP gives its gradient
    values: Tensor


@dataclass(frozen=True)
class _Bound:
    """A tensor of the model, where its module keeps it, and the views it was given."""

    name: str
    shelf: dict[str, Tensor]  # the module's own _parameters or _buffers
    key: str
    values: Tensor
    gradients: Tensor | None


class FlatModel:
    """`model`, moved to `device` in eval mode, its floating-point state bound to `flat` [P].

    `flat` and `grad` [parameters] are float32. State that the model keeps in another dtype (a bf16
    model, say) has a copy in that dtype, refreshed by `set` and read by `collect_gradients`.

    Of several ranks, each has some rows of every parameter: `flat` is of those, P_r long, and
    `part` says which they are. P_r is the same on all: the last numbers may be of nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        only: Container[str] | None = None,
        parallelize: Parallelize | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`only`: the names to bind, such as an adapter's; the rest stays as it was built."""
        self.aliases = _tied_names(model)
        if only is not None:
            self.aliases = [names for names in self.aliases if any(n in only for n in names)]
            model.requires_grad_(False)
        self.has_ties = any(len(names) > 1 for names in self.aliases)
        self.device = device
        self.ranks = ranks
        if self.ranks.several:
            self._free(model)
            sharding.shard(model, device, self.ranks, parallelize)
            self.module = model.eval()
        else:
            self.module = model.to(device).eval()
        self.batchnorm = batchnorm_layers(self.module)
        state = _state(self.module)
        self.shapes = {names[0]: tuple(state[names[0]].shape) for names in self.aliases}
        self._first = {name: names[0] for names in self.aliases for name in names}
        self._parts = {
            name: sharding.columns(name, tensor)
            for name in (names[0] for names in self.aliases)
            if self.ranks.several and sharding.local(tensor := state[name]) is not None
        }

        def kind(names: tuple[str, ...]) -> tuple[bool, bool, str]:
            tensor = state[names[0]]
            is_whole = names[0] not in self._parts
            return not isinstance(tensor, nn.Parameter), is_whole, str(tensor.dtype)

        floats = [names for names in self.aliases if state[names[0]].is_floating_point()]
        groups = [list(group) for _, group in groupby(sorted(floats, key=kind), key=kind)]
        slices: dict[str, slice] = {}
        offset = parameters = 0
        for first in (names[0] for group in groups for names in group):
            part = self._parts.get(first)
            numbers = state[first].numel() if part is None else part.stop - part.start
            slices[first] = slice(offset, offset + numbers)
            offset = slices[first].stop
            if isinstance(state[first], nn.Parameter):
                parameters = offset
        if offset == 0:
            raise TaskError(
                "build_model(): the model has no floating-point weights; return the trained network"
            )
        offset = max(self.ranks.gather(offset))
        shapes = {
            name: self.shapes[name] if name not in self._parts else (where.stop - where.start,)
            for name, where in slices.items()
        }
        self.layout = Layout(slices, shapes, parameters, offset)
        self.parameters = sum(  # of all ranks
            prod(self.shapes[first]) for first in slices if isinstance(state[first], nn.Parameter)
        )
        self.flat = torch.zeros(offset, dtype=torch.float32, device=device)
        self.grad = torch.zeros(parameters, dtype=torch.float32, device=device)
        self.version = 0  # counts changes of the weights, by us
        self._casts: list[_Cast] = []
        self._bound: list[_Bound] = []
        self._shards: list[_Shard] = []
        shelves = _shelves(self.module)
        for group in groups:
            if group[0][0] in self._parts:
                own = [(slices[names[0]], state[names[0]]) for names in group]
                self._shards += [_Shard(where, tensor, _own(tensor)) for where, tensor in own]
            else:
                self._bind(group, state, shelves)
        for shard in self._shards:
            self.flat[shard.where].copy_(shard.values.reshape(-1))

    def _free(self, model: nn.Module) -> None:
        """A frozen parameter may differ between checkpoints; to be known before it is sharded."""
        state = _state(model)
        for name in (name for names in self.aliases for name in names):
            if isinstance(state[name], nn.Parameter) and state[name].is_floating_point():
                state[name].requires_grad_(True)

    def part(self, name: str) -> slice | None:
        """The numbers of a tensor, laid flat, that this rank holds; None: all."""
        return self._parts.get(self.canonical(name))

    def _bind(
        self,
        group: list[tuple[str, ...]],
        state: dict[str, Tensor],
        shelves: dict[int, list[tuple[dict[str, Tensor], str]]],
    ) -> None:
        """Make every tensor of a one-dtype group a view into the flat vector, or into its copy."""
        slices, first = self.layout.slices, state[group[0][0]]
        where = slice(slices[group[0][0]].start, slices[group[-1][0]].stop)
        values = self.flat[where]
        gradients = self.grad[where] if isinstance(first, nn.Parameter) else None
        if first.dtype != torch.float32:
            values = values.to(first.dtype)
            gradients = None if gradients is None else torch.zeros_like(values)
            self._casts.append(_Cast(where, values, gradients))
        for names in group:
            own, shape = slices[names[0]], self.shapes[names[0]]
            here = slice(own.start - where.start, own.stop - where.start)
            view = values[here].view(shape)
            gradient = None if gradients is None else gradients[here].view(shape)
            with torch.no_grad():
                self.flat[own].copy_(state[names[0]].reshape(-1))
                view.copy_(state[names[0]])
            for name in names:
                tensor = state[name]
                tensor.data = view
                if gradient is not None:
                    # a frozen parameter may differ between checkpoints: the mask needs its gradient
                    tensor.requires_grad_(True)
                for shelf, key in shelves[id(tensor)]:
                    self._bound.append(_Bound(name, shelf, key, view, gradient))

    def canonical(self, name: str) -> str:
        """The layout's name of a tensor that may be tied to others."""
        return self._first[name]

    def name_of(self, tensor: Tensor | None) -> str | None:
        """The layout's name of a parameter or buffer of the module; None if it has none."""
        state = _state(self.module).items()
        return next((self._first.get(name) for name, own in state if own is tensor), None)

    @property
    def weights(self) -> list[Tensor]:
        """All that a checkpoint brings: `flat`, and the state that is not floating point."""
        state, firsts = _state(self.module), [names[0] for names in self.aliases]
        return [self.flat, *(state[name] for name in firsts if name not in self.layout.slices)]

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
        self.version += 1
        with torch.no_grad():
            for cast in self._casts:
                cast.values.copy_(self.flat[cast.where])
            if self._shards:
                sharding.let_go(self.module)
            for shard in self._shards:
                shard.values.copy_(self.flat[shard.where].view(shard.values.shape))

    def zero_gradients(self) -> None:
        self.grad.zero_()
        for cast in self._casts:
            if cast.gradients is not None:
                cast.gradients.zero_()
        for shard in self._shards:  # FSDP's own, which it makes anew
            shard.parameter.grad = None
        for bound in self._bound:  # again each time: a zero_grad() in the user's code drops them
            if bound.gradients is not None:
                bound.shelf[bound.key].grad = bound.gradients

    def collect_gradients(self) -> Tensor:
        """The gradient of all that was back-propagated since `zero_gradients`; [parameters]."""
        for cast in self._casts:
            if cast.gradients is not None:
                self.grad[cast.where].copy_(cast.gradients)
        if self.ranks.several:
            self._collect_shards()
        return self.grad

    def _collect_shards(self) -> None:
        """FSDP has taken the mean over the ranks; what each has whole, it has of its own rows."""
        end = self._shards[-1].where.stop if self._shards else 0
        self.grad[end:].div_(self.ranks.size)  # each rank's are added up with W's columns
        for shard in self._shards:
            found = shard.parameter.grad
            if found is not None:
                own = sharding.local(found)
                assert own is not None
                self.grad[shard.where].copy_(own.reshape(-1))

    def absorb_buffers(self) -> None:
        """After layers have changed their own buffers (BatchNorm): bring `flat` up to date."""
        for cast in self._casts:
            self.flat[cast.where].copy_(cast.values)

    def check_untouched(self, by: str = "predict()") -> None:
        """Weights that the user's code has moved or cast no longer follow `flat`: say so."""
        if self.module.training:
            raise TaskError(f"{by}: switches the model to train mode; leave out model.train()")
        for bound in self._bound:
            tensor = bound.shelf.get(bound.key)
            if tensor is None or tensor.data_ptr() != bound.values.data_ptr():
                raise TaskError(
                    f"{by}: {bound.name} was moved, cast or replaced; leave the model's weights "
                    "where they are, or work on a copy of the model"
                )


def batchnorm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }


def _own(tensor: Tensor) -> Tensor:
    own = sharding.local(tensor.detach())
    assert own is not None
    return own


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, under the names that state_dict() gives."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _shelves(model: nn.Module) -> dict[int, list[tuple[dict[str, Tensor], str]]]:
    """id of a tensor → the dicts and keys under which the modules keep it."""
    found: dict[int, list[tuple[dict[str, Tensor], str]]] = {}
    for module in model.modules():
        for shelf in (module._parameters, module._buffers):
            for key, tensor in shelf.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((shelf, key))  # type: ignore[arg-type]
    return found


def _tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the model's state, in its order, those of one and the same tensor together."""
    real = _shelves(model)
    groups: dict[object, list[str]] = {}
    for name, tensor in _state(model).items():
        if id(tensor) not in real:
            raise TaskError(
                f"build_model(): {name} in its state_dict() is a copy or extra state; "
                "register it as a parameter or buffer"
            )
        if tensor.is_meta:
            raise TaskError(
                f"build_model(): {name} is on the meta device; build it with real weights"
            )
        if tensor.is_complex():
            raise TaskError(f"build_model(): {name} is complex; store its real and imaginary parts")
        shared = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        alone = not tensor.numel()  # without an address: tied by being the same
        groups.setdefault(id(tensor) if alone else shared, []).append(name)
    return [tuple(names) for names in groups.values()]


def find_device(wanted: str) -> torch.device:
    """`auto`: cuda, else mps, else cpu."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device: {wanted!r} cannot be used here ({reason}); leave it out"
        ) from error
    return device
