"""The library: found, ordered, narrowed and compared by headers; names fitted onto the model."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import PREFIXES, Checkpoint, Reads, TensorInfo
from sewa_cli.checkpoints.checkpoint import Reader
from sewa_cli.errors import CheckpointError
from sewa_cli.objective.model import FlatModel

CPU = torch.device("cpu")


def save(path, tensors=None, metadata=None):
    save_file(tensors or {"w": torch.zeros(2, 3)}, path, metadata)
    return path


def opened(paths):
    reads = Reads()
    return [library.open_checkpoint(path, reads) for path in paths]


def steps(checkpoints):
    return [checkpoint.step for checkpoint in checkpoints]


def in_memory(step, tensors=None):
    """Only a header: enough for all that does not read."""
    path = Path(f"step-{step}.safetensors")
    return Checkpoint(
        path=path,
        step=step,
        size=0,
        tensors=tensors or {},
        files=(path,),
        open=Reader,
        reads=Reads(),
    )


def of_model(model, prefix="", leave_out=()):
    """The header of a checkpoint of `model`, every name behind `prefix`."""
    words = {torch.float32: "F32", torch.int64: "I64"}
    return in_memory(
        7,
        {
            prefix + name: TensorInfo(words[tensor.dtype], tuple(tensor.shape))
            for name, tensor in model.state_dict().items()
            if name not in leave_out
        },
    )


def match(checkpoint, model):
    flat = FlatModel(model, CPU)
    return library.match_names(checkpoint, flat.aliases, flat.shapes, flat.layout.slices)


def named(parameters):
    """A model with just these dotted names, each of a shape of its own."""
    root = nn.Module()
    for size, name in enumerate(parameters, 1):
        *parents, leaf = name.split(".")
        here = root
        for parent in parents:
            if parent not in dict(here.named_children()):
                here.add_module(parent, nn.Module())
            here = here.get_submodule(parent)
        here.register_parameter(leaf, nn.Parameter(torch.zeros(size)))
    return root


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-900", 900),
        ("step_0000900", 900),
        ("epoch=3-step=900", 900),
        ("v2-900", 900),
        ("900.ema", 900),
        ("8epoch", 8),
        ("epoch=3-step=900-v1", 900),
        ("epoch=3-val_loss=0.25", 3),
        ("epoch=3-val_f1=0.80", 3),
        ("val_wer=12-epoch=7", 7),
        ("epoch_3_acc_95", 3),
        ("step5-of-llama-7b", 5),
        ("epoch=10-loss=1.3e-05", 10),
        ("ckpt-1e5", 100_000),
        ("step1.5k", 1500),
        ("ckpt-2M", 2_000_000),
        ("epoch3_gen20", 3),
        ("loss_4.12", None),
        ("final", None),
    ],
)
def test_the_last_number_in_the_name_is_the_step(tmp_path, name, step):
    [checkpoint] = opened([save(tmp_path / f"{name}.safetensors")])
    assert checkpoint.step == step


def test_a_step_in_the_metadata_beats_the_name(tmp_path):
    files = [
        save(tmp_path / "step-1.safetensors", metadata={"step": "300"}),
        save(tmp_path / "step-2.safetensors", metadata={"step": "100"}),
        save(tmp_path / "step-200.safetensors", metadata={"format": "pt"}),
    ]
    ordered = library.in_order(opened(files))
    assert steps(ordered) == [100, 200, 300]
    assert ordered[0].path.name == "step-2.safetensors"


def test_a_file_without_a_step_among_others_is_told(tmp_path):
    files = [save(tmp_path / f"{name}.safetensors") for name in ("step-1", "final", "step-2")]
    with pytest.raises(CheckpointError, match=r"final.safetensors: no step.*rename it or leave"):
        library.in_order(opened(files))


def test_a_folder_of_nothing_but_our_own_outputs_holds_no_checkpoints(run_dir, sewa):
    (run_dir / "results").mkdir()
    assert sewa("select", "-o", "results/averaged.safetensors").code == 0
    ended = sewa("select", "results/")
    assert ended.code == 3
    assert ended.error.startswith("results: holds no *.safetensors files")


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({}, [*range(10, 121, 10)]),
        ({"last": 3}, [100, 110, 120]),
        ({"every": 5}, [20, 70, 120]),
        ({"from_step": 101}, [110, 120]),
        ({"from_step": 40, "to_step": 60}, [40, 50, 60]),
        ({"to_step": 90, "every": 3, "last": 2}, [60, 90]),
    ],
)
def test_narrow_takes_the_range_then_every_nth_from_the_newest_then_the_last(flags, kept):
    run = [in_memory(step) for step in range(10, 121, 10)]
    assert steps(library.narrow(run, **flags)) == kept


def test_a_file_that_vanished_since_it_was_opened_is_named(tmp_path):
    [checkpoint] = opened([save(tmp_path / "step-1.safetensors")])
    checkpoint.path.unlink()
    with pytest.raises(CheckpointError, match=r"step-1.safetensors: w: cannot be read"):
        checkpoint.read("w")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_one_out_is_named_wherever_it_stands(odd):
    usual, other = {"w": TensorInfo("F32", (2,))}, {"w": TensorInfo("F32", (3,))}
    run = [in_memory(step, other if step == odd else usual) for step in range(3)]
    with pytest.raises(CheckpointError) as caught:
        library.check_agreement(run)
    assert str(caught.value) == (
        f"step-{odd}.safetensors: w: expected F32 [2] as in the other checkpoints, found F32 [3]"
    )


NAMES = ("model.embed.weight", "layers.0.weight", "layers.0.bias", "lm_head.weight")
wrappers = st.lists(st.sampled_from(PREFIXES), max_size=3).map("".join)


@given(on_file=wrappers, on_model=wrappers)
def test_wrapper_prefixes_are_stripped_on_either_side(on_file, on_model):
    checkpoint = of_model(named(NAMES), on_file)
    matched = match(checkpoint, named([on_model + name for name in NAMES]))
    assert matched == {on_model + name: on_file + name for name in NAMES}


def test_a_compiled_part_of_a_model_fits_the_plain_one_and_back():
    compiled = ["_orig_mod.layers.0.weight", "layers.0._orig_mod.bias", "head._orig_mod.weight"]
    plain = ["layers.0.weight", "layers.0.bias", "head.weight"]
    assert match(of_model(named(compiled)), named(plain)) == dict(zip(plain, compiled, strict=True))
    assert match(of_model(named(plain)), named(compiled)) == dict(zip(compiled, plain, strict=True))


def test_names_that_differ_by_a_prefix_only_are_kept_apart():
    """head0.weight and model.head0.weight, wrapped or not: the least stripped name fits first."""
    pairs = [[f"head{i}.weight", f"model.head{i}.weight"] for i in range(10)]
    names = [name for pair in pairs for name in pair]
    wrapped = ["module." + name for name in names]
    assert match(of_model(named(names)), named(names)) == {name: name for name in names}
    assert match(of_model(named(wrapped)), named(names)) == dict(zip(names, wrapped, strict=True))
    assert match(of_model(named(names)), named(wrapped)) == dict(zip(wrapped, names, strict=True))


class Tied(nn.Module):
    """Embedding and output share one tensor, as in most language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("left_out", "kept"),
    [(["head.weight"], "embed.weight"), (["embed.weight"], "head.weight"), ([], "embed.weight")],
)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_tied_weights_fit_under_either_name_or_both_and_stand_once(left_out, kept, prefix):
    checkpoint = of_model(Tied(), prefix, leave_out=left_out)
    assert match(checkpoint, Tied()) == {kept: prefix + kept}
