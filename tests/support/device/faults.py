"""Faults of the device code that are described by hand: in what is held, by what and in which
order, and in what waits for what. Those that can be found in the source are in `mutants.py`.

A fault whose place is no longer there raises `NoSuchPlace`, which says what to do.
"""

from __future__ import annotations

from support.mutation import (
    Fault,
    at,
    becomes,
    calling,
    dropped,
    never,
    stripped,
    swapped_with_next,
)

_FILL = at("device.device", "DeviceTransfer._fill").call("_upload")
_WRITE = at("device.device", "DeviceTransfer.write").call("_upload")
_WAIT_OF_OWNER = at("device.device", "DeviceTransfer._let_go_of_sources").call("wait_event")
_BUSY = at("device.buffer", "DeviceBuffer.busy").returned()

# One wait for copies of whole blocks and for those of slices among ranks: loops of both judge it.
_UPDATED_TOO_EARLY = Fault(
    "updated before the device has its copy",
    dropped(at("params.host_cache", "HostCache.await_arrival").call("await_copy")),
)

# Faults of the transfer other than a missing wait.
BY_HAND = [
    Fault("a fill's host memory free", dropped(_FILL.argument(6).element("host"))),
    Fault("a write's host memory free", dropped(_WRITE.argument(6).element("host"))),
    Fault(
        "a write's target free",
        becomes(_WRITE.argument(5), "None"),
        dropped(_WRITE.argument(6).element("target")),
    ),
    Fault(
        "a read's source free",
        becomes(
            at("device.device", "DeviceTransfer._download").call("_InFlightCopy").argument(6),
            "None",
        ),
    ),
    Fault(
        "a ticket ends before its copy",
        dropped(at("device.device", "_Flights.settle").operand("query")),
    ),
    Fault(
        "a lost transfer's copies",
        dropped(at("device.device", "DeviceTransfer.__init__").call("finalize")),
    ),
    Fault("memory let go before the wait", swapped_with_next(_WAIT_OF_OWNER)),
    Fault(
        "another stream than the owner waits",
        becomes(_WAIT_OF_OWNER.receiver(), "torch.accelerator.current_stream(self.device)"),
    ),
    Fault("a refill", dropped(_BUSY.element("record_event"))),
    Fault("filled from elsewhere before the fill", dropped(_BUSY.element("filled"))),
    Fault(
        "no fill is noted",
        dropped(at("device.buffer", "DeviceBuffer._note_filled").assignment("filled")),
    ),
    Fault(
        "one view passes unnoticed",
        becomes(at("device.buffer", "_Loan.give_back").comparison("holders").right(), "2"),
    ),
    Fault(
        "the buffer's own tensor is no view",
        stripped(at("device.buffer", "DeviceBuffer.use").call("detach")),
    ),
    Fault(
        "users are not noted",
        dropped(at("device.buffer", "DeviceBuffer.use").call("append")),
    ),
]

_DETACH = at("params.copies", "Copies.detach")

# Faults of the code under models that are prepared for a device.
OF_MODELS = [
    Fault(
        "nobody waits for a block",
        calling(
            at("params.device_tier", "DeviceTier._memory_here").call("use"), "_loan.memory.detach"
        ),
    ),
    Fault(
        "an old copy is used",
        never(at("params.device_tier", "DeviceTier._stale").condition("on_device")),
    ),
    Fault(
        "released without the flip",
        never(at("params.copies", "Copies.forget").condition("is_attached")),
    ),
    Fault("no flip back", dropped(_DETACH.call("hide"))),
    Fault("a lost edit", becomes(_DETACH.comparison("_versions").right(), "block.version_now")),
    Fault("other memory is lost", never(_DETACH.operand("strangers"))),
    Fault(
        "a sum of what has not come",
        dropped(at("core.in_flight", "InFlight.finish_oldest").call("_wait")),
    ),
    Fault(
        "a gradient before it has come",
        dropped(at("optim.staging", "HostSum.settle").call("wait")),
    ),
    Fault(
        "a gradient stays and counts twice",
        dropped(
            # The other call is where it raises.
            at("params.gradients", "DeviceGradients._take").call("set_own_grad", 2, of=2)
        ),
    ),
    Fault(
        "added to what was there before",
        becomes(
            at("params.gradients", "DeviceGradients._add").call("_stage", 1, of=2).argument(2),
            "away.fill",
        ),
    ),
    Fault(
        "a gradient that is held is overwritten",
        never(at("params.gradients", "DeviceGradients._begin").comparison("holders")),
    ),
    Fault(
        "a wrong part",
        becomes(at("optim.staging", "StagedSums.add").call("partial", 1, of=2).argument(3), "0"),
    ),
    Fault(
        "an exposed gradient is not taken back",
        dropped(at("params.gradients", "DeviceGradients._take_back_to_original").call("copy_")),
    ),
    Fault(
        "nothing is copied back",
        dropped(
            # The callbacks at the end of a lending run in reverse order.
            at("params.copies", "Copies._end_exposing").call("callback", 3, of=3)
        ),
    ),
    Fault(
        "loaded values stay away",
        never(at("params.device_tier", "DeviceTier._end_showing").condition("generation", 2, of=2)),
    ),
    Fault(
        "parameters are seen outside of runs",
        never(at("params.copies", "Copies.watch_edits").condition("is_attached")),
    ),
    Fault(
        "dropped too early",
        dropped(at("params.host_cache", "HostCache.evict").call("await_copy")),
    ),
    _UPDATED_TOO_EARLY,
    Fault(
        "loaded before the device has its copy",
        dropped(at("params.device_tier", "DeviceTier._show").call("await_copy")),
    ),
    Fault(
        "gradients are not seen",
        becomes(
            at("params.placeholder", "make_placeholder").condition("on_device", 1, of=3),
            "True",
        ),
    ),
    Fault(
        "no room for others",
        becomes(
            at("params.device_budget", "DeviceBudget._room_bytes").call("max", 1, of=2), "0 * it"
        ),
    ),
    Fault(
        "too much before anything is known",
        becomes(
            at("params.device_budget", "DeviceBudget.blocks_bytes").call("min").argument(2), "left"
        ),
    ),
]

