"""Copies between host memory and a device: the only owner of streams and events.

There are two side streams: `up` carries uploads, `down` carries downloads; a third, made when it is
needed, carries copies and collectives between the devices of several ranks. All run beside the
compute stream, which is the current stream of the calling thread. The CPU does not wait here:
streams wait for one another, and only `Ticket.wait` and `close` block. The source and target of a
copy are held until it is over: a lease cannot return to its pool, nor device memory to its
allocator, while a copy is in flight.

Device memory for uploads comes from torch's caching allocator, from the memory of the stream `up`,
and is counted against a budget in bytes. It is released in the order of `up`, after the streams
that used it: the next copy on `up` may write to the same memory at once, and neither the CPU nor
the allocator waits. So the bytes in use never exceed the budget, however far the device runs behind
the CPU.

`device.py` has the copies, `buffer.py` the device memory, `streams.py` the streams,
`accelerator.py` the device itself, and `host.py` the case without one: the CPU's own memory, where
nothing is copied. Any thread may call. The package knows no policy and no files.
"""
