from openenv.core import GenericEnvClient

from roll_opd.extras.games import Environment


class Game(Environment):
    """A session of an OpenEnv server; `action` and `observation` are the fields that the texts are in."""

    def __init__(self, url: str, action: str = "text", observation: str = "text") -> None:
        self.client = GenericEnvClient(base_url=url).sync()  # connects when it is first used
        self.action, self.observation = action, observation

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        return self.client.reset(seed=seed).observation[self.observation], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        found = self.client.step({self.action: action})
        return found.observation[self.observation], float(found.reward or 0), found.done, False, {}

    def close(self) -> None:
        self.client.close()
