"""`sewa average` of a Hugging Face run is mergekit's linear merge, tensor by tensor.

mergekit wants an environment of its own: SEWA_MERGEKIT_PYTHON names its Python; else it is looked
for in this one, else the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import Sewa
from safetensors.torch import load_file
from trainers import LANGUAGE, third_party, train_with_transformers, write_task

PYTHON = os.environ.get("SEWA_MERGEKIT_PYTHON") or (
    sys.executable if find_spec("mergekit") is not None else None
)
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="no mergekit; SEWA_MERGEKIT_PYTHON can name one"),
    pytest.mark.slow,
]
MERGE = """
import json, sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
models, out_dtype, output = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
config = MergeConfiguration.model_validate({
    "merge_method": "linear", "dtype": "float32", "out_dtype": out_dtype,
    "models": [{"model": model, "parameters": {"weight": weight}} for model, weight in models],
})
run_merge(config, output, MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.25, 0.125, 0.0625, 0.0625]])
def test_average_equals_mergekits_linear_merge(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sewa: Sewa,
    dtype: str,
    weights: list[float] | None,
) -> None:
    """Tied embeddings; of bfloat16 checkpoints the sums are float32 in both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = write_task(tmp_path, LANGUAGE)
    from transformers import LlamaForCausalLM

    with third_party():
        train_with_transformers(task.build_model(), task.examples(), tmp_path / "run")
        for path in sorted(Path("run").glob("checkpoint-*")):
            model = LlamaForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
            model.save_pretrained(path)
    steps = [8, 10, 12, 14, 16]
    share = weights or [0.2] * 5
    models = [(str(Path(f"run/checkpoint-{s}").resolve()), w) for s, w in zip(steps, share)]  # noqa: B905
    command = [str(PYTHON), "-c", MERGE, json.dumps(models), dtype, "merged"]
    subprocess.run(command, check=True, capture_output=True)
    if weights is None:
        ended = sewa("average", "run", "--last", 5, "-o", "ours")
    else:
        named = [f"run/checkpoint-{step}" for step in steps]
        ended = sewa("average", *named, "--weights", ",".join(map(str, weights)), "-o", "ours")
    assert ended.code == 0, ended.err
    ours, theirs = load_file("ours/model.safetensors"), load_all(Path("merged"))
    assert "lm_head.weight" not in ours  # tied, and so saved once
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == getattr(torch, dtype)
        # the last bit of a float32 sum may go the other way, and a bfloat16 with it
        torch.testing.assert_close(
            tensor, theirs[name], rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-7
        )
        assert float((tensor != theirs[name]).float().mean()) < (0.01 if dtype != "float32" else 1)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
