"""Reception: the user's functions, imported, checked, guarded; and batches of every kind."""

from __future__ import annotations

import json
import sys
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sewa_cli.errors import ConfigError, TaskError, UserCodeError
from sewa_cli.objective.tree import rows, to_device
from sewa_cli.task import default_predict, load_task, make_task

CPU, META = torch.device("cpu"), torch.device("meta")


def task_of(functions=None, **args):
    usual = {
        "build_model": lambda: nn.Linear(3, 2),
        "selection_data": lambda: [1, 2],
        "loss": lambda outputs, _batch: outputs.mean(),
    }
    return make_task({**usual, **(functions or {})}, source="somewhere/task.py", args=args)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Encoder(nn.Module):
    """Takes keywords and answers with an object, as the Hugging Face models do."""

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return Output(logits=input_ids * mask, hidden=torch.zeros(()))


X, Y = torch.arange(6.0).reshape(2, 3), torch.tensor([0, 1])


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], (X,), X], ids=["tuple", "list", "one", "bare"])
def test_default_predict_gives_the_model_the_inputs_of_a_batch(batch):
    model = nn.Linear(3, 2)
    assert torch.equal(default_predict(model, batch), model(X))


def test_default_predict_gives_a_dict_as_keywords_and_takes_the_logits():
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    outputs = default_predict(Encoder(), {"input_ids": X, "attention_mask": mask})
    assert torch.equal(outputs, X * mask)


def test_a_generator_function_can_be_iterated_over_again():
    def selection_data():
        yield from (1, 2, 3)

    data = task_of({"selection_data": selection_data}).selection_data
    assert list(data) == [1, 2, 3]
    assert list(data) == [1, 2, 3]
    both = zip(data, data, strict=True)  # two at once do not eat each other's batches
    assert list(both) == [(1, 1), (2, 2), (3, 3)]


def test_a_loader_is_made_once_and_iterated_over_often():
    made = []

    def selection_data():
        made.append(DataLoader(range(4), batch_size=2))
        return made[-1]

    data = task_of({"selection_data": selection_data}).selection_data
    first = [batch.tolist() for batch in data]
    assert [batch.tolist() for batch in data] == first == [[0, 1], [2, 3]]
    assert len(made) == 1


def test_every_arg_that_no_function_takes_is_reported():
    with pytest.raises(ConfigError) as caught:
        task_of({"build_model": lambda width: nn.Linear(3, width)}, width=2, depht=1, see=0)
    assert caught.value.faults == (
        "args.depht: no function in task.py takes it",
        "args.see: no function in task.py takes it",
    )


def test_args_reach_the_task_from_yaml_and_set(run_dir, sewa):
    with (run_dir / "task.py").open("a") as file:
        file.write("def selection_data(rows, where): print(where); return data(1, rows)\n")
    with (run_dir / "sewa.yaml").open("a") as file:
        file.write("args: {rows: 40, where: ./data}\n")
    ended = sewa("select", "--json", "--set", "args.rows=50")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["selection_rows"] == 50
    assert "data" in ended.err.splitlines()  # sewa.yaml is here, and so is ./data


def test_all_missing_functions_are_reported_together():
    with pytest.raises(TaskError) as caught:
        make_task({"loss": 3}, source="x/task.py", args={})
    message = str(caught.value).splitlines()
    assert len(message) == 3
    assert message[0].startswith("task.py lacks build_model(**args): ")
    assert message[1].startswith("task.py lacks selection_data(**args): ")
    assert message[2] == "task.py: loss must be a function"


SMALL = """
from torch import nn
{extra}
def build_model(): return nn.Linear(WIDTH, 2)
def selection_data(): return []
def loss(outputs, batch): return outputs.mean()
"""


def test_a_task_file_can_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_task.py").write_text("WIDTH = 5\n")
    path = tmp_path / "my-task.py"
    path.write_text(SMALL.format(extra="from neighbour_of_task import WIDTH"))
    task = load_task(str(path), {})
    model = task.build_model()
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert task.source == str(path)


def test_an_importable_module_is_a_task(tmp_path, monkeypatch):
    package = tmp_path / "package_with_task"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "task.py").write_text(SMALL.format(extra="from .size import WIDTH"))
    (package / "size.py").write_text("WIDTH = 6\n")
    monkeypatch.chdir(tmp_path)
    task = load_task("package_with_task.task", {})
    model = task.build_model()
    assert isinstance(model, nn.Linear)
    assert model.in_features == 6
    assert task.source == str(package / "task.py")


def test_a_module_that_imports_a_missing_one_is_the_users_error_with_its_frame(
    tmp_path, monkeypatch
):
    (tmp_path / "task_with_lost_import.py").write_text("import nonesuch_package\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserCodeError, match="No module named 'nonesuch_package'") as caught:
        load_task("task_with_lost_import", {})
    assert "task_with_lost_import.py" in caught.value.frames


def test_functions_of_a_task_file_can_be_pickled_for_worker_processes(tmp_path):
    import pickle

    path = tmp_path / "pickled_task.py"
    path.write_text(SMALL.format(extra="WIDTH = 4"))
    load_task(str(path), {})
    function = sys.modules["pickled_task"].build_model
    assert pickle.loads(pickle.dumps(function)) is function


LOUD = """
import os, sys
def shout(where):
    print(f"print in {where}")
    os.write(1, f"write in {where}\\n".encode())
    sys.stdout.write(f"stdout in {where}\\n")

shout("import")
quiet_model, quiet_data, quiet_loss = build_model, data, loss
def build_model():
    shout("build_model")
    return quiet_model()
def selection_data():
    shout("selection_data")
    return quiet_data(1)
def loss(outputs, batch):
    shout("loss")
    return quiet_loss(outputs, batch)
def predict(model, batch):
    shout("predict")
    return model(batch[0])
def metrics(model):
    shout("metrics")
    return {}
"""


@pytest.mark.parametrize("command", ["select", "validate"])
def test_what_the_users_code_prints_goes_to_stderr_and_never_to_stdout(run_dir, sewa, command):
    with (run_dir / "task.py").open("a") as file:
        file.write(LOUD)
    ended = sewa(command, "--json")
    assert ended.code == 0, ended.err
    json.loads(ended.out)  # nothing but the report
    places = ["import", "build_model", "selection_data", "loss", "predict"]
    for place in [*places, "metrics"] if command == "select" else places:
        for way in ("print", "write", "stdout"):
            assert f"{way} in {place}\n" in ended.err


class Encoding(UserDict[str, Tensor]):
    """A tokenizer's output: a mapping whose keys are attributes, and which moves itself."""

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device, **_options):
        return Encoding({key: value.to(device) for key, value in self.items()})


def test_a_mapping_that_can_move_itself_keeps_its_kind():
    moved = to_device((Encoding({"input_ids": torch.zeros(4, 3)}), torch.zeros(4)), META)
    assert moved[0]["input_ids"].device == META
    assert moved[0].input_ids.device == META  # as the user's predict would write it


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(4, 3), 4),
        ((torch.zeros(5, 3), torch.zeros(5)), 5),
        ([torch.tensor(1.0), torch.zeros(6)], 6),
        ({"temperature": 0.1, "scale": torch.tensor(2.0), "x": torch.zeros(7, 2)}, 7),
        ({"inputs": {"deep": [torch.zeros(8)]}, "labels": None}, 8),
        (torch.zeros(3).numpy(), 3),
        (["one", "two", "three"], 3),
        (object(), 1),
        (torch.zeros(0, 3), 0),
    ],
)
def test_a_batch_counts_by_its_rows(batch, count):
    assert rows(batch) == count
