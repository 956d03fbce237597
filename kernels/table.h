// The end of each isa_*.cpp: all kernels of the namespace that is open, as a table.

#include "update.h"

// After the updates, whose functions it uses.
#include "passes.h"

extern const Table table;
const Table table = {OFFLOAD_ISA_NAME, adam, update<Sgd>, update<Adagrad>, update<Lion>,
                     sum_squares,      cast, touch,       checksum};
