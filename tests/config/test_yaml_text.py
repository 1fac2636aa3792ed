"""The YAML text of a plan: OmegaConf reads the values that were written."""

import random
from typing import Any

import yaml
from omegaconf import OmegaConf

from roll_opd.config.yaml_files import OmegaConfLoader, yaml_text

PIECES = ("a", "1", "e", ".", "-", "${", "}", "\\", "$", "{", ":", " ", "'", '"', "#", "\n", "_", "0x", "yes", "é", "~")


def made(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.5:
        values = [made(rng, depth - 1) for _ in range(rng.randint(0, 4))]
        return values if rng.random() < 0.5 else {f"key_{number}": value for number, value in enumerate(values)}
    texts = ("".join(rng.choices(PIECES, k=rng.randint(0, 5))) for _ in range(6))
    return rng.choice([None, True, 3, -1.5, 1e-7, 2.0**70, *texts])


def test_omegaconf_reads_the_values_that_were_written() -> None:
    rng = random.Random(0)
    for _ in range(300):
        values = {"values": made(rng, 3)}
        read = yaml.load(yaml_text(values), Loader=OmegaConfLoader)
        assert OmegaConf.to_container(OmegaConf.create(read), resolve=True) == values


def test_a_value_that_two_keys_share_is_written_twice() -> None:
    shared = {"a": [1]}
    assert yaml_text({"one": shared, "other": shared}).count("a:") == 2
