"""Finds the units of a model: groups of modules whose parameters are fetched and evicted together.

They follow the model's own structure: each of the repeated layers of a `ModuleList` or `Sequential`
is a unit if it has modules of its own, a large layer is one, and the modules that are left (a plain
`Linear` of a `Sequential`, say) are grouped up to a sensible size. A parameter that several modules
share (tied weights) belongs to the first unit that has it; the other units that use it need that
unit, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError
from offload.planning.unit import Member, Unit, padded_bytes

LARGE_BYTES = 32 << 20  # a layer that is a unit by itself
MOST_BYTES = 1 << 30  # a larger repeated layer is divided into units

# Classes of modules that become units, or a function that decides from a module's name and itself.
Choice = Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]


@dataclass
class _UnitDraft:
    """A group of modules that will be a unit. is_whole: the parameters of their children count,
    too; otherwise only their own.
    """

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    is_whole: bool = True

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self.modules:
            yield from module.named_parameters(recurse=self.is_whole, remove_duplicate=False)

    @property
    def nbytes(self) -> int:
        distinct = {param: param.numel() * param.element_size() for _, param in self.params()}
        return sum(distinct.values())


def find_units(
    model: nn.Module,
    choice: Choice | None = None,
    splits_types: bool = False,
    unit_bytes: int | None = None,
) -> list[Unit]:
    """Find all units of a model, in the order of its structure. Exactly one unit owns each
    parameter.

    choice: the modules that become units; None: find the layers. splits_types: no unit has
    parameters of two types. unit_bytes: neighbouring layers are joined in one unit up to this size;
    None: each layer is a unit. Raises `ConfigError` for a parameter that cannot be offloaded.
    """
    names = {param: name for name, param in model.named_parameters()}
    for param, name in names.items():
        _check_movable(name, param)
    chosen = _repeated if choice is None else _by(choice)
    drafts = _join(_gather(_walk("", model, chosen)), unit_bytes or 0)
    return _settle(drafts, names, splits_types)


def _walk(
    name: str,
    module: nn.Module,
    is_unit: Callable[[str, nn.Module, nn.Module | None], bool],
    parent: nn.Module | None = None,
) -> Iterator[_UnitDraft]:
    if is_unit(name, module, parent) or _uses_its_children(module):
        yield _UnitDraft(name, [module])
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield _UnitDraft(name, [module], is_whole=False)
    for child_name, child in module.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, is_unit, module)


def _repeated(name: str, module: nn.Module, parent: nn.Module | None) -> bool:
    """Return whether the module is one of the repeated layers, and no larger than a unit may be."""
    return _is_layer(module, parent) and _UnitDraft(name, [module]).nbytes <= MOST_BYTES


def _is_layer(module: nn.Module, parent: nn.Module | None) -> bool:
    """Return whether the module is one layer in a list of layers, and not itself a list of them."""
    if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
        return False
    if _is_list(module) and any(True for child in module.children() for _ in child.children()):
        return False  # a list of layers; one of plain modules is a layer
    return any(True for _ in module.children()) and _UnitDraft("", [module]).nbytes > 0


def large_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers that are too large to be one unit each; the outermost ones."""
    found: list[nn.Module] = []
    for child in model.children():
        is_large = _is_layer(child, model) and _UnitDraft("", [child]).nbytes > MOST_BYTES
        found += [child] if is_large else large_layers(child)
    return found


def _uses_its_children(module: nn.Module) -> bool:
    """Return whether the module has parameters of its own, and children but no lists of layers.
    Such a module may use its children's parameters without running them, as torch's attention does.
    """
    if not any(True for _ in module.parameters(recurse=False)) or _is_list(module):
        return False
    inner = [child for child in module.modules() if child is not module]
    return bool(inner) and not any(_is_list(child) for child in inner)


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _by(choice: Choice) -> Callable[[str, nn.Module, nn.Module | None], bool]:
    if callable(choice) and not isinstance(choice, type):
        return lambda name, module, _: bool(choice(name, module))
    classes = tuple(choice) if isinstance(choice, Iterable) else ()
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise ConfigError(
            f"units: expected module classes or a function of (name, module), got {choice!r}"
        )
    return lambda name, module, _: isinstance(module, classes)