# Faults of models that are sharded over ranks, each with the schedule that notices it.
OF_RANKS = [
    (
        Fault(
            "nobody waits for a gathered block",
            calling(
                at("params.gathered", "DeviceGathered.use").call("use"),
                "_loan.memory.detach",
            ),
        ),
        ("lazy", 0),
    ),
    (
        Fault(
            "a mean ends before it has been read",
            stripped(at("distributed.device_network", "DeviceNetwork._reduce").call("then")),
        ),
        ("lazy", 0),
    ),
    (
        Fault(
            "nobody waits for a lift",
            dropped(at("params.copies", "Copies.await_upload").call("wait")),
        ),
        ("eager", 0),
    ),
    (_UPDATED_TOO_EARLY, ("eager", 0)),
    (
        Fault(
            "a mean before it has come",
            dropped(at("params.mean_gradients", "MeanGradients._await").call("wait")),
        ),
        ("lazy", 0),
    ),
    (
        Fault(
            "a staging place is lost",
            dropped(at("params.mean_gradients", "MeanGradients._free").call("append")),
        ),
        ("lazy", 0),
    ),
    (
        Fault(
            "a gradient on disk has no staging place",
            dropped(at("params.mean_gradients", "MeanGradients._reduce").operand("target")),
        ),
        ("eager", 0),
    ),
    (
        Fault(
            "old whole blocks after the update",
            dropped(at("params.gathered_tier", "GatheredTier.collect_edits").call("forget")),
        ),
        ("eager", 0),
    ),
]

# Faults of gradients that several streams make.
OF_STREAMS = [
    Fault(
        "zeroed too late",
        dropped(at("params.gathered", "DeviceGatheredBlockMemory.make").call("note_fill")),
    ),
]

# Faults of optimizers that are sharded over ranks, stages 1 and 2.
_IDLE = "Mark(None, torch.Stream(self.transfer.device).record_event())"
_SEND = at("optim.reducer", "Reducer._send_round")
_LATER = (
    "exchange._transfer.across(lambda a=there, b=grad[span.first : span.end]: a.copy_(b), "
    "after=[exchange._transfer.mark().event])"
)
OF_STAGE_1 = [
    Fault(
        "gathered while the parameters were still in use",
        becomes(at("distributed.device_network", "DeviceNetwork.gather_there").call("mark"), _IDLE),
    ),
    Fault(
        "gathered before the own part was written",
        dropped(at("optim.exchange", "DeviceExchange._begin_gather").call("join")),
    ),
    Fault(
        "gathered before the last chunk was sent back",
        becomes(
            at("optim.updater", "Updater._update").returned(),
            "(self._sharded.advance(), it)[1]",
        ),
    ),
    Fault(
        "used before they were gathered",
        dropped(at("optim.exchange", "DeviceExchange.join").call("wait_for")),
    ),
]
OF_STAGE_2 = [
    Fault(
        "summed up before the gradients were there",
        becomes(at("distributed.device_network", "DeviceNetwork.reduce_there").call("mark"), _IDLE),
    ),
    Fault(
        "a buffer filled again too early",
        becomes(_SEND.call("add"), "(it, exchange.free.append(buffer))"),
    ),
    Fault("gradients dropped before they were copied", becomes(_SEND.call("copy_"), _LATER)),
    Fault(
        "means used before they came",
        # Of reductions alone: all-gathers wait in the same place, and fail otherwise.
        becomes(
            at("optim.reducer", "Reducer.__init__").call("InFlight").argument(1),
            "lambda ticket: ticket",
        ),
    ),
]
OF_TWO_STREAMS = [
    Fault(
        "gradients copied before they were made",
        dropped(at("optim.exchange", "DeviceExchange.wait_for_makers").call("wait_for")),
    ),
    Fault(
        "gradients not held",
        never(at("optim.reducer", "Reducer._send").condition("has_other_makers")),
    ),
]

ALL = [*BY_HAND, *OF_MODELS, *(fault for fault, _ in OF_RANKS), *OF_STREAMS]
ALL += [*OF_STAGE_1, *OF_STAGE_2, *OF_TWO_STREAMS]
ALL = list(dict.fromkeys(ALL))
