"""`01_plain.py` on every device there is: `prepare` plans, `run.loader` and `run.step` take the place of the loop's inside.

    python examples/02_prepare.py              on one device
    meshwright train examples/02_prepare.py    on all of them

The batch of 64 is the global batch: each rank reads and trains its share of the same 64 samples. So the losses are those of
`01_plain.py` to 1e-4, step by step, on one rank and on several.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import meshwright as mw


def loss_fn(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
x, x_held, y, y_held = train_test_split(images, labels, train_size=1536, random_state=0)
train, held_out = TensorDataset(x, y), TensorDataset(x_held, y_held)
# A generator of its own makes the order of the samples repeatable, here and in 01.
loader = DataLoader(train, batch_size=64, sampler=RandomSampler(train, generator=torch.Generator().manual_seed(0)))
validation = DataLoader(held_out, batch_size=64)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
run = mw.prepare(model, optimizer, loader)

for epoch in range(3):
    for batch in run.loader:
        loss = run.step(batch, loss_fn)

    mean = run.validate(validation, loss_fn)
    if run.is_first:
        print(f"epoch {epoch + 1}: loss {loss:.5f}, validation {mean:.5f}")
