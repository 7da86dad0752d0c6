"""A model of your own for the command line: a function that returns a `Task`, named as FILE:FUNCTION wherever a verb takes a model.

    meshwright plan examples/04_own_model.py:task
    meshwright train examples/04_own_model.py:task --steps 20

No loop, no data loading, no launcher: Meshwright profiles the model, plans, trains on the named data set, and writes a report.
"""

from torch import nn
from torch.nn.functional import cross_entropy

import meshwright as mw


class Residual(nn.Module):
    """Repeated blocks are what plans cut a model by."""

    def __init__(self, width):
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.inside(x)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), *[Residual(256) for _ in range(4)], nn.Linear(256, 10))


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def task():
    return mw.Task(
        name="digits-mlp",
        build=build,
        loss=loss,
        fields={"image": mw.Field((1, 8, 8)), "label": mw.Field((), "int64", high=10)},  # of one sample
        data="digits",  # or "synthetic", which makes up samples for any fields
        global_batch=64,
        learning_rate=1e-3,
    )
