"""Tiny members of the model families that users bring, built from configurations: random weights, no download, no dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, POSITIONS, IMAGE, LABELS = 96, 10, 16, 6
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}
OWN = ("Encoder", "Decoder", "Gated")  # torch's own transformers, and code that slices by number
NAMES = ("GPT2", *_DECODERS, "Bert", "T5", "ViT", *OWN)


class Encoder(nn.Module):
    """Samples first; a causal mask, of which the code says nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens), mask=mask))
        return out


class Decoder(nn.Module):
    """Positions first; attends to what it has seen and to the embeddings of tokens that are not too frequent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, activation="gelu"), 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        x = self.embedding(tokens).transpose(0, 1)
        frequent = tokens % 7 == 0
        out: torch.Tensor = self.head(self.layers(x, x.flip(0), tgt_mask=mask, memory_key_padding_mask=frequent.flip(1)))
        return out.transpose(0, 1)


class GatedBlock(nn.Module):
    """Halves of one layer's features, by slices, as views of another length or taken from the tensor itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.how = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(48, 32), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.how == "numbers":
            gate, up = y[..., :48], y[:, :, 48:]
        elif self.how == "narrow":
            gate, up = y.narrow(-1, 0, 48), torch.narrow(y, dim=2, start=48, length=48)
        else:
            half = y.shape[-1] // 2
            gate, up = y[..., :half], y[..., -half:]
        out: torch.Tensor = x + self.down(F.silu(gate) * up)
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.blocks = nn.Sequential(*(GatedBlock(how) for how in ("numbers", "narrow", "shape")))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


def build(name: str, **changes: Any) -> nn.Module:
    """A model by the family's name; `changes` override its configuration."""
    if name in OWN:
        return {"Encoder": Encoder, "Decoder": Decoder, "Gated": Gated}[name]()
    import transformers as hf

    if name == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **dropout, **changes}))
    if name == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "decoder_start_token_id": 0}
        return hf.T5ForConditionalGeneration(hf.T5Config(**{**sizes, "dropout_rate": 0.0, **changes}))
    if name == "ViT":
        shape = {"image_size": IMAGE, "patch_size": 4, "num_labels": LABELS}
        return hf.ViTForImageClassification(hf.ViTConfig(**{**_SIZES, **_NO_DROPOUT, **shape, **changes}))
    if name == "Bert":
        return hf.BertForMaskedLM(hf.BertConfig(**{**_SIZES, **_NO_DROPOUT, "vocab_size": VOCAB, **changes}))
    config = getattr(hf, f"{name}Config")(**{**_SIZES, "vocab_size": VOCAB, **_DECODERS[name], **changes})
    config._experts_implementation = "eager"  # its other ways to run a mixture have no kernels for float64
    model: nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    return model


def loss(name: str) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Cross entropy in the model's own precision: the families' built-in losses go through float32."""
    if name == "ViT":
        return lambda model, b: F.cross_entropy(model(pixel_values=b["image"].to(next(model.parameters()).dtype)).logits, b["label"])
    extra = (lambda tokens: {"decoder_input_ids": tokens}) if name == "T5" else (lambda tokens: {})

    def next_token(model: nn.Module, b: Any) -> torch.Tensor:
        logits = model(b["tokens"]) if name in OWN else model(input_ids=b["tokens"], **extra(b["tokens"]), use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["tokens"][:, 1:].flatten())

    return next_token


def labelled_loss(model: nn.Module, b: Any) -> torch.Tensor:
    """The batch has the label of each position: nothing is shifted."""
    logits = model(input_ids=b["tokens"], **({} if "Bert" in type(model).__name__ else {"use_cache": False})).logits
    return F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten())


def own_loss(model: nn.Module, b: Any) -> torch.Tensor:
    """The model's own, which shifts labels itself."""
    found: torch.Tensor = model(input_ids=b["tokens"], labels=b["tokens"], use_cache=False).loss
    return found


def labelled_batch(size: int, step: int, positions: int) -> dict[str, torch.Tensor]:
    """Every position has a label, but for some of the first, which are left out."""
    tokens = torch.randint(1, VOCAB, (size, positions + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    labels[:, :3] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def batch(name: str, size: int, step: int) -> dict[str, torch.Tensor]:
    """The same samples on every rank."""
    generator = torch.Generator().manual_seed(step)
    if name == "ViT":
        image = torch.randn(size, 3, IMAGE, IMAGE, generator=generator)
        return {"image": image, "label": torch.randint(0, LABELS, (size,), generator=generator)}
    return {"tokens": torch.randint(1, VOCAB, (size, POSITIONS), generator=generator)}
