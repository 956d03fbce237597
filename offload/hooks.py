"""Every hook that is registered with torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offload.shard import is_connected


def watch_gradients(
    params: Mapping[int, Tensor], arrived: Callable[[int], None]
) -> list[RemovableHandle]:
    """Call `arrived`, a method, with the number of each parameter whose gradient autograd has added
    to, as long as its owner lives. Not while ranks are connected: what reduces gradients over them
    writes to them later, unseen.
    """
    method = weakref.WeakMethod(arrived)

    def hook(number: int, _: Tensor) -> None:
        owner = method()
        if owner is not None and not is_connected():
            owner(number)

    return [
        param.register_post_accumulate_grad_hook(_bound(hook, number))  # type: ignore[no-untyped-call]
        for number, param in params.items()
        if param.requires_grad and param.is_leaf
    ]


def _bound(hook: Callable[[int, Tensor], None], number: int) -> Callable[[Tensor], None]:
    return lambda param: hook(number, param)
