"""How much memory, time and disk space measurements use, how much they write at most, and how each
figure is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.optim.traffic import FIELDS, plan_traffic
from offload.planning.layout import ELEMENT_BYTES, round_up
from offload.planning.planner import BUFFERS, DISK_CHUNK_NUMEL
from offload.planning.state_plan import Plan
from offload.tools.bench.figure import BenchProgress, Figure, FigureUnit, Repeats, repeat
from offload.tools.forecast.model_shape import Shape

_MOST_RUNS = 400  # of a measurement that writes nothing
_SUSTAINED_FILES = 5  # the files take one such part of all bytes written
TENTHS = 10
RUNS_A_TENTH = 4
ROUNDS = 5  # each: runs alone, then runs beside busy drives
# Per trained element, at most: the parameter, its gradient, two moments; twice that in room, since
# the store is copy on write.
_WRITTEN_BYTES_A_STEP = ELEMENT_BYTES * 4
_ROOM_BYTES = ELEMENT_BYTES * 8


@dataclass(frozen=True)
class ModelSize(Shape):
    """The shape of the model whose training is measured, a `StandIn`, and of its batches."""

    layers: int = 4
    hidden: int = 384
    vocabulary: int = 4096
    heads: int = 6
    intermediate: int = 1024
    batch: int = 4
    length: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class BenchSizes:
    """The sizes and durations of the measurements. seconds: how long one figure is measured, about.
    Bytes on drives are those of one directory, except `beside_bytes` and the model's, which all
    directories share.
    """

    seconds: float = 1.0
    least_runs: int = 3
    memory_bytes: int = 256 << 20  # source and target of a copy each: more than caches hold
    update_numel: int = 16 << 20
    disk_bytes: int = 512 << 20  # of chunks on the drive; a run moves them once
    disk_runs: int = 4  # of reads, writes, and both; at most
    chunk_numel: int = DISK_CHUNK_NUMEL
    buffers: int = BUFFERS
    beside_bytes: int = 1 << 30  # written beside a computation that is measured, at most
    sustained_bytes: int = 0  # written to fill a drive's cache; 0: not measured
    copy_bytes: int = 256 << 20  # one upload or download
    product_width: int = 4096  # at most; less where a product would take too long
    model: ModelSize = ModelSize()
    steps: int = 6  # of training, at most
    warm_up_steps: int = 2

    # --- bytes that move --------------------------------------------------------------------------

    def traffic(self, directories: int) -> Plan:
        return plan_traffic(self.disk_bytes * directories, self.buffers, self.chunk_numel)

    @property
    def sustained_traffic(self) -> Plan:
        """The plan of the files that a sustained run writes again and again."""
        return plan_traffic(self._sustained_files_bytes, self.buffers, self.chunk_numel)

    @property
    def sustained_chunks(self) -> int:
        """The number of chunks that are read and written after the fill."""
        left_bytes = self.sustained_bytes - self._sustained_files_bytes
        return max(TENTHS * 2 * self.buffers, left_bytes // self.chunk_bytes)

    @property
    def _sustained_files_bytes(self) -> int:
        least_bytes = (2 * self.buffers + 1) * self.chunk_bytes
        files_bytes = round_up(self.sustained_bytes // _SUSTAINED_FILES, self.chunk_bytes)
        return max(files_bytes, least_bytes)

    # --- costs: arithmetic only, since a plan of very many bytes takes long to make ---------------

    def burst_written_bytes(self, directories: int) -> int:
        """Return the most bytes that the runs over so many directories at once write: the fill, the
        runs that write, and the dirty chunks that these leave in buffers.
        """
        chunks_bytes = round_up(self.disk_bytes * directories, self.chunk_bytes)
        return (1 + 2 * self.disk_runs) * (chunks_bytes + self._buffers_bytes)

    def sustained_written_bytes(self) -> int:
        """Return the most bytes that a sustained run writes to one directory."""
        if not self.sustained_bytes:
            return 0
        moved_bytes = self.sustained_chunks * self.chunk_bytes
        return self._sustained_files_bytes + moved_bytes + self._buffers_bytes

    def beside_written_bytes(self) -> int:
        """Return the most bytes written beside one computation that is measured, including the
        writes in flight when a round ends.
        """
        return self.beside_bytes + ROUNDS * self._buffers_bytes

    def training_written_bytes(self) -> int:
        steps = 2 + self.warm_up_steps + self.steps  # initial and final values, too
        return steps * self.model.numel * _WRITTEN_BYTES_A_STEP

    def room_bytes(self) -> int:
        """Return the free bytes that a directory must have."""
        files_bytes = round_up(self.disk_bytes, self.chunk_bytes)
        if self.sustained_bytes:
            files_bytes = max(files_bytes, self._sustained_files_bytes)
        return max(files_bytes + self._buffers_bytes, self.model.numel * _ROOM_BYTES)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_numel * ELEMENT_BYTES * len(FIELDS)

    @property
    def _buffers_bytes(self) -> int:
        return self.buffers * self.chunk_bytes


DEFAULT = BenchSizes()


@dataclass(frozen=True)
class Bench:
    """The sizes of all measurements, and what shows their progress."""

    sizes: BenchSizes
    progress: BenchProgress

    def measure(
        self,
        name: str,
        unit: FigureUnit,
        run: Callable[[], float],
        runs: Repeats | None = None,
        warm_up: bool = True,
    ) -> Figure:
        """Repeat `run` and make a figure of its results. runs: None: as often as for figures that
        write nothing.
        """
        self.progress.begin(name)
        often = runs or Repeats(self.sizes.seconds, self.sizes.least_runs, _MOST_RUNS)
        each = repeat(run, often, self.progress.at, warm_up)
        return self.done(name, unit, each)

    def done(self, name: str, unit: FigureUnit, each: Sequence[float]) -> Figure:
        """Make a figure of the results of runs, and show it."""
        figure = Figure.of(name, unit, each)
        self.progress.done(figure)
        return figure
