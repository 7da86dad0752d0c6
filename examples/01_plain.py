"""Ordinary training on one device: scikit-learn's handwritten digits, a small network, a DataLoader, a validation loop.

    python examples/01_plain.py

`02_prepare.py` is this script on every device there is; it prints the same losses.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def loss_fn(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
x, x_held, y, y_held = train_test_split(images, labels, train_size=1536, random_state=0)
train, held_out = TensorDataset(x, y), TensorDataset(x_held, y_held)
# A generator of its own makes the order of the samples repeatable, here and in 02.
loader = DataLoader(train, batch_size=64, sampler=RandomSampler(train, generator=torch.Generator().manual_seed(0)))
validation = DataLoader(held_out, batch_size=64)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for epoch in range(3):
    for batch in loader:
        loss = loss_fn(model, [part.to(device) for part in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        total = sum(loss_fn(model, [part.to(device) for part in batch]) * len(batch[0]) for batch in validation)
    model.train()
    print(f"epoch {epoch + 1}: loss {loss:.5f}, validation {total / len(held_out):.5f}")
