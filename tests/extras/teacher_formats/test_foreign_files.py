"""Teacher files of Lightning-OPD and DistillKit: every row is decoded as stated, and errors name the row."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan
from roll_opd.data.row_formats import DataError
from roll_opd.data.teacher_files import FileFacts, facts_of, open_teacher_files
from roll_opd.data.teacher_scores import Expected
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.teacher_formats.packed_logprobs import read_packing, unpack_ids, unpack_logprobs

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "models" / "student"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(DEMO))


def plan_of(*files: Path, **changes: Any) -> DataPlan:
    return DataPlan(tuple(map(str, files)), 64, schema="scored", length_key="sequence_length", **changes)


LIGHTNING = pa.schema(
    [
        ("prompt", pa.string()),
        ("label", pa.string()),
        (
            "metadata",
            pa.struct(
                [
                    ("is_lightning_opd", pa.bool_()),
                    ("response_tokens", pa.list_(pa.int64())),
                    ("loss_mask", pa.list_(pa.int64())),
                    ("response", pa.string()),
                    ("teacher_log_probs", pa.list_(pa.float64())),
                ]
            ),
        ),
    ]
)


def lightning(path: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Path:
    """A row of `prepare_lightning_opd.py`, as that program writes it."""
    answer = "1 2 3"
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    facts = {"response_tokens": tokens, "loss_mask": [1] * (len(tokens) - 1) + [0], "response": answer}
    metadata = {"is_lightning_opd": True, **facts, "teacher_log_probs": [-0.5] * len(tokens), **changes}
    pq.write_table(pa.Table.from_pylist([{"prompt": "4 5", "label": "0", "metadata": metadata}], LIGHTNING), path)
    return path


def test_lightning_opd_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows, _ = open_teacher_files(
        plan_of(lightning(tmp_path / "a.parquet", tokenizer)), tokenizer, Expected(len(tokenizer))
    )
    (row,) = rows.all()
    assert row.scores is not None and row.scores.mask is not None and row.scores.logprobs is not None
    assert row.tokens.tolist() == tokenizer.encode("4 5", add_special_tokens=False)
    assert tokenizer.decode(row.answers[0]) == "1 2 3"
    assert row.scores.logprobs.tolist() == [-0.5] * len(row.answers[0])
    assert row.scores.mask.tolist() == [True] * (len(row.answers[0]) - 1) + [False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": "7 7 7"}, "response_tokens are not the tokens of the text response in the student's tokenizer"),
        ({"teacher_log_probs": [-0.5]}, "1 entries of teacher_logprobs"),
        ({"teacher_log_probs": None}, "has no teacher_logprobs"),
    ],
)
def test_an_inconsistent_row_of_lightning_opd_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any], message: str
) -> None:
    file = lightning(tmp_path / "a.parquet", tokenizer, **changes)
    with pytest.raises(DataError, match=f"a.parquet:1 .*{message}"):
        open_teacher_files(plan_of(file), tokenizer, Expected(len(tokenizer)))


PACKED = ("input_ids", "compressed_logprobs", "bytepacked_indices")
PACKINGS: dict[str, dict[str, Any]] = {
    "exact": {"d": 200, "k": 3, "exact_k": 3, "residual_bins": [], "delta_encoding": False},
    "polynomial": {
        **{"d": 200, "k": 6, "exact_k": 2, "exact_dtype": "bfloat16", "term_dtype": "float16"},
        **{"polynomial_terms": [0, 1, "sqrt"], "delta_encoding": False, "normalize_t": True},
        "residual_bins": [{"scale_dtype": "float16", "element_bits": 4, "num_elements": 3}],
    },
    "differences": {
        **{"d": 129_000, "k": 7, "exact_k": 1, "exact_dtype": "float16", "delta_encoding": True},
        "residual_bins": [
            {"scale_dtype": "float32", "element_bits": 8, "num_elements": 2},
            {"scale_dtype": "float16", "element_bits": 1, "num_elements": 4},
        ],
    },
}


def packed(name: str, seed: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return the bytes of log-probs and ids of one position, and their values, decoded number by number."""
    numbers, rng = PACKINGS[name], np.random.default_rng(seed)
    exact, rest = numbers["exact_k"], numbers["k"] - numbers["exact_k"]
    content, values = b"", []

    def put(value: float, dtype: str) -> float:
        nonlocal content
        if dtype == "bfloat16":
            raw = np.float32(value).tobytes()[2:]  # the upper half, on a little-endian machine
            content += raw
            return float(np.frombuffer(b"\0\0" + raw, "<f4")[0])
        raw = np.array(value, {"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
        content += raw
        return float(np.frombuffer(raw, {"float16": "<f2", "float32": "<f4"}[dtype])[0])

    for number in range(exact):
        values.append(put(-0.4 - 0.9 * number, numbers.get("exact_dtype", "float32")))
    terms = numbers.get("polynomial_terms", [])
    weights = [put(float(rng.normal(-1, 0.2)), numbers.get("term_dtype", "float32")) for _ in terms]
    others = []
    for rank in range(rest):
        t = rank / (rest - 1) if numbers.get("normalize_t") else rank
        powers = [math.sqrt(t) if term == "sqrt" else float(t) ** term for term in terms]
        others.append(sum(weight * power for weight, power in zip(weights, powers, strict=True)))
    first = 0
    for part in numbers["residual_bins"]:
        scale, bits = put(0.125, part["scale_dtype"]), ""
        for number in range(part["num_elements"]):
            stored = int(rng.integers(0, 2 ** part["element_bits"]))
            bits += format(stored, f"0{part['element_bits']}b")
            sign = 2 * stored - 1 if part["element_bits"] == 1 else stored - 2 ** (part["element_bits"] - 1)
            others[first + number] += sign * scale
        bits += "0" * (-len(bits) % 8)
        content += bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))
        first += part["num_elements"]
    values += others
    if numbers["delta_encoding"]:
        values = [sum(values[: number + 1]) for number in range(len(values))]
    ids = rng.choice(numbers["d"], numbers["k"], replace=False).tolist()
    width = math.ceil(math.log2(numbers["d"]))
    bits = "".join(format(token, f"0{width}b") for token in ids)
    bits += "0" * (-len(bits) % 8)
    return list(content), [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)], ids, values


