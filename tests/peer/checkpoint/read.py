"""Any reader of HDF5 opens state.h5: h5py sees the values that were saved.  read.py WRITER"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.argv[1], folder], check=True)
    manifest = json.loads(pathlib.Path(folder, "manifest.json").read_text())
    file = h5py.File(pathlib.Path(folder, "state.h5"), "r")
    numbers = np.arange(6) - 2.5
    net = file["model"]
    expected = {
        "model/layer1.bias": -np.arange(6.0),
        "model/layer1.count": np.int64(7),
        "model/layer1.empty": np.empty((0, 3), np.float32),
        "bfloat16": numbers.astype(np.float32),
        "half": numbers.astype(np.float16),
        "mask": numbers > 0,
        "complex": (numbers - 1j * numbers).astype(np.complex64),
        "byte": np.arange(250, 256, dtype=np.uint8),
        "large": np.arange(300_000.0),
        "optimizer/model/layer1.tied/exp_avg": np.full((4, 6), 0.05, np.float32),
    }
    for name, values in expected.items():
        stored = file[name][()]
        assert stored.dtype == values.dtype, f"{name}: {stored.dtype} in place of {values.dtype}"
        assert stored.shape == values.shape, f"{name}: {stored.shape} in place of {values.shape}"
        assert np.allclose(stored, values, rtol=1e-7), f"{name}: {stored}"
    assert net["layer1.tied"] == net["layer1.weight"], "two names of one dataset"
    assert np.array_equal(net["layer1.turned"].shape, (6, 4))

    # The manifest tells the same, and where the bytes lie.
    names = set()
    file.visititems(lambda name, item: names.add(name) if isinstance(item, h5py.Dataset) else None)
    tied = {tensor["name"] for tensor in manifest["tensors"] if "same_as" in tensor}
    assert tied == {"model/layer1.weight"}, tied  # visititems shows each dataset once
    assert names | tied >= {tensor["name"] for tensor in manifest["tensors"]} >= names
    for tensor in manifest["tensors"]:
        dataset = file[tensor["name"]]
        assert list(dataset.shape) == tensor["shape"], tensor
        if tensor.get("bytes"):
            assert dataset.id.get_offset() == tensor["offset"], tensor
    assert file["large"].id.get_offset() % 4096 == 0
print("h5py reads what was saved")
