"""Check a model's weight files against its config.json before a start: names, shapes, dtypes and sampled bytes.

A model whose config.json does not match its weights may load without an error and then give wrong log-probs. For
example, if config.json has too few layers, the last layers are dropped. A quantised matrix may be read without its
scales. This module does not import torch.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from roll_opd.models.families import FAMILIES
from roll_opd.models.model_files import IN_A_LAYER, PIECES, decoder_config, decoder_name, differ, pieces
from roll_opd.models.model_info import ModelFilesError, ModelInfo, StoredTensor, read_json

# decoders with known tensor names; for other decoders, only layers, embedding and head are compared
DENSE = ("llama", "mistral", "qwen2", "qwen3")
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"
BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")  # buffers in older releases; never loaded
OF_FURTHER_TOKENS = "eh_proj.weight"  # joins a token's embedding and hidden state
MAX_NAMED = 3  # tensors named in a message; the rest are counted
FIRST_PIECES = 4  # pieces of a tensor searched for zeros first; then all `PIECES` if one is zero
CHUNK_BYTES = 2**24

Shape = tuple[int, ...]


def weight_problems(info: ModelInfo, *, needs_head: bool = True) -> list[str]:
    """Return a message for each mismatch between the weights of a model and its config.json.

    The list is empty if the files contain no decoder. `needs_head` is False for a critic, which needs no output
    embedding. Raises ModelFilesError if a file cannot be read.
    """
    if not holds_decoder(info):
        return []
    found = {decoder_name(name): tensor for name, tensor in info.tensors.items()}
    config = decoder_config(read_json(info.path / "config.json"))
    tied, problems = info.tied, list(_layer_problems(info, found))
    wanted = {EMBEDDING: (info.vocab, info.hidden), FINAL_NORM: (info.hidden,)}
    if HEAD in found or (needs_head and not tied):
        wanted[HEAD] = (info.vocab, info.hidden)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != info.layers and not problems:
        problems.append(
            f"config.json lists {len(kinds)} layer_types, but num_hidden_layers is {info.layers}; layers are missing"
        )
    if info.model_type in DENSE:
        wanted |= _layer_shapes(info)
        problems += problems or [*_missing(wanted, found), *_unexpected(wanted, found)]
        problems += _other_types(found)
    problems += _other_shapes(wanted, found)
    if tied and not problems and {HEAD, EMBEDDING} <= found.keys() and differ(found[HEAD], found[EMBEDDING]):
        problems.append(
            f"tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}; set tie_word_embeddings to false, or remove"
            f" {HEAD}"
        )
    return [f"the weights in {info.path} do not fit its config.json: {problem}" for problem in dict.fromkeys(problems)]


def lost_weights(info: ModelInfo) -> list[str]:
    """Return messages about tensors in which all or half of the numbers are zero.

    A model with such tensors loads, but its log-probs are wrong: for example, -ln V for every token. Only a few pieces
    of each tensor are read at first. Tensors that may be zero (see `may_be_zero`) cause no message. The embedding and
    the output head cause a message only if all of their numbers are zero, because many of their rows may be zero.
    Raises ModelFilesError if a file cannot be read.
    """
    all_zero, half_zero = [], []
    zero_centred = _has_zero_centred_norms(info)
    try:
        for name, tensor in info.tensors.items():
            if may_be_zero(name, zero_centred=zero_centred) or tensor.dtype not in FLOATS:
                continue
            if not any(_zero_pieces(tensor, FIRST_PIECES)):
                continue
            zeros = _zero_pieces(tensor, PIECES)
            if zeros and all(zeros) and _all_zero(tensor):
                all_zero.append(name)
            elif len(zeros) > 2 and 2 * sum(zeros) >= len(zeros) and name not in (EMBEDDING, HEAD):
                half_zero.append(name)
    except OSError as error:
        raise ModelFilesError(f"{error.filename or info.path} cannot be read: {error.strerror}") from None
    return [
        f"{_named(names)} in {info.path}: {share} zero, so the weights were lost in a copy; download the model again"
        for names, share in ((all_zero, "all numbers are"), (half_zero, "half of the numbers are"))
        if names
    ]


def _has_zero_centred_norms(info: ModelInfo) -> bool:
    family = FAMILIES.get(info.model_type)
    config = decoder_config(read_json(info.path / "config.json"))
    return family is not None and family.pieces(config).zero_centred_norms


def may_be_zero(name: str, *, zero_centred: bool = False) -> bool:
    """Return whether a tensor may be zero everywhere: a bias, a buffer, or the value head of a new critic.

    If `zero_centred` is True, the weight of a norm may be zero too, because the norm multiplies by 1 + weight.
    """
    is_norm = zero_centred and name.endswith("norm.weight") and ".linear_attn." not in name
    return is_norm or name.endswith(("bias", *BUFFERS)) or name == VALUE_HEAD


def holds_decoder(info: ModelInfo) -> bool:
    """Return whether the names of the tensors show that the weights contain a decoder."""
    return any(decoder_name(name) == EMBEDDING or IN_A_LAYER.match(name) for name in info.tensors)


def _layer_shapes(info: ModelInfo) -> dict[str, Shape]:
    """Return name -> shape for the tensors in the layers of a Llama-like decoder in Hugging Face format."""
    queries, keys = info.heads * info.head_dim, info.kv_heads * info.head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (info.hidden,),
        "self_attn.q_proj.weight": (queries, info.hidden),
        "self_attn.k_proj.weight": (keys, info.hidden),
        "self_attn.v_proj.weight": (keys, info.hidden),
        "self_attn.o_proj.weight": (info.hidden, queries),
        "post_attention_layernorm.weight": (info.hidden,),
        "mlp.gate_proj.weight": (info.intermediate, info.hidden),
        "mlp.up_proj.weight": (info.intermediate, info.hidden),
        "mlp.down_proj.weight": (info.hidden, info.intermediate),
    }
    if info.model_type == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if info.model_type == "qwen3":
        layer |= {"self_attn.q_norm.weight": (info.head_dim,), "self_attn.k_norm.weight": (info.head_dim,)}
    return {f"model.layers.{number}.{name}": shape for number in range(info.layers) for name, shape in layer.items()}


def _layer_problems(info: ModelInfo, found: Mapping[str, StoredTensor]) -> Iterator[str]:
    numbers = {int(match[1]) for name in found if (match := IN_A_LAYER.match(name))}
    # multi-token-prediction layers are numbered after all other layers
    numbers -= {number for number in numbers if f"model.layers.{number}.{OF_FURTHER_TOKENS}" in found}
    if numbers and numbers != set(range(info.layers)):
        yield (
            f"num_hidden_layers is {info.layers}, but the weights have {len(numbers)} layers ({min(numbers)} to"
            f" {max(numbers)}); use the config.json of the same release"
        )


def _missing(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    names = [name for name in wanted if name not in found]
    if names == [HEAD]:
        yield (
            f"they have no {HEAD}, and tie_word_embeddings is not set; set tie_word_embeddings to true, or download the"
            " complete model"
        )
    elif names:
        yield f"they have no {_named(names)}; download the complete model, or the config.json of the same release"


def _unexpected(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    names = [name for name in found if name not in wanted and IN_A_LAYER.match(name) and not name.endswith(BUFFERS)]
    if names:
        yield f"they have {_named(names)}, which models of its model_type do not have; download the model's config.json"


def _other_shapes(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield a message for each tensor whose shape differs.

    Tensors that have the same name in different layers get a single message.
    """
    reported = set()
    for name, shape in wanted.items():
        if name in found and found[name].shape != shape and (short := IN_A_LAYER.sub("", name)) not in reported:
            reported.add(short)
            yield f"{name} is {_size(found[name].shape)}, but config.json expects {_size(shape)}"


