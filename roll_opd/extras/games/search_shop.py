"""`search_shop`: search and buy in a small synthetic shop, modelled on WebShop (https://arxiv.org/abs/2207.01206).

The first half of the file is the catalogue, its search and the score of a purchase; the second half is the game.
"""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import Game, Turn, at_least, random_numbers

KINDS = ("shirt", "jacket", "scarf", "lamp", "chair", "rug", "mug", "backpack")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
MATERIALS = ("cotton", "wool", "leather", "linen", "bamboo", "steel")
SIZES = ("small", "medium", "large")
LOWEST, HIGHEST = 5, 100  # lowest and highest price, in whole numbers


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
        """Return the fraction of the wanted attributes that an item has, or 0 for an item of the wrong kind."""
        if item.kind != self.kind:
            return 0.0
        met = (item.color == self.color, item.material == self.material, size == self.size, item.price <= self.most)
        return (1 + sum(met)) / (1 + len(met))


@cache
def catalogue(seed: int, count: int) -> tuple[Item, ...]:
    """Return the items of a shop. The same `seed` and `count` give the same items."""
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
    """Return the items with at least one of the words in their title, best matches first."""
    asked = set(words.lower().split())
    hits = [(len(asked & set(item.title.split())), item) for item in items]
    return tuple(item for count, item in sorted(hits, key=lambda hit: (-hit[0], hit[1].id)) if count)


PAGE = 5  # items per page
LEEWAY = 10  # maximum budget above the wanted item's price
BUY, BACK, NEXT, PREVIOUS = "buy now", "back to search", "next >", "< prev"
COMMAND = re.compile(r"(search|click)\s*\[([^\[\]]{0,200})\]", re.IGNORECASE)
INSTRUCTION = (
    "You are buying in a shop. Each turn give one of the available actions, in this form:"
    " <answer>search[red wool scarf]</answer> or <answer>click[buy now]</answer>. Choose a size before you buy."
)


@ENVIRONMENTS.register("search_shop")
@dataclass(eq=False)
class SearchShop(Game):
    """Synthetic shop.

    The reward is the fraction of the wanted attributes that the bought item has. An item of the wrong kind gives 0.
    `num_products` and `catalogue_seed` determine the shop's catalogue, which is the same in all episodes.
    """

    num_products: int = 200
    catalogue_seed: int = 0
    max_steps: int = 10

    def __post_init__(self) -> None:
        """Check the arguments, and fill the shop."""
        at_least("num_products", self.num_products, 1)
        at_least("catalogue_seed", self.catalogue_seed, 0)
        self._items = catalogue(self.catalogue_seed, self.num_products)
        self.set_up(INSTRUCTION)
        self._show()

    def _show(self, found: tuple[Item, ...] | None = None, page: int = 0, item: Item | None = None) -> None:
        """Show the search form, a page of results, or an item."""
        self._found, self._page, self._item = found, page, item
        self._size: str | None = None

    def begin(self, seed: int | None) -> None:
        """Draw a wish for an available item."""
        random = random_numbers(seed)
        self._wanted = self._items[int(random.integers(len(self._items)))]
        size = SIZES[int(random.integers(len(SIZES)))]
        item = self._wanted
        self._wish = Wish(item.kind, item.color, item.material, size, item.price + int(random.integers(LEEWAY)))
        self._score: float | None = None
        self._show()

    def play(self, action: str) -> Turn:
        """Search or click; an action that is not available changes nothing."""
        written = COMMAND.fullmatch(action.strip())
        if written and written[1].lower() == "search":
            return self._searched(written[2])
        target = written[2] if written else BUY if action.strip().lower() in ("buy", BUY) else ""
        target = target.strip().lower()
        return self._clicked(target) if target in self._clickable() else Turn()

    def _searched(self, words: str) -> Turn:
        if self._found is not None or self._item is not None:
            return Turn()
        self._show(search(self._items, words))
        return Turn(effective=True)

    def _clicked(self, target: str) -> Turn:
        found = self._found or ()
        if target == BUY and self._item is not None:
            self._score = self._wish.score(self._item, self._size)
            return Turn(self._score, effective=True, over=True)
        if target in SIZES:
            changed, self._size = self._size != target, target
            return Turn(effective=changed)
        if target == BACK:
            self._show()
        elif target == NEXT:
            self._show(found, self._page + 1)
        elif target == PREVIOUS:
            # returns from an item to the page of results
            self._show(found, self._page if self._item is not None else self._page - 1)
        else:
            self._show(found, self._page, next(item for item in found if item.id.lower() == target))
        return Turn(effective=True)

    def _clickable(self) -> list[str]:
        """Return the clickable targets in lower case."""
        if self._found is None:
            return []
        if self._item is not None:
            return [*SIZES, BUY, PREVIOUS, BACK]
        shown = self._found[self._page * PAGE : (self._page + 1) * PAGE]
        more = [NEXT] if (self._page + 1) * PAGE < len(self._found) else []
        return [*(item.id.lower() for item in shown), *([PREVIOUS] if self._page else []), *more, BACK]

    @property
    def succeeded(self) -> bool:
        """Whether the bought item has all wanted attributes."""
        return self._score == 1.0

    def render(self) -> str:
        """Return the wish, the page and the available actions."""
        if self._score is not None:
            return f"You bought it; it meets {self._score:.0%} of the wish."
        names = {item.id.lower(): item.id for item in self._found or ()}
        actions = [f"click[{names.get(target, target)}]" for target in self._clickable()] or ["search[words]"]
        return f"Buy {self._wish.text}.\n{self._page_text()}\nAvailable actions: {', '.join(actions)}"

    def _page_text(self) -> str:
        if self._found is None:
            return "You are at the search."
        if self._item is not None:
            item, size = self._item, self._size or "not chosen"
            return f"{item.id}: {item.title}, {item.price}. Size: {size} (of {', '.join(SIZES)})."
        shown = self._found[self._page * PAGE : (self._page + 1) * PAGE]
        if not shown:
            return "Nothing was found."
        lines = (f"{item.id}: {item.title}, {item.price}" for item in shown)
        return "\n".join((f"Page {self._page + 1} of {-(-len(self._found) // PAGE)}:", *lines))

    def solve(self) -> list[str]:
        """Return the actions that lead from the search form to the purchase of the wanted item.

        Raises `EnvironmentFailure` if the shop does not show the search form.
        """
        if self._found is not None or self._score is not None:
            raise EnvironmentFailure(
                "search_shop: solve works only at the search form; call reset or play click[back to search] first"
            )
        words = self._wanted.title
        page = search(self._items, words).index(self._wanted) // PAGE
        clicks = [*[NEXT] * page, self._wanted.id, self._wish.size, BUY]
        return [f"search[{words}]", *(f"click[{target}]" for target in clicks)]
