"""A job under Ray Train, as `muster bench start` compares it: when the first step was done, by the machine's monotonic
clock, as the last line.

ray_job.py RANKS FOLDER"""

import json
import os
import sys
import tempfile
import time

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def worker(config):
    import torch.distributed as dist

    sys.path.insert(0, config["scripts"])
    import torch_job

    torch_job.Training("mlp", 64, prepare_model).step()
    dist.barrier()
    if dist.get_rank() == 0:
        with open(config["result"], "w") as file:
            json.dump({"done_ns": time.monotonic_ns()}, file)


def main():
    ranks, folder = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory(dir=folder) as storage:
        result = os.path.join(storage, "result.json")
        ray.init(include_dashboard=False, num_cpus=max(2, ranks))
        TorchTrainer(
            worker,
            train_loop_config={"scripts": os.path.dirname(os.path.abspath(__file__)), "result": result},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=False),
            run_config=RunConfig(name="start", storage_path=storage),
        ).fit()
        ray.shutdown()
        with open(result) as file:
            print(file.read(), flush=True)


if __name__ == "__main__":
    main()
