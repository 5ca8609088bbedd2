"""formats.py FORMATS_PEER: files of netCDF4, xarray, MATLAB's format 7.3 and h5py, and what FORMATS_PEER (formats.cpp)
reads from them. Ends with 77 where Python has not all of these."""

import pathlib
import subprocess
import sys
import tempfile
import warnings

try:
    import h5py
    import hdf5storage
    import netCDF4
    import numpy
    import xarray
except ImportError as error:
    print(f"skipped: {sys.executable} has no {error.name}")
    sys.exit(77)

TORCH = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8", "Half": "f2", "Float": "f4",
         "Double": "f8", "Bool": "?", "ComplexFloat": "c8", "ComplexDouble": "c16"}


class Peer:
    def __init__(self, program, folder):
        self.program, self.output = program, folder / "values"

    def read(self, path, column):
        done = subprocess.run([self.program, path, column, self.output], check=True, capture_output=True, text=True)
        kind, shape = done.stdout.split(" ", 1)
        return numpy.fromfile(self.output, TORCH[kind]).reshape([int(n) for n in shape.strip("[] \n").split(",")])

    def windows(self, size, stride, variables):
        """The columns of windows, the last one being the origins."""
        words = [",".join(map(str, numbers)) for numbers in (size, stride)]
        done = subprocess.run([self.program, "--windows", *words, self.output, *variables], check=True,
                              capture_output=True, text=True)
        columns, begin = [], 0
        for line in done.stdout.splitlines():
            kind, shape = line.split(" ", 1)
            shape = [int(n) for n in shape.strip("[] ").split(",")]
            columns.append(numpy.fromfile(self.output, TORCH[kind], int(numpy.prod(shape)), offset=begin).reshape(shape))
            begin += columns[-1].nbytes
        return columns

    def copy(self, path, output, columns):
        subprocess.run([self.program, "--copy", path, output, *columns], check=True)

    def refusal(self, path, column):
        done = subprocess.run([self.program, path, column, self.output], capture_output=True, text=True)
        assert done.returncode != 0, f"{column} of {path} was read"
        return done.stderr

    def compare(self, path, column, values, kind):
        found = self.read(path, column)
        assert found.dtype == numpy.dtype(kind), f"{column} of {path} has the type {found.dtype}"
        numpy.testing.assert_array_equal(found, numpy.asarray(values).astype(kind), f"{column} of {path}")


def packed_netcdf(peer, folder):
    """The layouts in which reanalyses come: int16 with scale_factor and add_offset, an unlimited first dimension."""
    generator = numpy.random.default_rng(1)
    celsius = generator.normal(15, 10, (30, 37, 72))
    celsius[3, 4:9, 10:40] = numpy.nan
    for number, chunks in enumerate([(1, 37, 72), (7, 10, 20), None]):
        path = folder / f"era5_{number}.nc"
        with netCDF4.Dataset(path, "w") as file:
            for name, size in [("time", None), ("latitude", 37), ("longitude", 72)]:
                file.createDimension(name, size)
            field = file.createVariable("t2m", "i2", ("time", "latitude", "longitude"), fill_value=-32767, zlib=True,
                                        complevel=1, shuffle=True, chunksizes=chunks)
            field.scale_factor, field.add_offset = 0.00171, 288.4
            field[:] = numpy.ma.masked_where(numpy.isnan(celsius), numpy.nan_to_num(celsius) + 273.15)
            count = file.createVariable("count", ">u2", ("time",), endian="big", fill_value=False)
            count[:] = numpy.arange(30) * 2000
            byte = file.createVariable("quality", "i1", ("time", "latitude"), fill_value=-1)
            byte[:] = generator.integers(-1, 5, (30, 37))
            words = file.createVariable("name", str, ("time",))
            words[:] = numpy.array([f"day {day}" for day in range(30)], object)
        with netCDF4.Dataset(path) as file:
            peer.compare(path, "t2m", file["t2m"][:].filled(numpy.nan), "f4")
            peer.compare(path, "count", file["count"][:], "i4")
            file["quality"].set_auto_mask(False)
            peer.compare(path, "quality", file["quality"][:], "i1")
        assert "variable length" in peer.refusal(path, "name") or "strings" in peer.refusal(path, "name")


