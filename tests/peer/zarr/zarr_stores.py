"""zarr_stores.py ZARR_PEER MUSTER [DAMAGED]: stores that zarr and xarray write, in random forms, and what ZARR_PEER
(zarr.cpp) reads of them; and DAMAGED damaged ones (100 unless given), which must end in an error that names the store.
Ends with 77 where Python has no zarr with xarray."""

import ctypes
import ctypes.util
import itertools
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile

try:
    import netCDF4  # noqa: F401, for xarray
    import numcodecs
    import numpy
    import xarray
    import zarr
    import zarr.codecs.numcodecs as of_numcodecs
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
except ImportError:
    print(f"skipped: {sys.executable} has no zarr 3 with xarray")
    sys.exit(77)
warnings.simplefilter("ignore")

PEER, MUSTER = sys.argv[1:3]
DAMAGED = int(sys.argv[3]) if len(sys.argv) > 3 else 100
TYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
# What a tensor makes of a type; the others stay.
TENSORS = {"u2": "i4", "u4": "i8", "u8": "i8"}
# Most of the chunks do not fill the edges, and some are larger than the array.
SHAPES = [((1000,), (64,)), ((300, 7), (300, 7)), ((50, 33), (8, 10)), ((9, 20, 31), (2, 20, 7)), ((5,), (3,)),
          ((4, 3), (6, 5)), ((2, 3, 4, 5), (1, 2, 3, 2))]


def blosc(cname, shuffle):
    return BloscCodec(cname=cname, shuffle=shuffle)


# Of version 3: filters, compressors. A function takes the type.
CODECS_3 = {
    "none": ([], []),
    "zstd": ([], [ZstdCodec()]),
    "zstd_sum": ([], [ZstdCodec(level=5, checksum=True)]),
    "gzip": ([], [GzipCodec()]),
    "gzip_crc32c": ([], [GzipCodec(), Crc32cCodec()]),
    "crc32c": ([], [Crc32cCodec()]),
    "crc32c_zstd": ([], [Crc32cCodec(), ZstdCodec()]),
    "transpose": (lambda kind, rank: [TransposeCodec(order=tuple(range(rank))[::-1])], [ZstdCodec()]),
    "transpose_2": (lambda kind, rank: [TransposeCodec(order=tuple(range(1, rank)) + (0,))], []),
    "zlib_shuffle": (lambda kind, rank: [], lambda kind: [of_numcodecs.Shuffle(elementsize=numpy.dtype(kind).itemsize),
                                                         of_numcodecs.Zlib(level=3)]),
    "lz4": ([], [of_numcodecs.LZ4()]),
    "delta": (lambda kind, rank: [of_numcodecs.Delta(dtype=kind)], [ZstdCodec()]),
    "scaled": (lambda kind, rank: [of_numcodecs.FixedScaleOffset(dtype=kind, scale=10, offset=3, astype="i4")],
               [blosc("lz4", "shuffle")]),
} | {f"blosc_{cname}_{shuffle}": ([], [blosc(cname, shuffle)])
     for cname, shuffle in itertools.product(["lz4", "lz4hc", "zstd", "zlib", "blosclz"],
                                             ["noshuffle", "shuffle", "bitshuffle"])}
# Of version 2.
CODECS_2 = {
    "none": ([], None), "zlib": ([], numcodecs.Zlib()), "gzip": ([], numcodecs.GZip()), "lz4": ([], numcodecs.LZ4()),
    "zstd": ([], numcodecs.Zstd()), "crc32c": ([numcodecs.CRC32C()], numcodecs.Zstd()),
    "delta": (lambda kind: [numcodecs.Delta(dtype=kind)], numcodecs.LZ4()),
    "delta_shuffle": (lambda kind: [numcodecs.Delta(dtype=kind),
                                    numcodecs.Shuffle(elementsize=numpy.dtype(kind).itemsize)], numcodecs.Zlib()),
    "scaled": (lambda kind: [numcodecs.FixedScaleOffset(dtype=kind, scale=10, offset=3, astype="<i4")],
               numcodecs.Blosc()),
} | {f"blosc_{cname}_{shuffle}": ([], numcodecs.Blosc(cname=cname, shuffle=shuffle))
     for cname, shuffle in itertools.product(["lz4", "lz4hc", "zstd", "zlib", "blosclz"], [0, 1, 2])}


