"""window_speed.py WINDOW_SPEED: windows of a packed NetCDF-4 file in the layout of ERA5, read by muster
(window_speed.cpp) and by xarray with xbatcher's torch loader, each in one process, in a random order and in batches.

Prints windows per second and their ratio, the median of the rounds with the smallest and the largest. Ends with 77
where Python has no xbatcher, with 1 if the values differ or muster is slower."""

import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import netCDF4
    import numpy
    import torch
    import xarray
    import xbatcher
    import xbatcher.loaders.torch
except ImportError as error:
    print(f"skipped: {sys.executable} has no {error.name}")
    sys.exit(77)

TIMES, LATITUDES, LONGITUDES = 54, 721, 1440
SIZE = {"time": 12, "latitude": 64, "longitude": 64}
BATCH, ROUNDS, PEER_BATCHES = 8, 5, 12
CHUNKS = {"a field for each time": (1, LATITUDES, LONGITUDES), "blocks": (27, 91, 180)}


def write(path, chunks):
    generator = numpy.random.default_rng(1)
    with netCDF4.Dataset(path, "w") as file:
        for name, size in [("time", None), ("latitude", LATITUDES), ("longitude", LONGITUDES)]:
            file.createDimension(name, size)
        field = file.createVariable("t2m", "i2", ("time", "latitude", "longitude"), fill_value=-32767, zlib=True,
                                    complevel=1, shuffle=True, chunksizes=chunks)
        field.scale_factor, field.add_offset = 0.00171, 288.4
        north, east = numpy.mgrid[0:LATITUDES, 0:LONGITUDES]
        for hour in range(TIMES):
            weather = 3 * numpy.sin(north / 40 + hour / 9) * numpy.cos(east / 60 - hour / 7)
            field[hour] = 288 - 30 * numpy.cos(north / 115) + weather + generator.normal(0, 0.1, north.shape)


def read_with_muster(program, path, seed):
    """Windows per second, and the sum of all values."""
    size = ",".join(str(n) for n in SIZE.values())
    done = subprocess.run([program, size, str(BATCH), str(seed), f"{path}:/t2m"], check=True, capture_output=True,
                          text=True)
    windows, seconds, total = done.stdout.split()
    return int(windows) / float(seconds), float(total)


def read_with_xbatcher(path, seed, batches=None):
    """The same; of the first batches only if `batches` is given, as it is slow."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with xarray.open_dataset(path, chunks=None, cache=False) as file:
        generator = xbatcher.BatchGenerator(file["t2m"], input_dims=SIZE)
        windows = xbatcher.loaders.torch.MapDataset(generator)
        loader = torch.utils.data.DataLoader(windows, batch_size=BATCH, shuffle=True)
        count, total = 0, 0.0
        for number, batch in enumerate(loader, 1):
            count += len(batch)
            total += batch.sum(dtype=torch.float64).item()
            if number == batches:
                break
    return count / (time.perf_counter() - begin), total


def main():
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        for layout, chunks in CHUNKS.items():
            path = pathlib.Path(folder) / "era5.nc"
            write(path, chunks)
            ours, theirs = read_with_muster(sys.argv[1], path, 0)[1], read_with_xbatcher(path, 0)[1]
            assert math.isclose(ours, theirs, rel_tol=1e-5), f"the sum of values is {ours}, and xarray's is {theirs}"
            speeds = [(read_with_muster(sys.argv[1], path, seed)[0], read_with_xbatcher(path, seed, PEER_BATCHES)[0])
                      for seed in range(1, ROUNDS + 1)]
            ratios = [ours / theirs for ours, theirs in speeds]
            ours, theirs = (statistics.median(column) for column in zip(*speeds))
            slow = slow or statistics.median(ratios) < 1
            print(f"{layout}: muster {ours:.0f}, xarray and xbatcher {theirs:.0f} windows/s; "
                  f"{statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f})", flush=True)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
