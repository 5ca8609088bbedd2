# Ray Train 2.
#
#   python before.py STORAGE
import os
import sys
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_loop_per_worker(config):
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    net = prepare_model(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])

    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        # prepare_model() has wrapped the model; the checkpoint has the state of the model inside.
        net.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    x = torch.linspace(-3, 3, 1001).unsqueeze(1)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, torch.sin(x)), batch_size=config["batch_size"], shuffle=True))
    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        losses = torch.zeros(2)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(batch), target)
            loss.backward()
            optimizer.step()
            losses += torch.tensor([loss.item() * len(batch), len(batch)])
        # Ray keeps only the first worker's metrics, so the mean over the workers is computed here.
        torch.distributed.all_reduce(losses)
        metrics = {"epoch": epoch, "loss": (losses[0] / losses[1]).item()}
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": net.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, os.path.join(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


trainer = TorchTrainer(
    train_loop_per_worker,
    train_loop_config={"lr": 0.01, "batch_size": 32, "epochs": 20},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="sine", storage_path=os.path.abspath(sys.argv[1])),
)
print("loss", trainer.fit().metrics["loss"])
