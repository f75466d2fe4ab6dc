"""`task: gymnasium`: a policy judged by what it earns, with YAML alone."""

import numpy as np
import pytest
import torch
from torch import nn

from sewa_cli.errors import SewaError, TaskError, UserCodeError
from sewa_cli.task import load_task

gymnasium = pytest.importorskip("gymnasium")

POLICIES = """
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

class Walk(gymnasium.Env):
    '''A point is to stay near 0; an episode ends when it has gone too far.'''

    action_space = spaces.Box(-2, 4, (1, 1), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, far=5.0, actions=None, observations=None):
        self.far = far
        self.action_space = actions or self.action_space
        self.observation_space = observations or self.observation_space
        self.taken = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.taken = self.np_random.normal(size=2), []
        return self.at, {}

    def step(self, action):
        self.taken.append(action)
        assert action.shape == (1, 1) and action.dtype == np.float32
        if abs(action) > 1e6:
            raise OverflowError("too far")
        self.at = self.at + 0.1 * action.item() + 0.3 * self.np_random.normal(size=2)
        return self.at, -abs(self.at[0]), bool(abs(self.at[0]) > self.far), False, {}

def register(name, **options):
    if name not in gymnasium.registry:
        gymnasium.register(name, Walk, **options)

register("Walk-v0", max_episode_steps=30)
register("Endless-v0")
register("Free-v0", max_episode_steps=9, kwargs={"actions": spaces.Box(-np.inf, np.inf, (1, 1))})
register("Many-v0", kwargs={"actions": spaces.MultiDiscrete([2, 3])})
register("Pair-v0", kwargs={"observations": spaces.Dict({"at": Walk.observation_space})})

def linear(inputs=4, outputs=2):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)

class Pair(nn.Linear):
    def forward(self, observations):
        values = super().forward(observations)
        return {"logits": values, "value": values[:, 0], "both": (values, values)}

def pair(inputs=4, outputs=2):
    torch.manual_seed(0)
    return Pair(inputs, outputs)
"""


@pytest.fixture(autouse=True)
def _forget():
    known = set(gymnasium.registry)
    yield
    for name in set(gymnasium.registry) - known:
        del gymnasium.registry[name]


@pytest.fixture
def args(tmp_path):
    (tmp_path / "policies.py").write_text(POLICIES)
    return {"env": "CartPole-v1", "model": f"{tmp_path / 'policies.py'}:linear"}


def walk(args, **more):
    return args | {"env": "Walk-v0", "model_args": {"inputs": 2, "outputs": 1}} | more


def scores(task, parts, model=None):
    return task.scoring.score(model or task.build_model().eval(), parts)


def played(env, seed, act):
    """One episode, by itself."""
    observation, _ = env.reset(seed=seed)
    total, length, over = 0.0, 0, False
    while not over:
        with torch.no_grad():
            action = act(torch.tensor(observation[None], dtype=torch.float32))
        observation, reward, terminated, truncated, _ = env.step(action)
        total, length, over = total + float(reward), length + 1, terminated or truncated
    return {"return": total, "length": length}


def test_a_policy_needs_no_data_and_its_episodes_are_apart(args):
    task = load_task("gymnasium", args | {"seed0": 7})
    assert not task.has_loss
    assert task.scoring.at_once
    parts, heldout = task.scoring.parts.list(), task.scoring.heldout.list()
    assert parts == list(range(7, 507))
    assert len(heldout) == 100
    assert not {*parts} & {*heldout}
    more = load_task("gymnasium", args | {"seed0": 7, "episodes": 1_000_000}).scoring
    assert heldout == more.heldout.list()  # whatever it is chosen by
    assert heldout[0] > more.parts.list()[-1]


def test_discrete_actions_are_the_largest_outputs(args):
    task = load_task("gymnasium", args)
    model = task.build_model()
    seeds = list(range(40))  # more than are played side by side
    env = gymnasium.make("CartPole-v1")
    expected = [played(env, seed, lambda x: int(model(x).argmax())) for seed in seeds]
    assert scores(task, seeds, model) == expected
    assert scores(task, seeds[::-1], model) == expected[::-1]
    assert scores(task, [3], model) == [expected[3]]
    assert len({one["length"] for one in expected}) > 3


