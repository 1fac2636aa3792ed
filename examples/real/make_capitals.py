"""Write rows that ask for the capital of a country. The ground truth is its name.

    python examples/real/make_capitals.py output/data

Every third country is held out.
"""

import argparse
import json
from pathlib import Path

CAPITALS = """
France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, China Beijing, Russia Moscow, Egypt Cairo,
Greece Athens, Portugal Lisbon, Austria Vienna, Poland Warsaw, Ireland Dublin, Sweden Stockholm, Finland Helsinki,
Denmark Copenhagen, Hungary Budapest, Romania Bucharest, Bulgaria Sofia, Thailand Bangkok, Indonesia Jakarta,
Vietnam Hanoi, Iran Tehran, Iraq Baghdad, Syria Damascus, Jordan Amman, Turkey Ankara, Lebanon Beirut, Cuba Havana,
Chile Santiago, Uruguay Montevideo, Venezuela Caracas, Ecuador Quito, Canada Ottawa, Australia Canberra,
Nepal Kathmandu, Pakistan Islamabad, Bangladesh Dhaka, Afghanistan Kabul, Mongolia Ulaanbaatar, Philippines Manila,
Morocco Rabat, Tunisia Tunis, Libya Tripoli, Algeria Algiers, Ghana Accra, Nigeria Abuja, Senegal Dakar,
Uganda Kampala, Zimbabwe Harare, Zambia Lusaka, Angola Luanda, Sudan Khartoum, Jamaica Kingston, Iceland Reykjavik,
Belgium Brussels, Croatia Zagreb, Serbia Belgrade, Ukraine Kyiv, Belarus Minsk, Latvia Riga, Lithuania Vilnius,
Estonia Tallinn, Armenia Yerevan, Georgia Tbilisi, Qatar Doha
"""


def main() -> None:
    """Write capitals_train.jsonl and capitals_val.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "val": []}
    for number, pair in enumerate(CAPITALS.split(",")):
        country, capital = pair.split()
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        row = {
            "id": country,
            "tag": "general_rule",
            "messages": json.dumps([question]),
            "ground_truth": capital,
        }
        lines["val" if number % 3 == 2 else "train"].append(json.dumps(row) + "\n")
    for split, written in lines.items():
        (directory / f"capitals_{split}.jsonl").write_text("".join(written), encoding="utf-8")


if __name__ == "__main__":
    main()
