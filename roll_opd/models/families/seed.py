"""Seed-OSS: biases of queries, keys and values."""

from roll_opd.models.families.family import Config, Family, Pieces


def _seed_oss(config: Config) -> Pieces:
    has_bias = bool(config.get("attention_bias", True))
    return Pieces(qkv_bias=has_bias, out_bias=bool(config.get("attention_out_bias")))


def _problems(config: Config) -> tuple[str, ...]:
    if config.get("attention_out_bias") and not config.get("attention_bias", True):
        return ("attention_out_bias without attention_bias in config.json is not available yet",)
    return ()


FAMILIES = (Family("seed_oss", pieces=_seed_oss, reads=("attention_bias",), problems=_problems),)
