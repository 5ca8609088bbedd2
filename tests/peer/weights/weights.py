"""What muster exports is what torch and safetensors read, and the other way round.  weights.py PROGRAM MUSTER"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
try:
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"without safetensors, by torch alone: {error}")
    load_file = None

PROGRAM, MUSTER = sys.argv[1:]


def run(*words, code=0):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == code, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done


def same(have, want):
    assert list(sorted(have)) == list(sorted(want)), (sorted(have), sorted(want))
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, f"{name}: {have[name].dtype}, not {tensor.dtype}"
        assert have[name].shape == tensor.shape, f"{name}: {have[name].shape}, not {tensor.shape}"
        assert torch.equal(have[name], tensor), name


def exported(folder, checkpoint):
    """A checkpoint's entries in both formats are the same, and the model's go into its Python twin."""
    states = {}
    for entry in "model", "kinds":
        for form in ["torch"] + (["safetensors"] if load_file else []):
            out = folder / f"{entry}.{form}"
            words = [MUSTER, "checkpoint", "export", checkpoint, "--to", form, out, "--entry", entry]
            said = json.loads(run(*words, "--json").stdout)
            state = torch.load(out, weights_only=True) if form == "torch" else load_file(out)
            assert said["tensors"] == len(state) and said["bytes"] == os.path.getsize(out), said
            same(state, states.setdefault(entry, state))
            assert "there already" in run(*words, code=64).stderr
            run(*words, "--force")
    twin = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    twin.load_state_dict(states["model"])
    assert twin[1].num_batches_tracked == 1

    numbers = torch.arange(6.0) - 2.5
    same(states["kinds"], {
        "bfloat16": numbers.to(torch.bfloat16), "half": numbers.half(), "mask": numbers > 0,
        "empty": torch.empty(0, 3), "complex": torch.complex(numbers, -numbers), "turned": numbers.view(2, 3).t(),
        "byte": torch.arange(250, 256, dtype=torch.uint8)})
    unnamed = folder / "unnamed.pt"
    run(MUSTER, "checkpoint", "export", checkpoint, "--to", "torch", unnamed)
    same(torch.load(unnamed, weights_only=True), states["model"])
    assert "kinds, model, optimizer" in run(
        MUSTER, "checkpoint", "export", checkpoint, "--to", "torch", folder / "x", "--entry", "none", code=64).stderr
    assert not (folder / "x").exists()


def imported(folder):
    """What Python has saved, muster reads."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    flat = torch.arange(24.0)
    state = {**net.state_dict(), "part": flat[3:9].view(2, 3), "turned": flat.view(4, 6).t(), "truth": flat > 3,
             "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
    contents = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": float("inf"),
                "best": [0.5, None, True, "a"], "weight": torch.nn.Parameter(flat), "seed": 2**62}
    theirs, copy = folder / "theirs.pt", folder / "copy.pt"
    torch.save(state, theirs)
    run(PROGRAM, "copy", theirs, copy)
    same(torch.load(copy, weights_only=True), state)
    if load_file:
        run(PROGRAM, "copy", theirs, folder / "copy.safetensors")
        same(load_file(folder / "copy.safetensors"), state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "theirs.safetensors",
                  metadata={"by": "python"})
        os.remove(copy)
        assert json.loads(run(PROGRAM, "copy", folder / "theirs.safetensors", copy).stdout) == {"by": "python"}
        same(torch.load(copy, weights_only=True), state)

    for kind in torch.complex64, torch.complex128:
        z = torch.complex(flat, -flat).to(kind).view(4, 6)
        for state in ({"conj": z.conj(), "mH": z.mH, "part": z[1:].conj()[:, 2:]},
                      {"imag": z.conj().imag, "neg": torch._neg_view(z.real), "both": torch._neg_view(z.real)[2:]}):
            torch.save(state, theirs)
            os.remove(copy)
            run(PROGRAM, "copy", theirs, copy)
            same(torch.load(copy, weights_only=True), state)

    torch.save(contents, theirs)
    os.remove(copy)
    values = json.loads(run(PROGRAM, "copy", theirs, copy).stdout)
    assert values["epoch"] == 3 and values["loss"] == "inf" and values["best"] == contents["best"], values
    assert values["optimizer"]["param_groups"][0]["lr"] == 1e-3 and values["seed"] == 2**62, values
    same(torch.load(copy, weights_only=True), {
        "weight": flat, **{f"net/{name}": tensor for name, tensor in net.state_dict().items()},
        **{f"optimizer/state/{n}/{name}": tensor for n, parameter in optimizer.state_dict()["state"].items()
           for name, tensor in parameter.items()}})

    for kind in "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2":
        newer = {"a": flat.to(getattr(torch, kind))[2:9]}
        torch.save(newer, theirs)
        assert "Write it as safetensors" in run(PROGRAM, "copy", theirs, folder / "none.pt", code=65).stderr
        if load_file:
            run(PROGRAM, "copy", theirs, folder / f"{kind}.safetensors")
            have = load_file(folder / f"{kind}.safetensors")["a"]
            assert have.dtype == newer["a"].dtype and torch.equal(have.float(), newer["a"].float()), have

    class Trap:
        def __reduce__(self):
            return os.system, (f"touch {folder}/sprung",)

    for trap in Trap(), {"a": flat, "b": Trap()}, net:
        torch.save(trap, theirs)
        assert "call" in run(PROGRAM, "copy", theirs, folder / "none.pt", code=65).stderr
    torch.save(state, theirs, _use_new_zipfile_serialization=False)
    assert "newer" in run(PROGRAM, "copy", theirs, folder / "none.pt", code=65).stderr
    torch.jit.script(net).save(theirs)
    assert "TorchScript" in run(PROGRAM, "copy", theirs, folder / "none.pt", code=65).stderr
    assert not (folder / "sprung").exists() and not (folder / "none.pt").exists()


with tempfile.TemporaryDirectory() as name:
    run(PROGRAM, "make", pathlib.Path(name) / "checkpoint")
    exported(pathlib.Path(name), pathlib.Path(name) / "checkpoint")
    imported(pathlib.Path(name))
print("torch" + (" and safetensors read" if load_file else " reads") + " what muster writes, and muster what they write")