def test_sampled_actions_are_drawn_by_the_episodes_own_seed(args):
    task = load_task("gymnasium", args | {"policy": "sample"})
    model = task.build_model()
    first = scores(task, list(range(20)), model)
    assert scores(task, [12, 5], model) == [first[12], first[5]]
    sure = _constant(torch.tensor([0.0, -torch.inf]))  # an action that is ruled out
    always = played(gymnasium.make("CartPole-v1"), 3, lambda _: 0)
    assert scores(task, [3], sure) == [always]
    even = scores(task, list(range(100)), _constant(torch.zeros(2)))
    assert 18 < np.mean([one["length"] for one in even]) < 26  # of a coin: about 22


def _constant(bias):
    model = nn.Linear(4, len(bias))
    nn.init.zeros_(model.weight)
    model.bias = nn.Parameter(bias)
    return model


@pytest.mark.parametrize("stretch", [False, True])
def test_continuous_actions_are_clipped_or_stretched_to_the_bounds(args, stretch):
    task = load_task("gymnasium", walk(args, stretch=stretch))
    model = task.build_model()

    def act(x):
        output = model(x).numpy().reshape(1, 1)
        return np.clip(output * 3 + 1 if stretch else output, -2, 4)

    env = gymnasium.make("Walk-v0")
    for seed, found in enumerate(scores(task, [0, 1, 2], model)):
        assert found == pytest.approx(played(env, seed, act), rel=1e-4)
    limited = load_task("gymnasium", walk(args, max_steps=4, env_args={"far": 100.0}))
    assert [one["length"] for one in scores(limited, [0, 1])] == [4, 4]


@pytest.mark.parametrize("output", ["logits", None, "both", "values", 0])
def test_one_output_of_several_is_named(args, output):
    several = args | {"model": args["model"].replace("linear", "pair")}
    task = load_task("gymnasium", several | ({} if output is None else {"output": output}))
    message = {
        None: r"must give one tensor, found a dict of 'logits', 'value', 'both'; .*args\.output",
        "both": r"must give one tensor, found tuple of 2",
        "values": r"args\.output: the model has no output 'values', found a dict of 'logits'",
        0: r"args\.output: the model has no output 0",
    }
    if output == "logits":
        assert scores(task, [0, 1]) == scores(load_task("gymnasium", args), [0, 1])
        return
    with pytest.raises(TaskError, match=message[output]):
        scores(task, [0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"env": "CartPool-v1"},
            "args.env: CartPool-v1: Environment `CartPool` doesn't exist. Did ",
        ),
        ({"env": "nowhere:Env-v0"}, "No module named 'nowhere'"),
        ({"env": "Many-v0"}, "actions of MultiDiscrete([2 3]) have no ready-made policy; write a"),
        ({"env": "Pair-v0"}, "args.flatten: Pair-v0 has observations of Dict('at'"),
        ({"policy": "continuous"}, "args.policy: CartPole-v1 has actions of Discrete(2), so it "),
        ({"env": "Free-v0", "stretch": True}, "args.stretch: Free-v0 has actions without bounds"),
        ({"episodes": 0}, "args.episodes: "),
        ({"model": "policies"}, "args.model: must look like"),
    ],
)
def test_wrong_args_are_reported_in_one_line(args, change, message):
    with pytest.raises(SewaError) as caught:
        load_task("gymnasium", args | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_the_environment_is_reported(args):
    task = load_task("gymnasium", args)
    with pytest.raises(TaskError) as caught:
        scores(task, [0], nn.Linear(3, 2))
    start = "CartPole-v1: the model does not take its observations, float32 [8, 4]: mat1"
    assert str(caught.value).startswith(start)
    with pytest.raises(TaskError, match=r"must give \[8, 2\], a number for each .*found \[8, 3\]"):
        scores(task, [0], nn.Linear(4, 3))
    broken = nn.Linear(4, 2)
    nn.init.constant_(broken.bias, torch.nan)
    # not the task's fault: an average that has exploded fails, and others go on
    with pytest.raises(UserCodeError, match="seed 5, step 1: the model's output is NaN or infin"):
        scores(task, [5], broken)