def xarray_files(peer, folder):
    generator = numpy.random.default_rng(2)
    values = generator.normal(0, 3, (20, 8, 9)).astype("f4")
    values[5] = numpy.nan
    data = xarray.Dataset({"u": (("time", "y", "x"), values), "v": (("time", "y", "x"), 2 * values)},
                          {"time": xarray.date_range("2020-01-01", periods=20)})
    path = folder / "x.nc"
    data.to_netcdf(path, engine="netcdf4", encoding={
        "u": {"dtype": "int16", "scale_factor": 0.001, "_FillValue": -9999, "zlib": True},
        "v": {"_FillValue": -9999.0}})
    with xarray.open_dataset(path) as file:
        peer.compare(path, "u", file["u"].values, "f4")
        peer.compare(path, "v", file["v"].values, "f4")
    with xarray.open_dataset(path, decode_times=False) as file:
        peer.compare(path, "time", file["time"].values, "i8")


def windows(peer, folder):
    """Windows of variables that share some dimensions, which have names."""
    generator = numpy.random.default_rng(5)
    for number, chunks in enumerate([(1, 37, 72), (7, 10, 20), None]):
        path = folder / f"windows_{number}.nc"
        with netCDF4.Dataset(path, "w") as file:
            for name, size in [("time", None), ("latitude", 37), ("longitude", 72)]:
                file.createDimension(name, size)
            times = file.createVariable("time", "f8", ("time",))
            times[:] = numpy.arange(30) / 8
            field = file.createVariable("t2m", "i2", ("time", "latitude", "longitude"), fill_value=-32767, zlib=True,
                                        complevel=1, shuffle=True, chunksizes=chunks)
            field.scale_factor, field.add_offset = 0.00171, 288.4
            field[:] = generator.normal(288, 10, (30, 37, 72))
            height = file.createVariable("height", ">f4", ("longitude", "latitude"), endian="big")
            height[:] = generator.normal(500, 300, (72, 37))
        with netCDF4.Dataset(path) as file:
            t2m, height, times = file["t2m"][:].filled(numpy.nan), file["height"][:].data, file["time"][:].data
        size, stride = (12, 16, 16), (6, 8, 8)
        found = peer.windows(size, stride, [f"{path}:/{name}" for name in ("t2m", "height", "time")])
        places = {(t, y, x) for t in range(0, 19, 6) for y in range(0, 22, 8) for x in range(0, 57, 8)}
        assert {tuple(origin) for origin in found[3]} == places and len(found[3]) == len(places)
        for (t, y, x), field, ground, moments in zip(found[3], found[0], found[1], found[2]):
            numpy.testing.assert_array_equal(field, t2m[t:t + 12, y:y + 16, x:x + 16].astype("f4"))
            numpy.testing.assert_array_equal(ground, height[x:x + 16, y:y + 16])
            numpy.testing.assert_array_equal(moments, times[t:t + 12])


def missing_values(peer, folder):
    """Attributes that say which values are missing, as numbers and as text."""
    path = folder / "missing.nc"
    stored = numpy.array([-9999, -5, 0, 3, 100, 101, 120], "i2")
    attributes = {
        "range": {"valid_range": numpy.array([-5, 100], "i2")}, "least": {"valid_min": numpy.int16(0)},
        "most": {"valid_max": numpy.int16(100)}, "text": {"missing_value": "-9999"}, "words": {"missing_value": "101"},
        "both": {"missing_value": numpy.int16(3), "valid_max": numpy.int16(100)},
    }
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("n", len(stored))
        for name, given in attributes.items():
            for kind, scale in [("i2", 0.5), ("f4", None), ("i4", None)]:
                variable = file.createVariable(f"{name}_{kind}", kind, ("n",), fill_value=False)
                variable.setncatts(given | ({} if scale is None else {"scale_factor": scale}))
                variable.set_auto_maskandscale(False)
                variable[:] = stored
        for name, kind, sign in [("a", "i1", "true"), ("b", "i2", "True"), ("c", "u1", "false"), ("d", "u2", "false")]:
            variable = file.createVariable(name, kind, ("n",), fill_value=False)
            variable._Unsigned = sign
            variable.set_auto_maskandscale(False)
            variable[:] = stored.astype(kind)
    with netCDF4.Dataset(path) as file, warnings.catch_warnings(action="ignore"):
        for name, given in attributes.items():
            for kind in ["i2", "f4"]:
                values = numpy.ma.asarray(file[f"{name}_{kind}"][:]).astype("f4")
                if isinstance(given.get("missing_value"), str):  # which netCDF4 leaves out, with a warning
                    values[stored == int(given["missing_value"])] = numpy.ma.masked
                peer.compare(path, f"{name}_{kind}", values.filled(numpy.nan), "f4")
            peer.compare(path, f"{name}_i4", stored, "i4")
        for name, kind in [("a", "u1"), ("b", "i4")]:
            peer.compare(path, name, file[name][:], kind)
    with xarray.open_dataset(path) as file:
        for name, kind in [("c", "i1"), ("d", "i2")]:
            peer.compare(path, name, file[name].values, kind)


