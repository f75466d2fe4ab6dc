"""`sewa average` of a Hugging Face run is mergekit's linear merge, tensor by tensor.

mergekit wants an environment of its own: SEWA_MERGEKIT_PYTHON names its Python; else it is looked
for in this one, else the tests are skipped.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers.frozen import FROZEN, third_party
from safetensors.torch import load_file

PYTHON = os.environ.get("SEWA_MERGEKIT_PYTHON") or (
    sys.executable if find_spec("mergekit") is not None else None
)
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="no mergekit; SEWA_MERGEKIT_PYTHON can name one"),
    pytest.mark.breadth,
]
MERGE = """
import json, sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for models, out_dtype, output in json.loads(sys.argv[1]):
    config = MergeConfiguration.model_validate({
        "merge_method": "linear", "dtype": "float32", "out_dtype": out_dtype,
        "models": [{"model": model, "parameters": {"weight": weight}} for model, weight in models],
    })
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(config, output, options)
"""
STEPS = [8, 10, 12, 14, 16]
# products with these weights are exact in float32, so that both must give the same bits
WEIGHTS = {"equal": [1.0] * 5, "halves": [0.5, 0.25, 0.125, 0.0625, 0.0625]}
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """The same run in both dtypes, and mergekit's merges of it."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("mergekit")
    jobs = []
    with third_party():
        for dtype in DTYPES:
            paths = [folder / dtype / f"checkpoint-{step}" for step in STEPS]
            for path in paths:
                source = FROZEN / "transformers" / "run" / path.name
                model = LlamaForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
                model.save_pretrained(path)
            for name, weights in WEIGHTS.items():
                models = list(zip(map(str, paths), weights, strict=True))
                jobs.append([models, dtype, str(folder / f"{dtype}-{name}")])
    command = [str(PYTHON), "-c", MERGE, json.dumps(jobs)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_average_equals_mergekits_linear_merge(merged, tmp_path, sewa, dtype, name):
    """Tied embeddings; of bfloat16 checkpoints the sums are float32 in both."""
    shares = ",".join(map(str, WEIGHTS[name]))
    weights = ["--weights", shares] if name == "halves" else []
    ended = sewa("average", merged / dtype, *weights, "-o", tmp_path / "ours")
    assert ended.code == 0, ended.err
    ours = load_all(tmp_path / "ours")
    theirs = load_all(merged / f"{dtype}-{name}")
    assert "lm_head.weight" not in ours  # tied, and so saved once
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for tensor_name, tensor in ours.items():
        other = theirs[tensor_name]
        assert tensor.dtype == other.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, other), tensor_name


def load_all(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
