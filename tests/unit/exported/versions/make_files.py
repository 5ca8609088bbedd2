"""make_files.py FOLDER: writes torch-VERSION.pt2, a small exported model, and torch-VERSION.pt, what it computes in
Python. exported_files_test.cpp reads them. Run it with each version of torch whose files are to be kept.
line.pt2 is the model of tests/mpi/exported_test.cpp."""

import pathlib
import sys

import torch
from torch import nn

BATCH = torch.export.Dim("batch", min=2, max=64)


class Net(nn.Module):
    """A bit of all that a file has: parameters, tied ones, buffers of both kinds, constants, modes, a part without
    gradients, and sizes that are computed."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.encoder, self.decoder = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(1, 2, 4), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        y = torch.relu(self.norm(self.conv(x))).transpose(1, 2) * self.scale
        with torch.no_grad():
            mean = y.mean((1, 2), keepdim=True)
        y = self.encoder(y - mean) * torch.tensor([1.0, -1.0, 0.5])
        return self.drop(torch.tanh(y @ self.decoder.weight).reshape(x.size(0) * x.size(2), 4))


folder, version = pathlib.Path(sys.argv[1]), ".".join(torch.__version__.split(".")[:2])
torch.set_num_threads(1)
torch.manual_seed(1)
net = Net().train()
x = torch.randn(5, 2, 6)
torch.export.save(torch.export.export(net, (x[:4],), dynamic_shapes=({0: BATCH},)), folder / f"torch-{version}.pt2")
torch.manual_seed(2)
training = net(x)
(training ** 2).sum().backward()
gradients = {f"gradients.{name}": parameter.grad for name, parameter in net.named_parameters()}
buffers = {f"buffers.{name}": buffer.clone() for name, buffer in net.state_dict().items() if "scale" not in name}
net.eval()
torch.save({"x": x, "training": training.detach(), "evaluation": net(x).detach(), **gradients,
            **{name: buffer for name, buffer in buffers.items() if "norm.r" in name or "calls" in name}},
           folder / f"torch-{version}.pt")

line = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)).train()
torch.export.save(torch.export.export(line, (torch.zeros(4, 1),), dynamic_shapes=({0: torch.export.Dim("batch")},)),
                  folder / "line.pt2")