def matlab_files(peer, folder):
    """They begin with a user block of 512 bytes."""
    generator = numpy.random.default_rng(3)
    path = str(folder / "data.mat")
    matrices = {"a": generator.normal(size=(40, 5)), "b": generator.integers(0, 200, (40, 3)).astype("u1"),
                "c": generator.normal(size=(40, 6)).astype("f4")}
    for compress in [False, True]:
        hdf5storage.savemat(path, matrices, format="7.3", oned_as="column", store_python_metadata=False,
                            action_for_matlab_incompatible="error", compress=compress, compress_size_threshold=0,
                            truncate_existing=True)
        with h5py.File(path) as file:
            assert file.userblock_size == 512
            for name, values in matrices.items():
                peer.compare(path, name, values.T, values.dtype)  # MATLAB's matrices are stored column by column
    with h5py.File(path, "a") as file:
        for rows in [4, 100_000]:
            file.create_dataset(f"unwritten_{rows}", (rows,), "f8")
    for rows in [4, 100_000]:
        peer.compare(path, f"unwritten_{rows}", numpy.zeros(rows), "f8")


def h5py_files(peer, folder):
    """Every type and byte order, as it lies and in chunks."""
    generator = numpy.random.default_rng(4)
    kinds = {"i1": "i1", "u1": "u1", "<i2": "i2", ">i2": "i2", "<u2": "i4", ">u2": "i4", "<i4": "i4", ">i4": "i4",
             "<u4": "i8", ">u4": "i8", "<i8": "i8", ">i8": "i8", "<u8": "i8", ">u8": "i8", "<f2": "f2", ">f2": "f2",
             "<f4": "f4", ">f4": "f4", "<f8": "f8", ">f8": "f8", "?": "?", "c8": "c8", "c16": "c16"}
    layouts = {"plain": {}, "chunks": {"chunks": (7, 2)}, "gzip": {"chunks": (7, 2), "compression": "gzip"},
               "sums": {"chunks": (16, 3), "fletcher32": True}}
    path = folder / "types.h5"
    with h5py.File(path, "w") as file:
        for kind in kinds:
            for name, options in layouts.items():
                file.create_dataset(f"{name} {kind}", data=generator.integers(0, 100, (50, 3)).astype(kind), **options)
        file.create_dataset("colour", data=generator.integers(0, 3, 50).astype(">i4"),
                            dtype=h5py.enum_dtype({"red": 0, "green": 1, "blue": 2}, basetype=">i4"))
        file.create_dataset("text", data=[b"abc"] * 50)
        file.create_dataset("points", data=numpy.zeros(50, [("x", "f4"), ("y", "f4")]))
    with h5py.File(path) as file:
        for kind, found in kinds.items():
            for name in layouts:
                peer.compare(path, f"{name} {kind}", file[f"{name} {kind}"][:], found)
        peer.compare(path, "colour", file["colour"][:], "i4")
    for name, word in [("text", "strings"), ("points", "compound")]:
        assert word in peer.refusal(path, name), name


def copies(peer, folder):
    """Copies of NetCDF files have the same dimensions, in their order; of one size, only names tell them apart."""
    generator = numpy.random.default_rng(6)
    path, copy = folder / "square.nc", folder / "copy.h5"
    with netCDF4.Dataset(path, "w") as file:
        for name, size in [("time", None), ("longitude", 9), ("latitude", 9), ("level", 3)]:
            file.createDimension(name, size)
        file.createVariable("latitude", "f8", ("latitude",))[:] = numpy.arange(9) * 10
        file.createVariable("longitude", "i4", ("longitude",))[:] = numpy.arange(9) * 3
        file.createVariable("t", "f4", ("latitude", "longitude"), zlib=True)[:] = generator.normal(size=(9, 9))
        file.createVariable("height", ">i2", ("longitude", "latitude"), endian="big")[:] = numpy.arange(81).reshape(9, 9)
        file.createVariable("wind", "f8", ("latitude", "longitude", "level"))[:] = generator.normal(size=(9, 9, 3))
        file["t"].units = "K"
    for columns in [["t", "height", "wind"], ["t", "latitude", "wind", "height"], ["wind", "longitude", "latitude", "t"]]:
        peer.copy(path, copy, columns)
        with netCDF4.Dataset(path) as old, netCDF4.Dataset(copy) as new:
            assert sorted(set(new.variables)) == sorted(columns), new.variables
            for name in columns:
                assert new[name].dimensions == old[name].dimensions, (name, new[name].dimensions)
                numpy.testing.assert_array_equal(new[name][:], old[name][:])
            for name, dimension in new.dimensions.items():
                assert len(dimension) == len(old.dimensions[name])
            assert new["t"].units == "K"
        with xarray.open_dataset(path) as old, xarray.open_dataset(copy, engine="netcdf4") as new:
            for name in columns:
                assert new[name].dims == old[name].dims and dict(new[name].sizes) == dict(old[name].sizes)
                numpy.testing.assert_array_equal(new[name].values, old[name].values)
            assert set(new.coords) == {"latitude", "longitude"} & set(columns)
        with h5py.File(copy) as file:
            assert [scales[0].name for scales in file["t"].dims] == ["/latitude", "/longitude"]
    peer.copy(path, copy, ["t", "height"])
    wanted = peer.windows((4, 3), (2, 2), [f"{path}:/t", f"{path}:/height"])
    for one, other in [(path, copy), (copy, path), (copy, copy)]:
        for found, want in zip(peer.windows((4, 3), (2, 2), [f"{one}:/t", f"{other}:/height"]), wanted):
            numpy.testing.assert_array_equal(found, want)


