// The team: the threads of this process that run kernels.
//
// One team for the whole process, so that calls from several Python threads share the cores instead of
// multiplying threads: at most `team_limit()` lanes run at any moment, over all calls; the calling thread is one of
// them. The lanes are threads of the OpenMP library that torch has brought into the process: after an operation of
// torch's they spin for some milliseconds, and threads of our own would have to share their cores for that long.
// Lanes run in round-to-nearest with denormals kept, not in the caller's modes: otherwise results would depend on
// which thread takes which block.
#pragma once

#include <cstdint>

namespace offload {

// One piece of a call; must not throw.
using Task = void (*)(const void* context, int64_t index);

// Runs task(context, 0) .. task(context, count - 1), each once, in any order, on at most `lanes` threads
// (0: as many as the limit). Returns when all are done. Any thread; after fork() too.
void team_run(int64_t count, int lanes, Task task, const void* context);

int team_limit();           // at the start: the cores that the process may run on then
void team_set_limit(int);   // 1 or more
void team_assume_forked();  // torch's threads may be gone: from now on threads of our own
int team_most_lanes();      // most lanes that ran at the same moment since the last call; for tests

}  // namespace offload
