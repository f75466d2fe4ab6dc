"""Gymnasium's Hopper without what a study does not look at: the same episodes in 0.6 of the time.

A step of Hopper-v5 spends as long on its `info`, on checks and on looking twice whether the hopper
has fallen as on physics. `lean` replaces its `step` in this process; the numbers are the same to
the bit, which it makes sure of first.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

FASTEST = 10.0  # what an observation tells of a velocity, at most
STEPS = 300  # that are compared


def lean() -> None:
    """Change every Hopper of this process."""
    theirs = HopperEnv.step
    if theirs is _step:
        return
    before = _played()
    HopperEnv.step = _step
    mujoco.set_mjcb_time(None)  # it times each stage of each step: a tenth of all
    if _played() != before:
        HopperEnv.step = theirs
        raise SystemExit("Hopper-v5 of this gymnasium is another; benchmarks/quality/hopper.py")


def _step(self: Any, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    data, began = self.data, self.data.qpos[0]
    data.ctrl[:] = action
    mujoco.mj_step(self.model, data, nstep=self.frame_skip)
    state = np.concatenate((data.qpos, data.qvel))
    x, z, angle, *rest = state.tolist()
    forward = self._forward_reward_weight * ((x - began) / self.dt)
    low, high = self._healthy_state_range
    healthy = (
        self._healthy_z_range[0] < z < self._healthy_z_range[1]
        and self._healthy_angle_range[0] < angle < self._healthy_angle_range[1]
        and all(low < one < high for one in (angle, *rest))
    )
    cost = self._ctrl_cost_weight * np.add.reduce(action * action)
    reward = forward + healthy * self._healthy_reward - cost
    if max(rest) > FASTEST or min(rest) < -FASTEST:
        velocities = state[self.model.nq :]
        np.clip(velocities, -FASTEST, FASTEST, out=velocities)
    return state[1:], reward, not healthy and self._terminate_when_unhealthy, False, {}


def _played() -> list[Any]:
    """Return where some hundred random steps lead."""
    env, random = gymnasium.make("Hopper-v5", disable_env_checker=True), np.random.default_rng(0)
    found: list[Any] = [env.reset(seed=0)[0].tolist()]
    for n in range(STEPS):
        action = random.uniform(-1, 1, 3).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        found.append((observation.tolist(), float(reward), bool(terminated), truncated))
        if terminated:
            found.append(env.reset(seed=n)[0].tolist())
    env.close()
    return found
