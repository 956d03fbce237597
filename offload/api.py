"""The functions of the public interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.checkpoint.loading import load as load_checkpoint
from offload.checkpoint.saves import save as save_checkpoint
from offload.core.config import Config
from offload.core.errors import ConfigError
from offload.core.heap import HEAP
from offload.core.log import LOG
from offload.core.tensors import outside_inference_mode
from offload.core.torch_versions import warn_if_unknown
from offload.distributed.group import place_of
from offload.distributed.placing import is_sharded
from offload.distributed.ranks import Ranks, ranks_of
from offload.optim import attach, is_wrapped
from offload.optim.opening import draw_up, open_session
from offload.params.hooks import watch_gradients, watch_passes
from offload.params.prepare_plan import PreparePlan, connected_ranks, plan_by_consensus
from offload.params.prepared import Prepared, prepared_of, refuse_prepared
from offload.params.units import Choice
from offload.planning.limits import host_bytes, limited, telling_of_the_budget
from offload.planning.state_plan import Plan
from offload.planning.training import TrainingPlan
from offload.telemetry.report import Report, report_on

if TYPE_CHECKING:
    from offload.tools.forecast.forecast import Forecast


@outside_inference_mode
def wrap(
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    elementwise: bool = False,
    measure: bool = False,
    **fields: Any,
) -> Any:
    """Move the optimizer's state to host memory and NVMe, within `host_memory` bytes. Returns the
    same optimizer object; the training loop stays as it is.

    With several ranks (torchrun) every rank calls it, and each keeps and updates its part of the
    state. Gradients are averaged by DistributedDataParallel, or, without it, during backward if
    `release_grads=True`. Every rank must then call `state_dict()` and `close()`, too. With
    `process_group=False` each rank has all of the state.

    elementwise: states that an optimizer of your own treats each element of a parameter by itself.

    measure: spend about a second on measuring the speed of drives and update, so that plan and
    report can predict the duration of a step; it writes up to 384 MiB.

    fields: those of `Config`.
    """
    warn_if_unknown(torch.__version__)
    ranks = _ranks_for(optimizer, config, fields)
    session = open_session(
        optimizer,
        partial(Config.of, config, **fields),
        elementwise,
        measure,
        watch_gradients,
        watch_passes,
        ranks,
    )
    kind = type(optimizer).__name__
    attach(optimizer, session)
    HEAP.trim_after_start()
    LOG.info("%s is wrapped:\n%s", kind, session.plan)
    return optimizer


def _ranks_for(
    optimizer: torch.optim.Optimizer, config: Config | None, fields: dict[str, Any]
) -> Ranks | None:
    """Return the ranks that share a plain optimizer's state; None if its parameters are sharded
    already. All ranks must call it, before an error can occur on one of them.
    """
    if _is_sharded(optimizer):
        return None
    return ranks_of(fields.get("process_group", getattr(config, "process_group", None)))


def _is_sharded(optimizer: object) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(is_sharded(param) for group in groups for param in group["params"])


@outside_inference_mode
def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    *,
    weights: str | PathLike[str] | None = None,
    units: Choice | None = None,
    **fields: Any,
) -> Any:
    """Move the model's parameters and gradients and the optimizer's state to host memory and NVMe,
    within `host_memory` bytes; they are fetched before they are used. Model and optimizer stay the
    same objects, and the training loop stays as it is. Returns both, or the model alone if there is
    no optimizer.

    weights: a safetensors file, or a directory that `save_pretrained` has written, with the values;
    they are cast if the model has other floating-point types. Parameters that no optimizer changes
    are read from these files each time and never written. A model on the meta device is filled
    block by block: from the weights, or else by its modules (`offload.params.initialise` says how).
    If model and weights do not fit together, an error is raised and nothing has changed.

    units: module classes, or a function of name and module, that choose which modules are fetched
    together; the default is each repeated layer that has modules of its own, and the rest grouped.

    fields: those of `Config`.
    """
    warn_if_unknown(torch.__version__)
    config = Config.of(config, **fields)
    refuse_prepared(model)
    with connected_ranks(config.process_group) as ranks:
        allowed_bytes, _ = host_bytes(config)
        place = None if ranks is None else ranks.place
        holder = f"{type(model).__name__}, prepared"
        with telling_of_the_budget(config), limited(config, holder):
            prepare_plan = plan_by_consensus(
                ranks,
                allowed_bytes,
                lambda nbytes: PreparePlan(model, optimizer, config, nbytes, units, weights, place),
            )
            made = Prepared(prepare_plan, model, optimizer, ranks)
    HEAP.trim_after_start()
    LOG.info("%s is prepared:\n%s", type(model).__name__, made.prepare_plan.plan)
    return model if optimizer is None else (model, optimizer)


@contextmanager
def resident(*modules: nn.Module) -> Iterator[None]:
    """Keep the parameters of these modules in memory, all at once, while the block runs: code in it
    can read and change them like ordinary parameters. Raises `CapacityError` if they do not fit
    beside the parameters in use.
    """
    with ExitStack() as stack:
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ConfigError(f"resident: expected modules, got {type(module).__name__}")
            made = prepared_of(module)
            if made is not None:  # an ordinary module is in memory anyway
                stack.enter_context(made.resident(module))
        yield


@outside_inference_mode
def close(prepared: Any) -> None:
    """Turn a prepared model (with its optimizer, if it has one) or a wrapped optimizer into
    ordinary ones again. Idempotent.
    """
    made = prepared_of(prepared)
    if made is not None:
        made.close()
    elif isinstance(prepared, torch.optim.Optimizer) and is_wrapped(prepared):
        prepared.close()
    elif not isinstance(prepared, nn.Module | torch.optim.Optimizer):
        raise ConfigError(f"close: expected a model or an optimizer, got {type(prepared).__name__}")


@outside_inference_mode
def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    background: bool = False,
    **stateful: Any,
) -> Any:
    """Save model, optimizer and the states of all random number generators as one checkpoint: the
    new directory `path`, which is complete or absent even after a crash or loss of power. Returns
    the path.

    Wrapped, prepared and ordinary objects are saved alike, and streamed: no copy of the state is
    made.

    stateful: further objects with `state_dict()`, by name (a scheduler, a scaler, a loader).

    extra: plain values and tensors of your own; `load` returns them.

    keep: how many checkpoints of this model to keep in the parent directory. Older ones are removed
    after the new checkpoint has been read back and verified. Checkpoints of models with other
    names, types or shapes do not count and are not removed.

    background: return a ticket while the optimizer's state is still being written. Training may go
    on; what is saved is the state at the moment of the call. `ticket.wait()` returns the path or
    raises the error; if no code waits, the next save raises it. The next save, a load, `close()`
    and the end of the process wait for the ticket as far as they must.
    """
    return save_checkpoint(
        path, model, optimizer, prepared_of(model), extra, keep, bool(background), stateful
    )


@outside_inference_mode
def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **stateful: Any,
) -> Any:
    """Load a checkpoint, or the newest complete one below a directory, into objects of any kind
    (wrapped, prepared or ordinary), and return its `extra`. Training continues bit for bit.

    Names, types and shapes of everything must fit, and every byte must be as it was written;
    otherwise an error says what is wrong, and nothing has changed. Below a directory, a checkpoint
    that is damaged or of another version is skipped with a warning; one that the system does not
    allow to be read is an error. An optimizer keeps its own `fused`, `foreach`, `capturable` and
    `differentiable`. Without an optimizer and stateful objects, only the model is loaded, for
    evaluation, and the states of the random number generators.

    stateful: the objects that were given to `save` by name.
    """
    return load_checkpoint(path, model, optimizer, prepared_of(model), stateful)


@outside_inference_mode
def plan(
    optimizer: torch.optim.Optimizer | nn.Module | str | PathLike[str],
    config: Config | torch.optim.Optimizer | str | None = None,
    *,
    elementwise: bool = False,
    measure: bool = False,
    **fields: Any,
) -> Plan | TrainingPlan | Forecast:
    """Return the plan of what `wrap` with the same arguments would do, and raise the same errors.
    For a model and its optimizer, `plan(model, optimizer, host_memory=...)`, return the plan of
    `prepare`. Nothing is kept, and without `measure` nothing is allocated.

    For a model given by name ("7B", the path of a Hugging Face config.json, or "module:function"),
    followed by the name of its optimizer (default "adamw"), return a `Forecast` of the training,
    also on other machines, as `offload plan` prints it:
    `plan("7B", "lion", host_memory="64GiB", batch=4, sequence=2048, on="rtx4090-1ssd")`. fields:
    `layers`, `hidden`, `vocabulary`, `heads`, `intermediate` (for a size), `batch`, `sequence`,
    `steps`, `save_every`, `dtype`, `host_memory`, `device_memory`, `nvme` or `nvme_count`,
    `activations`, `on` (a profile), `endurance` (TB), `use` ("prepare" or "wrap"), `lora` (rank),
    `full`. What does not fit is a `CapacityError` that says which single changes would fit.
    """
    if isinstance(optimizer, str | PathLike | nn.Module):
        if elementwise or measure:
            raise ConfigError(
                "plan: elementwise and measure are for wrapped optimizers; leave them out"
            )
        if isinstance(optimizer, nn.Module):
            return _plan_of_model(optimizer, config, fields)
        return _plan_by_name(optimizer, config, fields)
    if isinstance(config, torch.optim.Optimizer | str):
        raise ConfigError("plan: expected an optimizer, or a model and its optimizer; got two")
    config = Config.of(config, **fields)
    place = None if _is_sharded(optimizer) else place_of(config.process_group)
    return draw_up(optimizer, config, elementwise, measure, place).plan


def _plan_by_name(
    model: str | PathLike[str], optimizer: object, fields: dict[str, Any]
) -> Forecast:
    if optimizer is not None and not isinstance(optimizer, str):
        raise ConfigError(
            f"plan: expected the name of an optimizer after that of a model, got "
            f"{type(optimizer).__name__}"
        )
    # Imported here, since training needs none of it.
    from offload.tools.forecast.forecaster import forecast
    from offload.tools.forecast.request import ForecastRequest

    return forecast(ForecastRequest.of(model, optimizer=optimizer, **fields))


def _plan_of_model(model: nn.Module, second: object, fields: dict[str, Any]) -> TrainingPlan:
    units, weights = fields.pop("units", None), fields.pop("weights", None)
    optimizer = second if isinstance(second, torch.optim.Optimizer) else None
    config = second if isinstance(second, Config) else fields.pop("config", None)
    if optimizer is None and second is not None and config is not second:
        raise ConfigError(f"plan: expected an optimizer or a Config, got {type(second).__name__}")
    config = Config.of(config, **fields)
    refuse_prepared(model)
    allowed_bytes, _ = host_bytes(config)
    with telling_of_the_budget(config):
        place = place_of(config.process_group)
        prepare_plan = PreparePlan(model, optimizer, config, allowed_bytes, units, weights, place)
    prepare_plan.close()
    return prepare_plan.plan


def report(optimizer: Any) -> Report:
    """Return what a wrapped optimizer, or a prepared model with its optimizer, has done: bytes,
    seconds by cause, prefetch hits, fall-backs.
    """
    return report_on(optimizer)