def values_of(kind, shape, generator):
    """Values that compress, noise in some."""
    count = int(numpy.prod(shape))
    values = numpy.cumsum(generator.integers(0, 3, count)) % 100
    if generator.random() < 0.3:
        values = generator.integers(0, 100, count)
    values = values.reshape(shape).astype(kind)
    return values + (1j * values[::-1]).astype(kind) if numpy.dtype(kind).kind == "c" else values


def write_array(group, name, version, kind, shape, chunk, codec, pick, generator):
    """Adds an array of random form; returns its values, as zarr reads them."""
    numbers = numpy.dtype(kind).kind in "iuf" and numpy.dtype(kind).itemsize >= (4 if numpy.dtype(kind).kind == "f" else 1)
    if codec.startswith(("delta", "scaled")) and not numbers:
        codec = "zstd"
    if codec.startswith("transpose") and len(shape) == 1:
        codec = "zstd"
    fill = pick.choice([0, 1, 7]) if kind != "?" else pick.choice([False, True])
    if numpy.dtype(kind).kind == "f" and pick.random() < 0.3:
        fill = pick.choice([float("nan"), float("inf"), -float("inf"), 0.1])
    if numpy.dtype(kind).kind == "c" and pick.random() < 0.5:
        fill = complex(1.5, pick.choice([float("nan"), -2]))
    options = dict(shape=shape, chunks=chunk, fill_value=fill)
    if version == 3:
        filters, compressors = CODECS_3[codec]
        options["filters"] = filters(kind, len(shape)) if callable(filters) else filters
        options["compressors"] = compressors(kind) if callable(compressors) else compressors
        options["chunk_key_encoding"] = {"name": pick.choice(["default", "v2"]), "separator": pick.choice("./")}
        if pick.random() < 0.4:
            options["shards"] = tuple(size * pick.choice([1, 2, 3]) for size in chunk)
        big = pick.random() < 0.3 and not codec.startswith(("delta", "scaled"))
        options["serializer"] = BytesCodec(endian="big" if big else "little")
        array = group.create_array(name, dtype=kind, **options)
    else:
        filters, compressor = CODECS_2[codec]
        order = pick.choice("<>") if numpy.dtype(kind).itemsize > 1 else "|"
        options["filters"] = filters(order + kind) if callable(filters) else filters
        options["order"] = pick.choice("CF")
        options["chunk_key_encoding"] = {"name": "v2", "separator": pick.choice("./")}
        array = group.create_array(name, dtype=order + kind if kind != "?" else "?", compressors=compressor, **options)
    values = values_of(kind, shape, generator)
    if pick.random() < 0.3:  # some chunks are missing
        part = tuple(slice(0, pick.randint(0, size)) for size in shape)
        array[part] = values[part]
    else:
        array[...] = values
    return array[...]


