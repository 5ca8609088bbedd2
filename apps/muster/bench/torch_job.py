"""A rank of a job with which `muster bench` compares muster: DistributedDataParallel over gloo, under torchrun, or
under mpirun on several hosts. If MUSTER_BENCH_BACKEND is "muster": over muster, under mpirun.

torch_job.py step MODEL BATCH STEPS   the median time of a step, that of the slowest rank
torch_job.py start                    when the first step was done, by the machine's monotonic clock
torch_job.py recovery                 the same after a rank was killed and the job started again, and when that was
torch_job.py torch_save|dcp|torch_load FOLDER MB TENSORS   the median time of a save until it is durable, by rank 0 or
                                      by all, or of a load into tensors that are there

The models are those of apps/models. Rank 0 prints the result as its last line."""

import json
import logging
import os
import signal
import shutil
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

WARM_UP_STEPS = 5
warnings.filterwarnings("ignore")
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def perceptron(*sizes):
    layers = [nn.Flatten()]
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def convolution(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = convolution(outputs, outputs, 3, 1), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(convolution(inputs, outputs, 1, stride),
                                                                 nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu_()))
        return (y + self.shortcut(x)).relu_()


def resnet18():
    layers = [convolution(1, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        layers += [BasicBlock(inputs, outputs, 1 if inputs == outputs else 2), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS = {
    "mlp": lambda: perceptron(784, 1024, 1024, 10),
    "mlp50": lambda: perceptron(784, 3072, 3072, 256, 10),
    "cnn": convolutions,
    "resnet18": resnet18,
}


class Training:
    """SGD on random images in memory; `parallel` wraps the model."""

    def __init__(self, model, batch_size, parallel):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = parallel(MODELS[model]())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1000 + dist.get_rank())
        self.batches = [(torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))) for _ in range(4)]
        self.steps = 0

    def step(self):
        images, labels = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()


def parallel(model):
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def time_steps(model, batch_size, steps):
    training = Training(model, batch_size, parallel)
    for _ in range(WARM_UP_STEPS):
        training.step()
    seconds = []
    last = time.perf_counter()
    for _ in range(steps):
        training.step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    slowest = torch.tensor(1e3 * statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"step_ms": slowest.item()}


def first_step():
    Training("mlp", 64, parallel).step()
    dist.barrier()
    return {"done_ns": time.monotonic_ns()}


def recover(folder, parallel, newest, save, rank, ranks):
    """Saves every 20 steps; the last rank kills itself after 70. The restart is timed up to its first step."""
    note = os.path.join(folder, "killed")
    training = Training("mlp", 64, parallel)
    saved = newest()
    if saved:
        state = torch.load(saved, mmap=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.steps = state["steps"]
    while True:
        training.step()
        if saved:
            break
        if training.steps % 20 == 0:
            save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(),
                  "steps": training.steps})
        if training.steps == 70 and rank == ranks - 1:
            with open(note, "w") as file:
                file.write(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    done = time.monotonic_ns()
    with open(note) as file:
        return {"done_ns": done, "killed_ns": int(file.read())}


def recover_by_files():
    folder = os.environ["MUSTER_BENCH_FOLDER"]
    path = os.path.join(folder, "torch_state.pt")

    def save(state):
        if dist.get_rank() == 0:
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)

    result = recover(folder, parallel, lambda: path if os.path.exists(path) else None, save, dist.get_rank(),
                     dist.get_world_size())
    if dist.get_rank() == 0:
        os.remove(path)
    return result


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def torch_save(state, path):
    if dist.get_rank() == 0:
        with open(os.path.join(path, "state.pt"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync(path)


def dcp_save(state, path):
    import torch.distributed.checkpoint as dcp  # only here, since importing it takes a while

    dcp.save(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        sync(path)


def torch_load(state, path):
    for name, values in torch.load(os.path.join(path, "state.pt"), weights_only=True, mmap=True).items():
        state[name].copy_(values)


def time_checkpoints(method, folder, megabytes, tensors, times=3):
    """Times saves or loads from a barrier on. The slowest rank counts; the first time is a warm-up and is dropped."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    state = {f"t{i:03}": torch.rand(megabytes * 1_000_000 // 4 // tensors) for i in range(tensors)}
    target = {name: torch.zeros_like(values) for name, values in state.items()}
    path = os.path.join(folder, "checkpoint")
    seconds = []
    for _ in range(times + 1):
        if dist.get_rank() == 0 and not (method == "torch_load" and seconds):
            shutil.rmtree(path, ignore_errors=True)
            os.mkdir(path)
            if method == "torch_load":
                torch_save(state, path)
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        if method == "torch_load":
            torch_load(target, path)
        else:
            {"torch_save": torch_save, "dcp": dcp_save}[method](state, path)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(taken.item())
        if method == "torch_load":
            assert all(target[name].equal(values) for name, values in state.items())
            for values in target.values():
                values.zero_()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return {"ms": 1e3 * statistics.median(seconds[1:])}


def main():
    if os.environ.get("MUSTER_BENCH_BACKEND") == "muster":
        import muster_torch  # noqa: F401

        dist.init_process_group("muster", init_method="muster://")
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        dist.init_process_group("gloo", rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
                                world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    else:
        dist.init_process_group("gloo")
    if sys.argv[1] == "start":
        result = first_step()
    elif sys.argv[1] == "recovery":
        result = recover_by_files()
    elif sys.argv[1] in ("torch_save", "dcp", "torch_load"):
        result = time_checkpoints(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        result = time_steps(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    if dist.get_backend() == "gloo":
        os._exit(0)  # torch 2.13 aborts now and then while it takes its gloo group down


if __name__ == "__main__":
    main()
