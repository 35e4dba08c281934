"""Which kernels are called: support for tests whose ranks must use those of one implementation alone."""

from moecomm.kernels.base import RowKernels
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.registry import eager_kernels_for, kernels_for


def methods_of(contract):
    return {name for name in vars(contract) if not name.startswith("_")}


def watch(name, called):
    """Notes in `called` which kernels of this name are called."""

    def noted(call, method):
        def noting(*args, **options):
            called.add(method)
            return call(*args, **options)

        return noting

    for kernels, contract in ((kernels_for(name), RowKernels), (eager_kernels_for(name), EagerKernels)):
        for method in methods_of(contract):
            setattr(kernels, method, noted(getattr(kernels, method), method))


def unwatch(name):
    for kernels, contract in ((kernels_for(name), RowKernels), (eager_kernels_for(name), EagerKernels)):
        for method in methods_of(contract):
            delattr(kernels, method)
