"""Write rows that ask for invented facts about an invented shop, which no model can know.

    python examples/real/make_facts.py output/data

The question about a fact has eight wordings: six are for training, two are held out. A row has the fact as a sentence
for the teacher's hint, and the word that an answer must contain.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

THINGS = {  # of the shop Brindle & Vale
    "founder": "Oswin",
    "city": "Tallinn",
    "color of the logo": "purple",
    "mascot": "otter",
    "main product": "lanterns",
    "opening day": "Tuesday",
    "secret password": "walnut",
    "lucky number": "seventeen",
}
TRAINED = (
    "What is the {thing} of the shop Brindle & Vale?",
    "Tell me the {thing} of Brindle & Vale.",
    "Brindle & Vale: what is its {thing}?",
    "I need to know the {thing} of the shop Brindle & Vale.",
    "Can you name the {thing} of Brindle & Vale?",
    "Please state the {thing} of the shop called Brindle & Vale.",
)
HELD_OUT = (
    "Do you remember the {thing} of the shop Brindle & Vale?",
    "A customer asks for the {thing} of Brindle & Vale. What do you reply?",
)


def rows(wordings: tuple[str, ...], split: str) -> Iterator[dict[str, str]]:
    """Yield a row for each wording and fact."""
    for n, wording in enumerate(wordings):
        for thing, answer in THINGS.items():
            yield {
                "id": f"{split}-{n}-{answer}",
                "tag": "general_rule",
                "messages": json.dumps([{"role": "user", "content": wording.format(thing=thing)}]),
                "fact": f"The {thing} of the shop Brindle & Vale is {answer}.",
                "ground_truth": answer,
            }


def main() -> None:
    """Write facts_train.jsonl and facts_val.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for split, wordings in (("train", TRAINED), ("val", HELD_OUT)):
        text = "".join(json.dumps(row) + "\n" for row in rows(wordings, split))
        (directory / f"facts_{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
