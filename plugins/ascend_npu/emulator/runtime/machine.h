// The machine that runs all streams: its lock, its thread, its scheduler, and its report of a deadlock.
#pragma once

#include <functional>
#include <mutex>
#include <set>

#include "stream.h"

namespace emulator {

// Ordered by number and not by address, so that one seed gives one schedule in every process.
struct ByNumber {
    bool operator()(const Stream* a, const Stream* b) const { return a->id < b->id; }
};

struct Machine {
    std::recursive_mutex lock;
    std::set<Stream*, ByNumber> streams;
    std::set<Event*> events;
    Stream* standard = nullptr;
    int next_id = 0;

    // Run tasks until `finished`, `first` before other streams. Returns DEADLOCK with a report if no task can run.
    Status drive(const std::function<bool()>& finished, Stream* first);
    // With a seed: run a few tasks of any stream, as a device does that runs ahead of the host.
    void run_ahead();

private:
    bool step(Stream* stream);
    bool step_any(Stream* first);
    std::string report() const;
};

Machine& machine();

}  // namespace emulator