def run(*arguments, **options):
    done = subprocess.run([str(each) for each in arguments], text=True, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def read_columns(stores, folder):
    """Compares arrays: {(store, group, name): values}."""
    keys = list(stores)
    lines = run(PEER, "columns", folder,
                input="".join(f"{store}{':/' + group if group else ''} {name}\n" for store, group, name in keys))
    for number, (key, line) in enumerate(zip(keys, lines, strict=True)):
        assert not line.startswith("error"), (key, line)
        values = stores[key]
        wanted = values.astype(TENSORS.get(values.dtype.str[1:], values.dtype.newbyteorder("=")))
        shape = json.loads(line.split(" ", 1)[1])
        assert tuple(shape) == values.shape, (key, line)
        read = numpy.fromfile(folder / str(number), wanted.dtype).reshape(shape)
        assert wanted.tobytes() == read.tobytes() or numpy.array_equal(wanted, read, equal_nan=True), (key, line, wanted, read)


def check_random_stores(folder, rounds):
    pick, generator = random.Random(rounds), numpy.random.default_rng(rounds)
    arrays = {}
    for version in 2, 3:
        codecs = list(CODECS_2 if version == 2 else CODECS_3) * rounds
        for place in "folder", "zip", "deflated":
            path = folder / f"{version}{place}"
            group = zarr.open_group(path, mode="w", zarr_format=version)
            inner = group.create_group("in/side")
            for number, codec in enumerate(codecs):
                into, kind = pick.choice([group, inner]), pick.choice(TYPES)
                shape, chunk = pick.choice(SHAPES)
                name = f"a{number}"
                values = write_array(into, name, version, kind, shape, chunk, codec, pick, generator)
                arrays[(path, into.path, name)] = values
            if pick.random() < 0.5:
                zarr.consolidate_metadata(path)
            if place == "folder":
                continue
            kept = {key: values for key, values in arrays.items() if key[0] == path}
            packed = path.with_suffix(".zip")
            sharded = {key for key in kept if zarr.open_array(path / key[1] / key[2]).shards}
            with zipfile.ZipFile(packed, "w") as archive:
                for file in sorted(path.rglob("*")):
                    is_in_shards = any(file.is_relative_to(path / key[1] / key[2]) for key in sharded)
                    how = zipfile.ZIP_DEFLATED if place == "deflated" and not is_in_shards else zipfile.ZIP_STORED
                    if file.is_file():
                        archive.write(file, file.relative_to(path), how)
            for key, values in kept.items():
                arrays[(packed, key[1], key[2])] = arrays.pop(key)
            shutil.rmtree(path)
    read_columns(arrays, folder)
    print(f"{len(arrays)} random arrays")


def check_types_and_links(folder):
    """What is refused is named, and the other arrays are read."""
    path = folder / "others.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=3)
    group.create_array("words", shape=(3,), dtype=str)
    group.create_array("dates", shape=(3,), dtype="M8[s]")
    group.create_array("records", shape=(3,), dtype=[("a", "i4"), ("b", "f4")])
    group.create_array("packed", shape=(3,), dtype="i4", compressors=[of_numcodecs.BZ2()])
    good = group.create_array("good", shape=(6,), chunks=(2,), dtype="i4")
    good[:] = numpy.arange(6)
    linked = group.create_array("linked", shape=(6,), chunks=(2,), dtype="i4")
    linked[:] = 1
    (path / "linked/c/1").unlink()
    (path / "linked/c/1").symlink_to(path / "good/c/1")
    behind = group.create_array("behind", shape=(6,), chunks=(2,), dtype="i4")
    behind[:] = 1
    (path / "behind/c").rename(folder / "elsewhere")
    (path / "behind/c").symlink_to(folder / "elsewhere")
    (path / "outside").symlink_to(path / "good")
    old = zarr.open_group(folder / "old.zarr", mode="w", zarr_format=2)
    old.create_array("words", shape=(3,), dtype="S5")
    old.create_array("unicode", shape=(3,), dtype="U5")
    cases = [(path, "words", "strings"), (path, "dates", "datetime64"), (path, "records", "structured"),
             (path, "packed", "codec that muster does not know (numcodecs.bz2)"), (path, "linked", "is a link"),
             (path, "behind", "is a link"), (path, "outside", "is a link"), (folder / "old.zarr", "words", "strings"),
             (folder / "old.zarr", "unicode", "strings")]
    lines = run(PEER, "columns", folder, input="".join(f"{store} {name}\n" for store, name, _ in cases))
    for (store, name, text), line in zip(cases, lines, strict=True):
        assert line.startswith("error") and text in line and str(store) in line, (name, line)
    read_columns({(path, "", "good"): numpy.arange(6, dtype="i4")}, folder)
    # A chunk that comes later is read; the missing one has the fill value.
    (path / "good/c/1").unlink()
    read_columns({(path, "", "good"): numpy.array([0, 1, 0, 0, 4, 5], "i4")}, folder)
    root = zarr.create_array(folder / "single.zarr", shape=(5, 2), chunks=(2, 2), dtype="f4")
    root[:] = numpy.arange(10).reshape(5, 2)
    read_columns({(folder / "single.zarr", "", "single"): numpy.arange(10, dtype="f4").reshape(5, 2)}, folder)
    print("refused types, links and missing chunks")


def check_snappy(folder):
    """numcodecs has no snappy; the blosc library that muster uses may have it."""
    name = ctypes.util.find_library("blosc")
    values = numpy.arange(3000, dtype="i4")
    packed = ctypes.create_string_buffer(values.nbytes + 16)
    size = name and ctypes.CDLL(name).blosc_compress_ctx(
        5, 1, ctypes.c_size_t(4), ctypes.c_size_t(values.nbytes), values.ctypes.data_as(ctypes.c_void_p), packed,
        ctypes.c_size_t(len(packed)), b"snappy", ctypes.c_size_t(0), 1)
    if not size or size < 0:
        return
    zarr.create_array(folder / "x.zarr", shape=values.shape, chunks=values.shape, dtype="i4",
                      compressors=[BloscCodec(cname="snappy")])
    (folder / "x.zarr/c").mkdir()
    (folder / "x.zarr/c/0").write_bytes(packed.raw[:size])
    read_columns({(folder / "x.zarr", "", "x"): values}, folder)
    print("blosc with snappy")


def weather(version):
    """A dataset in the layout of WeatherBench, packed in part."""
    generator = numpy.random.default_rng(1)
    time = numpy.arange("2000-01-01", "2000-01-13", 6, dtype="M8[h]")
    latitude, longitude = numpy.linspace(90, -90, 7), numpy.arange(0, 360, 30.0)
    shape = (len(time), len(latitude), len(longitude))
    t2m = generator.normal(280, 10, shape).astype("f4")
    t2m[3, 2, 1] = numpy.nan
    dataset = xarray.Dataset(
        {"t2m": (("time", "latitude", "longitude"), t2m),
         "packed": (("time", "latitude", "longitude"), numpy.round(t2m[::-1] * 2) / 2),
         "land": (("latitude", "longitude"), generator.integers(0, 2, shape[1:]).astype("i1"))},
        coords={"time": time.astype("M8[ns]"), "latitude": latitude, "longitude": longitude})
    dataset.t2m.attrs["valid_min"] = -1000.0
    dataset.t2m.attrs["missing_value"] = numpy.nan
    encoding = {"t2m": {"chunks": (1, 7, 12)}, "packed": {"chunks": (5, 4, 12), "dtype": "i2", "scale_factor": 0.5,
                                                         "add_offset": 200.0, "_FillValue": -9}}
    if version == 2:
        encoding["t2m"]["compressors"] = numcodecs.Blosc(cname="lz4")
    return dataset, encoding


def windows(folder, options, *variables):
    lines = run(PEER, "windows", folder, json.dumps(options), *variables)
    types = {"Float": "f4", "Double": "f8", "Char": "i1", "Long": "i8"}
    return {name: numpy.fromfile(folder / name, types[kind]).reshape(json.loads(shape))
            for name, kind, shape in (line.split(" ", 2) for line in lines)}


def check_xarray(folder):
    for version, place in itertools.product([2, 3], ["zarr", "zip"]):
        dataset, encoding = weather(version)
        path = folder / f"weather{version}.{place}"
        if place == "zarr":
            dataset.to_zarr(path, zarr_format=version, encoding=encoding)
        else:
            with zarr.storage.ZipStore(path, mode="w") as store:
                dataset.to_zarr(store, zarr_format=version, encoding=encoding, consolidated=False)
        # As xarray reads it, but for times.
        stored = xarray.open_zarr(path if place == "zarr" else zarr.storage.ZipStore(path, mode="r"), decode_times=False)
        read = windows(folder, {"size": [2, 0, 0], "stride": [3, 0, 0], "margin": [1, 0, 0]}, f"{path}:/t2m",
                       f"{path}:/packed", f"{path}:/land")
        for name in "t2m", "packed":
            values = stored[name].values
            padded = numpy.pad(values, ((1, 1), (0, 0), (0, 0)), constant_values=numpy.nan)
            wanted = numpy.stack([padded[begin:begin + 4] for begin in range(0, len(values) - 1, 3)])
            numpy.testing.assert_allclose(read[name], wanted, rtol=1e-7 if name == "t2m" else 1e-6)
        assert (read["land"] == dataset.land.values).all()
        # A part by the values of time and latitude; latitude descends.
        time = stored.time.values
        first, last = float(time[5]), float(time[11])
        read = windows(folder, {"size": [1, 2, 0], "range": [["time", first, last], ["latitude", -60, 60]]},
                       f"{path}:/t2m")
        part = stored.t2m.sel(time=slice(first, last), latitude=slice(60, -60)).values
        assert read["origin"][0].tolist() == [5, 1, 0] and len(read["t2m"]) == 7 * 2
        for window, (begin, row, _) in zip(read["t2m"], read["origin"]):
            numpy.testing.assert_array_equal(window[0], part[begin - 5, row - 1:row + 1])
        # The copy opens in xarray with the same values and dimensions.
        copy = folder / "copy.h5"
        run(MUSTER, "convert", "zarr", path, copy, "--columns", "time,t2m,packed")
        with xarray.open_dataset(copy, engine="netcdf4", decode_times=False) as copied:
            assert copied.t2m.dims == ("time", "latitude", "longitude")
            numpy.testing.assert_array_equal(copied.t2m.values, stored.t2m.values)
            numpy.testing.assert_allclose(copied.packed.values, stored.packed.values)
            numpy.testing.assert_array_equal(copied.time.values, time)
        described = json.loads("\n".join(run(MUSTER, "inspect", path, "--json")))
        columns = {column["name"]: column for column in described["columns"]}
        assert columns["t2m"]["chunk"] == [1, 7, 12] and columns["t2m"]["reader"] == "decoded", columns
    print("xarray: values, windows, parts, copies")


DAMAGES = ["cut", "flip", "empty", "grow", "metadata", "number"]
NUMBERS = [0, -1, 1, 3, 2**31, 2**32, 2**62, 2**63, 2**64, 1e30, None, "x", [], {}, [2**62], True]


def damage_json(text, pick):
    """Changes a number, a word or a list somewhere in the metadata."""
    document = json.loads(text)
    places = []

    def collect(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                collect(value[key])

    collect(document)
    container, key = pick.choice(places)
    if pick.random() < 0.2 and isinstance(container, dict):
        del container[key]
    else:
        container[key] = pick.choice(NUMBERS)
    return json.dumps(document)


def damage(path, pick):
    """Damages a file of the store. Returns what was done."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    file, how = pick.choice(files), pick.choice(DAMAGES)
    content = bytearray(file.read_bytes())
    is_metadata = file.name in ("zarr.json", ".zarray", ".zattrs", ".zgroup")
    if how in ("metadata", "number"):
        file = pick.choice([file for file in files if file.name in ("zarr.json", ".zarray")])
        content = bytearray(damage_json(file.read_text(), pick).encode())
    elif how == "cut":
        del content[pick.randrange(len(content)):]
    elif how == "flip":
        for _ in range(pick.choice([1, 8])):
            content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    elif how == "empty":
        content.clear()
    else:
        content += bytes(pick.choice([1, 100_000, 5_000_000]))
    file.write_bytes(content)
    return f"{how} of {file.relative_to(path)}", is_metadata


def check_damaged(folder, count):
    pick, generator = random.Random(count), numpy.random.default_rng(count)
    whole = {}
    for version in 2, 3:
        for number in range(6):
            path = folder / f"whole{version}{number}"
            group = zarr.open_group(path, mode="w", zarr_format=version)
            shape, chunk = pick.choice(SHAPES)
            codec = pick.choice(list(CODECS_2 if version == 2 else CODECS_3))
            write_array(group, "x", version, pick.choice(TYPES[1:]), shape, chunk, codec, pick, generator)
            whole[path] = codec
    damaged, what = [], {}
    for number in range(count):
        source = pick.choice(list(whole))
        path = folder / f"damaged{number}"
        shutil.copytree(source, path)
        done, _ = damage(path, pick)
        what[path] = f"{source.name} {whole[source]}: {done}"
        if number % 3 == 0:  # as an archive, of which a piece may be damaged, too
            packed = path.with_suffix(".zip")
            with zipfile.ZipFile(packed, "w") as archive:
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        archive.write(file, file.relative_to(path))
            shutil.rmtree(path)
            what[packed] = what.pop(path) + " in an archive"
            if number % 2 == 0:
                content = bytearray(packed.read_bytes())
                for _ in range(pick.choice([1, 30])):
                    content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
                packed.write_bytes(content)
            path = packed
        damaged.append(path)
    # In little memory, so that one that takes too much of it fails.
    lines = run("bash", "-c", 'ulimit -v 6000000; exec "$0" all', PEER, input="".join(f"{path}\n" for path in damaged))
    errors = 0
    for path, line in zip(damaged, lines, strict=True):
        if line == "read":  # values may be damaged where nothing tells
            continue
        errors += 1
        assert line.startswith("65 ") and str(path) in line, (path, what[path], line)
    assert errors > count / 3, errors
    print(f"{count} damaged stores, {errors} errors")


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for check, arguments in ((check_types_and_links, ()), (check_random_stores, (1,)), (check_snappy, ()),
                                 (check_xarray, ()), (check_damaged, (DAMAGED,))):
            (folder / check.__name__).mkdir()
            check(folder / check.__name__, *arguments)


main()
