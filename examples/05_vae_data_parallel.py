"""Data parallelism written by hand, in three ways, for a variational autoencoder: `connect` gives the groups, the rest is yours.

    python examples/05_vae_data_parallel.py                                          one process: every group has one rank
    meshwright train examples/05_vae_data_parallel.py -- --mode per_tensor           one all-reduce a parameter, after backward
    meshwright train examples/05_vae_data_parallel.py -- --mode bucketed             few large ones, after backward
    torchrun --nproc-per-node 2 examples/05_vae_data_parallel.py --mode overlapped   the same, sent while backward goes on
    mpirun -n 2 python examples/05_vae_data_parallel.py --infer 4 --latency t.csv    over MPI; inference too, and how long each step took

All print the same losses: those of one process on the same global batches. Every collective carries a name: `--trace FILE` profiles
the last step, and shows each under its name at https://ui.perfetto.dev (on GPUs, Nsight Systems does too). The last line is what was counted.
"""

import argparse

import torch
from sklearn.datasets import load_digits

import meshwright as mw
from meshwright import zoo
from vae_common import Latency, infer


class PerTensor:
    """The simplest: gradients travel one by one when all of them are there."""

    def __init__(self, model, data):
        self.model, self.data = model, data

    def finish(self):
        works = [self.data.all_reduce(p.grad, f"grad/{name}") for name, p in self.model.named_parameters()]
        for work in works:
            work.wait()

    def clear(self):
        self.model.zero_grad()


class Bucketed:
    """Gradients are views of flat buffers, so that a whole buffer travels in one call and nothing is copied."""

    def __init__(self, model, data, limit):
        self.data, self.works = data, []
        self.buckets = [[]]  # last layers first: about the order in which backward reaches them
        for p in reversed(list(model.parameters())):
            if self.buckets[-1] and sum(q.numel() * q.element_size() for q in [*self.buckets[-1], p]) > limit:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.flat = [b[0].new_zeros(sum(p.numel() for p in b)) for b in self.buckets]
        for flat, bucket in zip(self.flat, self.buckets, strict=True):
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p)  # autograd adds in place to a gradient that is there already

    def send(self, index):
        self.works.append(self.data.all_reduce(self.flat[index], f"grads/bucket{index}"))

    def finish(self):
        for index in range(len(self.buckets)):
            self.send(index)
        self.wait()

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def clear(self):
        for flat in self.flat:
            flat.zero_()


class Overlapped(Bucketed):
    """A bucket leaves as soon as backward has filled it. The graph is the same on every rank, and so is the order of the calls."""

    def __init__(self, model, data, limit):
        super().__init__(model, data, limit)
        self.missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, index=index: self.arrived(index))

    def arrived(self, index):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            self.send(index)
            self.missing[index] = len(self.buckets[index])

    def finish(self):
        self.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["per_tensor", "bucketed", "overlapped"], default="overlapped")
    parser.add_argument("--backend", choices=["gloo", "mpi", "nccl"], help="nccl on GPUs, mpi under mpirun, else gloo, unless you say")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--bucket-kb", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--infer", type=int, default=0, metavar="N", help="then reconstruct N batches that were not trained on")
    parser.add_argument("--latency", metavar="FILE", help="write a CSV of how long each step took, on the slowest rank")
    parser.add_argument("--trace", help="write a timeline of the last step here")
    args = parser.parse_args()

    groups = mw.connect(backend=args.backend)  # no mesh: all ranks are data parallel
    data = groups.data
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend != "gloo" else "cpu")
    latency = Latency(groups.world, device)

    torch.manual_seed(0)  # the same values on every rank
    task = zoo.load("vae")  # its loss is the negative evidence lower bound
    model = task.build().to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, momentum=0.9)
    images = torch.tensor(load_digits().images).view(-1, 1, 8, 8) / 16
    limit = args.bucket_kb * 1024
    sync = PerTensor(model, data) if args.mode == "per_tensor" else (Bucketed if args.mode == "bucketed" else Overlapped)(model, data, limit)

    def step(number):
        batch = images[64 * number % 1728 :][:64]  # the global batch, of which this rank takes its share
        first, end = (len(batch) * rank // data.size for rank in (data.rank, data.rank + 1))
        model.noise.set_key(0, number, first)  # the VAE's noise belongs to the sample, wherever it is computed
        sync.clear()
        loss = task.loss(model, {"image": batch[first:end].to(device)}) * ((end - first) / len(batch))
        loss.backward()
        sync.finish()
        optimizer.step()
        mean = loss.detach()
        data.all_reduce(mean, "loss").wait()
        if groups.rank == 0:
            print(f"step {number + 1}: loss {mean:.10g}")

    for number in range(args.steps - 1):
        with latency.of("train", number):
            step(number)
    groups.ledger.drain()  # count one step only
    with latency.of("train", args.steps - 1):
        if args.trace and groups.rank == 0:
            with torch.profiler.profile() as profiler:
                step(args.steps - 1)
            profiler.export_chrome_trace(args.trace)
        else:
            step(args.steps - 1)
    if groups.rank == 0:
        lines = groups.ledger.drain()
        print(f"{args.mode} on {data.size}: {sum(line.calls for line in lines)} calls, {sum(line.bytes for line in lines):,} bytes a step")

    infer(model, images, args.infer, groups, latency)
    if args.latency:
        latency.write(args.latency)


main()
