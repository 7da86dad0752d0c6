"""How weights lie in a folder that other software reads: those of the zoo's GPT and Llama, and of transformers, as `from_pretrained` has them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.box import Box, Shape, whole_box
from meshwright.core.serialization import write_json
from meshwright.core.tensor_layout import Segment, TensorLayout
from meshwright.zoo.gpt import GPT, GPTConfig
from meshwright.zoo.llama import Llama, LlamaConfig

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "*.model",
    "chat_template*",
)


def _in_order(name: str, shape: Shape) -> TensorLayout:
    return TensorLayout.uncut(shape)


@dataclass(frozen=True)
class WeightLayout:
    """The folder's name of each of the model's tensors, and where their elements are in it. The default is the model's own names and order."""

    rename: Callable[[str], str] = lambda name: name
    place: Callable[[str, Shape], TensorLayout] = _in_order  # of the model's tensor in one that has the folder's order
    transposed: Callable[[str], bool] = lambda name: False  # whether the folder then exchanges the two dims
    base: tuple[str, ...] = ()  # prefixes that names have not in a folder of the model without its head
    config: Mapping[str, Any] | None = None
    source: Path | None = None  # a folder with a tokenizer
    write: Callable[[Path], None] = field(default=lambda folder: None)

    def shape_in_folder(self, name: str, shape: Shape) -> Shape:
        return shape[::-1] if self.transposed(name) else shape

    def boxes_in_folder(self, name: str, shape: Shape, box: Box) -> Iterator[tuple[Box, Box]]:
        """The parts of a box of the model's tensor that are boxes of the folder's: (in the model's, in the folder's)."""
        for inside, outside in self.place(name, shape).boxes(box):
            yield inside, Box(outside.start[::-1], outside.size[::-1]) if self.transposed(name) else outside

    def to_folder(self, name: str, tensor: Tensor) -> Tensor:
        """The folder's tensor."""
        place = self.place(name, tuple(tensor.shape))
        if place != TensorLayout.uncut(place.shape):
            source, tensor = tensor, torch.empty_like(tensor)
            for inside, outside in place.boxes(whole_box(place.shape)):
                tensor[outside.slices()] = source[inside.slices()]
        return tensor.t().contiguous() if self.transposed(name) else tensor

    def write_extras(self, folder: Path) -> None:
        """Write the configuration, and copy the tokenizer, so that `from_pretrained` finds them."""
        if self.config is not None:
            write_json(folder / "config.json", self.config)
        self.write(folder)
        for pattern in _TOKENIZER_FILES if self.source is not None else ():
            for path in sorted(self.source.glob(pattern)):  # type: ignore[union-attr]
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def weight_layout(model: nn.Module, source: Path | None = None) -> WeightLayout:
    """The layout of a model's weights; `source` is the Hugging Face folder that it comes from, if it does."""
    if isinstance(model, GPT):
        return _gpt_layout(model.config)
    if isinstance(model, Llama):
        return _llama_layout(model.config)
    if _is_of_transformers(model):
        return WeightLayout(write=lambda folder: _write_config(model, folder), source=source)
    return WeightLayout()


def converts_weights(model: nn.Module) -> bool:
    """Whether transformers changes the tensors of a folder, and not only their dtype, when it reads them into this model."""
    if not any(_is_of_transformers(module) for module in model.modules()):
        return False
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        return True
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 it changed none but these
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    return bool(get_model_conversion_mapping(model, add_legacy=False))  # type: ignore[arg-type]


def _is_of_transformers(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "to_json_file")


def _write_config(model: Any, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(str(folder / "config.json"))


_GPT_NAMES = (
    (r"embedding\.tokens\.weight", "transformer.wte.weight"), (r"embedding\.positions\.weight", "transformer.wpe.weight"),
    (r"norm\.(\w+)", r"transformer.ln_f.\1"), (r"head\.weight", "lm_head.weight"),
    (r"blocks\.(\d+)\.attention_norm\.(\w+)", r"transformer.h.\1.ln_1.\2"), (r"blocks\.(\d+)\.mlp_norm\.(\w+)", r"transformer.h.\1.ln_2.\2"),
    (r"blocks\.(\d+)\.attention\.qkv\.(\w+)", r"transformer.h.\1.attn.c_attn.\2"),
    (r"blocks\.(\d+)\.attention\.output\.(\w+)", r"transformer.h.\1.attn.c_proj.\2"),
    (r"blocks\.(\d+)\.mlp\.up\.(\w+)", r"transformer.h.\1.mlp.c_fc.\2"), (r"blocks\.(\d+)\.mlp\.down\.(\w+)", r"transformer.h.\1.mlp.c_proj.\2"),
)  # fmt: skip
_LLAMA_NAMES = (
    (r"embedding\.weight", "model.embed_tokens.weight"), (r"norm\.weight", "model.norm.weight"), (r"head\.weight", "lm_head.weight"),
    (r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blocks\.(\d+)\.attention\.query\.weight", r"model.layers.\1.self_attn.q_proj.weight"),
    (r"blocks\.(\d+)\.attention\.key\.weight", r"model.layers.\1.self_attn.k_proj.weight"),
    (r"blocks\.(\d+)\.attention\.value\.weight", r"model.layers.\1.self_attn.v_proj.weight"),
    (r"blocks\.(\d+)\.attention\.output\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
)  # fmt: skip


def _renamed(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in table:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    return name


def _gpt_layout(config: GPTConfig) -> WeightLayout:
    """GPT-2's linear layers are transposed, and its fused layer has all queries, then all keys, then all values; ours goes head by head."""

    def is_linear(name: str) -> bool:
        return re.fullmatch(r"blocks\.\d+\.(attention\.(qkv|output)|mlp\.(up|down))\.weight", name) is not None

    def place(name: str, shape: Shape) -> TensorLayout:
        uncut = TensorLayout.uncut(shape)
        if ".attention.qkv." not in name:
            return uncut
        size = shape[0] // (3 * config.heads)
        rows = [Segment((3 * head + part) * size, (part * config.heads + head) * size, size) for head in range(config.heads) for part in range(3)]
        return TensorLayout(shape, (tuple(rows), *uncut.segments[1:]))

    sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads, "n_positions": config.context, "vocab_size": config.vocab}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout) | {"attn_pdrop": 0.0}
    ends = {"bos_token_id": config.vocab - 1, "eos_token_id": config.vocab - 1}
    described = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", **sizes, **dropout, **ends}
    return WeightLayout(lambda name: _renamed(name, _GPT_NAMES), place, is_linear, ("transformer.",), described)


def _llama_layout(config: LlamaConfig) -> WeightLayout:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1.0:
        scaled = {"factor": config.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        rope = {**rope, "rope_type": "llama3", **scaled}
    described = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": config.width, "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab, "max_position_embeddings": config.context, "rms_norm_eps": config.eps, "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings, "rope_theta": config.rope_theta, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return WeightLayout(lambda name: _renamed(name, _LLAMA_NAMES), base=("model.",), config=described)
