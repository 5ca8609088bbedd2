"""npz.py MUSTER FORMATS_PEER: archives of numpy.savez, as MUSTER converts them and FORMATS_PEER reads the result. Ends
with 77 where Python has no numpy."""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

try:
    import numpy
except ImportError as error:
    print(f"skipped: {sys.executable} has no {error.name}")
    sys.exit(77)

# The types of columns, as FORMATS_PEER names them and as NumPy does.
TORCH = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8", "Half": "f2", "Float": "f4",
         "Double": "f8", "Bool": "?", "ComplexFloat": "c8", "ComplexDouble": "c16"}
KINDS = ["?", "i1", "u1", "<i2", ">i2", "<i4", ">i4", "<i8", ">i8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8",
         "<c16"]


class Muster:
    def __init__(self, tool, reader, folder):
        self.tool, self.reader, self.folder = tool, reader, folder
        self.archive, self.output, self.values = folder / "in.npz", folder / "out.h5", folder / "values"

    def convert(self, *options):
        command = [self.tool, "convert", "npz", self.archive, self.output, *options]
        return subprocess.run(command, capture_output=True, text=True)

    def column(self, name):
        done = subprocess.run([self.reader, self.output, name, self.values], check=True, capture_output=True, text=True)
        kind, shape = done.stdout.split(" ", 1)
        return numpy.fromfile(self.values, TORCH[kind]).reshape([int(n) for n in shape.strip("[] \n").split(",")])

    def compare(self, arrays):
        done = self.convert()
        assert done.returncode == 0, done.stderr
        for name, values in arrays.items():
            found = self.column(name)
            assert found.dtype == values.dtype.newbyteorder("="), f"{name} has the type {found.dtype}"
            numpy.testing.assert_array_equal(found, values, name)

    def refusal(self, *options):
        self.output.unlink(missing_ok=True)
        done = self.convert(*options)
        assert done.returncode == 65, f"it ended with {done.returncode}: {done.stderr}"
        assert {path.name for path in self.folder.iterdir()} <= {"in.npz", "values"}, "a file was left behind"
        return done.stderr


def random_arrays(generator):
    rows = int(generator.integers(1, 400))
    arrays = {}
    for number, kind in enumerate(generator.choice(KINDS, 5)):
        shape = (rows, *generator.integers(1, 6, generator.integers(0, 4)))
        arrays[f"a{number}"] = generator.integers(0, 100, shape).astype(kind)
    return arrays


def same_values(muster):
    generator = numpy.random.default_rng(1)
    for number in range(10):
        arrays = random_arrays(generator)
        (numpy.savez if number % 2 == 0 else numpy.savez_compressed)(muster.archive, **arrays)
        muster.compare(arrays)
    numpy.savez(muster.archive, numpy.arange(5), numpy.ones((5, 2), "f4"))  # without names
    muster.compare({"arr_0": numpy.arange(5), "arr_1": numpy.ones((5, 2), "f4")})


def zip64_archives(muster):
    """Archives with the fields that files of more than 4 GB need: Python writes them beyond a limit, lowered here."""
    generator = numpy.random.default_rng(2)
    limit, zipfile.ZIP64_LIMIT = zipfile.ZIP64_LIMIT, 10
    try:
        for save in (numpy.savez, numpy.savez_compressed):
            arrays = random_arrays(generator)
            save(muster.archive, **arrays)
            assert b"PK\x06\x06" in muster.archive.read_bytes(), "it has no directory of zip64"
            muster.compare(arrays)
    finally:
        zipfile.ZIP64_LIMIT = limit


def refused(muster):
    ragged = numpy.array([[1], [1, 2]], object)
    for name, values, words in [("objects", ragged, "Python objects"), ("text", numpy.array(["a", "b"]), "type '<U1'"),
                                ("columns", numpy.asfortranarray(numpy.ones((2, 3))), "Fortran order"),
                                ("records", numpy.zeros(2, [("x", "f4")]), "named fields"),
                                ("long", numpy.arange(9), "long has 9")]:
        numpy.savez(muster.archive, **{"x": numpy.arange(2), name: values})
        message = muster.refusal()
        assert words in message and f"in.npz:{name}" in message, message
        done = muster.convert("--columns", "x")
        assert done.returncode == 0, done.stderr
        numpy.testing.assert_array_equal(muster.column("x"), [0, 1])
    numpy.savez(muster.archive, **{"a/b": numpy.arange(2)})
    assert "has a slash" in muster.refusal()
    with zipfile.ZipFile(muster.archive, "w", zipfile.ZIP_BZIP2) as archive:
        with archive.open("x.npy", "w") as entry:
            numpy.lib.format.write_array(entry, numpy.arange(2))
    assert "not by deflate" in muster.refusal()
    numpy.savez(muster.archive, x=numpy.arange(1000))
    muster.archive.write_bytes(muster.archive.read_bytes()[:-40])
    assert "not a whole .npz archive" in muster.refusal()


def main(tool, reader):
    with tempfile.TemporaryDirectory() as folder:
        muster = Muster(tool, reader, pathlib.Path(folder))
        for part in [same_values, zip64_archives, refused]:
            part(muster)
            print(f"{part.__name__}: as NumPy has it")


if __name__ == "__main__":
    main(*sys.argv[1:])
