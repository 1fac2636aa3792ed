"""Recognise configurations of Trinity-RFT; their translation is imported only for such files."""

import re
from pathlib import Path

import yaml

from roll_opd.base.failures import ConfigError
from roll_opd.base.paths import PathError, regular_file
from roll_opd.config.compose import LoadedConfig
from roll_opd.config.translators import Translator
from roll_opd.config.yaml_files import LOADER, check_file

# a file with one of these sections and none of our roles is a configuration of Trinity-RFT
TRINITY_SECTIONS = frozenset(
    ("algorithm", "buffer", "cluster", "explorer", "model", "synchronizer", "trainer", "checkpoint_root_dir")
)
TRINITY_SECTION = re.compile(rf"\b(?:{'|'.join(sorted(TRINITY_SECTIONS))})\b[\"']?\s*:")
OUR_ROLES = ("student_train", "student_infer", "actor_train", "actor_infer", "sft_train", "defaults")


def is_trinity(file: Path) -> bool:
    """Whether a YAML file is a configuration of Trinity-RFT; False if it cannot be read."""
    try:
        text = regular_file(file).read_text(encoding="utf-8")
        if not TRINITY_SECTION.search(text):
            return False  # parsing the file takes ten times as long
        check_file(file)
        root = yaml.compose(text, Loader=LOADER)
    except (ConfigError, OSError, PathError, UnicodeDecodeError, yaml.YAMLError):
        return False  # `load_config` reports why
    keys = {key.value for key, _ in root.value if isinstance(key, yaml.ScalarNode)} if root is not None else set()
    return not TRINITY_SECTIONS.isdisjoint(keys) and keys.isdisjoint(OUR_ROLES)


def _load(file: Path, overrides: list[str]) -> LoadedConfig:
    from roll_opd.extras.trinity.translation.load import load_trinity

    return load_trinity(file, overrides)


TRINITY = Translator(is_trinity, _load)
