"""A script whose model has no memory before `prepare`: `birth_script.py KIND CONSTRAINTS OUTPUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from tests.procs.birth_jobs import data_bytes

kind, constraints, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
rank = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.tokens.weight
        if kind != "meta":  # a module on meta has lost it: no reset_parameters() gives it values
            self.register_buffer("scale", torch.linspace(1, 2, width), persistent=False)
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) * getattr(self, "scale", 1.0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


tokens = torch.randint(0, 50, (32, 9), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=8)
torch.manual_seed(5 + rank * (kind != "live"))  # the first rank's seed counts, as it does for a live model
if kind == "meta":
    with torch.device("meta"):
        model: object = Net()
elif kind == "deferred":
    model = mw.deferred_init(Net)
elif kind == "large":
    import resource

    torch.manual_seed(5)
    model = mw.deferred_init(lambda: Net(1024, 12))
    whole = sum(p.nbytes for p in model.parameters())  # with its gradients and AdamW's states it is four times as large
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 2 * whole, resource.RLIM_INFINITY))
else:
    model = Net if kind == "factory" else Net()
optimizer = make_optimizer(model) if isinstance(model, nn.Module) else make_optimizer
run = mw.prepare(model, optimizer, loader, loss_fn=loss_fn, **constraints)
losses = [float(run.step(batch, loss_fn)) for batch in run.loader]
state = run.state_dict() if kind != "large" else {}  # it is whole on the first rank
if run.is_first:
    output.write_text(json.dumps({"losses": losses, "names": sorted(state), "sum": float(sum(t.double().abs().sum() for t in state.values()))}))
