"""torch's own attention by plain calls: the same numbers whatever it is given, and cut by heads wherever that can be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.describe.attention_decompose import decompose_attention, decomposed_attention
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.plan.tensor_planner import choose_tensor_grid

SAMPLES, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
PADDED = torch.arange(KEYS).expand(SAMPLES, -1) > torch.tensor([[6], [3], [1]])
FORBIDDEN = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.3
EACH = torch.randn(SAMPLES * HEADS, QUERIES, KEYS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("made", "call"),
    [
        ({}, {}),
        ({"bias": False}, {}),
        ({}, {"attn_mask": FORBIDDEN}),
        ({}, {"attn_mask": EACH}),
        ({}, {"key_padding_mask": PADDED}),
        ({}, {"key_padding_mask": PADDED, "attn_mask": FORBIDDEN}),
        ({}, {"key_padding_mask": PADDED.double(), "attn_mask": EACH}),
        ({"kdim": 6, "vdim": 10}, {}),
        ({}, {"need_weights": True}),
        ({}, {"need_weights": True, "average_attn_weights": False, "attn_mask": FORBIDDEN}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    ],
)
def test_the_same_as_torch(made: dict[str, Any], call: dict[str, Any], first: bool) -> None:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, dtype=torch.float64, **made)
    sizes = ((QUERIES, WIDTH), (KEYS, made.get("kdim", WIDTH)), (KEYS, made.get("vdim", WIDTH)))
    query, key, value = (
        torch.randn(SAMPLES, *s, dtype=torch.float64) if first else torch.randn(s[0], SAMPLES, s[1], dtype=torch.float64) for s in sizes
    )
    check(module, (query, key, value), {"need_weights": False, **call})


@pytest.mark.parametrize("call", [{}, {"attn_mask": CAUSAL}, {"attn_mask": CAUSAL, "is_causal": True}, {"attn_mask": CAUSAL < 0}])
@pytest.mark.parametrize("shape", [(SAMPLES, QUERIES, WIDTH), (QUERIES, WIDTH)])
def test_attention_to_itself_alone_or_in_batches(call: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    x = torch.randn(shape, dtype=torch.float64)
    check(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64), (x, x, x), {"need_weights": False, **call})


def check(module: nn.MultiheadAttention, given: tuple[torch.Tensor, ...], call: dict[str, Any]) -> None:
    """Outputs, weights and gradients."""
    wanted, its_weights = module(*given, **call)
    wanted.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    with decomposed_attention(module):
        found, weights = module(*given, **call)
        found.square().sum().backward()
    assert "forward" not in vars(module)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([p.grad for p in module.parameters() if p.grad is not None], gradients, rtol=1e-11, atol=1e-11)
    assert (weights is None) == (its_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, its_weights)


def test_an_encoder_layer_has_no_short_cut_past_its_modules() -> None:
    """When nothing is trained torch computes the whole layer in one call, from the parameters that it finds in its modules."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True), 2).eval()
    x, padding = torch.randn(SAMPLES, KEYS, WIDTH), PADDED
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
        decompose_attention(encoder)
        calls: list[str] = []
        for name, module in encoder.named_modules():
            plain = module.forward
            module.forward = lambda *a, _n=name, _f=plain, **k: (calls.append(_n), _f(*a, **k))[1]
        found = encoder(x, src_key_padding_mask=padding)
    assert {"layers.0.self_attn.out_proj", "layers.1.linear1"} <= set(calls)
    torch.testing.assert_close(found[~padding], wanted[~padding])


class Own(nn.Module):
    """An attention module in a user's own block."""

    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.norm, self.attention, self.call = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out: torch.Tensor = x + self.attention(y, y, y, **self.call)[0]
        return out


def test_weights_that_are_asked_for_keep_it_whole_and_the_reason_says_so() -> None:
    batch = {"x": torch.zeros(2, QUERIES, WIDTH)}

    def flow(model: nn.Module) -> Any:
        return trace_module_dataflow(model, lambda m, b: m(b["x"]).square().mean(), batch)

    cut = flow(Own(need_weights=False))
    pieces = {c.parameter for s in choose_tensor_grid(cut, (2,))[0].sharded_dims for c in s.parameter_shards}
    assert {"attention.in_proj_weight", "attention.out_proj.weight"} <= pieces
    whole = choose_tensor_grid(flow(Own()), (2,))[0]
    assert not [s for s in whole.sharded_dims if "in_proj" in s.name]
    assert "need_weights=True" in whole.unsharded_reasons["attention.in_proj_weight"]
