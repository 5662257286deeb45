"""Parameter matrices that are followed by a normalization, from the module graph."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch import fx, nn

from nnunet_cpr.cpr.regularized_parameters import NORMALIZATIONS

_TRANSPARENT_MODULES = (nn.Identity, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Unflatten)
_TRANSPARENT_FUNCTIONS = ("contiguous", "flatten", "movedim", "permute", "reshape", "transpose", "view")
_WITHOUT_VALUES = ("dim", "numel", "size", "shape", "ndim", "dtype", "device")
"""Functions and attributes that do not read the elements of a tensor."""


def matrices_before_normalization(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of layers whose whole output goes into normalization layers.

    Dropout, identities and changes of shape may be in between; activations, additions and concatenations
    may not. The graph is that of ``torch.fx``. If a module cannot be traced, its children are traced
    separately; a layer whose normalization is outside of them is then not found.

    Args:
        module: the network, not called and not changed.

    Example:
        >>> block = nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2), nn.Conv3d(2, 1, 1))
        >>> found = matrices_before_normalization(block)
        >>> [name for name, p in block.named_parameters() if id(p) in found and p.ndim > 1]
        ['0.weight']
    """
    uses = list(_uses(module))  # a layer may be called several times
    others = {key for key, is_normalized in uses if not is_normalized}
    return {key for key, _ in uses} - others


def _uses(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield the id of a parameter for each of its uses, and True if only normalizations follow."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs the forward methods of any module, which may fail in any way
        for child in module.children():
            yield from _uses(child)
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        if node.op == "call_module":
            readers = list(_readers(node, modules))
            is_normalized = bool(readers) and all(isinstance(r, NORMALIZATIONS) for r in readers)
            for p in modules[str(node.target)].parameters(recurse=False):
                yield id(p), is_normalized
        elif node.op == "get_attr":  # used in a function
            yield id(attrgetter(str(node.target))(module)), False


class _Tracer(fx.Tracer):
    """Tracer that does not look into normalization layers and layers with parameters of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_layer = not list(m.children()) and bool(list(m.parameters()))
        is_known = is_layer or isinstance(m, NORMALIZATIONS)
        return is_known or super().is_leaf_module(m, module_qualified_name)


def _readers(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[nn.Module | str]:
    """Yield the modules that read the elements of a node's result, and the names of functions."""
    for user in node.users:
        reader: nn.Module | str = getattr(user.target, "__name__", str(user.target))
        if user.op == "call_module":
            reader = modules[str(user.target)]
        elif user.target is getattr:
            reader = str(user.args[1])
        if isinstance(reader, _TRANSPARENT_MODULES) or reader in _TRANSPARENT_FUNCTIONS:
            yield from _readers(user, modules)
        elif reader not in _WITHOUT_VALUES:
            yield reader
