"""Decoder families, one file per group of families (see `family_definition.Family`).

A family has tensor names, layer variants and config.json keys.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from roll_opd.models.families.family_definition import Family


def _families() -> Iterator[Family]:
    for module in pkgutil.iter_modules(__path__):
        yield from getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILIES", ())


FAMILIES = {family.model_type: family for family in sorted(_families(), key=lambda family: family.model_type)}
