"""`08_script_plain.py` on every device there is: its own loop stays, and five lines are new or changed.

    python examples/09_script_own_loop.py              on one device
    meshwright train examples/09_script_own_loop.py    on all of them

The batch of 64 is the global batch. Losses and accuracies are those of the plain script, up to the rounding of bfloat16.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--resume", default=None)
parser.add_argument("--out", default="best.pt")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 1, 16, 16, generator=generator), torch.randint(9, (count,), generator=generator)
    x[torch.arange(count), 0, y] += 1  # a class is a brighter row
    return TensorDataset(x, y)


torch.manual_seed(0)
train_loader = DataLoader(make(500, 1), batch_size=64, shuffle=True)
val_loader = DataLoader(make(129, 2), batch_size=64)
model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 9)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=args.epochs * len(train_loader))
best = 0.0
if args.resume:
    model.load_state_dict(torch.load(args.resume))
model, optimizer, train_loader, val_loader, scheduler = mw.prepare(model, optimizer, train_loader, val_loader, scheduler)

for epoch in range(args.epochs):
    model.train()
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    right = total = 0
    val = 0.0
    with torch.no_grad():
        for x, y in val_loader:
            x, y = x.to(device), y.to(device)
            out, y = mw.gather((model(x), y))
            val += cross_entropy(out, y, reduction="sum").item()
            right += (out.argmax(1) == y).sum().item()
            total += len(y)
    accuracy = right / total
    mw.print(f"epoch {epoch}: loss {mw.mean(loss, train_loader):.5f} val {val / total:.5f} acc {accuracy:.4f} lr {scheduler.get_last_lr()[0]:.6f}")
    if accuracy > best and mw.is_first():
        best = accuracy
        torch.save(model.state_dict(), args.out)
