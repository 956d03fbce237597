// The end of each isa_*.cpp: all kernels of the namespace that is open, as a table.

#include "update.h"
#include "passes.h"

extern const Table table;
const Table table = {OFFLOAD_ISA_NAME, update<Adam, AdamScalars>, update<Sgd, SgdScalars>,
                     update<Adagrad, AdagradScalars>, update<Lion, LionScalars>, sum_squares, cast, touch};
