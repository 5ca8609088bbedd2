"""Makes the wheel of muster_torch. scripts/build-python copies this file beside the built package and runs it there."""

import os
import runpy

from setuptools import Distribution, setup


class CompiledDistribution(Distribution):
    """A distribution with compiled code: its wheel is for one Python version on one kind of machine."""

    def has_ext_modules(self):
        return True


torch_version = runpy.run_path("muster_torch/_build.py")["TORCH_VERSION"]
setup(
    name="muster_torch",
    version=os.environ["MUSTER_VERSION"],
    description="torch.distributed over MPI, by muster",
    license="Apache-2.0",
    packages=["muster_torch"],
    package_data={"muster_torch": ["*.so*"]},
    install_requires=["torch==" + torch_version.split("+")[0]],
    distclass=CompiledDistribution,
)