def _gather(drafts: Iterable[_UnitDraft]) -> list[_UnitDraft]:
    """Group small modules that belong to no layer, up to the size of a large layer."""
    found: list[_UnitDraft] = []
    rest: _UnitDraft | None = None
    for draft in drafts:
        if draft.is_whole or draft.nbytes >= LARGE_BYTES:
            found.append(draft)
            continue
        if rest is None or rest.nbytes + draft.nbytes > LARGE_BYTES:
            rest = _UnitDraft(draft.name, [], is_whole=False)
            found.append(rest)
        rest.modules += draft.modules
    return found


def _join(drafts: Sequence[_UnitDraft], most_bytes: int) -> list[_UnitDraft]:
    """Join neighbouring layers of one list, up to `most_bytes`."""
    found: list[_UnitDraft] = []
    for draft in drafts:
        last = found[-1] if found else None
        if (
            last is not None
            and last.is_whole
            and draft.is_whole
            and last.name.rpartition(".")[0] == draft.name.rpartition(".")[0]
            and last.nbytes + draft.nbytes <= most_bytes
        ):
            last.modules += draft.modules
        else:
            found.append(draft)
    return found


def _settle(
    drafts: Sequence[_UnitDraft], names: dict[nn.Parameter, str], splits_types: bool
) -> list[Unit]:
    """Give every parameter to the first draft that has it, and make the units. Frozen parameters
    beside trained ones become a unit of their own, without modules: its block is never written,
    however the trained ones change. So do parameters of another type, if `splits_types`.
    """
    owner: dict[nn.Parameter, int] = {}
    units: list[Unit] = []
    for draft in drafts:
        number = len(units)
        used = dict.fromkeys(param for _, param in draft.params())
        groups = _group([param for param in used if param not in owner], splits_types)
        for offset, (_, params) in enumerate(groups):
            owner |= dict.fromkeys(params, number + offset)
        needs = tuple(sorted({owner[param] for param in used}))
        name = draft.name or "the model"
        if len(draft.modules) > 1:
            name += f" and {len(draft.modules) - 1} more"
        members = _members(groups[0][1], names)
        units.append(Unit(number, name, tuple(draft.modules), members, needs))
        for kind, params in groups[1:]:
            here, members = len(units), _members(params, names)
            units.append(Unit(here, f"{name}, {kind}", (), members, (here,)))
    return units


def _group(
    own: Sequence[nn.Parameter], splits_types: bool
) -> list[tuple[str, Sequence[nn.Parameter]]]:
    """Divide a draft's own parameters into units: trained ones first. Returns for each its kind,
    such as "frozen bfloat16", which becomes a part of its name, and its parameters.
    """
    found: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for param in own:
        dtype = str(param.dtype).removeprefix("torch.") if splits_types else ""
        found.setdefault((not param.requires_grad, dtype), []).append(param)
    if not found:
        return [("", own)]
    ordered = sorted(found.items(), key=lambda item: item[0][0])  # keeps the order of types
    return [
        (" ".join(filter(None, ("frozen" if is_frozen else "", dtype))), params)
        for (is_frozen, dtype), params in ordered
    ]


def _members(params: Iterable[nn.Parameter], names: dict[nn.Parameter, str]) -> tuple[Member, ...]:
    members, begin = [], 0
    for param in params:
        members.append(Member(names[param], param, begin, param.shape, param.dtype))
        begin += padded_bytes(members[-1].nbytes)
    return tuple(members)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with lazy parameters or buffers: these have no shape before its first run.
    Raises `ConfigError`.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name}: is lazy and has no shape yet; run one batch through the model first"
            )


def _check_movable(name: str, param: Tensor) -> None:
    if type(param) is not nn.Parameter:
        raise ConfigError(
            f"{name}: is a {type(param).__module__}.{type(param).__name__}, which cannot be "
            "offloaded yet (quantised and sharded parameters are not)"
        )
    if param.is_inference():
        raise ConfigError(
            f"{name}: was made under torch.inference_mode(), where torch does not count changes; "
            "make the model outside of it (it can be evaluated under it all the same)"
        )
    if param.layout != torch.strided or not (param.is_contiguous() or param.is_meta):
        raise ConfigError(
            f"{name}: expected a contiguous parameter, got {param.layout} with strides "
            f"{param.stride()}; make it contiguous"
        )
