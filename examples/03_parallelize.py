"""Your own loop, under a plan of your own: `parallelize` changes model and optimizer in place, then everything is torch's own verbs.

    meshwright train examples/03_parallelize.py                on all devices
    torchrun --nproc-per-node 2 examples/03_parallelize.py     or under any launcher that sets WORLD_SIZE and LOCAL_RANK

Here the plan is ZeRO-2: gradients and the optimizer's state are cut over the ranks. In an own loop each rank feeds its own slice
of the global batch, and gradients are averaged over ranks; slices of one size make that the mean over the global batch. So the
losses are those of `01_plain.py` to 1e-4, on one rank and on several.
"""

import os

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import meshwright as mw
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy

world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
x, x_held, y, y_held = train_test_split(images, labels, train_size=1536, random_state=0)
train = TensorDataset(x, y)
loader = DataLoader(train, batch_size=64, sampler=RandomSampler(train, generator=torch.Generator().manual_seed(0)))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

plan = mw.Plan("digits", global_batch=64, mesh=Mesh(shard=world), memory=MemoryPolicy(zero=2), device=device.type)
applied = mw.parallelize(model, optimizer, plan)
rank = applied.groups.rank
first, count = plan.sample_range(rank)
mine = slice(first, first + count)  # of every global batch; the order of samples is the same on every rank

for epoch in range(3):
    for x, y in loader:
        loss = cross_entropy(model(x[mine].to(device)), y[mine].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    loss = loss.detach()
    applied.groups.world.all_reduce(loss, "loss", "mean").wait()  # of this rank's slice until here
    with torch.no_grad():  # small enough for every rank to look at all of it
        held_out = cross_entropy(model(x_held.to(device)), y_held.to(device))
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss:.5f}, validation {held_out:.5f}")
