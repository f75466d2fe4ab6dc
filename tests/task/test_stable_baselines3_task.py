"""`task: stable-baselines3`: a run's policies, chosen by their return, without any code."""

import base64
import json
import os
import pickle
from zipfile import ZipFile

import pytest
from torch import nn

pytest.importorskip("stable_baselines3")
pytestmark = pytest.mark.breadth


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Five saves of PPO, whose Monitor has noted the environment."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.monitor import Monitor

    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    with Monitor(gymnasium.make("CartPole-v1"), "logs/monitor.csv") as env:
        options = {"net_arch": [16], "activation_fn": nn.ReLU}
        model = PPO(
            "MlpPolicy", env, n_steps=64, seed=0, policy_kwargs=options, device="cpu", verbose=0
        )
        model.learn(640, callback=CheckpointCallback(128, "logs"))
    model.save("logs/final.zip")
    return tmp_path / "logs"


@pytest.mark.usefixtures("run")
def test_the_zip_loaded_by_PPO_plays_the_reported_return(sewa):
    import gymnasium
    from stable_baselines3 import PPO

    task = ["--task", "stable-baselines3", "--set", "args.heldout=5", "--metric", "return"]
    ended = sewa("select", "logs", *task, "--budget", 40, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["output"] == "averaged.zip"
    model, env, returns = PPO.load("averaged.zip", device="cpu"), gymnasium.make("CartPole-v1"), []
    for seed in range(1_000_000, 1_000_005):
        (seen, _), earned, is_over = env.reset(seed=seed), 0.0, False
        while not is_over:
            action, _ = model.predict(seen, deterministic=True)
            seen, reward, terminated, truncated, _ = env.step(action)
            earned, is_over = earned + reward, terminated or truncated
        returns.append(earned)
    [scores] = [found["scores"] for found in report["findings"] if found["kind"] == "contest"]
    assert scores[report["written"]]["heldout"] == pytest.approx(sum(returns) / 5)


def test_an_environment_that_nobody_named_is_asked_for(run, sewa):
    (run / "monitor.csv").unlink()
    ended = sewa("select", "logs", "--task", "stable-baselines3", "--metric", "return")
    assert ended.code == 2
    assert "args.env: logs has no monitor.csv that names the environment; name it" in ended.error


class Evil:
    def __reduce__(self):
        return os.system, ("touch it-ran",)


@pytest.mark.parametrize("key", ["policy_class", "policy_kwargs"])
def test_the_pickles_in_a_zip_are_not_run(run, sewa, key):
    path = run / "rl_model_640_steps.zip"
    with ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    data = json.loads(members["data"])
    data[key] = {":serialized:": base64.b64encode(pickle.dumps(Evil())).decode()}
    with ZipFile(path, "w") as new:
        for name, content in (members | {"data": json.dumps(data)}).items():
            new.writestr(name, content)
    ended = sewa("select", "logs", "--task", "stable-baselines3", "--metric", "return")
    assert ended.code == 4, ended.err
    assert "its policy needs posix.system, which could run code; write a task.py" in ended.error
    assert not (run.parent / "it-ran").exists()
