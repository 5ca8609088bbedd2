"""chunks.py CHUNKS_PEER: datasets that h5py and hdf5plugin write with every filter that muster decodes, in several types
and shapes, and what CHUNKS_PEER (chunks.cpp) reads. Ends with 77 where Python has no hdf5plugin."""

import itertools
import pathlib
import subprocess
import sys
import tempfile

try:
    import h5py
    import hdf5plugin
    import numpy
except ImportError:
    print(f"skipped: {sys.executable} has no h5py with hdf5plugin")
    sys.exit(77)

TYPES = ["i1", "u2", "i4", "f4", "f8", "c16"]
# Shapes and chunks, most of which do not fill the edges.
SHAPES = [((1000,), (64,)), ((300, 7), (300, 7)), ((50, 33), (8, 10)), ((9, 20, 31), (2, 20, 7)), ((5,), (3,))]


def blosc(codec, shuffle):
    return dict(hdf5plugin.Blosc(cname=codec, clevel=5, shuffle=shuffle))


FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip_shuffle": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
    "gzip_checksum": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "checksum": {"fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf_shuffle": {"compression": "lzf", "shuffle": True},
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4_small": dict(hdf5plugin.LZ4(nbytes=2048)),
    "zstd": dict(hdf5plugin.Zstd(clevel=3)),
    "zstd_shuffle": dict(hdf5plugin.Zstd(clevel=3), shuffle=True),
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle_lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle_small": dict(hdf5plugin.Bitshuffle(nelems=64, cname="lz4")),
    "bitshuffle_zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
} | {
    f"blosc_{codec}_{shuffle}": blosc(codec, shuffle)
    for codec, shuffle in itertools.product(["blosclz", "lz4", "lz4hc", "zlib", "zstd"], [0, 1, 2])
}
if h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP) and (
        h5py.h5z.get_filter_info(h5py.h5z.FILTER_SZIP) & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED):
    FILTERS |= {f"szip_{method}": {"compression": "szip", "compression_opts": (method, 8)} for method in ("nn", "ec")}


def values_of(kind, shape, generator):
    """Values that compress, noise in some."""
    count = int(numpy.prod(shape))
    values = numpy.cumsum(generator.integers(0, 3, count)) % 100
    if generator.random() < 0.3:
        values = generator.integers(0, 100, count)
    return values.reshape(shape).astype(kind)


def write(file, generator):
    """Writes the datasets; returns their values by name."""
    written = {}
    for name, options in FILTERS.items():
        for kind, (number, (shape, chunk)) in itertools.product(TYPES, enumerate(SHAPES)):
            if "szip" in name and (kind == "c16" or numpy.prod(chunk) < 32):
                continue
            key = f"{name}_{kind}_{number}"
            written[key] = values_of(kind, shape, generator)
            file.create_dataset(key, data=written[key], chunks=chunk, **options)
    # Each chunk leaves out other filters.
    for name, options in FILTERS.items():
        key = f"masks_{name}"
        written[key] = values_of("f4", (8 * 16,), generator)
        dataset = file.create_dataset(key, (8 * 16,), "f4", chunks=(16,), **options)
        count = dataset.id.get_create_plist().get_nfilters()
        for chunk in range(8):
            part = written[key][16 * chunk:16 * chunk + 16]
            if chunk % 2 == 0 or count == 0:
                dataset[16 * chunk:16 * chunk + 16] = part
            else:
                dataset.id.write_direct_chunk((16 * chunk,), part.tobytes(), filter_mask=(1 << count) - 1)
    # Chunks that were never written.
    written["holes"] = numpy.zeros((100, 10), "f4")
    written["holes"][33:44, 5] = 1
    file.create_dataset("holes", (100, 10), "f4", chunks=(10, 10), compression="gzip")[33:44, 5] = 1
    return written


def main(peer):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for seed, (block, version) in enumerate(itertools.product([0, 512], ["earliest", "v110"])):
            path = folder / f"{seed}.h5"
            with h5py.File(path, "w", libver=(version, "v110"), userblock_size=block) as file:
                written = write(file, numpy.random.default_rng(seed))
            output = folder / str(seed)
            output.mkdir()
            subprocess.run([peer, path, output], check=True)
            for name, values in written.items():
                if (output / name).read_bytes() != values.tobytes():
                    sys.exit(f"{name} of seed {seed} was read as something else")
            print(f"{len(written)} datasets in format {version} after {block} bytes are read as they were written")


if __name__ == "__main__":
    main(sys.argv[1])
