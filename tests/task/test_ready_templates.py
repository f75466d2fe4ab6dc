"""`sewa init --task …` and docs/reference/tasks.md say what the ready-made tasks take."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from sewa_cli.config import READY_MADE, Config, load_config
from sewa_cli.task.ready.classification import ClassificationArgs
from sewa_cli.task.ready.gymnasium import GymnasiumArgs
from sewa_cli.task.ready.huggingface import COLUMNS, USUAL_LENGTH, HuggingFaceArgs
from sewa_cli.task.ready.lm_eval import LmEvalArgs
from sewa_cli.task.ready.stable_baselines3 import StableBaselines3Args

ARGS = {
    "huggingface": HuggingFaceArgs,
    "classification": ClassificationArgs,
    "gymnasium": GymnasiumArgs,
    "stable-baselines3": StableBaselines3Args,
    "lm-eval": LmEvalArgs,
}
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text()


def shown_in_template(name):
    """Return the live keys of `args`, and the commented ones."""
    template = files("sewa_cli") / "templates" / name / "sewa.yaml"
    text = template.read_text(encoding="utf-8")
    lines = [found[1] for line in text.splitlines() if (found := re.match(r"  # (\w+: .*)$", line))]
    return yaml.safe_load(text)["args"], yaml.safe_load("\n".join(lines))


@pytest.mark.parametrize("name", ARGS)
def test_the_template_shows_every_arg_and_its_real_default(name):
    live, commented = shown_in_template(name)
    fields = ARGS[name].model_fields
    assert not live.keys() & commented.keys()
    assert live.keys() | commented.keys() == fields.keys()
    # None in the model: they depend on the kind or on the config
    usual = {**COLUMNS["sequence-classification"], **COLUMNS["image-classification"]}
    usual |= {**COLUMNS["causal-lm"], **COLUMNS["speech-seq2seq"]}
    usual |= {"max_length": USUAL_LENGTH}
    for key, value in commented.items():
        real = fields[key].get_default(call_default_factory=True)
        assert value == (usual.get(key) if name == "huggingface" and real is None else real), key


@pytest.mark.parametrize("name", ARGS)
def test_the_page_has_a_row_for_every_arg_and_no_other(name):
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert ARGS[name].model_fields.keys() <= rows
    assert rows == {key for model in ARGS.values() for key in model.model_fields}


def test_every_yaml_of_the_page_is_a_config_of_known_args():
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    kinds = set()
    for text in examples:
        config = Config.model_validate(yaml.safe_load(text))
        assert config.args.keys() <= ARGS[config.task].model_fields.keys()
        kinds.add(config.args.get("kind", config.task))
    assert kinds <= {*COLUMNS, *READY_MADE}
    assert kinds >= {"causal-lm", "classification", "gymnasium"}


@pytest.mark.parametrize("name", READY_MADE)
def test_init_writes_a_ready_made_config(name, sewa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = sewa("init", "--task", name)
    assert (ended.code, ended.out) == (0, "sewa.yaml\n")
    # all faults at once, each with its place: what is not there yet
    ended = sewa("validate")
    if name == "gymnasium":
        assert ended.code == 4
        assert "net.py: no such" in ended.error
        return
    if name == "stable-baselines3":  # which may not be installed
        assert (ended.code, ended.error[:4]) in ((4, "task"), (3, "logs"))
        return
    if name == "lm-eval":
        assert ended.code == 2
        assert "args.include_path: tasks: no such" in ended.error
        return
    assert ended.code == 2
    for key in ("selection", "heldout"):
        assert f"args.{key}: " in ended.err
    assert "no such file or folder" in ended.err


def test_paths_are_relative_to_the_yaml_and_in_flags_to_the_working_directory(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "sewa.yaml").write_text(
        "args: {model: net.py:make, selection: a.npz, heldout: ../b.npz, x: a.npz}\n"
    )
    flags = {"task": "classification"}
    assert load_config(folder / "sewa.yaml", flags, ["args.training=c.npz"]).args == {
        "model": f"{folder}/net.py:make",
        "selection": f"{folder}/a.npz",
        "heldout": f"{folder}/../b.npz",
        "x": "a.npz",
        "training": "c.npz",
    }
    (folder / "sewa.yaml").write_text("task: classification\nargs: {model: a.b:make}\n")
    assert load_config(folder / "sewa.yaml").args == {"model": "a.b:make"}
