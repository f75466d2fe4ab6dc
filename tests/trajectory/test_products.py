"""Products by tiles: what the naive product gives, whatever the threads and the files."""

import hypothesis.strategies as st
import pytest
import torch
from helpers.problems import dense
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from sewa_cli.config import load_config
from sewa_cli.errors import CheckpointError
from sewa_cli.events import Events
from sewa_cli.opening import open_session
from sewa_cli.placing import CheckpointRows
from sewa_cli.task import make_task
from sewa_cli.trajectory import products
from sewa_cli.trajectory.tiers import Dense, Streamed

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_tiles(monkeypatch):
    """A few columns each, so that a small W has many."""
    monkeypatch.setattr(products, "COLUMNS", 8)
    monkeypatch.setattr(products, "FEWEST_COLUMNS", 3)
    monkeypatch.setattr(products, "WORTHWHILE", 1)
    monkeypatch.setattr(products, "ALONE", 1)


def naive(W, a, G):
    return a.double() @ W.double(), G.double() @ W[:, : G.shape[1]].double().T


def test_tiles_of_every_shape_give_the_naive_product():
    @settings(max_examples=30)
    @given(st.integers(1, 120), st.integers(1, 60), st.integers(1, 5), st.integers(0, 10**6))
    def check(k, P, M, seed):
        torch.manual_seed(seed)
        W, a = torch.randn(k, P), torch.randn(M, k)
        G = torch.randn(M, int(torch.randint(1, P + 1, ())))
        held = dense(W)
        mixed, pulled = naive(W, a, G)
        torch.testing.assert_close(held.mix(a).double(), mixed, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(held.pull_back(G).double(), pulled, rtol=1e-4, atol=1e-4)

    check()


class Net(torch.nn.Module):
    """Tensors of many sizes, one of them tied, one empty, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 9)
        self.second = torch.nn.Linear(9, 7, bias=False)
        self.tied = self.first
        self.none = torch.nn.Parameter(torch.empty(0, 3))
        self.norm = torch.nn.BatchNorm1d(7)


def rows_of(folder):
    x = torch.zeros(2, 7)
    functions = {
        "build_model": Net,
        "selection_data": lambda: [(x, x)],
        "loss": lambda outputs, batch: ((outputs - batch[1]) ** 2).mean(),
    }
    task = make_task(functions, source="here", args={})
    config = load_config(None, {"checkpoints": (folder,), "device": "cpu", "K": 2})
    return CheckpointRows(open_session(config, task, Events()))


def save(state, folder, step, form):
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    if form == "file":
        state = {name: tensor.clone() for name, tensor in state.items()}
        save_file(state, folder / f"step-{step}.safetensors")
    elif form == "pt":
        torch.save(state, folder / f"step-{step}.pt")
    elif form == "legacy":
        torch.save(state, folder / f"step-{step}.pt", _use_new_zipfile_serialization=False)
    elif form == "strided":
        state["first.weight"] = state["first.weight"].T.contiguous().T
        torch.save(state, folder / f"step-{step}.pt")
    else:
        from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

        save_distributed(state, checkpoint_id=folder / f"step-{step}", no_dist=True)


@pytest.mark.filterwarnings("ignore")  # of torch.distributed's
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("file", torch.float32),
        ("file", torch.bfloat16),
        ("pt", torch.float16),
        ("legacy", torch.float32),
        ("strided", torch.float64),
        ("dcp", torch.bfloat16),
    ],
)
def test_a_stream_of_files_gives_the_products_that_W_in_memory_gives(tmp_path, form, dtype):
    torch.manual_seed(0)
    for step in range(20):
        model = Net()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape))
        state = {
            n: t.to(dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()
        }
        save(state, tmp_path, step, form)
    rows = rows_of(tmp_path)
    held = Dense.read(rows)
    stream = Streamed.read(rows, 1)
    # legacy files cannot be mapped; a strided tensor is no flat view
    assert stream.has_tiles == (form in ("file", "pt", "dcp"))
    a, G = torch.rand(2, 20), torch.randn(2, held.layout.parameters)
    torch.testing.assert_close(stream.mix(a), held.mix(a), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stream.pull_back(G), held.pull_back(G), rtol=1e-5, atol=1e-5)


def test_a_mapped_file_that_changes_between_two_products_is_told(tmp_path):
    for step in range(3):
        save(Net().state_dict(), tmp_path, step, "file")
    rows = rows_of(tmp_path)
    stream = Streamed.read(rows, 1)
    stream.mix(torch.rand(1, 3))
    save(Net().state_dict(), tmp_path, 1, "file")
    with pytest.raises(CheckpointError, match=r"step-1\.safetensors: changed while it was being"):
        stream.mix(torch.rand(1, 3))


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ([], "files"),
        (["--K", "3", "--solver", "gumbel"], "memory"),
        (["--K", "3", "--solver", "linear"], "bf16"),
        pytest.param(["--K", "3", "--solver", "gumbel"], "files", marks=pytest.mark.breadth),
        pytest.param(["--K", "3", "--solver", "linear"], "memory", marks=pytest.mark.breadth),
    ],
)
def test_a_command_writes_the_same_bytes_with_one_two_and_four_threads(sewa, flags, tier):
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        output = f"{threads}.safetensors"
        ended = sewa("select", *flags, "--set", f"tier={tier}", "-o", output)
        assert ended.code == 0, ended.err
        weights = load_file(output)
        found.append(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
    assert found[1] == found[0]
    assert found[2] == found[0]