def _other_types(found: Mapping[str, StoredTensor]) -> Iterator[str]:
    by_type: dict[str, list[str]] = {}
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS and not name.endswith(BUFFERS):
            by_type.setdefault(tensor.dtype, []).append(name)
    for dtype, names in by_type.items():
        yield f"{_named(names)}: quantised weights ({dtype}) are not available yet; use the release in bf16 or fp16"


def _named(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more tensors" if rest > 0 else "")


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a number"


def _all_zero(tensor: StoredTensor) -> bool:
    width, size = FLOATS[tensor.dtype], tensor.end - tensor.start
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return all(
            _is_zero(stream.read(min(CHUNK_BYTES, size - place)), width) for place in range(0, size, CHUNK_BYTES)
        )


def _zero_pieces(tensor: StoredTensor, count: int) -> list[bool]:
    return [_is_zero(piece, FLOATS[tensor.dtype]) for piece in pieces(tensor, count)]


def _is_zero(numbers: bytes, width: int) -> bool:
    """Return whether little-endian floats of `width` bytes are all zero (+0 or -0)."""
    signs = numbers[width - 1 :: width].replace(b"\x80", b"\x00")
    return not any(signs) and not any(any(numbers[byte::width]) for byte in range(width - 1))


WINDOW_LAYERS = "max_window_layers"  # in Qwen releases, at most the number of layers
ITS_DEFAULT = 28  # default of transformers, independent of the number of layers
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)  # Qwen3-8B; not 8x7B, not A3B
LESS = 0.95  # minimum ratio of parameters to the size in the name; releases have at least 0.98


def lost_layer_hints(path: Path, layers: int, parameters: int, window_layers: object) -> Iterator[str]:
    """Yield the reasons to suspect that layers of a model were lost.

    `window_layers` is the value of `max_window_layers` in config.json, or None if config.json has no such key.
    """
    if isinstance(window_layers, int) and window_layers > layers and window_layers != ITS_DEFAULT:
        yield f"config.json has {WINDOW_LAYERS} {window_layers} and num_hidden_layers {layers}"
    if named := IN_NAME.findall(path.resolve().name):
        billions = float(named[-1])
        if parameters < LESS * billions * 1e9:
            yield (
                f"its name implies {billions:g} billion parameters, but its weights have {parameters / 1e9:.3g} billion"
            )
