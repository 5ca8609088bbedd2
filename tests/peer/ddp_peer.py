"""ddp_peer.py COMMAND…: trains a small model under torch's DistributedDataParallel over gloo, two ranks, and compares
each step's loss with what COMMAND, the same training with muster (ddp_peer.cpp), writes into the file named by its last
argument. Ends with 77 where Python has no torch."""

import os
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD, STEPS, BATCH, CLASSES = 2, 50, 16, 10
TOLERANCE = 1e-5


def wave(sizes, scale, frequency, phase):
    count = torch.Size(sizes).numel()
    return (scale * torch.sin(frequency * torch.arange(count, dtype=torch.float64) + phase)).float().view(sizes)


def train(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32), nn.Tanh(),
                        nn.Linear(32, CLASSES))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(wave(p.shape, 0.3, 0.91, rank + k + 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        seed = step * WORLD + rank
        x = wave((BATCH, 1, 8, 8), 1, 0.37, seed)
        y = (torch.arange(BATCH) * 7 + seed) % CLASSES
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    if rank == 0:
        torch.save(losses, os.path.join(folder, "ddp.pt"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at a regular end, threads of torch sometimes abort the process


def main():
    with tempfile.TemporaryDirectory() as folder:
        written = os.path.join(folder, "losses.txt")
        subprocess.run([*sys.argv[1:], written], check=True)
        with open(written) as file:
            ours = [float(line) for line in file]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(train, args=(folder,), nprocs=WORLD)
        theirs = torch.load(os.path.join(folder, "ddp.pt"))
    assert len(ours) == len(theirs) == STEPS, (len(ours), len(theirs))
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs)]
    print(f"loss {theirs[0]:.6f} -> {theirs[-1]:.6f} under DDP, {ours[0]:.6f} -> {ours[-1]:.6f} with muster; "
          f"largest relative difference {max(differences):.2e}")
    assert theirs[-1] < theirs[0], "the model learns nothing, so the comparison means nothing"
    assert max(differences) <= TOLERANCE, differences


if __name__ == "__main__":
    main()