def numbered_copies(peer, folder):
    """Copies of a coordinate of two dimensions, and of groups with a variable that has the name of a dimension outside."""
    path, copy = folder / "numbered.nc", folder / "copy.h5"
    with netCDF4.Dataset(path, "w") as file:
        for name, size in [("unused", 4), ("time", 6), ("nv", 2), ("x", 3)]:
            file.createDimension(name, size)
        file.createVariable("time", "f8", ("time", "nv"))[:] = numpy.arange(12).reshape(6, 2)
        file.createVariable("t", "f4", ("time", "x"))[:] = numpy.arange(18).reshape(6, 3)
        group = file.createGroup("g")
        group.createVariable("time", "f8", ("time",))[:] = numpy.arange(6)
        group.createVariable("t", "f4", ("time", "x"))[:] = numpy.arange(18).reshape(6, 3)
        group = file.createGroup("bounds")
        group.createVariable("time", "f8", ("time", "nv"))[:] = numpy.arange(12).reshape(6, 2)
        group.createVariable("t", "f4", ("time", "x"))[:] = numpy.arange(18).reshape(6, 3)
        group = file.createGroup("across")
        group.createVariable("time", "f8", ("x",))[:] = numpy.arange(3)
        group.createVariable("t", "f4", ("x", "time"))[:] = numpy.arange(18).reshape(3, 6)
    for group, columns in [("", ["time", "t"]), ("", ["time"]), ("", ["t"]), ("g", ["time", "t"]), ("g", ["t"]),
                           ("bounds", ["time", "t"]), ("across", ["time", "t"]), ("across", ["t"])]:
        peer.copy(f"{path}:/{group}" if group else path, copy, columns)
        with netCDF4.Dataset(path) as old, netCDF4.Dataset(copy) as new:
            for name in columns:
                variable = old[f"{group}/{name}"] if group else old[name]
                numpy.testing.assert_array_equal(new[name][:], variable[:])
                if (group, name) != ("across", "t") or len(columns) == 1:  # a file has one variable or dimension time
                    assert new[name].dimensions == variable.dimensions, (name, new[name].dimensions)


def copied_enumerations(peer, folder):
    """Enumerations become integers in a copy, and so do the attributes that have the type of their variable."""
    path, copy = folder / "kinds.nc", folder / "copy.h5"
    stored = numpy.array([1, 2, 255, 2], "u1")
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("n", len(stored))
        kind = file.createEnumType("u1", "kind", {"land": 1, "sea": 2, "none": 255})
        file.createVariable("x", kind, ("n",), fill_value=255)[:] = stored
    peer.copy(path, copy, ["x"])
    with netCDF4.Dataset(copy) as new:
        assert new["x"].dtype == new["x"]._FillValue.dtype == "u1" and new["x"]._FillValue == 255
        numpy.testing.assert_array_equal(numpy.ma.getmaskarray(new["x"][:]), stored == 255)
        numpy.testing.assert_array_equal(new["x"][:].data, stored)


def main(program):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        peer = Peer(program, folder)
        for files in [packed_netcdf, xarray_files, windows, missing_values, copies, numbered_copies,
                      copied_enumerations, matlab_files, h5py_files]:
            files(peer, folder)
            print(f"{files.__name__}: all values are read as their library reads them")


if __name__ == "__main__":
    main(sys.argv[1])
