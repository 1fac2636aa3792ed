"""Make inputs of golden runs that are not in the examples: a mixture-of-experts model and rows with two tags.

.venv/bin/python tests/goldens/inputs.py DIRECTORY
"""

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tests/pipelines"))

ROWS = {"odd": slice(0, 150), "even": slice(150, 250)}


def main(place: Path) -> None:
    from mixture import save_mixture

    place.mkdir(parents=True, exist_ok=True)
    save_mixture(place / "mixture")
    lines = (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for tag, part in ROWS.items():
        text = "".join(json.dumps({**row, "tag": tag}) + "\n" for row in rows[part])
        (place / f"{tag}.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