@pytest.mark.parametrize("name", PACKINGS)
def test_compressed_log_probs_of_distillkit_are_decoded(tmp_path: Path, name: str) -> None:
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(PACKINGS[name]))
    packing = read_packing(tmp_path / "compression_config.yaml")
    positions = [packed(name, seed) for seed in range(5)]
    logprobs = unpack_logprobs(np.array([position[0] for position in positions], np.uint8), packing)
    ids = unpack_ids(np.array([position[1] for position in positions], np.uint8), packing)
    assert ids.tolist() == [position[2] for position in positions]
    np.testing.assert_allclose(logprobs, [position[3] for position in positions], rtol=1e-6)


def test_a_file_of_distillkit_is_read_and_its_faults_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The position after token i has the distribution of token i + 1; a row may have one more position."""
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(PACKINGS["exact"]))
    positions = [packed("exact", seed) for seed in range(4)]
    row = {
        "input_ids": [5, 6, 7, 8],
        "compressed_logprobs": [position[0] for position in positions],
        "bytepacked_indices": [position[1] for position in positions],
    }
    short = {**row, "bytepacked_indices": row["bytepacked_indices"][:2]}
    longer = {**row, "compressed_logprobs": [[*position, 0] for position in row["compressed_logprobs"]]}
    single = {"input_ids": [5], "compressed_logprobs": [], "bytepacked_indices": []}
    pq.write_table(pa.Table.from_pylist([row, short, longer, single]), tmp_path / "data_0.parquet")
    expected = Expected(len(tokenizer), topk=3)
    rows, report = open_teacher_files(plan_of(tmp_path / "data_0.parquet", on_bad_row="drop"), tokenizer, expected)
    (read,) = rows.all()
    assert read.scores is not None and read.scores.topk_ids is not None and read.scores.topk_logprobs is not None
    assert read.tokens.tolist() == [5] and read.answers[0].tolist() == [6, 7, 8]
    assert read.scores.topk_ids.tolist() == [position[2] for position in positions[:3]]
    assert facts_of([str(tmp_path / "data_0.parquet")], None) == FileFacts(None, 3)
    text = report.describe_bad()
    assert "4 positions of log-probs and 2 of ids for 4 tokens" in text and "13 bytes of log-probs" in text
    assert "fewer than two tokens" in text


def test_files_that_cannot_be_decoded_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    columns = {
        "legacy compression": {"packed_indices": [[1]], "exact_values": [[1.0]], "coeffs": [[1.0]]},
        "is no compression configuration": {
            "input_ids": [[1]],
            "compressed_logprobs": [[]],
            "bytepacked_indices": [[]],
        },
    }
    for message, table in columns.items():
        pq.write_table(pa.table(table), tmp_path / "other.parquet")
        with pytest.raises(DataError, match=message):
            open_teacher_files(plan_of(tmp_path / "other.parquet"), tokenizer, Expected(40, "abc", topk=4))
