"""Catalogue, search and purchase score of the synthetic shop."""

from dataclasses import dataclass
from functools import cache

import numpy as np

KINDS = ("shirt", "jacket", "scarf", "lamp", "chair", "rug", "mug", "backpack")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
MATERIALS = ("cotton", "wool", "leather", "linen", "bamboo", "steel")
SIZES = ("small", "medium", "large")
LOWEST, HIGHEST = 5, 100  # of prices, whole numbers


@dataclass(frozen=True)
class Item:
    """Product of the shop; the buyer chooses its size."""

    id: str
    kind: str
    color: str
    material: str
    price: int

    @property
    def title(self) -> str:
        """Display name."""
        return f"{self.color} {self.material} {self.kind}"


@dataclass(frozen=True)
class Wish:
    """Wanted attributes of a purchase."""

    kind: str
    color: str
    material: str
    size: str
    most: int  # maximum price

    @property
    def text(self) -> str:
        """Description in the observation."""
        return f"a {self.color} {self.kind} of {self.material}, size {self.size}, for at most {self.most}"

    def score(self, item: Item, size: str | None) -> float:
        """Return the share of wanted attributes that an item has; 0 for another kind."""
        if item.kind != self.kind:
            return 0.0
        met = (item.color == self.color, item.material == self.material, size == self.size, item.price <= self.most)
        return (1 + sum(met)) / (1 + len(met))


@cache
def catalogue(seed: int, count: int) -> tuple[Item, ...]:
    """Return the items of a shop, deterministic in `seed` and `count`."""
    random = np.random.default_rng(seed)

    def one_of(words: tuple[str, ...]) -> str:
        return words[int(random.integers(len(words)))]

    return tuple(
        Item(
            f"B{number:03d}",
            one_of(KINDS),
            one_of(COLORS),
            one_of(MATERIALS),
            int(random.integers(LOWEST, HIGHEST, endpoint=True)),
        )
        for number in range(count)
    )


def search(items: tuple[Item, ...], words: str) -> tuple[Item, ...]:
    """Return the items with one of the words in their title, best matches first."""
    asked = set(words.lower().split())
    hits = [(len(asked & set(item.title.split())), item) for item in items]
    return tuple(item for count, item in sorted(hits, key=lambda hit: (-hit[0], hit[1].id)) if count)
