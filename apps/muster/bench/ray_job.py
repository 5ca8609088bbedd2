"""A job under Ray Train, as `muster bench` compares it. The last line says, by the machine's monotonic clock,

ray_job.py start RANKS FOLDER      when the first step was done
ray_job.py recovery RANKS FOLDER   the same after a rank was killed and the job started again, and when that was"""

import json
import os
import sys
import tempfile
import time

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def worker(config):
    import torch.distributed as dist

    sys.path.insert(0, config["scripts"])
    import torch
    import torch_job

    folder = os.path.dirname(config["result"])

    def newest():
        checkpoint = ray.train.get_checkpoint()
        return os.path.join(checkpoint.path, "state.pt") if checkpoint else None

    def save(state):
        if dist.get_rank() != 0:
            return ray.train.report({"steps": state["steps"]})
        with tempfile.TemporaryDirectory(dir=folder) as made:
            torch.save(state, os.path.join(made, "state.pt"))
            ray.train.report({"steps": state["steps"]}, checkpoint=Checkpoint.from_directory(made))

    if config["job"] == "recovery":
        result = torch_job.recover(folder, prepare_model, newest, save, dist.get_rank(), dist.get_world_size())
    else:
        torch_job.Training("mlp", 64, prepare_model).step()
        dist.barrier()
        result = {"done_ns": time.monotonic_ns()}
    if dist.get_rank() == 0:
        with open(config["result"], "w") as file:
            json.dump(result, file)


def main():
    job, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory(dir=folder) as storage:
        result = os.path.join(storage, "result.json")
        ray.init(include_dashboard=False, num_cpus=max(2, ranks))
        TorchTrainer(
            worker,
            train_loop_config={"job": job, "scripts": os.path.dirname(os.path.abspath(__file__)), "result": result},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=False),
            run_config=RunConfig(name=job, storage_path=storage, failure_config=FailureConfig(max_failures=3)),
        ).fit()
        ray.shutdown()
        with open(result) as file:
            print(file.read(), flush=True)


if __name__ == "__main__":
    main()
