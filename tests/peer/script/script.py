"""script.py COMMAND…: makes a TorchScript module, lets COMMAND (mpirun … script_peer, see script.cpp) train it on two
ranks, trains it itself under torch's DistributedDataParallel over gloo, and compares the losses and what the two have
saved. Ends with 77 where Python has no torch."""

import os
import subprocess
import sys
import tempfile
import warnings

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

warnings.filterwarnings("ignore", message=".*torch.jit.*")

WORLD, STEPS, BATCH, CLASSES = 2, 30, 8, 5
TOLERANCE = 2e-5


def wave(sizes, frequency, phase):
    count = torch.Size(sizes).numel()
    return torch.sin(frequency * torch.arange(count, dtype=torch.float64) + phase).float().view(sizes)


class Net(nn.Module):
    """A convolution, batch-norm, a buffer that forward() replaces, and a branch that tracing would not keep."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        x = self.features(x)
        return self.head(x.flatten(1))


def train(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    net = torch.jit.load(os.path.join(folder, "net.pt"))
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        seed = step * WORLD + rank
        x = wave((BATCH, 1, 6, 6), 0.37, seed)
        y = (torch.arange(BATCH) * 3 + seed) % CLASSES
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    state = net.state_dict()
    for name, tensor in state.items():
        if "running" in name:  # as Session::evaluation() does
            dist.all_reduce(tensor)
            tensor /= WORLD
    if rank == 0:
        torch.save((losses, state), os.path.join(folder, "ddp.pt"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at a regular end, threads of torch sometimes abort the process


def main():
    with tempfile.TemporaryDirectory() as folder:
        in_folder = lambda name: os.path.join(folder, name)
        torch.manual_seed(5)
        torch.jit.script(Net()).save(in_folder("net.pt"))
        subprocess.run([*sys.argv[1:], *map(in_folder, ("net.pt", "trained.pt", "losses.txt"))], check=True)
        with open(in_folder("losses.txt")) as file:
            ours = [float(line) for line in file]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(train, args=(folder,), nprocs=WORLD)
        theirs, state = torch.load(in_folder("ddp.pt"))
        trained = torch.jit.load(in_folder("trained.pt"))

    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    print(f"loss {theirs[0]:.6f} -> {theirs[-1]:.6f} under DDP, {ours[0]:.6f} -> {ours[-1]:.6f} with muster; "
          f"largest relative difference {max(differences):.2e}")
    assert theirs[-1] < theirs[0], "the model learns nothing, so the comparison means nothing"
    assert max(differences) <= TOLERANCE, differences

    mine = trained.state_dict()
    assert list(mine) == list(state), (list(mine), list(state))
    for name, tensor in state.items():
        assert torch.allclose(mine[name], tensor, rtol=1e-4, atol=1e-6), (name, mine[name], tensor)
    assert not trained.training
    net = Net()
    net.load_state_dict(mine)
    x = wave((3, 1, 6, 6), 0.21, 1)
    assert torch.allclose(trained(x), net.eval()(x), rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(trained.train().parameters(), lr=0.1)  # and is trained on
    trained(x).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
