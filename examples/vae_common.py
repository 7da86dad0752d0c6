"""What both VAE examples share: inference, and how long steps take on the slowest rank, since that is what everybody waits for."""

import csv
import time
from contextlib import contextmanager

import torch


class Latency:
    """Times parts of a script. On GPUs each part is an NVTX range too, which Nsight Systems shows."""

    def __init__(self, world, device):
        self.world, self.device, self.rows = world, device, []

    @contextmanager
    def of(self, phase, number):
        if self.device.type == "cuda":
            torch.cuda.nvtx.range_push(f"{phase}/{number}")
        begun = self._now()
        yield
        self.rows.append((phase, number, self._now() - begun))
        if self.device.type == "cuda":
            torch.cuda.nvtx.range_pop()

    def _now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def write(self, path):
        """A line for each part that was timed, and one for all of a phase together. Every rank calls it; the first one writes."""
        slowest = torch.tensor([seconds for _, _, seconds in self.rows], dtype=torch.float64, device=self.device)
        self.world.all_reduce(slowest, "latency", "max").wait()
        if self.world.rank > 0:
            return
        rows = [(phase, number, seconds) for (phase, number, _), seconds in zip(self.rows, slowest.tolist(), strict=True)]
        with open(path, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("phase", "step", "seconds"))
            table.writerows(rows)
            for phase in dict.fromkeys(phase for phase, _, _ in rows):
                table.writerow((phase, "total", sum(seconds for p, _, seconds in rows if p == phase)))


def infer(model, images, batches, groups, latency):
    """Reconstruct batches from the end of the images, each rank its share of them; the first one prints how far off they are."""
    data, like = groups.data, next(model.parameters())
    model.eval()
    for number in range(batches):
        with latency.of("infer", number), torch.no_grad():
            batch = images[-64 * (number + 1) :][:64]
            first, end = (len(batch) * rank // data.size for rank in (data.rank, data.rank + 1))
            mine = batch[first:end].to(like)
            error = (model(mine)[0].sigmoid() - mine).square().sum() / batch.numel()
            data.all_reduce(error, "error").wait()
        if groups.rank == 0:
            print(f"batch {number + 1}: mean squared error {error:.10g}")
