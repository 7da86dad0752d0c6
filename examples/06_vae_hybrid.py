"""Data × tensor parallelism written by hand, for the same variational autoencoder as in 05.

    python examples/06_vae_hybrid.py                                  one process: every group has one rank
    torchrun --nproc-per-node 2 examples/06_vae_hybrid.py             tp=2
    meshwright train examples/06_vae_hybrid.py --nproc 4              dp=2 × tp=2; others: -- --mesh tp=4
    mpirun -n 2 python examples/06_vae_hybrid.py --infer 4            over MPI, and inference on the same pieces

Both halves of the model are two linear layers. The first is cut by its outputs (a column of neurons a rank), the second by its inputs
(a row), so that what lies between them never travels: one all-reduce completes the output in forward, one completes the gradient of the input in
backward. Each rank holds, multiplies and differentiates its pieces alone. The losses are those of one process on the same global batches.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import linear

import meshwright as mw
from meshwright import zoo
from vae_common import Latency, infer


class Enter(torch.autograd.Function):
    """Forward: nothing. Backward: every rank has the gradient through its piece; the whole gradient is their sum."""

    @staticmethod
    def forward(ctx, x, comm, name):
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        ctx.comm.all_reduce(gradient, ctx.name).wait()
        return gradient, None, None


class Complete(torch.autograd.Function):
    """Forward: every rank has a part of the sum; the whole is their sum. Backward: nothing."""

    @staticmethod
    def forward(ctx, x, comm, name):
        x = x.clone()
        comm.all_reduce(x, name).wait()
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class Column(nn.Module):
    """This rank's outputs of a linear layer."""

    def __init__(self, whole, tp, name):
        super().__init__()
        self.tp, self.name = tp, name
        self.weight = nn.Parameter(whole.weight.detach().chunk(tp.size, 0)[tp.rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(tp.size)[tp.rank].clone())

    def forward(self, x):
        if x.requires_grad:
            x = Enter.apply(x, self.tp, f"tp_input/{self.name}")
        return linear(x, self.weight, self.bias)


class Row(nn.Module):
    """This rank's inputs of a linear layer. Its bias is whole, and added once, after the sum."""

    def __init__(self, whole, tp, name):
        super().__init__()
        self.tp, self.name = tp, name
        self.weight = nn.Parameter(whole.weight.detach().chunk(tp.size, 1)[tp.rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return Complete.apply(linear(x, self.weight), self.tp, f"tp_output/{self.name}") + self.bias


def cut(model, tp):
    """In place; what was cut is let go."""
    for half, first, second in (("encoder", 1, 3), ("decoder", 0, 2)):
        layers = model.get_submodule(half)
        layers[first] = Column(layers[first], tp, f"{half}.{first}")
        layers[second] = Row(layers[second], tp, f"{half}.{second}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=*,tp=2", help="* takes the ranks that are left")
    parser.add_argument("--backend", choices=["gloo", "mpi", "nccl"], help="nccl on GPUs, mpi under mpirun, else gloo, unless you say")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--infer", type=int, default=0, metavar="N", help="then reconstruct N batches that were not trained on")
    parser.add_argument("--latency", metavar="FILE", help="write a CSV of how long each step took, on the slowest rank")
    args = parser.parse_args()

    groups = mw.connect(args.mesh, backend=args.backend)
    data, tp = groups.data, groups.tp
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend != "gloo" else "cpu")
    latency = Latency(groups.world, device)

    torch.manual_seed(0)  # the same values on every rank
    task = zoo.load("vae")
    model = task.build().to(device, getattr(torch, args.dtype))
    whole = sum(p.numel() for p in model.parameters())
    cut(model, tp)
    held = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, momentum=0.9)
    images = torch.tensor(load_digits().images).view(-1, 1, 8, 8) / 16

    def step(number):
        batch = images[64 * number % 1728 :][:64]  # the ranks of one tensor-parallel group take the same share of it
        first, end = (len(batch) * rank // data.size for rank in (data.rank, data.rank + 1))
        model.noise.set_key(0, number, first)
        optimizer.zero_grad()
        loss = task.loss(model, {"image": batch[first:end].to(device)}) * ((end - first) / len(batch))
        loss.backward()
        # Replicas hold the same pieces, so pieces meet over the data group alone. A Row's bias has the same gradient on all of tp.
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        data.all_reduce(flat, "grads").wait()
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))
        optimizer.step()
        mean = loss.detach()
        data.all_reduce(mean, "loss").wait()
        if groups.rank == 0:
            print(f"step {number + 1}: loss {mean:.10g}")

    for number in range(args.steps):
        with latency.of("train", number):
            step(number)

    if groups.rank == 0:
        print(f"dp={data.size} × tp={tp.size}: each rank holds {held:,} of {whole:,} parameters")

    infer(model, images, args.infer, groups, latency)
    if args.latency:
        latency.write(args.latency)


main()
