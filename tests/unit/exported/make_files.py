"""Writes the exported programs of exported_test.cpp, packed: python make_files.py [FOLDER]"""
import gzip
import io
import pathlib
import sys
import warnings

import torch
from torch import nn
from torch.export import Dim, export, save
from torch.nn import functional as F

warnings.filterwarnings("ignore")
folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)


def pack(name, program):
    buffer = io.BytesIO()
    save(program, buffer)
    (folder / f"{name}.pt2.gz").write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def write(name, model_class, inputs, named=None, shapes=None, mode=True):
    torch.manual_seed(0)  # the same weights in each file
    pack(name, export(model_class().train(mode), inputs, named, dynamic_shapes=shapes))


class Modes(nn.Module):
    """Tied weights, a buffer that is not in the state, no_grad, autocast and what depends on the mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first[0].weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            mean = x.mean()
        h = F.dropout(self.first(x) * self.scale, 0.25, self.training)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = h @ h.t()
        return self.last(h) + mean + y.float().sum()


class Norms(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Tanh())


class Signature(nn.Module):
    """A signature of dicts and tuples, sizes that are computed, and a number."""

    def forward(self, pair, table, *, bias, flag=None):
        a, b = pair
        rows = a.shape[0]
        sizes = a.new_zeros(rows // 2 + 1, max(rows * 3 - 1, 4))
        return {"sum": a + b + table["k"] * bias, "more": (sizes, [a * 2, rows / 2])}


class Random(nn.Module):
    def forward(self, x):
        return x + torch.bernoulli(x)


class Depends(nn.Module):
    def forward(self, x):
        return x[x > 0] * 2


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total.add_(x.detach().sum(0))
        return x * self.total


x = torch.rand(3, 4)
batch = Dim("batch", min=2, max=64)
write("modes", Modes, (x,), shapes={"x": {0: batch}})
write("modes_eval", Modes, (x,), shapes={"x": {0: batch}}, mode=False)
write("norms", Norms, (torch.rand(3, 3),), shapes={"input": {0: Dim("batch", min=1)}})
write("signature", Signature, ((x, x + 1), {"k": x + 2}), {"bias": x + 3, "flag": None},
      {"pair": ({0: batch}, {0: batch}), "table": {"k": {0: batch}}, "bias": {0: batch}, "flag": None})
write("random", Random, (x,))
write("depends", Depends, (x,))
write("branches", Branches, (x,))
pack("counter", export(Counter().train(), (x,)).run_decompositions({}))
