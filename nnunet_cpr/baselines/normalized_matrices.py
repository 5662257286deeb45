"""Parameter matrices that are followed by a normalization, from the module graph."""

from __future__ import annotations

from operator import attrgetter

from torch import fx, nn

from nnunet_cpr.param_groups import NORMALIZATIONS

_TRANSPARENT_MODULES = (nn.Identity, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Unflatten)
_TRANSPARENT_METHODS = {
    *("contiguous", "flatten", "movedim", "permute", "reshape", "squeeze", "swapaxes", "transpose"),
    *("unflatten", "unsqueeze", "view"),
}
_WITHOUT_VALUES = {"dim", "numel", "size", "shape", "ndim", "dtype", "device"}
"""Methods and attributes that do not read the elements of a tensor."""


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
    calls: dict[int, list[bool]] = {}  # of each parameter, whose layer may be called several times
    _trace(module, calls)
    return {key for key, normalized in calls.items() if all(normalized)}


def _trace(module: nn.Module, calls: dict[int, list[bool]]) -> None:
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs the forward methods of any module, which may fail in any way
        for child in module.children():
            _trace(child, calls)
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        if node.op == "call_module":
            is_normalized = _is_normalized(node, modules)
            for p in modules[str(node.target)].parameters(recurse=False):
                calls.setdefault(id(p), []).append(is_normalized)
        elif node.op == "get_attr":  # used in a function
            calls.setdefault(id(attrgetter(str(node.target))(module)), []).append(False)


class _Tracer(fx.Tracer):
    """Tracer that does not look into normalization layers and layers with parameters of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_layer = not any(True for _ in m.children()) and any(True for _ in m.parameters())
        is_known = is_layer or isinstance(m, NORMALIZATIONS)
        return is_known or super().is_leaf_module(m, module_qualified_name)


def _is_normalized(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return True if every use of the node's result is a normalization."""
    uses = [user for user in node.users if not _reads_no_values(user)]
    return bool(uses) and all(
        _is_normalization(user, modules)
        or (_is_transparent(user, modules) and _is_normalized(user, modules))
        for user in uses
    )


def _is_normalization(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], NORMALIZATIONS)


def _is_transparent(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _TRANSPARENT_MODULES)
    return _called_name(node) in _TRANSPARENT_METHODS


def _reads_no_values(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _WITHOUT_VALUES
    return node.op == "call_method" and node.target in _WITHOUT_VALUES


def _called_name(node: fx.Node) -> str:
    """Return the name of a method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
