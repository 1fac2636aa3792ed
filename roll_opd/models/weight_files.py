"""Holds a model's weight files against its config.json, before anything starts: names, shapes and types from the
headers, and a few bytes of every tensor. No torch.

A model whose config.json does not fit its weights may load and run and give wrong log-probs without a word: with a
layer fewer in config.json the last ones are left out, a quantised matrix is read without its scales.
"""

import re
from collections.abc import Iterator, Mapping

from roll_opd.models.model_info import ModelFilesError, ModelInfo, StoredTensor, read_json
from roll_opd.models.safetensors_headers import PIECES, differ, pieces

# The decoders whose tensors are known by name. Of the others, layers and the ends of the model are compared.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"
IN_A_LAYER = re.compile(r"model\.layers\.(\d+)\.")
BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")  # of older releases; nobody loads them
OF_FURTHER_TOKENS = "eh_proj.weight"  # joins a token's embedding and hidden state
NAMED = 3  # tensors that a sentence names; the rest are counted
FIRST_PIECES = 4  # of a tensor, to detect zeros; then all `PIECES` if one of them is zero
CHUNK_BYTES = 2**24

Shape = tuple[int, ...]


def weight_problems(info: ModelInfo, *, needs_head: bool = True) -> list[str]:
    """Return a sentence for each way in which the weights of `info` do not fit its config.json.

    None where weights are missing. A model that ends in values needs no output embedding. Raises ModelFilesError for
    files that cannot be read.
    """
    if not holds_decoder(info):
        return []
    found = info.tensors
    config = read_json(info.path / "config.json")
    tied, problems = bool(config.get("tie_word_embeddings")), list(_layer_problems(info, found))
    wanted = {EMBEDDING: (info.vocab, info.hidden), FINAL_NORM: (info.hidden,)}
    if HEAD in found or (needs_head and not tied):
        wanted[HEAD] = (info.vocab, info.hidden)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != info.layers and not problems:
        problems.append(
            f"layer_types names {len(kinds)} layers there, num_hidden_layers {info.layers}; layers are lost"
        )
    if info.model_type in DENSE:
        wanted |= _layer_shapes(info)
        problems += problems or [*_missing(wanted, found), *_unexpected(wanted, found)]
        problems += _other_types(found)
    problems += _other_shapes(wanted, found)
    if tied and not problems and {HEAD, EMBEDDING} <= found.keys() and differ(found[HEAD], found[EMBEDDING]):
        problems.append(
            f"tie_word_embeddings is true there, but {HEAD} is not {EMBEDDING}; set it to false, or remove {HEAD}"
        )
    return [f"the weights in {info.path} do not fit its config.json: {problem}" for problem in dict.fromkeys(problems)]


def lost_weights(info: ModelInfo) -> list[str]:
    """Return a sentence for each kind of tensor that is zero, wholly or in half; reads a few pieces of every one.

    Such a model loads, and gives every token -ln V or another wrong number. Biases may be zero, and so may many rows of
    the vocabulary. Raises ModelFilesError for files that cannot be read.
    """
    whole, half = [], []
    try:
        for name, tensor in info.tensors.items():
            if may_be_zero(name) or tensor.dtype not in FLOATS:
                continue
            if not any(_zero_pieces(tensor, FIRST_PIECES)):
                continue
            zeros = _zero_pieces(tensor, PIECES)
            if zeros and all(zeros) and _all_zero(tensor):
                whole.append(name)
            elif len(zeros) > 2 and 2 * sum(zeros) >= len(zeros) and name not in (EMBEDDING, HEAD):
                half.append(name)
    except OSError as error:
        raise ModelFilesError(f"{error.filename or info.path} cannot be read: {error.strerror}") from None
    return [
        f"{_named(names)} in {info.path}: {share} zero, so the weights were lost on their way; get the model again"
        for names, share in ((whole, "all numbers are"), (half, "half of the numbers are"))
        if names
    ]


def may_be_zero(name: str) -> bool:
    """Say whether a tensor of this name may hold zeros alone: a bias, a buffer, or the value head of a new critic."""
    return name.endswith(("bias", *BUFFERS)) or name == VALUE_HEAD


def holds_decoder(info: ModelInfo) -> bool:
    """Say whether the weights have anything of a decoder, by the names of their tensors."""
    return any(name == EMBEDDING or IN_A_LAYER.match(name) for name in info.tensors)


def _layer_shapes(info: ModelInfo) -> dict[str, Shape]:
    """Return name -> shape of every tensor in the layers of a Llama-like decoder, as Hugging Face stores them."""
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
    # layers that predict further tokens are numbered after the others
    numbers -= {number for number in numbers if f"model.layers.{number}.{OF_FURTHER_TOKENS}" in found}
    if numbers and numbers != set(range(info.layers)):
        yield (
            f"num_hidden_layers is {info.layers} there, and the weights hold {len(numbers)} layers ({min(numbers)} to"
            f" {max(numbers)}); put the config.json of the same release beside them"
        )


def _missing(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    names = [name for name in wanted if name not in found]
    if names == [HEAD]:
        yield f"they have no {HEAD}, and tie_word_embeddings is not true there; set it, or get the whole model"
    elif names:
        yield f"they have no {_named(names)}; get the whole model, or its own config.json"


def _unexpected(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    names = [name for name in found if name not in wanted and IN_A_LAYER.match(name) and not name.endswith(BUFFERS)]
    if names:
        yield f"they have {_named(names)}, which its model_type does not have; get the model's own config.json"


def _other_shapes(wanted: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield a sentence for each tensor of another shape; of those in the layers, for the first of its name."""
    told = set()
    for name, shape in wanted.items():
        if name in found and found[name].shape != shape and (short := IN_A_LAYER.sub("", name)) not in told:
            told.add(short)
            yield f"{name} is {_size(found[name].shape)}, config.json makes it {_size(shape)}"


def _other_types(found: Mapping[str, StoredTensor]) -> Iterator[str]:
    by_type: dict[str, list[str]] = {}
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS and not name.endswith(BUFFERS):
            by_type.setdefault(tensor.dtype, []).append(name)
    for dtype, names in by_type.items():
        yield f"{_named(names)}: quantised weights ({dtype}) are not available yet; give the release in bf16 or fp16"


def _named(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more tensors" if rest > 0 else "")


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
    """Say whether little-endian floats of `width` bytes are all zero, of either sign."""
    signs = numbers[width - 1 :: width].replace(b"\x80", b"\x00")
    return not any(signs) and not any(any(numbers[byte::width]) for byte in range(width - 1))
